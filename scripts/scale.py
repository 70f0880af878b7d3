"""What limits training at scale, on paper: `python scripts/scale.py` prints the tables of docs/scale.md.

Per optimizer step: the target's pass, features on the wire or from the disk, the head's step and the
all-reduce of its gradient, from the cost model of a training step. Nothing is measured here; times
that overlap are set side by side, and the longest is the limit.
"""

from dataclasses import dataclass

PACK, NUM_PACKS = 4096, 64
"""Tokens of a pack; packs of an optimizer step (one for each GPU where there are more)."""
NUM_UNROLL, SURVIVAL, SUPERVISED = 7, 1.0, 0.6
"""K; share of rows that go on; share of tokens that the target generated."""
NUM_AUX, DRAFT_VOCAB, EPOCHS = 3, 32000, 2
PEAK, TARGET_SHARE, STEP_SHARE = 989e12, 0.45, 0.35
"""bfloat16 FLOP/s of an H200, and the shares of it that a prefill and the head's step are given."""
NODE, NVLINK, NETWORK, DISK = 8, 450e9, 50e9, 12e9
"""GPUs of a node; bytes/s of a GPU to its neighbours and out of the node; of a node's own disks."""
GPUS = (1, 8, 16, 64, 256, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A target and the head that is trained for it."""

    name: str
    active: float
    """Parameters that a token passes through."""
    layers: int
    hidden: int
    vocab: int
    ffn: int
    """Of the head's layer."""
    kv: int
    """Width of the head's keys."""
    min_gpus: int
    """That hold the target's weights and work on one batch."""

    @property
    def fc(self) -> int:
        """Weights that fuse the captured states."""
        return NUM_AUX * self.hidden**2

    @property
    def layer(self) -> int:
        """Weights of the decoder layer: projections of 2D-wide rows, output, MLP."""
        return 2 * self.hidden * (self.hidden + 2 * self.kv) + self.hidden**2 + 3 * self.hidden * self.ffn

    @property
    def lm_head(self) -> int:
        """Weights over the draft vocabulary."""
        return self.hidden * DRAFT_VOCAB

    @property
    def head(self) -> int:
        """Trained weights, norms left out."""
        return self.fc + self.layer + self.lm_head

    def step_flops(self) -> float:
        """Of a token in training; the cache holds the teacher's log-sum-exp, so W logits are enough."""
        rows = sum(SUPERVISED * SURVIVAL**k for k in range(NUM_UNROLL))
        products = 2 * (self.fc + rows * (self.layer + self.lm_head)) + 2 * rows * self.hidden * PACK
        return 3 * products + SUPERVISED * 2 * self.lm_head

    def target_flops(self) -> float:
        """Of a token in the target's pass, the logits of supervised tokens included."""
        attention = 2 * self.layers * self.hidden * PACK
        return 2 * self.active + attention + SUPERVISED * 2 * self.hidden * self.vocab

    def feature_bytes(self) -> float:
        """Of a token in bfloat16: captured states, and the last one of supervised tokens."""
        return 2 * self.hidden * (NUM_AUX + SUPERVISED)


CASES = (
    Case(name="8B", active=8e9, layers=32, hidden=4096, vocab=128256, ffn=14336, kv=1024, min_gpus=1),
    Case(name="70B", active=70e9, layers=80, hidden=8192, vocab=128256, ffn=28672, kv=1024, min_gpus=2),
    Case(
        name="1T MoE, 32B active",
        active=32e9,
        layers=61,
        hidden=7168,
        vocab=163840,
        ffn=18432,
        kv=1024,
        min_gpus=16,
    ),
)


def step_seconds(case: Case, gpus: int) -> dict[str, float]:
    """Seconds that each part takes for one optimizer step on `gpus` GPUs, which do all of it in turns."""
    tokens = PACK * max(NUM_PACKS, gpus)
    nodes = max(gpus // NODE, 1)
    gradient = 2.0 * case.head
    local = min(gpus, NODE)
    reduce = (
        2 * (local - 1) / local * gradient / NVLINK + 2 * (nodes - 1) / nodes * gradient / local / NETWORK
    )
    return {
        "target": tokens * case.target_flops() / (gpus * PEAK * TARGET_SHARE),
        "wire": tokens * case.feature_bytes() / (gpus * NETWORK),
        "disk": tokens * case.feature_bytes() / (nodes * DISK),
        "step": tokens * case.step_flops() / (gpus * PEAK * STEP_SHARE),
        "all-reduce": reduce,
    }


def limits(seconds: dict[str, float]) -> tuple[str, str]:
    """What takes longest with a live target, and with a cache that was filled once for all epochs."""
    live = {name: value for name, value in seconds.items() if name != "disk"}
    cached = {name: value for name, value in seconds.items() if name != "wire"}
    cached["target"] /= EPOCHS
    return max(live, key=live.__getitem__), max(cached, key=cached.__getitem__)


def table(case: Case) -> str:
    """Milliseconds of every part, by the number of GPUs."""
    columns = ("GPUs", "tokens", *(f"{name} ms" for name in step_seconds(case, 1)), "limit, live", "cached")
    lines = [
        f"**{case.name}**: a head of {case.head / 1e9:.2f} B weights; a token takes "
        f"{case.step_flops() / 1e9:.0f} GFLOP in the step, {case.target_flops() / 1e9:.0f} in the target, "
        f"and {case.feature_bytes() / 1024:.1f} KiB of states.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    for gpus in GPUS:
        seconds = step_seconds(case, gpus)
        cells = [f"{1000 * value:,.1f}" for value in seconds.values()]
        live, cached = limits(seconds)
        if gpus < case.min_gpus:
            cells[0], live, cached = "-", "does not fit", "a cache made elsewhere"
        tokens = PACK * max(NUM_PACKS, gpus)
        lines.append(f"| {gpus} | {tokens:,} | {' | '.join(cells)} | {live} | {cached} |")
    return "\n".join(lines)


def memory_table() -> str:
    """Gigabytes of a rank for weights, float32 gradients, moments and master weights, on 8 ranks."""
    lines = ["| target | stage 0 | stage 1 | stage 2 | stage 3 would hold |", "|---|---|---|---|---|"]
    for case in CASES:
        per_weight = (2 + 4 + 12, 2 + 4 + 12 / NODE, 2 + (4 + 12) / NODE, 2 + (4 + 12) / NODE)
        held = " | ".join(f"{case.head * size / 1e9:.1f}" for size in per_weight)
        lines.append(f"| {case.name} | {held} |")
    return "\n".join(lines)


def main() -> None:
    """Prints everything."""
    print("\n\n".join([*map(table, CASES), memory_table()]))


if __name__ == "__main__":
    main()
