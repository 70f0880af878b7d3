"""Muon for hidden matrices and AdamW for the rest give what each gives alone, over a restart too."""

import copy

import pytest
import torch
from torch import nn

from slipstream.train.config import DeepSpeedConfig, Optimizer, TrainConfig
from slipstream.train.optimizers import make_optimizer
from tests.heads import make_geometry, make_head

HIDDEN = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = make_head(make_geometry())


def set_gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.empty(parameter.shape).normal_(generator=generator)


def test_each_parameter_has_its_optimizer() -> None:
    config = TrainConfig(optimizer=Optimizer.muon, learning_rate=1e-2, weight_decay=0.1)
    both, alone = Trained(), Trained()
    optimizer = make_optimizer(both, config)
    hidden = [p for name, p in alone.named_parameters() if name.split(".")[-2] in HIDDEN]
    rest = [p for name, p in alone.named_parameters() if name.split(".")[-2] not in HIDDEN]
    assert len(hidden) == 8 and {p.dim() for p in hidden} == {2}
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    matrices, norms = ([p for p in rest if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for step in range(4):
        if step == 2:  # a restart
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make_optimizer(both, config)
            optimizer.load_state_dict(saved)
        for module in (both, alone):
            set_gradients(module, step)
        for one in (optimizer, muon, adamw):
            one.step()
    for (name, a), b in zip(both.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_shares_of_the_rate() -> None:
    for kind in Optimizer:
        module = Trained()
        config = TrainConfig(optimizer=kind, fc_learning_rate_share=0.25, weight_decay=0.1)
        groups = make_optimizer(module, config).param_groups
        of = {id(p): group for group in groups for p in group["params"]}
        assert of[id(module.head.fc.weight)]["lr_share"] == 0.25
        assert of[id(module.head.lm_head.weight)]["lr_share"] == 1.0
        assert of[id(module.head.norm.weight)]["weight_decay"] == 0.0
        assert len(of) == len(list(module.parameters()))


@pytest.mark.parametrize("stage", [1, 2])
def test_muon_needs_whole_matrices(stage: int) -> None:
    config = TrainConfig(optimizer=Optimizer.muon, deepspeed=DeepSpeedConfig(zero_stage=stage))
    (problem,) = config.problems()
    assert problem.startswith("train.optimizer=muon turns whole matrices")
    assert not TrainConfig(optimizer=Optimizer.muon).problems()
