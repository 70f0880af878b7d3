"""What changes from one draft step to the next: the diagnosis behind EAGLE-3.1 (2605.09992).

For each draft depth: the size of the state that is carried, and where the head's first layer looks.
Depth 0 is the row of true target states that the first draft comes from.

Shape suffixes: T token row, N query head, M key/value head, S cached row, H head size, K depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.data.states import recorded_states
from slipstream.drafters.layers import DraftCache
from slipstream.eval.charts import lines
from slipstream.eval.drafters.eagle import EagleModel
from slipstream.eval.page import html_table

MAX_DEPTH = 8
STRIDE = 6
"""Every so many tokens of an answer a chain is drafted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Means over all drafted chains, by depth."""

    rms_K: tuple[float, ...]
    """Of the carried state."""
    first_K: tuple[float, ...]
    """Attention mass on the first token."""
    prompt_K: tuple[float, ...]
    """On the rest of the prompt."""
    answer_K: tuple[float, ...]
    """On the committed part of the answer."""
    own_K: tuple[float, ...]
    """On the row itself and the drafted rows before it."""


class WatchedCache(DraftCache):
    """A draft cache that notes where the newest row of the first layer looks."""

    weights_S: Tensor

    def attend(
        self, layer: int, query_BTNH: Tensor, key_BTMH: Tensor, value_BTMH: Tensor, visible_TS: Tensor | None
    ) -> Tensor:
        """See `DraftCache`."""
        out = super().attend(layer, query_BTNH, key_BTMH, value_BTMH, visible_TS)
        if layer == 0:
            key_MSH, _ = (x[0] for x in self.held(layer, query_BTNH.shape[1]))
            query_MGH = query_BTNH[0, -1].unflatten(0, (key_MSH.shape[0], -1))
            scores_MGS = query_MGH @ key_MSH.transpose(1, 2) / query_MGH.shape[-1] ** 0.5
            self.weights_S = scores_MGS.float().softmax(-1).flatten(0, 1).mean(0)
        return out


@torch.inference_mode()
def measure_drift(
    model: PreTrainedModel, drafter: EagleModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Drift:
    """Drafts chains behind many places of given answers: (prompt ids, answer ids) each."""
    sums, num_chains = torch.zeros(5, MAX_DEPTH + 1, dtype=torch.float64), 0
    drafter.cache_type = WatchedCache
    for prompt_ids, answer_ids in texts:
        ids_T = torch.tensor([*prompt_ids, *answer_ids], device=model.device)
        with recorded_states(model.get_decoder(), drafter.aux_layers) as states:
            model(input_ids=ids_T[None], use_cache=False, logits_to_keep=1)
        aux_LTD = [states[boundary][0] for boundary in drafter.aux_layers]
        drafter.start(prompt_ids, len(ids_T) + 1)
        begin = 0
        for end in range(len(prompt_ids) + 1, len(ids_T), STRIDE):
            logits_1W = drafter.commit(ids_T[begin + 1 : end + 1], [x[begin:end] for x in aux_LTD])
            begin, num_chains = end, num_chains + 1
            for depth in range(MAX_DEPTH + 1):
                sums[:, depth] += _look(drafter, len(prompt_ids), end)
                ids_1 = drafter.target_ids_W[logits_1W.argmax(-1)]
                visible_1X = torch.ones(1, depth + 1, dtype=torch.bool, device=ids_1.device)
                logits_1W = drafter.extend(ids_1, torch.zeros_like(ids_1), visible_1X, depth + 1)
    drafter.cache_type = DraftCache
    means = (sums / max(num_chains, 1)).tolist()
    return Drift(
        rms_K=tuple(means[0]),
        first_K=tuple(means[1]),
        prompt_K=tuple(means[2]),
        answer_K=tuple(means[3]),
        own_K=tuple(means[4]),
    )


def _look(drafter: EagleModel, num_prompt: int, num_committed: int) -> Tensor:
    """Size of the newest carried state and the four attention masses."""
    cache = drafter.cache
    assert isinstance(cache, WatchedCache)
    own = num_committed - 1  # the newest committed row is the chain's first
    weights_S = cache.weights_S.double().cpu()
    parts = (weights_S[:1], weights_S[1:num_prompt], weights_S[num_prompt:own], weights_S[own:])
    rms = drafter.carried_TD[-1].double().square().mean().sqrt().cpu()
    return torch.stack([rms, *(part.sum() for part in parts)])


def drift_section(drifts: dict[str, Drift]) -> str:
    """Charts and table of one or several heads, as HTML."""
    masses = ("first", "prompt", "answer", "own")
    size = lines(
        {name: list(enumerate(drift.rms_K)) for name, drift in drifts.items()},
        x="draft depth",
        y="RMS of the carried state",
    )
    charts = [
        lines(
            {mass: list(enumerate(getattr(drift, f"{mass}_K"))) for mass in masses},
            x="draft depth",
            y=f"attention mass, {name}",
        )
        for name, drift in drifts.items()
    ]
    rows = [
        (f"{name}: {label}", *(f"{value:.3g}" for value in getattr(drift, f"{key}_K")))
        for name, drift in drifts.items()
        for key, label in {"rms": "RMS", **{mass: f"mass on {mass}" for mass in masses}}.items()
    ]
    return size + "".join(charts) + html_table(("", *map(str, range(MAX_DEPTH + 1))), rows)
