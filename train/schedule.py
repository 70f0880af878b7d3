"""Learning rate as a function of the optimizer step: nothing to save, nothing to resume."""

import math

from slipstream.train.config import Schedule, TrainConfig


def learning_rate(step: int, *, total_steps: int, config: TrainConfig) -> float:
    """Rate of optimizer step `step`, counted from 1 to `total_steps`.

    >>> config = TrainConfig(learning_rate=1e-4, warmup_share=0.1, schedule=Schedule.linear)
    >>> [f"{learning_rate(s, total_steps=20, config=config):.4g}" for s in (1, 2, 3, 10, 11, 20)]
    ['5e-05', '0.0001', '9.444e-05', '5.556e-05', '5e-05', '0']
    >>> config = TrainConfig(learning_rate=1.0, warmup_share=0.1, schedule=Schedule.wsd, decay_share=0.2)
    >>> [learning_rate(s, total_steps=20, config=config) for s in (1, 2, 16, 17, 18, 20)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.0]
    """
    warmup = math.ceil(config.warmup_share * total_steps)
    if step <= warmup:
        return config.learning_rate * step / warmup
    done = (step - warmup) / max(total_steps - warmup, 1)
    falling = math.ceil(config.decay_share * total_steps)
    shape = {
        Schedule.linear: 1 - done,
        Schedule.cosine: (1 + math.cos(math.pi * done)) / 2,
        Schedule.constant: 1.0,
        Schedule.wsd: min(1.0, (total_steps - step) / falling),
    }[config.schedule]
    return config.learning_rate * (config.final_lr_share + (1 - config.final_lr_share) * shape)
