"""AdamW, or Muon with AdamW for what is no hidden matrix, as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slipstream.train.config import Optimizer, TrainConfig

HEAD = "lm_head.weight"
"""Its rows are words: each is a vector of its own, not a part of a map between hidden states."""


def make_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a recipe; every group holds `lr_share`, its part of the learning rate."""
    groups = _groups(module, config)
    adamw: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.betas[0], config.betas[1]),
        "fused": True,  # in place; the plain one makes copies as large as the parameters
    }
    if config.optimizer is Optimizer.adamw:
        return torch.optim.AdamW([group for group in groups if group["params"]], **adamw)
    return MuonWithAdamW(groups, lr=config.learning_rate, adamw=adamw)


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW behind one list of groups and one state, as DeepSpeed wants it."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, adamw: dict[str, Any]) -> None:
        """Groups whose parameters are hidden matrices have `is_hidden`."""
        filled = [group for group in groups if group["params"]]
        hidden, rest = ([g for g in filled if g["is_hidden"] == is_hidden] for is_hidden in (True, False))
        self._muon = torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(rest, **adamw)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Lets both update their groups."""
        parts: list[tuple[torch.optim.Optimizer, bool]] = [(self._muon, True), (self._adamw, False)]
        for inner, is_hidden in parts:
            # Loading a checkpoint makes new groups and a new state here.
            inner.param_groups = [group for group in self.param_groups if group["is_hidden"] == is_hidden]
            inner.state = self.state
            inner.step()


def _groups(module: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Hidden matrices, `fc` with its own rate, the draft vocabulary, and norms, which are never decayed."""
    decay = config.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay, "lr_share": 1.0, "is_hidden": True},
        {"params": [], "weight_decay": decay, "lr_share": config.fc_learning_rate_share, "is_hidden": True},
        {"params": [], "weight_decay": decay, "lr_share": 1.0, "is_hidden": False},
        {"params": [], "weight_decay": 0.0, "lr_share": 1.0, "is_hidden": False},
    ]
    for name, parameter in module.named_parameters():
        place = int(name.endswith(".fc.weight"))
        if parameter.dim() < 2 or name.endswith(HEAD):
            place = 2 if name.endswith(HEAD) else 3
        groups[place]["params"].append(parameter)
    return groups
