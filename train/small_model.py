"""Trains a small language model with the target's tokenizer, as a standalone drafter to compare with.

It learns the target's own answers from the `tokens` stage.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.data.progress import Meter
from slipstream.data.target.resolve import Target
from slipstream.data.types import TokenizedSample

HEAD_DIM = 32
PEAK_RATE = 1e-3
IGNORED = -100


def train_small_model(
    target: Target,
    samples: Sequence[TokenizedSample],
    folder: Path,
    *,
    hidden_size: int,
    num_layers: int,
    num_steps: int,
    rows_per_step: int,
    seed: int,
) -> int:
    """Writes the model in the HF form beside the target's tokenizer; returns its parameters."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=target.config.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // HEAD_DIM,
            num_key_value_heads=1,
            head_dim=HEAD_DIM,
            max_position_embeddings=target.config.max_position_embeddings,
            tie_word_embeddings=True,
        )
    )
    module: torch.nn.Module = model
    module.to(target.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=num_steps, pct_start=0.1)
    rng = random.Random(seed)
    with Meter("draft model", num_steps, unit="steps") as meter:
        for _ in range(num_steps):
            loss = _loss(model, rng.choices(samples, k=rows_per_step), target.device)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            meter.advance(1, f"loss {loss.item():.3f}")
    model.save_pretrained(folder)
    target.tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _loss(model: LlamaForCausalLM, samples: Sequence[TokenizedSample], device: torch.device) -> Tensor:
    """Cross-entropy of the supervised tokens: where the target wrote them."""
    ids_BT = pad_sequence([s.input_ids_T for s in samples], batch_first=True).to(device)
    labels = [s.input_ids_T.masked_fill(~s.loss_mask_T, IGNORED) for s in samples]
    labels_BT = pad_sequence(labels, batch_first=True, padding_value=IGNORED).to(device)
    states_BTD = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    is_loss_BT = labels_BT[:, 1:] != IGNORED
    logits_RV = model.lm_head(states_BTD[:, :-1][is_loss_BT])
    return F.cross_entropy(logits_RV, labels_BT[:, 1:][is_loss_BT])
