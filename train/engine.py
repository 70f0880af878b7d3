"""The one place that talks to DeepSpeed and torch.distributed."""

import logging
import os
import socket
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.data.config import Dtype
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
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
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


def from_rank_0(value: T) -> T:
    """What rank 0 passed; any object that can be pickled."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


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
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.packs_per_step // num_ranks,
        "gradient_clipping": config.clip_norm,
        "zero_optimization": {"stage": config.deepspeed.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.deepspeed.dtype is Dtype.bfloat16},
        "steps_per_print": 1_000_000_000,
    }


class Engine:
    """A DeepSpeed engine behind five calls: forward, backward, step, save, load."""

    def __init__(self, module: nn.Module, config: TrainConfig, device: torch.device) -> None:
        """Wraps the module; every rank must hold the same weights."""
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # A kernel of inference that DeepSpeed would compile for minutes at the first start on a CPU.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.num_micro_batches = config.packs_per_step // world_size()
        self._engine, *_ = deepspeed.initialize(
            model=module.to(device),
            optimizer=make_optimizer(module, config),
            config=deepspeed_settings(config, world_size()),
            dist_init_required=False,
        )
        if world_size() == 1 and config.deepspeed.zero_stage == 0:
            # Nothing to reduce, yet DeepSpeed would copy all gradients into one buffer and back.
            self._engine.enable_backward_allreduce = False

    def __call__(self, *inputs: Any) -> Any:
        """Forward pass."""
        return self._engine(*inputs)

    def backward(self, local_sum: Tensor) -> None:
        """Accumulates the gradient of a sum over rows.

        DeepSpeed's averaging over ranks and micro-batches is undone, since the row weights already
        hold the global count.
        """
        self._engine.backward(local_sum * (world_size() * self.num_micro_batches))

    def step(self, learning_rate: float) -> None:
        """Ends a micro-batch; the last one of a step updates the weights."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_share"]
        self._engine.step()

    def grad_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping; None where DeepSpeed keeps none (ZeRO-0)."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def save(self, folder: Path, tag: str) -> None:
        """Writes model and optimizer states; called on every rank."""
        self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)

    def load(self, folder: Path, tag: str) -> None:
        """Reads what `save` wrote; called on every rank."""
        self._engine.load_checkpoint(str(folder), tag=tag)
