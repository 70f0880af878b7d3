"""Settings of a draft head, and the geometry that follows from them and the target."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SIZES = ("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings that follow the target where they are 0."""

TARGET_KEYS = {
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
}
"""What a target's config must say."""


class Init(Enum):
    """Where the first weights of a head come from."""

    random = "random"
    """Normal with standard deviation 0.02, norms one."""
    target = "target"
    """lm_head and norm from the target, fc passing the highest captured state through."""
    regression = "regression"
    """As target, with fc and attention from least squares (`slipstream.train.warm_start`); for other
    kinds than eagle3 the same as target."""


class Engine(Enum):
    """A serving engine."""

    vllm = "vllm"
    sglang = "sglang"


class Form(Enum):
    """How config.json is laid out; the tensors are the same."""

    eagle3 = "eagle3"
    """Plain; vLLM and SGLang read it."""
    speculators = "speculators"
    """Names its target, so `vllm serve FOLDER` is enough; vLLM alone reads it."""


KINDS = ("eagle3", "eagle1", "medusa")
FEATURE_KINDS = ("eagle1", "medusa")
"""Kinds that read the target's last state behind its final norm and nothing else."""


@dataclass
class DrafterConfig:
    """The draft head of a recipe; 0 and empty mean: as the target."""

    kind: str = "eagle3"
    """A key of `slipstream.drafters.registry.DRAFTERS`."""
    aux_layers: list[int] = field(default_factory=list)
    """Captured boundaries, boundary b being the state that enters layer b; empty: [2, n//2, n-3]."""
    draft_vocab_size: int = 0
    """W; 0 keeps the target's whole vocabulary."""
    num_layers: int = 1
    """The first layer reads embedding and state side by side, further ones the state alone."""
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    qk_norm: bool = False
    """Qwen3 style: RMSNorm of every query and key head before the rotary embedding."""
    norm_before_residual: bool = False
    """The residual of the first layer is the normed fused state."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated captured states."""
    fc_norm: bool = False
    """EAGLE-3.1: one RMSNorm for each captured state."""
    norm_output: bool = False
    """EAGLE-3.1: the carried state is the one after the final norm."""
    num_heads: int = 4
    """Medusa's heads, as many as train.unroll.num_steps."""
    init: Init = Init.target

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = []
        if self.kind not in KINDS:
            found.append(f"drafter.kind={self.kind} is not one of {', '.join(KINDS)}")
        if self.kind in FEATURE_KINDS and self.aux_layers:
            found.append(f"drafter.aux_layers: {self.kind} reads the target's last state, leave it empty")
        if self.kind == "eagle1" and self.num_layers != 1:
            found.append("drafter.num_layers must be 1 for eagle1")
        if self.num_layers < 1:
            found.append("drafter.num_layers must be at least 1")
        for key in SIZES:
            if getattr(self, key) < 0:
                found.append(f"drafter.{key} must be at least 0 (0: as the target)")
        if self.head_dim % 2:
            found.append(f"drafter.head_dim={self.head_dim} must be even: rotary positions turn pairs")
        if self.aux_layers != sorted(set(self.aux_layers)) or min(self.aux_layers, default=1) < 1:
            found.append(f"drafter.aux_layers={self.aux_layers} must be strictly increasing and >= 1")
        if self.norm_before_fc and self.fc_norm:
            found.append("drafter.norm_before_fc and drafter.fc_norm exclude each other")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftGeometry:
    """Every number the head and its exported config.json need; nothing is guessed later."""

    hidden_size: int
    """D, equal to the target's."""
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """V."""
    draft_vocab_size: int
    """W."""
    aux_layers: tuple[int, ...]
    """Boundary indices."""
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    """In the transformers 5 form: rope_type, rope_theta and what the type needs."""
    qk_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    num_heads: int = 0
    """Of Medusa."""

    @property
    def fc_width(self) -> int:
        """Input width of `fc`, L*D."""
        return len(self.aux_layers) * self.hidden_size

    @property
    def has_vocab_map(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size


def resolve_aux_layers(aux_layers: list[int], num_layers: int) -> tuple[int, ...]:
    """Captured boundaries of an n-layer target (ALGORITHMS.md section 2).

    Raises:
        ValueError: out of range, not increasing, or no default exists.
    """
    chosen = aux_layers or [2, num_layers // 2, num_layers - 3]
    if chosen != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] > num_layers:
        hint = "" if aux_layers else " (the default needs 7 layers or more)"
        raise ValueError(
            f"drafter.aux_layers={chosen} must be strictly increasing boundaries within "
            f"0..{num_layers} of a {num_layers}-layer target{hint}: set drafter.aux_layers=[a,b,c]"
        )
    return tuple(chosen)


def sglang_refusals(drafter: "DrafterConfig | DraftGeometry", num_target_layers: int | None) -> list[str]:
    """What SGLang cannot express of a head: one line for each, empty when it serves it.

    Without `num_target_layers` only what does not depend on the target is looked at.
    """
    found = []
    if drafter.qk_norm:
        found.append("drafter.qk_norm=true: SGLang has no EAGLE-3 layer with q/k norms")
    if drafter.norm_before_residual:
        found.append("drafter.norm_before_residual=true: SGLang always adds to the un-normed state")
    if len(drafter.aux_layers) == 1:
        found.append("drafter.aux_layers holds one boundary: SGLang then leaves out fc")
    if num_target_layers is not None and drafter.aux_layers[-1] == num_target_layers:
        found.append(
            f"drafter.aux_layers holds boundary {num_target_layers}: SGLang captures no state behind the "
            f"last layer"
        )
    return [f"{line}; change it, or set export.engines=[vllm]" for line in found]


def resolve_geometry(config: DrafterConfig, target: Mapping[str, Any]) -> DraftGeometry:
    """Combines recipe and target.

    Args:
        config: the recipe's section.
        target: the target's text config as a mapping (`PretrainedConfig.to_dict()`).

    Raises:
        ValueError: names the key that does not fit.
    """
    if missing := sorted(TARGET_KEYS - target.keys()):
        raise ValueError(
            f"target.name: its config.json has no {', '.join(missing)}: no head fits such a model"
        )
    vocab_size = target["vocab_size"]
    draft_vocab_size = config.draft_vocab_size or vocab_size
    if draft_vocab_size > vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size={draft_vocab_size} is larger than the target's vocabulary "
            f"of {vocab_size}: lower it, or 0 for all"
        )
    heads = config.num_attention_heads or target["num_attention_heads"]
    kv_heads = config.num_key_value_heads or target.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"drafter.num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    if target["hidden_size"] % heads:
        raise ValueError(
            f"drafter.num_attention_heads={heads} must divide the hidden size, {target['hidden_size']}: "
            f"transformers and the engines refuse others"
        )
    target_head_dim = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
    return DraftGeometry(
        hidden_size=target["hidden_size"],
        intermediate_size=config.intermediate_size or target["intermediate_size"],
        num_layers=config.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=config.head_dim or target_head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=resolve_aux_layers(
            [target["num_hidden_layers"]] if config.kind in FEATURE_KINDS else list(config.aux_layers),
            target["num_hidden_layers"],
        ),
        rms_norm_eps=target["rms_norm_eps"],
        max_position_embeddings=target["max_position_embeddings"],
        rope_parameters=_rope_parameters(target),
        qk_norm=config.qk_norm,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        num_heads=config.num_heads if config.kind == "medusa" else 0,
    )


def _rope_parameters(target: Mapping[str, Any]) -> dict[str, Any]:
    """Rope settings of old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) configs."""
    rope = dict(target.get("rope_parameters") or target.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", target.get("rope_theta") or 10000.0)
    return {key: value for key, value in rope.items() if value is not None}


def geometry_to_dict(geometry: DraftGeometry) -> dict[str, Any]:
    """Plain values for JSON."""
    return {**dataclasses.asdict(geometry), "aux_layers": list(geometry.aux_layers)}
