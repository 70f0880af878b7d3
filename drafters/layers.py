"""Building blocks of a draft head.

Shapes: R rows (any leading axes), B batch, T new tokens, S cached tokens, D hidden size, N query
heads, M key/value heads, H head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.drafters.config import DraftGeometry


class Rotary(nn.Module):
    """Rotary position embedding with the target's parameters (transformers computes the angles)."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        # In a tuple, so that a model cast to bfloat16 keeps its angles in float32 as the engines do.
        try:
            self._angles = (LlamaRotaryEmbedding(llama_config(geometry)),)
        except KeyError as error:
            raise ValueError(f"rope_type {error} of the target's config is not known") from None

    def forward(self, states_RNH: Tensor, position_R: Tensor) -> Tensor:
        """Turns queries or keys to their positions; [..., N, H] and [...] of int64."""
        flat = position_R.reshape(1, -1)
        cos, sin = self._angles[0](states_RNH, flat)
        cos, sin = (x.reshape(*position_R.shape, 1, -1) for x in (cos, sin))
        first, second = states_RNH.chunk(2, dim=-1)
        turned: Tensor = states_RNH * cos + torch.cat((-second, first), dim=-1) * sin
        return turned


def llama_config(geometry: DraftGeometry) -> LlamaConfig:
    """The geometry as a transformers config."""
    return LlamaConfig(
        hidden_size=geometry.hidden_size,
        num_attention_heads=geometry.num_attention_heads,
        num_key_value_heads=geometry.num_key_value_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=geometry.max_position_embeddings,
        rope_parameters=dict(geometry.rope_parameters),
    )


class DraftCache:
    """Keys and values of the draft layer while decoding, in buffers that never move.

    `truncate` forgets the tail; the next `append` overwrites it.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        geometry: DraftGeometry,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (batch_size, geometry.num_key_value_heads, max_length, geometry.head_dim)
        self._key_BMSH = torch.empty(shape, device=device, dtype=dtype)
        self._value_BMSH = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, key_BTMH: Tensor, value_BTMH: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new rows and returns views [B, M, S, H] of everything held."""
        end = self.length + key_BTMH.shape[1]
        self._key_BMSH[:, :, self.length : end] = key_BTMH.transpose(1, 2)
        self._value_BMSH[:, :, self.length : end] = value_BTMH.transpose(1, 2)
        self.length = end
        return self._key_BMSH[:, :, :end], self._value_BMSH[:, :, :end]

    def truncate(self, length: int) -> None:
        """Keeps the first `length` rows."""
        self.length = min(self.length, length)


class DraftAttention(nn.Module):
    """Projections of the EAGLE-3 layer, whose input is twice as wide as the hidden size.

    q, k and v read [norm(embedding); norm(hidden)]. The two halves are projected apart and added,
    since over the unroll steps the embedding half only shifts and is computed once.
    """

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        hidden, head_dim = geometry.hidden_size, geometry.head_dim
        self.hidden_size, self.head_dim = hidden, head_dim
        self.q_proj = nn.Linear(2 * hidden, geometry.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, geometry.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, geometry.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(geometry.num_attention_heads * head_dim, hidden, bias=False)

    def embedding_half(self, name: str, normed_RD: Tensor) -> Tensor:
        """Share of the embedding in projection `name` (q, k or v), [R, N*H]."""
        return F.linear(normed_RD, self._weight(name)[:, : self.hidden_size])

    def add_hidden_half(self, name: str, embedding_half: Tensor, normed_RD: Tensor) -> Tensor:
        """Completes projection `name` of the same rows, [R, N, H]."""
        full: Tensor = embedding_half + F.linear(normed_RD, self._weight(name)[:, self.hidden_size :])
        heads: Tensor = full.unflatten(-1, (-1, self.head_dim))
        return heads

    def _weight(self, name: str) -> Tensor:
        return self.get_parameter(f"{name}_proj.weight")


class SwiGLU(nn.Module):
    """Gated MLP of the Llama family."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        hidden, wide = geometry.hidden_size, geometry.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, states_RD: Tensor) -> Tensor:
        """[R, D] to [R, D]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(states_RD)) * self.up_proj(states_RD))
        return out


class DraftLayer(nn.Module):
    """The decoder layer of EAGLE-3 (2503.01840), in pieces that training and decoding share."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.norm_before_residual = geometry.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = DraftAttention(geometry)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = SwiGLU(geometry)

    def residual(self, hidden_RD: Tensor, normed_RD: Tensor) -> Tensor:
        """What the attention output is added to."""
        return normed_RD if self.norm_before_residual else hidden_RD

    def finish(self, residual_RD: Tensor, attended_RX: Tensor) -> Tensor:
        """Output projection, residual and MLP; `attended` is [R, N*H]."""
        after_attention = residual_RD + self.self_attn.o_proj(attended_RX)
        out: Tensor = after_attention + self.mlp(self.post_attention_layernorm(after_attention))
        return out
