"""Settings of training."""

from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from math import inf

from slipstream.data.config import Dtype

AT_LEAST_1 = (
    "epochs",
    "tokens_per_pack",
    "packs_per_step",
    "log_every",
    "validate_every",
    "validate_tokens",
    "save_every",
    "keep_checkpoints",
)
ABOVE_0 = ("learning_rate", "fc_learning_rate_share", "clip_norm")
NOT_IDENTITY = (
    "wandb",
    "tensorboard",
    "log_every",
    "validate_every",
    "validate_tokens",
    "save_every",
    "keep_checkpoints",
)
"""Settings that do not change the trained weights."""
SHARES = ("warmup_share", "final_lr_share")


class Schedule(Enum):
    """Shape of the learning rate after warm-up."""

    linear = "linear"
    cosine = "cosine"
    constant = "constant"
    wsd = "wsd"
    """Stable, and a linear fall over the last `decay_share` of the steps."""


class Optimizer(Enum):
    """What turns gradients into changes of the weights."""

    adamw = "adamw"
    muon = "muon"
    """Matrices by Muon, at updates as large as AdamW's; the draft vocabulary's head and norms by AdamW."""


class LossMean(Enum):
    """What the loss is a mean of."""

    token = "token"
    """Every row counts the same."""
    sequence = "sequence"
    """Every document counts the same, however long its answers are."""


class LossKind(Enum):
    """Loss of a row; formulas in `slipstream.train.losses`."""

    ce = "ce"
    tv = "tv"
    lk_lambda = "lk_lambda"
    lk_alpha = "lk_alpha"


class TeacherForm(Enum):
    """Where the target's probabilities over the draft vocabulary come from."""

    cached = "cached"
    """Made once a pack and held in bfloat16."""
    recomputed = "recomputed"
    """Made where a chunk of rows needs them, in float32. The rows are visited teacher by teacher,
    so this costs hardly more and holds nothing."""


class OutsideVocab(Enum):
    """Rows whose target argmax has no draft id."""

    drop = "drop"
    renormalise = "renormalise"


class WandbMode(Enum):
    """Weights & Biases; auto: online with a login and a network, else offline."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class UnrollConfig:
    """Training-time test."""

    num_steps: int = 7
    """K, draft steps a row is unrolled."""
    step_decay: float = 0.8
    """Step k weighs step_decay**k."""
    survival: float = 1.0
    """Share of the rows that each step hands to the next; below 1 a step that keeps fewer rows
    weighs them more, so the expected gradient stays that of step_decay."""
    outside_vocab: OutsideVocab = OutsideVocab.drop


@dataclass
class LossConfig:
    """What the head is trained for."""

    kind: LossKind = LossKind.ce
    mean: LossMean = LossMean.token
    """Over all ranks and packs of an optimizer step, separately for each unroll step."""
    teacher: TeacherForm = TeacherForm.recomputed
    chunk_mib: int = 64
    """Size of the float32 logits that exist at one time."""

    def chunk_rows(self, draft_vocab_size: int) -> int:
        """Rows whose logits fill a chunk."""
        return max(1, (self.chunk_mib << 20) // (4 * draft_vocab_size))


@dataclass
class DeepSpeedConfig:
    """What the DeepSpeed engine is told."""

    zero_stage: int = 0
    """0, 1 or 2."""
    dtype: Dtype = Dtype.float32
    """float32, or bfloat16 with float32 master weights."""


@dataclass
class SelectionConfig:
    """Decodes with the head while it is trained, and keeps the best one instead of the last."""

    every: int = 0
    """Optimizer steps between two measurements, with one more at the end; 0: never."""
    num_prompts: int = 32
    """Prompts, from the validation split, which the ranks share."""
    max_new_tokens: int = 64
    num_draft_tokens: int = 4
    """K of the chain."""
    seconds: float = 60.0
    """Limit of a measurement: what the first one manages is what the later ones decode; 0: none."""
    tolerance: float = 1.0
    """An earlier head is better than a later one if its acceptance length is higher by more than
    this many standard errors of the difference over the prompts."""
    keep: int = 2
    """Best heads that stay on disk."""
    patience: int = 0
    """Training ends when the last N measurements were all worse than the best one; 0: never."""

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = []
        least = {"every": 0, "num_prompts": 1, "max_new_tokens": 2, "num_draft_tokens": 1, "keep": 1}
        for key, value in (least | {"patience": 0}).items():
            if getattr(self, key) < value:
                found.append(f"train.selection.{key} must be at least {value}")
        for key in ("seconds", "tolerance"):
            if not 0 <= getattr(self, key) < inf:
                found.append(f"train.selection.{key} must be a number >= 0")
        return found


@dataclass
class WandbConfig:
    """Where curves go besides metrics.jsonl."""

    mode: WandbMode = WandbMode.auto
    project: str = "slipstream"


@dataclass
class DraftModelConfig:
    """The small language model that scripts/draft_model.py trains."""

    hidden_size: int = 64
    """A multiple of 32."""
    num_layers: int = 2
    num_steps: int = 400
    rows_per_step: int = 8
    """Documents of one optimizer step."""

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = []
        if self.hidden_size < 32 or self.hidden_size % 32:
            found.append("draft_model.hidden_size must be a multiple of 32")
        for key in ("num_layers", "num_steps", "rows_per_step"):
            if getattr(self, key) < 1:
                found.append(f"draft_model.{key} must be at least 1")
        return found


@dataclass
class TrainConfig:
    """The optimization."""

    epochs: int = 1
    max_steps: int = 0
    """Stop after N optimizer steps; 0 runs all epochs."""
    tokens_per_pack: int = 4096
    """Tokens packed into one micro-batch of one rank."""
    packs_per_step: int = 8
    """Packs of an optimizer step over all ranks: world size times gradient accumulation."""
    learning_rate: float = 5e-5
    fc_learning_rate_share: float = 1.0
    """Of `fc`, as a share of learning_rate. Without fc_norm it reads states of RMS 5 to 50, so the
    same change of a weight moves its output that much more than elsewhere."""
    optimizer: Optimizer = Optimizer.adamw
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Of AdamW."""
    weight_decay: float = 0.0
    clip_norm: float = 0.5
    warmup_share: float = 0.015
    """Share of the optimizer steps that warm up."""
    schedule: Schedule = Schedule.linear
    final_lr_share: float = 0.0
    """Where the schedule ends, as a share of the peak."""
    decay_share: float = 0.2
    """Share of the optimizer steps over which schedule=wsd falls."""
    ema: float = 0.0
    """Decay of the moving average of the weights that is validated, selected and exported in their
    place; the average of the first steps is shorter. 0: the weights themselves."""
    unroll: UnrollConfig = field(default_factory=UnrollConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    log_every: int = 10
    validate_every: int = 200
    """Optimizer steps; also at the end."""
    validate_tokens: int = 65536
    """Tokens of the validation split that are used."""
    save_every: int = 500
    """Optimizer steps; also at the end."""
    keep_checkpoints: int = 2
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    tensorboard: bool = False
    """Also write curves that TensorBoard reads (extra `tensorboard`)."""
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = [f"train.{key} must be at least 1" for key in AT_LEAST_1 if getattr(self, key) < 1]
        found += [
            f"train.{key} must be above 0 and finite" for key in ABOVE_0 if not 0 < getattr(self, key) < inf
        ]
        found += [f"train.{key} must lie in [0, 1]" for key in SHARES if not 0 <= getattr(self, key) <= 1]
        if self.max_steps < 0:
            found.append("train.max_steps must be at least 0 (0 runs all epochs)")
        if not 0 <= self.weight_decay < inf:
            found.append("train.weight_decay must be a number >= 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            found.append("train.betas must hold two numbers in [0, 1)")
        if self.unroll.num_steps < 1:
            found.append("train.unroll.num_steps must be at least 1")
        if self.loss.chunk_mib < 1:
            found.append("train.loss.chunk_mib must be at least 1")
        for key in ("step_decay", "survival"):
            if not 0 < getattr(self.unroll, key) <= 1:
                found.append(f"train.unroll.{key} must lie in (0, 1]")
        if self.deepspeed.zero_stage not in (0, 1, 2):
            found.append(f"train.deepspeed.zero_stage={self.deepspeed.zero_stage}: 0, 1 or 2")
        if self.deepspeed.dtype not in (Dtype.float32, Dtype.bfloat16):
            found.append("train.deepspeed.dtype must be float32 or bfloat16")
        return found + self.selection.problems() + self._extra_problems()

    def _extra_problems(self) -> list[str]:
        found = []
        if not 0 <= self.ema < 1:
            found.append("train.ema must lie in [0, 1)")
        if not 0 < self.decay_share <= 1:
            found.append("train.decay_share must lie in (0, 1]")
        if self.optimizer is Optimizer.muon and self.deepspeed.zero_stage > 0:
            found.append(
                f"train.optimizer=muon turns whole matrices and train.deepspeed.zero_stage="
                f"{self.deepspeed.zero_stage} flattens and splits them: set the stage to 0, or "
                f"train.optimizer=adamw"
            )
        if self.tensorboard and find_spec("tensorboard") is None:
            found.append("train.tensorboard=true needs a package: pip install 'slipstream[tensorboard]'")
        return found
