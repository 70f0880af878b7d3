"""The target's forward pass over documents, and what is kept of it.

Boundary b is the state entering layer b (HF `hidden_states[b]`); for an n-layer target boundary n
is the last layer's output before the final norm, which HF's last entry is not.

Shape suffixes as in `slipstream.data.types`; B document of a batch, C row of a chunk.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.data.small import top_teacher, top_tokens
from slipstream.data.types import HiddenStateSample, TokenizedSample

HEAD_ROWS = 512
"""Rows whose full-vocabulary logits are in memory together."""


@contextlib.contextmanager
def recorded_states(base: nn.Module, boundaries: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Yields a dict that every forward pass of `base` fills with the states at `boundaries`.

    A boundary is what enters a layer, or the final norm: hooks read it there, because HF's own
    `hidden_states` keeps all layers and ends with the normed state.
    """
    places: list[nn.Module] = [*base.layers, base.norm]  # type: ignore[list-item, misc]
    states: dict[int, Tensor] = {}

    def keep(boundary: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        states[boundary] = args[0]

    with contextlib.ExitStack() as hooks:
        for boundary in boundaries:
            hook = functools.partial(keep, boundary)
            hooks.enter_context(places[boundary].register_forward_pre_hook(hook))
        yield states


@torch.no_grad()
def capture_batch(
    model: PreTrainedModel,
    samples: Sequence[TokenizedSample],
    aux_layers: tuple[int, ...],
    dtype: torch.dtype,
    topk: int = 0,
) -> list[HiddenStateSample]:
    """One forward pass of the target over documents of any lengths; states of storage type `dtype`.

    Args:
        model: the target, on one device or spread over several.
        samples: the documents.
        aux_layers: boundaries.
        dtype: of the states.
        topk: top tokens of each teacher, or 0 for the state before the final norm.

    Returns:
        One sample for each document, on the CPU, without padding.

    Raises:
        ValueError: a state is not finite in the storage type.
    """
    base = model.get_decoder()
    ids = [sample.input_ids_T for sample in samples]
    masks = [sample.loss_mask_T for sample in samples]
    ids_BT, mask_BT, real_BT = (
        nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        for rows in (ids, masks, [torch.ones_like(mask_T) for mask_T in masks])
    )
    layers = (*aux_layers, len(base.layers))
    with recorded_states(base, layers) as states:
        output = base(input_ids=ids_BT, attention_mask=real_BT.long(), use_cache=False).last_hidden_state
    states_TLD = torch.stack([_chosen(states[layer], real_BT) for layer in layers], dim=1)
    head = model.get_output_embeddings()
    return assemble(samples, states_TLD, _chosen(output, mask_BT), head, layers, dtype, topk)


def _chosen(states_BTD: Tensor, which_BT: Tensor) -> Tensor:
    """Some states, on the device of the choice; layers of a spread model lie on several."""
    return states_BTD[which_BT.to(states_BTD.device)].to(which_BT.device)


@torch.no_grad()
def assemble(
    samples: Sequence[TokenizedSample],
    states_TLD: Tensor,
    normed_PD: Tensor,
    head: Callable[[Tensor], Tensor],
    layers: Sequence[int],
    dtype: torch.dtype,
    topk: int,
) -> list[HiddenStateSample]:
    """Samples from the states of all their tokens, one document after the other.

    Args:
        samples: the documents.
        states_TLD: at `layers`, of which the last is the boundary before the final norm.
        normed_PD: behind the final norm, of the supervised tokens.
        head: gives logits over the whole vocabulary.
        layers: boundaries.
        dtype: of the states.
        topk: see `capture_batch`.
    """
    supervised = [int(sample.loss_mask_T.sum()) for sample in samples]
    teacher = {name: x.cpu().split(supervised) for name, x in _teacher(head, normed_PD, topk).items()}
    stored = _stored(states_TLD, dtype, samples, layers).split([len(s.input_ids_T) for s in samples])
    found = []
    for i, (sample, stored_TLD) in enumerate(zip(samples, stored, strict=True)):
        tensors = {name: parts[i] for name, parts in teacher.items()}
        if not topk:
            tensors["last_hidden_PD"] = stored_TLD[sample.loss_mask_T, -1]
        found.append(
            HiddenStateSample(
                id=sample.id,
                input_ids_T=sample.input_ids_T,
                loss_mask_T=sample.loss_mask_T,
                aux_TLD=stored_TLD[:, :-1],
                **tensors,
            )
        )
    return found


def _teacher(head: Callable[[Tensor], Tensor], normed_PD: Tensor, topk: int) -> dict[str, Tensor]:
    """What is kept of the full-vocabulary logits, of which never more than a chunk exists."""
    first, second = [], []
    for chunk_CD in torch.split(normed_PD, HEAD_ROWS):
        logits_CV = head(chunk_CD).float()
        if topk:
            ids_CE, log_probs_CE = top_tokens(logits_CV.log_softmax(-1), topk)
        else:
            ids_CE, log_probs_CE = logits_CV.argmax(-1), logits_CV.logsumexp(-1)
        first.append(ids_CE)
        second.append(log_probs_CE)
    if topk:
        return top_teacher(torch.cat(first), torch.cat(second))
    return {"argmax_P": torch.cat(first), "logsumexp_P": torch.cat(second)}


def _stored(
    states_TLD: Tensor, dtype: torch.dtype, samples: Sequence[TokenizedSample], layers: Sequence[int]
) -> Tensor:
    """States of all samples in the storage type, on the CPU; refuses what does not fit."""
    stored_TLD = states_TLD.to(dtype)
    bad_TLD = ~stored_TLD.isfinite()
    if bad_TLD.any():
        # The lowest boundary: from there a nan spreads through all that follow.
        layer, row, element = bad_TLD.transpose(0, 1).nonzero()[0].tolist()
        names = [sample.id for sample in samples for _ in sample.input_ids_T]
        raise ValueError(
            f"sample {names[row]}: the state at boundary {layers[layer]} holds "
            f"{states_TLD[row, layer, element].item():g}, which {dtype} cannot store: set "
            f"data.capture.dtype to bfloat16 or float32 for a large value; for nan or inf run the target "
            f"itself in another target.dtype"
        )
    return stored_TLD.cpu()
