"""Pieces of the draft layer that keep little for their backward pass.

Autograd would keep every normed state and every factor of the MLP; over K unroll steps that is
most of a step's memory. These functions keep their inputs and the two products that are expensive
to make again, and redo the element-wise rest.

Shapes: R rows, D input width, X output width, Y intermediate width, T rows of the pack.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Calls an autograd function, which torch leaves without types."""
    return function.apply(*inputs)


def rms_norm(states_RD: Tensor, scale_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normed states, and the float32 factor [R, 1] that norms them."""
    norm_R1 = torch.linalg.vector_norm(states_RD, dim=-1, keepdim=True, dtype=torch.float32)
    factor_R1 = torch.rsqrt(norm_R1.square_().div_(states_RD.shape[-1]).add_(eps))
    return (states_RD * factor_R1).mul_(scale_D).to(states_RD.dtype), factor_R1


def rms_norm_backward(
    grad_RD: Tensor, states_RD: Tensor, scale_D: Tensor, factor_R1: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` with respect to states and scale."""
    unit_RD = states_RD * factor_R1
    along_RD = unit_RD * grad_RD
    grad_scale_D = along_RD.sum(0)
    mean_R1 = (along_RD @ scale_D.to(along_RD.dtype)).div_(states_RD.shape[-1])[:, None]
    torch.mul(grad_RD, scale_D, out=along_RD)
    grad_states = along_RD.sub_(unit_RD.mul_(mean_R1)).mul_(factor_R1)
    return grad_states.to(states_RD.dtype), grad_scale_D.to(scale_D.dtype)


class _NormedProjections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_RD: Tensor,
        scale_D: Tensor,
        eps: float,
        source_R: Tensor | None,
        num: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        weights, shares = tensors[:num], tensors[num:]
        normed_RD, factor_R1 = rms_norm(states_RD, scale_D, eps)
        ctx.save_for_backward(states_RD, scale_D, factor_R1, source_R, *weights)
        if source_R is None:
            return tuple(normed_RD @ weight.T for weight in weights)
        ctx.num_shared = shares[0].shape[0]
        return tuple(
            share.index_select(0, source_R).addmm_(normed_RD, weight.T)
            for weight, share in zip(weights, shares, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states_RD, scale_D, factor_R1, source_R, *weights = ctx.saved_tensors
        normed_RD = (states_RD * factor_R1).mul_(scale_D).to(states_RD.dtype)
        grad_normed = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_normed.addmm_(grad, weight)
        grad_weights = [grad.T @ normed_RD for grad in grads]
        grad_shares = []
        if source_R is not None:
            shape = ctx.num_shared
            grad_shares = [g.new_zeros(shape, g.shape[1]).index_add_(0, source_R, g) for g in grads]
        grad_states, grad_scale = rms_norm_backward(grad_normed, states_RD, scale_D, factor_R1)
        return grad_states, grad_scale, None, None, None, *grad_weights, *grad_shares


def normed_projections(
    states_RD: Tensor,
    scale_D: Tensor,
    eps: float,
    *,
    weights: Sequence[Tensor],
    shares: Sequence[Tensor] = (),
    source_R: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Norm, then several products, each added to a share made before if there is one.

    Args:
        states_RD: what is normed.
        scale_D: of the norm.
        eps: of the norm.
        weights: [X, D] each.
        shares: [T, X] each.
        source_R: the row of the shares that each row takes.

    Returns:
        For each weight `share[source] + norm(states) @ weight.T`, [R, X].
    """
    outs: tuple[Tensor, ...] = apply(
        _NormedProjections, states_RD, scale_D, eps, source_R, len(weights), *weights, *shares
    )
    return outs


class _NormedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_RD: Tensor,
        scale_D: Tensor,
        eps: float,
        gate_YD: Tensor,
        up_YD: Tensor,
        down_DY: Tensor,
    ) -> Tensor:
        normed_RD, factor_R1 = rms_norm(states_RD, scale_D, eps)
        gate_RY, up_RY = normed_RD @ gate_YD.T, normed_RD @ up_YD.T
        ctx.save_for_backward(states_RD, scale_D, factor_R1, gate_YD, up_YD, down_DY, gate_RY, up_RY)
        return torch.addmm(states_RD, F.silu(gate_RY).mul_(up_RY), down_DY.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        states_RD, scale_D, factor_R1, gate_YD, up_YD, down_DY, gate_RY, up_RY = ctx.saved_tensors
        active_RY = F.silu(gate_RY)
        grad_down = grad_RD.T @ (active_RY * up_RY)
        grad_RY = grad_RD @ down_DY
        grad_up_RY = active_RY.mul_(grad_RY)
        grad_gate_RY = torch.ops.aten.silu_backward(grad_RY.mul_(up_RY), gate_RY)
        grad_normed = (grad_gate_RY @ gate_YD).addmm_(grad_up_RY, up_YD)
        normed_RD = (states_RD * factor_R1).mul_(scale_D).to(states_RD.dtype)
        grad_gate, grad_up = grad_gate_RY.T @ normed_RD, grad_up_RY.T @ normed_RD
        grad_states, grad_scale = rms_norm_backward(grad_normed, states_RD, scale_D, factor_R1)
        return grad_states.add_(grad_RD), grad_scale, None, grad_gate, grad_up, grad_down


def normed_swiglu(
    states_RD: Tensor, scale_D: Tensor, eps: float, *, gate_YD: Tensor, up_YD: Tensor, down_DY: Tensor
) -> Tensor:
    """The states plus the gated MLP of their norm, [R, D]."""
    out: Tensor = apply(_NormedSwiGLU, states_RD, scale_D, eps, gate_YD, up_YD, down_DY)
    return out


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_RNH: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
        ctx.save_for_backward(cos_R1H, sin_R1H)
        return _turned(states_RNH, cos_R1H, sin_R1H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RNH: Tensor) -> tuple[Tensor | None, ...]:
        cos_R1H, sin_R1H = ctx.saved_tensors
        return _turned(grad_RNH, cos_R1H, -sin_R1H), None, None


def _turned(states_RNH: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
    out_RNH = states_RNH * cos_R1H
    half = states_RNH.shape[-1] // 2
    out_RNH[..., :half].addcmul_(states_RNH[..., half:], sin_R1H[..., :half], value=-1)
    out_RNH[..., half:].addcmul_(states_RNH[..., :half], sin_R1H[..., half:])
    return out_RNH


def turn(states_RNH: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
    """Rotary embedding in the form of the Llama family: both halves of a head turn together."""
    out: Tensor = apply(_Turn, states_RNH, cos_R1H, sin_R1H)
    return out


def compile_pieces() -> None:
    """Lets torch.compile make one kernel of each element-wise piece, for the whole process.

    The products between them stay with the libraries, and their sizes, which differ from pack to
    pack, with eager code: the unroll as a whole takes minutes to compile and is compiled again.
    """
    for name in ("rms_norm", "rms_norm_backward", "_turned"):
        globals()[name] = torch.compile(globals()[name], dynamic=True)
