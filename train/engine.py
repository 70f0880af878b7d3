"""The one place that talks to DeepSpeed and torch.distributed."""

import contextlib
import io
import logging
import os
import socket
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.data.config import Dtype
from slipstream.train import portable
from slipstream.train.config import TrainConfig
from slipstream.train.optimizers import make_optimizer

T = TypeVar("T")


def init_distributed() -> torch.device:
    """Joins the process group of torchrun (or makes one of a single process).

    Returns:
        This rank's device.
    """
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank() -> int:
    """This process among all."""
    return dist.get_rank()


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size()


def sum_over_ranks(values: Tensor) -> Tensor:
    """All-reduced sum, in place."""
    dist.all_reduce(values)
    return values


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether a rank says so; the same answer on every rank."""
    vote = torch.tensor(float(flag), device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def from_rank_0(value: T) -> T:
    """What rank 0 passed; any object that can be pickled."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def from_all_ranks(value: T) -> list[T]:
    """What every rank passed; any object that can be pickled."""
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Waits for every rank."""
    dist.barrier()


def shutdown() -> None:
    """Leaves the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def deepspeed_settings(config: TrainConfig, num_ranks: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a recipe.

    Raises:
        ValueError: packs_per_step cannot be shared by the ranks.
    """
    if config.packs_per_step % num_ranks:
        raise ValueError(
            f"train.packs_per_step={config.packs_per_step} must be a multiple of the {num_ranks} "
            f"ranks: set train.packs_per_step={num_ranks * max(config.packs_per_step // num_ranks, 1)}"
        )
    is_bfloat16 = config.deepspeed.dtype is Dtype.bfloat16
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.packs_per_step // num_ranks,
        "gradient_clipping": 0.0 if _is_plain(config) else config.clip_norm,
        "zero_optimization": {"stage": config.deepspeed.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": is_bfloat16},
        # Packs add up in float32; without shares DeepSpeed has one type for weights and gradients.
        "data_types": {"grad_accum_dtype": "fp32" if is_bfloat16 and config.deepspeed.zero_stage else None},
        "steps_per_print": 1_000_000_000,
    }


def _is_plain(config: TrainConfig) -> bool:
    """Whether DeepSpeed leaves the optimizer as it is: no shares, no master copy."""
    return config.deepspeed.zero_stage == 0 and config.deepspeed.dtype is Dtype.float32


class Engine:
    """A DeepSpeed engine behind five calls: forward, backward, step, save, load."""

    def __init__(self, module: nn.Module, config: TrainConfig, device: torch.device) -> None:
        """Wraps the module; every rank must hold the same weights."""
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # A kernel of inference that DeepSpeed would compile for minutes at the first start on a CPU.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        optimizer = make_optimizer(module, config)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        self.num_micro_batches = config.packs_per_step // world_size()
        self._num_done = 0
        with contextlib.redirect_stdout(io.StringIO()):  # where it prints how much memory is in use
            self._engine, *_ = deepspeed.initialize(
                model=module.to(device),
                optimizer=optimizer,
                config=deepspeed_settings(config, world_size()),
                dist_init_required=False,
            )
        if world_size() == 1 and config.deepspeed.zero_stage == 0:
            # Nothing to reduce, yet DeepSpeed would copy all gradients into one buffer and back.
            self._engine.enable_backward_allreduce = False
        self._optimizer = optimizer
        # With a master copy and no shares DeepSpeed has made a step already, to see what memory it takes.
        optimizer.state.clear()
        self._clip_norm = config.clip_norm if _is_plain(config) else None
        self._is_shared = config.deepspeed.zero_stage > 0
        self._slots = portable.slots(
            module,
            groups,
            [list(group["params"]) for group in optimizer.param_groups],
            is_shared=self._is_shared,
        )

    def __call__(self, *inputs: Any) -> Any:
        """Forward pass."""
        return self._engine(*inputs)

    def backward(self, local_sum: Tensor) -> None:
        """Accumulates the gradient of a sum over rows.

        DeepSpeed's averaging over ranks and micro-batches is undone, since the row weights already
        hold the global count.
        """
        self._engine.backward(local_sum * (world_size() * self.num_micro_batches))

    def step(self, learning_rate: float) -> bool:
        """Ends a micro-batch; the last one of a step updates the weights.

        Returns:
            Whether it did, the same on every rank: not before the last micro-batch, and not where the
            gradient of any rank is not finite.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_share"]
        self._num_done = (self._num_done + 1) % self.num_micro_batches
        is_finite = self._num_done > 0 or self._clip()
        self._engine.step()
        return is_finite and self._engine.was_step_applied()

    def _clip(self) -> bool:
        """Clips gradients that DeepSpeed leaves alone; without a finite norm it drops them.

        DeepSpeed has reduced them, so that all ranks see the same. Elsewhere it clips and skips itself.
        """
        if self._clip_norm is None:
            return True
        parameters = list(self._engine.module.parameters())
        self._norm = torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        is_finite = bool(self._norm.isfinite())
        if not is_finite:
            for parameter in parameters:
                parameter.grad = None  # the optimizer passes over parameters without one
        return is_finite

    def grad_norm(self) -> float:
        """Norm of the last step's gradient before clipping."""
        return float(self._engine.get_global_grad_norm() if self._clip_norm is None else self._norm)

    def save(self) -> portable.Tensors:
        """Weights and optimizer state, whole, on rank 0; called on every rank."""
        return portable.gather(self._slots, self._optimizer.state)

    def load(self, tensors: portable.Tensors) -> None:
        """Takes up what `save` gave on rank 0, under whatever ranks and ZeRO stage; called on every rank."""
        portable.spread_states(self._slots, self._optimizer.state, tensors)
        portable.spread_tensors(self._slots, self._optimizer.state, tensors)
        if self._is_shared:
            self._engine.optimizer.update_lp_params()
