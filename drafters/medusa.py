"""Medusa heads (2401.10774): each predicts a token further ahead from the target's last state alone.

Head k is a stack of residual blocks x + SiLU(W x) over the target's last state behind its final norm;
one lm_head, which starts as the target's rows of the draft vocabulary, reads them all. In vLLM's form
that is `original_lm_head`. vLLM has a `token_map` for a smaller draft vocabulary, but its loader (0.32)
then misses that tensor in its own bookkeeping and stops; so the bundle has a row for every token.

Shapes: R rows (any leading axes), D hidden size, V target vocabulary, W draft vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS, read_config, read_tensors
from slipstream.drafters.config import DraftGeometry, Init
from slipstream.drafters.eagle1 import INIT_STD, load_exactly

ARCHITECTURE = "MedusaModel"
LM_HEAD, SERVED_LM_HEAD = "lm_head.weight", "lm_heads.0.weight"
TOKEN_MAP = "token_map"


class _Block(nn.Module):
    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(num_layers)
        )

    def forward(self, states_RD: Tensor) -> Tensor:
        for layer in self.layers:
            states_RD = states_RD + F.silu(layer(states_RD))
        return states_RD


class MedusaHeads(nn.Module):
    """Named as vLLM reads it, but for the lm_head (see `serving_medusa`)."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.blocks = nn.ModuleList(
            _Block(geometry.hidden_size, geometry.num_layers) for _ in range(geometry.num_heads)
        )
        self.lm_head = nn.Linear(geometry.hidden_size, geometry.draft_vocab_size, bias=False)

    def states(self, number: int, feature_RD: Tensor) -> Tensor:
        """What the lm_head reads of head `number`."""
        out: Tensor = self.blocks[number](feature_RD)
        return out

    def forward(self, number: int, feature_RD: Tensor) -> Tensor:
        """Logits [..., W] of head `number`: of the token `number` + 2 places behind each row's."""
        logits: Tensor = self.lm_head(self.states(number, feature_RD))
        return logits

    @torch.no_grad()
    def initialise(self, init: Init, *, lm_head_WD: Tensor, norm_D: Tensor, seed: int) -> None:
        """Sets the first weights, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, INIT_STD, generator=generator)
        if init is not Init.random:
            self.lm_head.weight.copy_(lm_head_WD)


def medusa_config(geometry: DraftGeometry, *, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json that vLLM's method `medusa` reads."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "medusa",
        "hidden_size": geometry.hidden_size,
        "vocab_size": geometry.vocab_size,
        "truncated_vocab_size": geometry.vocab_size,
        "num_heads": geometry.num_heads,
        "num_hidden_layers": geometry.num_layers,
        "original_lm_head": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(geometry.aux_layers),
    }


def medusa_tensors(tensors: dict[str, Tensor], target_ids_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The heads' tensors under the names that vLLM reads; no map when the vocabularies are equal.

    A token outside the draft vocabulary gets the mean of the rows within: its logit is the mean of
    theirs and never the largest, so vLLM drafts what the head drafts. The map is for our own reader.
    """
    served = {SERVED_LM_HEAD if name == LM_HEAD else name: tensor for name, tensor in tensors.items()}
    if len(target_ids_W) < vocab_size:
        rows_WD = served[SERVED_LM_HEAD]
        mean_D = rows_WD.float().mean(0).to(rows_WD.dtype)
        served[SERVED_LM_HEAD] = mean_D.repeat(vocab_size, 1).index_copy(0, target_ids_W, rows_WD)
        served[TOKEN_MAP] = target_ids_W.to(torch.int64)
    return served


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedMedusa:
    """Heads read back from their bundle."""

    heads: MedusaHeads
    target_ids_W: Tensor


def read_medusa(folder: Path) -> ServedMedusa:
    """Reads a serving bundle.

    Raises:
        ValueError: a file, key or tensor is missing or wrong.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    target_ids_W = tensors.pop(TOKEN_MAP, None)
    try:
        geometry = DraftGeometry(
            hidden_size=config["hidden_size"],
            intermediate_size=0,
            num_layers=config["num_hidden_layers"],
            num_attention_heads=0,
            num_key_value_heads=0,
            head_dim=0,
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["vocab_size"] if target_ids_W is None else len(target_ids_W),
            aux_layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
            rms_norm_eps=0.0,
            max_position_embeddings=0,
            rope_parameters={},
            qk_norm=False,
            norm_before_residual=False,
            norm_before_fc=False,
            fc_norm=False,
            norm_output=False,
            num_heads=config["num_heads"],
        )
    except KeyError as error:
        raise ValueError(f"{folder / CONFIG}: key {error} is missing: export the heads again") from None
    heads = MedusaHeads(geometry)
    named = {LM_HEAD if name == SERVED_LM_HEAD else name: tensor for name, tensor in tensors.items()}
    if target_ids_W is None:
        target_ids_W = torch.arange(geometry.vocab_size)
    elif len(named.get(LM_HEAD, ())) == geometry.vocab_size:
        named[LM_HEAD] = named[LM_HEAD][target_ids_W]
    load_exactly(heads, named, folder / WEIGHTS)
    return ServedMedusa(heads=heads.eval(), target_ids_W=target_ids_W)
