"""The state of training in one layout, whatever number of ranks and ZeRO stage made it.

`NAME` is the float32 weight of a parameter and `NAME.KEY` what the optimizer keeps for it: a tensor
of its shape (a moment) or a scalar (a count of steps). Tensors are gathered and spread one by one, so
a rank never holds more than one whole tensor besides its own share; rank 0 holds them on the CPU.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A parameter of the module and the tensor that the optimizer updates for it."""

    name: str
    parameter: Any
    """With the methods that DeepSpeed gives it where the optimizer's tensors are shared by ranks."""
    master: Tensor
    """float32; the parameter itself, its copy, or this rank's flat share of its whole group."""
    is_shared: bool


def slots(
    module: nn.Module,
    groups: Iterable[list[nn.Parameter]],
    masters: Iterable[list[Tensor]],
    *,
    is_shared: bool,
) -> list[Slot]:
    """Pairs parameters with what the optimizer updates, in the order of its groups.

    Args:
        module: whose names are used.
        groups: parameters of each group, before DeepSpeed replaced them.
        masters: what each group holds now.
        is_shared: whether a group is one flat tensor of which every rank has a part.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        Slot(
            name=names[id(parameter)],
            parameter=parameter,
            master=updated[0] if is_shared else updated[i],
            is_shared=is_shared,
        )
        for group, updated in zip(groups, masters, strict=True)
        for i, parameter in enumerate(group)
    ]


def _link(slot: Slot, state: dict[str, Tensor]) -> None:
    """Shows DeepSpeed the optimizer's state; it looked when only the first group had one."""
    if slot.is_shared and slot.parameter._hp_mapping is not None:
        slot.parameter._hp_mapping.set_optim_state_fragment(slot.master, state)


@torch.no_grad()
def gather(slots: Iterable[Slot], states: Mapping[Tensor, dict[str, Tensor]]) -> Tensors:
    """Every tensor, whole and on the CPU, on rank 0 (others take part and get none).

    Args:
        slots: of this rank, in the same order on every rank.
        states: the optimizer's state of every master.
    """
    whole: Tensors = {}

    def keep(name: str, tensor: Tensor) -> None:
        if dist.get_rank() == 0:
            whole[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)

    for slot in slots:
        keep(slot.name, slot.parameter.get_full_hp_param() if slot.is_shared else slot.master)
        state = states.get(slot.master, {})
        _link(slot, state)
        for key, value in state.items():
            is_split = slot.is_shared and value.dim() > 0
            keep(f"{slot.name}.{key}", slot.parameter.get_full_hp_param(key) if is_split else value)
    return whole


@torch.no_grad()
def spread_states(slots: Iterable[Slot], states: dict[Tensor, dict[str, Tensor]], whole: Tensors) -> None:
    """Makes the optimizer's state as large as it must be; moments are zero until `spread_tensors`.

    Args:
        slots: of this rank.
        states: the optimizer's, filled here.
        whole: what `gather` gave; read on rank 0.
    """
    scalars = [{key: value for key, value in whole.items() if value.dim() == 0}]
    names = [list(whole)]
    dist.broadcast_object_list(scalars)
    dist.broadcast_object_list(names)
    for slot in slots:
        prefix = f"{slot.name}."
        keys = [name.removeprefix(prefix) for name in names[0] if name.startswith(prefix)]
        if keys:
            states[slot.master] = {
                key: scalars[0][prefix + key].to(slot.master.device)
                if prefix + key in scalars[0]
                else torch.zeros_like(slot.master)
                for key in keys
            }


@torch.no_grad()
def spread_tensors(slots: Iterable[Slot], states: Mapping[Tensor, dict[str, Tensor]], whole: Tensors) -> None:
    """Fills weights and moments from rank 0's `whole`; every rank takes part.

    The module's own weights follow their masters, except where ranks share these.
    """
    for slot in slots:

        def value(name: str, slot: Slot = slot) -> Tensor:
            shape, device = slot.parameter.shape, slot.master.device
            tensor = torch.empty(shape, dtype=torch.float32, device=device)
            if dist.get_rank() == 0:
                tensor.copy_(whole[name])
            dist.broadcast(tensor, 0)
            return tensor

        state = states.get(slot.master, {})
        _link(slot, state)
        moments = [key for key, tensor in state.items() if tensor.dim() > 0]
        if slot.is_shared:
            slot.parameter.set_full_hp_param(value(slot.name))
            for key in moments:
                slot.parameter.set_full_hp_param(value(f"{slot.name}.{key}"), key)
        else:
            slot.master.copy_(value(slot.name))
            slot.parameter.copy_(slot.master)
            for key in moments:
                state[key].copy_(value(f"{slot.name}.{key}"))
