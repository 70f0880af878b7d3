"""Evidence that speculative sampling gives the target's distribution (`eval.lossless=true`).

Fixed prompts are answered many times with and without the drafter. Two tests compare the tokens: a
chi-square test of homogeneity, and the total variation against its band under permutation. Each
prompt is looked at in several ways (every position, and all positions jointly), so both levels are
divided by the number of looks (Bonferroni).
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.data.progress import Meter
from slipstream.data.target.resolve import Target
from slipstream.data.template import render_prompt, stop_token_ids
from slipstream.data.types import Conversation, first_turn
from slipstream.eval.decoder import SpeculativeDecoder
from slipstream.eval.drafters.registry import Contender
from slipstream.eval.verify import Sampling

Counts = npt.NDArray[np.int64]

LEVEL = 0.01
"""Chance that a lossless drafter fails, over all looks of one kind of test."""
NUM_TOKENS = 4
"""Of an answer; the first comes without a draft."""
MIN_COUNT = 10
"""Outcomes seen less often, in both kinds of answers together, are pooled."""
NUM_PERMUTATIONS = 2000
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One comparison of two samples."""

    prompt: str
    what: str
    outcomes: int
    p_value: float
    """Of the chi-square test."""
    total_variation: float
    band: float
    """Largest total variation that chance explains at the level."""
    accepted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """All looks at one drafter."""

    drafter: str
    samples: int
    accepted_drafts: int
    """Without any the tests would say nothing."""
    looks: tuple[Look, ...]

    @property
    def lossless(self) -> bool:
        """Whether no look tells the two apart."""
        return all(look.accepted for look in self.looks)


def prove(
    target: Target,
    contenders: Sequence[Contender],
    prompts: Sequence[Conversation],
    sampling: Sampling,
    num_samples: int,
) -> list[Proof]:
    """Samples every prompt `num_samples` times plainly and with each drafter, and compares."""
    model, tokenizer = target.model(), target.tokenizer()
    stop_ids = stop_token_ids(target)
    plain = SpeculativeDecoder(
        model, contenders[0].drafter, num_draft_tokens=0, sampling=sampling, stop_ids=stop_ids
    )
    proofs = []
    num_looks = len(prompts) * NUM_TOKENS
    generator = torch.Generator(target.device).manual_seed(SEED)
    with Meter("lossless", (len(contenders) + 1) * len(prompts) * num_samples, unit="answer") as meter:

        def sample(decoder: SpeculativeDecoder, ids: Sequence[int]) -> tuple[list[tuple[int, ...]], int]:
            answers, accepted = [], 0
            for _ in range(num_samples):
                result = decoder.generate(ids, NUM_TOKENS, generator)
                answers.append(result.token_ids)
                accepted += sum(r.accepted for r in result.rounds)
                meter.advance(1)
            return answers, accepted

        rendered = {prompt.id: render_prompt(tokenizer, first_turn(prompt)) for prompt in prompts}
        reference = {name: sample(plain, ids)[0] for name, ids in rendered.items()}
        for contender in contenders:
            decoder = SpeculativeDecoder(
                model,
                contender.drafter,
                num_draft_tokens=contender.depth,
                sampling=sampling,
                stop_ids=stop_ids,
            )
            drawn = {name: sample(decoder, ids) for name, ids in rendered.items()}
            proofs.append(
                Proof(
                    drafter=contender.name,
                    samples=num_samples,
                    accepted_drafts=sum(accepted for _, accepted in drawn.values()),
                    looks=tuple(
                        look
                        for name, (answers, _) in drawn.items()
                        for look in compare_answers(name, reference[name], answers, LEVEL / num_looks)
                    ),
                )
            )
    return proofs


def compare_answers(
    prompt: str, first: Sequence[tuple[int, ...]], second: Sequence[tuple[int, ...]], level: float
) -> list[Look]:
    """Looks at every position behind the first token, and at all of them jointly."""

    def at(answers: Sequence[tuple[int, ...]], position: int) -> list[Hashable]:
        return [answer[position : position + 1] for answer in answers]  # empty behind a stop token

    looks = [
        _look(prompt, f"token {position + 1}", at(first, position), at(second, position), level)
        for position in range(1, NUM_TOKENS)
    ]
    return [*looks, _look(prompt, "answer", list(first), list(second), level)]


def _look(
    prompt: str, what: str, first: Sequence[Hashable], second: Sequence[Hashable], level: float
) -> Look:
    common = [outcome for outcome, count in Counter([*first, *second]).items() if count >= MIN_COUNT]
    place = {outcome: i for i, outcome in enumerate(common)}
    codes = np.array([place.get(outcome, len(common)) for outcome in [*first, *second]])
    counts = _counts(codes, len(first), len(common) + 1)
    p_value = chi_square_p(counts)
    observed = _total_variation(counts)
    random = np.random.default_rng(SEED)
    shuffled = [
        _total_variation(_counts(random.permutation(codes), len(first), len(common) + 1))
        for _ in range(NUM_PERMUTATIONS)
    ]
    # Beyond the resolution of the permutations the band is their largest value.
    band = float(np.quantile(shuffled, 1 - max(level, 1 / NUM_PERMUTATIONS)))
    return Look(
        prompt=prompt,
        what=what,
        outcomes=len(common) + 1,
        p_value=p_value,
        total_variation=observed,
        band=band,
        accepted=p_value >= level and observed <= max(band, max(shuffled)),
    )


def _counts(codes: Counts, num_first: int, num: int) -> Counts:
    halves = codes[:num_first], codes[num_first:]
    return np.stack([np.bincount(half, minlength=num) for half in halves])


def _total_variation(counts: Counts) -> float:
    shares = counts / counts.sum(1, keepdims=True)
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def chi_square_p(counts: Counts) -> float:
    """P-value of the hypothesis that both rows of counts come from one distribution.

    >>> round(chi_square_p(np.array([[30, 70], [50, 50]])), 4)
    0.0039
    """
    counts = counts[:, counts.sum(0) > 0]
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / counts.sum()
    freedom = counts.shape[1] - 1
    if freedom == 0:
        return 1.0
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
