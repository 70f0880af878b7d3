"""How tokens are chosen and drafted chains accepted, as pure functions (ALGORITHMS.md section 4).

Shape suffixes: B sequence, K drafted token, N = K + 1 verified position, V target vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How target and drafter choose tokens; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Keeps the fewest likeliest tokens that hold this share; 1 switches it off."""
    top_k: int = 0
    """Keeps so many tokens, before `top_p`; 0 switches it off."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution that is sampled from, float32 [..., V], of logits [..., V]; not for greedy.

        >>> Sampling(temperature=1.0, top_p=0.6).probs(torch.tensor([0.5, 0.3, 0.2]).log())
        tensor([0.6250, 0.3750, 0.0000])
        """
        probs = torch.softmax(logits.float() / self.temperature, dim=-1)
        if self.top_k == 0 and self.top_p >= 1.0:
            return probs
        sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            sorted_probs[..., self.top_k :] = 0.0
        # A token stays while those before it do not hold the share yet, so the first always stays.
        before = sorted_probs.cumsum(dim=-1) - sorted_probs
        sorted_probs[before >= self.top_p * sorted_probs.sum(dim=-1, keepdim=True)] = 0.0
        kept = torch.zeros_like(probs).scatter_(-1, order, sorted_probs)
        return kept / kept.sum(dim=-1, keepdim=True)


class Dice:
    """The draws of a verification, one at a time; a test replaces them by every outcome in turn."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def coin(self, chance: float) -> bool:
        """True with this chance; never at 0."""
        device = self._generator.device if self._generator is not None else None
        return torch.rand((), generator=self._generator, device=device).item() < chance

    def token(self, probs_V: Tensor) -> int:
        """A sample of a distribution, which need not be normalised."""
        return int(torch.multinomial(probs_V, 1, generator=self._generator))


def accept_greedy(draft_ids_K: Tensor, target_ids_N: Tensor) -> tuple[int, int]:
    """Accepts drafts while they equal the target's argmax: how many, and its own token after them.

    >>> accept_greedy(torch.tensor([5, 6, 7]), torch.tensor([5, 6, 1, 2]))
    (2, 1)
    """
    num_drafts = draft_ids_K.numel()
    # One transfer for both: on a GPU each one waits for the device.
    both = torch.cat([draft_ids_K, target_ids_N]).tolist()
    drafts, targets = both[:num_drafts], both[num_drafts:]
    num_accepted = next((i for i in range(num_drafts) if drafts[i] != targets[i]), num_drafts)
    return num_accepted, targets[num_accepted]


def accept_sampled(
    draft_ids_K: Tensor, draft_probs_KV: Tensor, target_probs_NV: Tensor, generator: torch.Generator | None
) -> tuple[int, int]:
    """Speculative sampling of one sequence: how many drafts are accepted, and the sampled token after them.

    See `accept_sampled_rows`.
    """
    accepted_1, next_1 = accept_sampled_rows(
        draft_ids_K[None], draft_probs_KV[None], target_probs_NV[None], generator
    )
    accepted, next_token = torch.cat([accepted_1, next_1]).tolist()
    return accepted, next_token


def accept_sampled_rows(
    draft_ids_BK: Tensor,
    draft_probs_BKV: Tensor,
    target_probs_BNV: Tensor,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: the tokens are distributed exactly as the target's.

    Draft x, sampled from q (`draft_probs_BKV`), is accepted with probability min(1, p(x)/q(x)). The first
    rejected one is replaced by a sample of normalise(max(p - q, 0)); after K acceptances the bonus token
    is a sample of p. `generator` is on the device of the tensors.

    Returns:
        The number of accepted drafts [B], and the sampled token after them [B].
    """
    index_BK1 = draft_ids_BK[..., None]
    target_BK = target_probs_BNV[:, :-1].gather(2, index_BK1)[..., 0]
    draft_BK = draft_probs_BKV.gather(2, index_BK1)[..., 0]
    uniform_BK = torch.rand(draft_ids_BK.shape, generator=generator, device=draft_ids_BK.device)
    # u < p/q without the division; strict, so that p = 0 is never accepted even at u = 0.
    accepted_B = (uniform_BK * draft_BK < target_BK).long().cumprod(1).sum(1)
    row_B = torch.arange(len(accepted_B), device=accepted_B.device)
    probs_BV = target_probs_BNV[row_B, accepted_B]
    # Behind the last draft nothing was drafted, so nothing is taken off.
    residual_BV = (probs_BV - F.pad(draft_probs_BKV, (0, 0, 0, 1))[row_B, accepted_B]).clamp(min=0.0)
    # All zero only where p and q differ by rounding: then p itself is right.
    left_BV = torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, probs_BV)
    return accepted_B, torch.multinomial(left_BV, 1, generator=generator)[:, 0]
