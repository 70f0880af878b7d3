"""Building blocks of a draft head.

Shapes: R rows (any leading axes), B batch, T new tokens, S cached tokens, D hidden size, N query
heads, M key/value heads, H head size, P draft layers.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.drafters.config import DraftGeometry
from slipstream.drafters.fused import normed_projections, normed_swiglu, turn
from slipstream.drafters.ttt_attention import cached_attention


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
        cos, sin = self.angles(states_RNH, position_R.reshape(1, -1))
        return turn(states_RNH, *(x.reshape(*position_R.shape, 1, -1) for x in (cos, sin)))

    def angles(self, like: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every angle, [B, T, H] each, in the type of `like`."""
        cos, sin = self._angles[0](like, position_BT)
        return cos, sin


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


class AttentionCache(Protocol):
    """What a head asks of its cache."""

    def attend(
        self, layer: int, query_BTNH: Tensor, key_BTMH: Tensor, value_BTMH: Tensor, visible_TS: Tensor | None
    ) -> Tensor:
        """Adds new rows of a layer; what their queries find, [B, T, N*H]."""

    def advance(self, num_rows: int) -> None:
        """Keeps the rows that were added to every layer."""


class DraftCache:
    """Keys and values of the draft layers while decoding, in buffers that never move.

    `truncate` forgets the tail; the next `append` to each layer overwrites it.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        geometry: DraftGeometry,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (
            geometry.num_layers,
            batch_size,
            geometry.num_key_value_heads,
            max_length,
            geometry.head_dim,
        )
        self._key_PBMSH = torch.empty(shape, device=device, dtype=dtype)
        self._value_PBMSH = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, key_BTMH: Tensor, value_BTMH: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new rows of a layer and returns views [B, M, S, H] of everything it holds.

        The rows count once `advance` says that every layer has them.
        """
        num_new = key_BTMH.shape[1]
        for held, new in zip(self.held(layer, num_new), (key_BTMH, value_BTMH), strict=True):
            held[:, :, self.length :] = new.transpose(1, 2)
        return self.held(layer, num_new)

    def held(self, layer: int, num_new: int) -> tuple[Tensor, Tensor]:
        """Views [B, M, S, H] of what a layer holds, with `num_new` rows that do not count yet."""
        end = self.length + num_new
        return self._key_PBMSH[layer, :, :, :end], self._value_PBMSH[layer, :, :, :end]

    def attend(
        self, layer: int, query_BTNH: Tensor, key_BTMH: Tensor, value_BTMH: Tensor, visible_TS: Tensor | None
    ) -> Tensor:
        """Adds new rows of a layer; what their queries find [B, T, N*H] (see `cached_attention`)."""
        return cached_attention(query_BTNH, *self.append(layer, key_BTMH, value_BTMH), visible_TS)

    def advance(self, num_rows: int) -> None:
        """Keeps the rows that were appended to every layer."""
        self.length += num_rows

    def truncate(self, length: int) -> None:
        """Keeps the first `length` rows."""
        self.length = min(self.length, length)


class DraftAttention(nn.Module):
    """Projections of a draft layer.

    In the first layer q, k and v read [norm(embedding); norm(hidden)]. The two halves are projected
    apart and added, since over the unroll steps the embedding half only shifts and is computed once.
    """

    def __init__(self, geometry: DraftGeometry, *, reads_embedding: bool) -> None:
        super().__init__()
        hidden, head_dim = geometry.hidden_size, geometry.head_dim
        width = 2 * hidden if reads_embedding else hidden
        self.hidden_size, self.head_dim, self.qk_norm = hidden, head_dim, geometry.qk_norm
        self.q_proj = nn.Linear(width, geometry.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, geometry.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, geometry.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(geometry.num_attention_heads * head_dim, hidden, bias=False)
        if geometry.qk_norm:
            self.q_norm = nn.RMSNorm(head_dim, eps=geometry.rms_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=geometry.rms_norm_eps)

    def weights(self, names: str, *, of_embedding: bool = False) -> list[Tensor]:
        """The part of q, k or v that reads the hidden state, or the embedding; [X, D] each."""
        full = [self.get_parameter(f"{name}_proj.weight") for name in names]
        width = self.hidden_size
        return [weight[:, :width] if of_embedding else weight[:, -width:] for weight in full]

    def heads(self, name: str, projected_RX: Tensor) -> Tensor:
        """Projection q, k or v as [R, N, H]."""
        heads: Tensor = projected_RX.unflatten(-1, (-1, self.head_dim))
        if self.qk_norm and name != "v":
            heads = self.get_submodule(f"{name}_norm")(heads)
        return heads


class SwiGLU(nn.Module):
    """Gated MLP of the Llama family."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        hidden, wide = geometry.hidden_size, geometry.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, states_RD: Tensor, norm: nn.RMSNorm) -> Tensor:
        """The states plus the MLP of their norm."""
        return normed_swiglu(
            states_RD,
            norm.weight,
            norm_eps(norm),
            gate_YD=self.gate_proj.weight,
            up_YD=self.up_proj.weight,
            down_DY=self.down_proj.weight,
        )


class DraftLayer(nn.Module):
    """A decoder layer of the head, in pieces that training and decoding share.

    The first one is EAGLE-3's (2503.01840); further ones are plain Llama layers.
    """

    def __init__(self, geometry: DraftGeometry, *, is_first: bool) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.is_first = is_first
        self.norm_before_residual = is_first and geometry.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        if is_first:
            self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = DraftAttention(geometry, reads_embedding=is_first)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = SwiGLU(geometry)

    def embedding_shares(self, embed_RD: Tensor) -> dict[str, Tensor]:
        """Share of the embedding in each projection; the first layer alone reads it."""
        if not self.is_first:
            return {}
        norm, weights = self.input_layernorm, self.self_attn.weights("qkv", of_embedding=True)
        shares = normed_projections(embed_RD, norm.weight, norm_eps(norm), weights=weights)
        return dict(zip("qkv", shares, strict=True))

    def project(
        self, names: str, hidden_RD: Tensor, shares: dict[str, Tensor], source_R: Tensor
    ) -> list[Tensor]:
        """The projections `names` of some rows, [R, N, H] each.

        Args:
            names: letters out of q, k and v.
            hidden_RD: the layer's input.
            shares: of the embedding, see `embedding_shares`.
            source_R: the row of the shares that each row takes.
        """
        norm = self.hidden_norm if self.is_first else self.input_layernorm
        projected = normed_projections(
            hidden_RD,
            norm.weight,
            norm_eps(norm),
            weights=self.self_attn.weights(names),
            shares=[shares[name] for name in names] if shares else (),
            source_R=source_R if shares else None,
        )
        return [self.self_attn.heads(name, x) for name, x in zip(names, projected, strict=True)]

    def finish(self, hidden_RD: Tensor, attended_RX: Tensor) -> Tensor:
        """Output projection, residual and MLP.

        Args:
            hidden_RD: the layer's input.
            attended_RX: [R, N*H].
        """
        residual_RD = self.hidden_norm(hidden_RD) if self.norm_before_residual else hidden_RD
        after_RD = torch.addmm(residual_RD, attended_RX, self.self_attn.o_proj.weight.T)
        out: Tensor = self.mlp(after_RD, self.post_attention_layernorm)
        return out


def norm_eps(norm: nn.RMSNorm) -> float:
    """The eps that every norm here is made with."""
    assert norm.eps is not None
    return norm.eps
