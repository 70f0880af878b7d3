"""Switches speculation off under load, and on again, without flapping."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationGuard:
    """Queue depth in, speculate or not out.

    Verifying a draft costs the target more work, which is free while memory bounds a step and is
    not once computing does. Speculation stops when more than `off_above` requests are there and
    comes back at `on_at` or fewer; between the two it stays as it is.

    >>> guard = SpeculationGuard(off_above=8, on_at=6)
    >>> [guard.update(depth) for depth in (1, 8, 9, 8, 7, 6, 8)]
    [True, True, False, False, False, True, True]
    """

    off_above: int
    on_at: int
    speculates: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.on_at <= self.off_above:
            raise ValueError(f"on_at={self.on_at} must lie in 0..off_above={self.off_above}")

    def update(self, depth: int) -> bool:
        """Whether to speculate with `depth` requests running and waiting."""
        self.speculates = depth <= (self.off_above if self.speculates else self.on_at)
        return self.speculates


def guard_at(threshold: int) -> SpeculationGuard:
    """A guard for a measured threshold: back on at three quarters of it."""
    return SpeculationGuard(off_above=threshold, on_at=threshold * 3 // 4)
