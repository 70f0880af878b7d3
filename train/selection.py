"""Keeps the head that decodes best: every so often a few prompts are decoded with the real decoder.

The decoder itself comes from outside (`Decode`). The ranks share the prompts and add up their counts,
so none waits for longer than a measurement takes.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from slipstream.data.cache import HiddenStateSource
from slipstream.data.files import atomic_path, read_json, reading, write_json
from slipstream.data.progress import say
from slipstream.train import engine as distributed
from slipstream.train.config import SelectionConfig

FOLDER, STATE = "best", "selection.json"

DecodePrompt = Callable[[Sequence[int]], tuple[int, int]]
"""Token ids of a prompt -> verification rounds and accepted drafts of its greedy answer."""
Decode = Callable[[nn.Module], DecodePrompt]
"""A head in training -> what decodes with its present weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a head was worth on the prompts."""

    step: int
    rounds: tuple[int, ...]
    """Of each prompt."""
    accepted: tuple[int, ...]
    losses: dict[str, float]
    """As last reported: of training and of validation, at the first unroll step."""
    seconds: float

    @property
    def acceptance_length(self) -> float:
        """tau: mean tokens of a round, the target's own included."""
        return 1.0 + sum(self.accepted) / max(sum(self.rounds), 1)

    def lead(self, other: "Measured") -> float:
        """By how many standard errors, over the prompts, it is ahead of another (0 if it is not).

        Both are ratios over the same prompts: what counts is how a prompt's share in one ratio
        differs from its share in the other.
        """
        gain = self.acceptance_length - other.acceptance_length
        if gain <= 0:
            return 0.0
        shares = [measured.deviations() for measured in (self, other)]
        num = len(self.rounds)
        variance = num / max(num - 1, 1) * sum((a - b) ** 2 for a, b in zip(*shares, strict=True))
        return gain / math.sqrt(variance) if variance else math.inf

    def deviations(self) -> list[float]:
        """What each prompt adds to the acceptance length beyond the mean of all."""
        mean, total = self.acceptance_length - 1.0, max(sum(self.rounds), 1)
        return [(a - mean * r) / total for a, r in zip(self.accepted, self.rounds, strict=True)]


class Selection:
    """The measurements of a run and its best heads, in `folder/best`."""

    def __init__(
        self,
        config: SelectionConfig,
        folder: Path,
        prompts: Sequence[Sequence[int]] = (),
        decode: Decode | None = None,
    ) -> None:
        """Writes nothing.

        Args:
            config: with `every` at 0 nothing is ever measured, and no more arguments are needed.
            folder: of the training stage.
            prompts: token ids; with a time limit the first measurement may drop the last ones.
            decode: the decoder.
        """
        self._config, self._folder = config, folder
        self._prompts, self._decode = list(prompts), decode
        self._measured: list[Measured] = []

    def resume(self, step: int) -> None:
        """Goes on after `step`: what was measured behind it is forgotten."""
        found: list[Measured] = []
        path = self._folder / STATE
        if distributed.rank() == 0 and path.exists():
            with reading(path, way_out=f"delete {self._folder} to train again"):
                found = [Measured(**{**row, **_tuples(row)}) for row in read_json(path)]
        found = distributed.from_rank_0(found)
        self._measured = [measured for measured in found if measured.step <= step]
        if self._measured:
            self._prompts = self._prompts[: len(self._measured[0].rounds)]

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether the head after optimizer step `step` is to be measured."""
        every = self._config.every
        return every > 0 and (is_last or step % every == 0)

    def measure(self, step: int, head: nn.Module, losses: Mapping[str, float]) -> Measured:
        """Decodes the prompts and keeps the head if it is among the best; called on every rank.

        `losses` are shown beside the result.
        """
        start = time.monotonic()
        rounds, accepted = self._counts(head, start)
        measured = Measured(
            step=step,
            rounds=rounds,
            accepted=accepted,
            losses=dict(losses),
            seconds=round(time.monotonic() - start, 3),
        )
        self._measured.append(measured)
        if distributed.rank() == 0:
            if measured in self.ranking()[: self._config.keep]:
                tensors = {name: x.detach().cpu().contiguous() for name, x in head.state_dict().items()}
                with atomic_path(self._folder / self.file(measured)) as temporary:
                    save_file(tensors, temporary)
            write_json(self._folder / STATE, [dataclasses.asdict(row) for row in self._measured])
            self._say(measured)
        return measured

    def _counts(self, head: nn.Module, start: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rounds and accepted drafts of every prompt, from all ranks."""
        assert self._decode is not None
        decode = self._decode(head)
        limit = self._config.seconds if not self._measured and self._config.seconds else math.inf
        counts = torch.zeros(3, len(self._prompts), dtype=torch.int64)
        for i in range(distributed.rank(), len(self._prompts), distributed.world_size()):
            counts[:, i] = torch.tensor([1, *decode(self._prompts[i])])
            if time.monotonic() - start > limit:
                break
        device = next(head.parameters()).device
        is_done, rounds, accepted = distributed.sum_over_ranks(counts.to(device)).tolist()
        num = [*is_done, 0].index(0)  # all ranks have come so far
        self._prompts = self._prompts[:num]
        return tuple(rounds[:num]), tuple(accepted[:num])

    def ranking(self) -> list[Measured]:
        """The best one, then the others by acceptance length.

        Best is the latest head that the longest acceptance length measured so far does not lead by
        more than the tolerance: between heads that a few prompts cannot tell apart, more training
        decides.
        """
        if not self._measured:
            return []
        by_length = sorted(self._measured, key=lambda m: (m.acceptance_length, m.step), reverse=True)
        close = [m for m in by_length if by_length[0].lead(m) <= self._config.tolerance]
        best = max(close, key=lambda m: m.step)
        return [best, *(m for m in by_length if m is not best)]

    @property
    def best_file(self) -> str | None:
        """Where the best head that is still on disk lies; None where nothing was measured."""
        files = (self.file(measured) for measured in self.ranking())
        return next((file for file in files if (self._folder / file).exists()), None)

    @property
    def is_over(self) -> bool:
        """Whether the head has been getting worse for long enough to stop."""
        patience = self._config.patience
        if not 0 < patience < len(self._measured):
            return False
        return self.ranking()[0] not in self._measured[-patience:]

    def prune(self) -> None:
        """Removes heads that are not among the best; called when a checkpoint at this step is whole.

        Until then a resumed run may need those that were best before.
        """
        if distributed.rank() == 0:
            kept = {self._folder / self.file(m) for m in self.ranking()[: self._config.keep]}
            for file in (self._folder / FOLDER).glob("step-*.safetensors"):
                if file not in kept:
                    file.unlink()

    @staticmethod
    def file(measured: Measured) -> str:
        """Where a head lies, below the folder of the stage."""
        return f"{FOLDER}/step-{measured.step:07d}.safetensors"

    def _say(self, measured: Measured) -> None:
        best = self.ranking()[0]
        losses = "".join(f"{name} {value:.3f}, " for name, value in measured.losses.items())
        where = "now the best" if best is measured else f"best {best.acceptance_length:.3f} of {best.step}"
        say(
            f"selection    step {measured.step}: {losses}acceptance length "
            f"{measured.acceptance_length:.3f} ({where}), {len(measured.rounds)} prompts in "
            f"{measured.seconds:.1f} s"
        )


def _tuples(row: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(row[name]) for name in ("rounds", "accepted")}


def validation_prompts(source: HiddenStateSource, num_prompts: int, *, longest: int) -> list[list[int]]:
    """What precedes the first generated token in documents of the validation split, no prompt twice.

    Raises:
        ValueError: there is none of at most `longest` tokens.
    """
    prompts: dict[tuple[int, ...], None] = {}
    for row in source.rows("validation"):
        if len(prompts) == num_prompts:
            break
        sample = source.load(row.id)
        first = int(sample.loss_mask_T.int().argmax())
        if first <= longest:
            prompts[tuple(sample.input_ids_T[:first].tolist())] = None
    if not prompts:
        raise ValueError(
            f"train.selection.every decodes prompts of the validation split, and it has none of at most "
            f"{longest} tokens: raise data.validation_share, or set train.selection.every=0"
        )
    return [list(prompt) for prompt in prompts]
