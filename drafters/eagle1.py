"""The EAGLE-1 head (2401.15077), which EAGLE-2 decodes with trees: it predicts the target's next feature.

A feature is the target's last state behind its final norm, what the target's own head reads. Feature
and token embedding meet in `fc`; one decoder layer without a norm before its attention follows; the
target's head reads the result, which is carried to the next draft step as it is.

Shapes: R rows (any leading axes), B batch, T new rows, N query heads, M key/value heads, H head size,
D hidden size.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS, read_config, read_tensors
from slipstream.drafters.config import DraftGeometry, Init
from slipstream.drafters.layers import Rotary

ARCHITECTURE = "EagleLlamaForCausalLM"
INIT_STD = 0.02

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, T, N, H], keys and values [B, T, M, H] to [B, T, N*H]."""


class _Attention(nn.Module):
    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        hidden, head_dim = geometry.hidden_size, geometry.head_dim
        self.q_proj = nn.Linear(hidden, geometry.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, geometry.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, geometry.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(geometry.num_attention_heads * head_dim, hidden, bias=False)


class _MLP(nn.Module):
    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        hidden, wide = geometry.hidden_size, geometry.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, states_RD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(states_RD)) * self.up_proj(states_RD))
        return out


class _Layer(nn.Module):
    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(geometry), _MLP(geometry)
        self.post_attention_layernorm = nn.RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)


class Eagle1Head(nn.Module):
    """Named as the serving engines read it; embedding and head are the target's and stay outside."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.fc = nn.Linear(2 * geometry.hidden_size, geometry.hidden_size, bias=False)
        self.layers = nn.ModuleDict({"0": _Layer(geometry)})
        self.rotary = Rotary(geometry)

    def forward(
        self, embed_BTD: Tensor, feature_BTD: Tensor, position_BT: Tensor, attend: Attention
    ) -> Tensor:
        """Predicted features [B, T, D] of the tokens whose embeddings are given.

        Args:
            embed_BTD: embedding of the token after each row.
            feature_BTD: the target's feature of each row, or the prediction of the row before.
            position_BT: rotary positions.
            attend: over a cache, or over the rows of a pack.
        """
        layer: Any = self.layers["0"]
        attn, size = layer.self_attn, self.geometry.head_dim
        state_BTD = self.fc(torch.cat((embed_BTD, feature_BTD), dim=-1))
        query, key, value = (
            proj(state_BTD).unflatten(-1, (-1, size)) for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        query, key = self.rotary(query, position_BT), self.rotary(key, position_BT)
        state_BTD = state_BTD + attn.o_proj(attend(query, key, value))
        out: Tensor = state_BTD + layer.mlp(layer.post_attention_layernorm(state_BTD))
        return out

    @torch.no_grad()
    def initialise(self, init: Init, *, lm_head_WD: Tensor, norm_D: Tensor, seed: int) -> None:
        """Sets the first weights, the same on every rank; but for `random` the feature passes through."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, INIT_STD, generator=generator)
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
        if init is not Init.random:
            hidden = self.geometry.hidden_size
            self.fc.weight[:, hidden:].add_(torch.eye(hidden))


def eagle1_config(geometry: DraftGeometry, *, bos: Any, eos: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json that vLLM's method `eagle` reads."""
    rope = dict(geometry.rope_parameters)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": geometry.num_attention_heads,
        "num_key_value_heads": geometry.num_key_value_heads,
        "head_dim": geometry.head_dim,
        "vocab_size": geometry.vocab_size,
        "rms_norm_eps": geometry.rms_norm_eps,
        "hidden_act": "silu",
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "max_position_embeddings": geometry.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(geometry.aux_layers),
    }


def read_eagle1(folder: Path) -> Eagle1Head:
    """Reads a serving bundle.

    Raises:
        ValueError: a file, key or tensor is missing or wrong.
    """
    config = read_config(folder)
    try:
        geometry = DraftGeometry(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=1,
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["vocab_size"],
            aux_layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
            rms_norm_eps=config["rms_norm_eps"],
            max_position_embeddings=config["max_position_embeddings"],
            rope_parameters=config["rope_parameters"],
            qk_norm=False,
            norm_before_residual=False,
            norm_before_fc=False,
            fc_norm=False,
            norm_output=False,
        )
    except KeyError as error:
        raise ValueError(f"{folder / CONFIG}: key {error} is missing: export the head again") from None
    head = Eagle1Head(geometry)
    load_exactly(head, read_tensors(folder), folder / WEIGHTS)
    return head.eval()


def load_exactly(head: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Loads tensors that must be the module's, no more and no less.

    Raises:
        ValueError: lists what is missing, unexpected or of a wrong shape.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = {
        name: f"{found.get(name, 'missing')}, not {wanted.get(name, 'there at all')}"
        for name in sorted(wanted.keys() | found.keys())
        if found.get(name) != wanted.get(name)
    }
    if wrong:
        raise ValueError(f"{source}: {json.dumps(wrong)}: export the head again")
    head.load_state_dict(tensors)
