"""Learning rate as a function of the optimizer step: nothing to save, nothing to resume."""

import math

from slipstream.train.config import Schedule


def learning_rate(
    step: int, *, total_steps: int, peak: float, warmup_share: float, schedule: Schedule, final_share: float
) -> float:
    """Rate of optimizer step `step`, counted from 1 to `total_steps`.

    >>> rate = lambda s: learning_rate(
    ...     s, total_steps=20, peak=1e-4, warmup_share=0.1, schedule=Schedule.linear, final_share=0.0)
    >>> [f"{rate(s):.4g}" for s in (1, 2, 3, 10, 11, 20)]
    ['5e-05', '0.0001', '9.444e-05', '5.556e-05', '5e-05', '0']
    """
    warmup = math.ceil(warmup_share * total_steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(total_steps - warmup, 1)
    shape = {
        Schedule.linear: 1 - done,
        Schedule.cosine: (1 + math.cos(math.pi * done)) / 2,
        Schedule.constant: 1.0,
    }[schedule]
    return peak * (final_share + (1 - final_share) * shape)
