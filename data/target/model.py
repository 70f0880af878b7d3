"""Loads the target model, frozen and made quick: attention without copies, packed products.

Shape suffixes: B batch row, N query head, K key-value head, G query heads per key-value head,
Q new token, T token, H head size.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import logging

ATTENTION = "slipstream"
"""Name under which transformers knows the attention of this module."""

FOLD_LIMIT = 64
"""Longest query that is folded; longer ones are prefill, where copying keys costs little."""


def folded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Grouped-query attention for few new tokens, the group folded into the query rows.

    transformers' sdpa repeats keys and values for every query head when several tokens come with
    a mask. Here [B, N, Q, H] queries become [B, K, G*Q, H] and the keys are read as they lie. Two
    plain products: on a CPU they take half the time of the fused kernel for so few rows. Gives
    [B, Q, N, H] and no attention weights.
    """
    num_new = query.shape[2]
    is_unmasked_prefill = attention_mask is None and num_new > 1
    if is_unmasked_prefill or num_new > FOLD_LIMIT or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch, heads, _, size = query.shape
    num_kv, length = key.shape[1], key.shape[2]
    query_BKRH = (query * (kwargs.get("scaling") or size**-0.5)).reshape(batch, num_kv, -1, size)
    scores_BKRT = query_BKRH @ key.transpose(2, 3)
    if attention_mask is not None:
        assert attention_mask.is_floating_point(), "made by additive_mask"
        scores_BKRT.view(batch, num_kv, -1, num_new, length).add_(attention_mask[:, :, None])
    weights_BKRT = scores_BKRT.softmax(-1, dtype=torch.float32).to(value.dtype)
    output_BNQH = (weights_BKRT @ value).view(batch, heads, num_new, -1)
    return output_BNQH.transpose(1, 2).contiguous(), None


def additive_mask(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor | None:
    """transformers' sdpa mask as numbers to add: made once a step instead of once a layer."""
    allowed = sdpa_mask(*args, dtype=dtype, **kwargs)
    if allowed is None:
        return None
    # Not -inf: rows of padding see nothing and must stay finite.
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)


AttentionInterface.register(ATTENTION, folded_attention)
AttentionMaskInterface.register(ATTENTION, additive_mask)


class PackedLinear(nn.Module):
    """A frozen float32 linear layer on a CPU with its weight packed for oneDNN.

    Packed once instead of at every call: 1.4 times as fast at 32 rows, twice at 5 (what a
    verification of four drafted tokens takes). The weight itself is given up.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._bias = None if linear.bias is None else linear.bias.detach()
        # Not a buffer: a packed tensor can be neither saved nor moved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        """The same product as the layer it was made from."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return output


def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers of a frozen model by packed ones where that is possible."""
    if not torch.backends.mkldnn.is_available():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.is_cpu and child.weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear(child))


def load_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, spread: bool = False
) -> PreTrainedModel:
    """Loads a causal language model for inference: frozen, in `dtype`, on `device`.

    With `spread` accelerate puts its layers on all devices of the machine, and what does not fit on
    them into memory.

    On a CPU its linear layers have no `weight` any more (see `PackedLinear`); what training needs
    of the target comes from `slipstream.data.target.weights`.

    Raises:
        ValueError: weights and config.json do not belong together.
    """
    set_threads()
    logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        device_map="auto" if spread else None,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused here, in one line
    )
    model: PreTrainedModel = loaded[0]
    _refuse_random_weights(path, model.config, loaded[1])
    # A model that transformers would not run with sdpa (attention sinks) keeps its own attention.
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
    module: nn.Module = model
    module.eval().requires_grad_(False)
    if not spread:
        module.to(device)
        pack_linears(module)
    return model


def _refuse_random_weights(path: Path, config: Any, found: Mapping[str, Any]) -> None:
    """Raises ValueError where transformers filled in random weights or left out layers."""
    text_config = config.get_text_config(decoder=True)
    # Layers that predict further tokens are not built, and rightly so.
    num_layers = text_config.num_hidden_layers + (text_config.to_dict().get("num_nextn_predict_layers") or 0)
    layers = [re.match(r"model\.layers\.(\d+)\.", name) for name in found["unexpected_keys"]]
    faults = {
        "missing": sorted(found["missing_keys"]),
        "of another size": sorted(
            f"{name} ({list(size)}, by config.json {list(wanted)})"
            for name, size, wanted in found["mismatched_keys"]
        ),
        "beyond num_hidden_layers": sorted(m.string for m in layers if m and int(m[1]) >= num_layers),
    }
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{path}: weights and config.json do not belong together, {fault}: "
                f"{', '.join(names[:3])}{more}: correct config.json, or fetch the target again"
            )


def set_threads() -> None:
    """Lets torch use the physical cores, or OMP_NUM_THREADS where the user has set it."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = set()  # hyper-threads of one core have the same list of siblings
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    torch.set_num_threads(len(cores))


@contextlib.contextmanager
def fastest_threads(work: Callable[[], object]) -> Iterator[None]:
    """Uses, until left, the number of threads that do `work` in the least time, the fewest of equals.

    One sequence of a small model is many short products: waking a thread can cost more than it saves.
    Only numbers up to the one in use are tried, none where the user has set OMP_NUM_THREADS.
    """
    most = torch.get_num_threads()
    counts = [] if "OMP_NUM_THREADS" in os.environ else sorted({most >> i for i in range(most.bit_length())})
    seconds = dict.fromkeys(counts, math.inf)
    try:
        for count in counts * 2:
            torch.set_num_threads(count)
            begin = time.perf_counter()
            work()
            seconds[count] = min(seconds[count], time.perf_counter() - begin)
        torch.set_num_threads(min(counts, key=seconds.__getitem__, default=most))
        yield
    finally:
        torch.set_num_threads(most)
