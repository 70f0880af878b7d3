"""The accept rules, and that sampling through them gives the target's distribution."""

import torch
from scipy.stats import chisquare
from torch import Tensor

from slipstream.eval.verify import Sampling, accept_greedy, accept_sampled, accept_sampled_rows


def test_probs_temperature_and_order() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    plain = Sampling(temperature=1.0, top_p=1.0, top_k=0).probs(logits)
    torch.testing.assert_close(plain, torch.tensor([[0.1, 0.4, 0.3, 0.2]]))
    cold = Sampling(temperature=0.5, top_p=1.0, top_k=0).probs(logits)
    torch.testing.assert_close(cold, torch.tensor([[0.01, 0.16, 0.09, 0.04]]) / 0.30)
    # top_k first, then top_p of what is left: 4/7 of it is less than 0.6, so the second stays.
    both = Sampling(temperature=1.0, top_p=0.6, top_k=2).probs(logits)
    torch.testing.assert_close(both, torch.tensor([[0.0, 4 / 7, 3 / 7, 0.0]]))
    one = Sampling(temperature=1.0, top_p=0.01, top_k=0).probs(logits)
    torch.testing.assert_close(one, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


def test_top_k_keeps_exactly_k_of_equals_and_may_exceed_the_vocabulary() -> None:
    equal = torch.zeros(5)
    assert (Sampling(temperature=1.0, top_p=1.0, top_k=2).probs(equal) > 0).sum() == 2
    assert (Sampling(temperature=1.0, top_p=1.0, top_k=9).probs(equal) > 0).sum() == 5


def test_accept_greedy() -> None:
    target = torch.tensor([4, 5, 6, 7])
    assert accept_greedy(torch.tensor([4, 5, 6]), target) == (3, 7)
    assert accept_greedy(torch.tensor([4, 0, 6]), target) == (1, 5)
    assert accept_greedy(torch.tensor([0, 5, 6]), target) == (0, 4)
    assert accept_greedy(torch.tensor([], dtype=torch.int64), target[:1]) == (0, 4)


def test_a_token_the_target_excludes_is_never_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    target_NV = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    for _ in range(200):
        assert accept_sampled(torch.tensor([0]), torch.tensor([[1.0, 0.0]]), target_NV, generator) == (0, 1)


def test_equal_distributions_accept_everything() -> None:
    generator = torch.Generator().manual_seed(0)
    probs_NV = torch.softmax(torch.randn(4, 7, generator=generator), -1)
    for _ in range(200):
        ids_K = torch.multinomial(probs_NV[:3], 1, generator=generator)[:, 0]
        assert accept_sampled(ids_K, probs_NV[:3], probs_NV, generator)[0] == 3


def test_every_row_of_a_batch_has_the_target_distribution() -> None:
    """Two kinds of rows side by side; what each emits first is distributed as its own target."""
    generator, size, num = torch.Generator().manual_seed(4), 5, 20_000
    target_2V = torch.softmax(torch.randn(2, size, generator=generator), -1)
    draft_2V = torch.softmax(torch.randn(2, size, generator=generator), -1)
    kind_B = torch.arange(num) % 2
    draft_BKV = draft_2V[kind_B][:, None].expand(-1, 2, -1)
    ids_BK = torch.stack(
        [torch.multinomial(draft_BKV[:, k], 1, generator=generator)[:, 0] for k in (0, 1)], 1
    )
    target_BNV = target_2V[kind_B][:, None].expand(-1, 3, -1)
    accepted_B, next_B = accept_sampled_rows(ids_BK, draft_BKV, target_BNV, generator)
    assert set(accepted_B.tolist()) == {0, 1, 2}
    first_B = torch.where(accepted_B > 0, ids_BK[:, 0], next_B)
    for kind in (0, 1):
        observed = torch.bincount(first_B[kind_B == kind], minlength=size)
        wanted = target_2V[kind].double()
        assert chisquare(observed.numpy(), (wanted / wanted.sum() * num / 2).numpy()).pvalue > 0.01
        bonus = torch.bincount(next_B[(kind_B == kind) & (accepted_B == 2)], minlength=size)
        wanted = wanted / wanted.sum() * bonus.sum()
        assert chisquare(bonus.numpy(), wanted.numpy()).pvalue > 0.01


def _sampled_chain(target_VV: Tensor, draft_VV: Tensor, num: int, generator: torch.Generator) -> list[int]:
    """Emits `num + 1` tokens of a Markov chain from state 0: one round, then plain sampling."""
    drafts = [0]
    while len(drafts) <= num:
        drafts.append(int(torch.multinomial(draft_VV[drafts[-1]], 1, generator=generator)))
    contexts = torch.tensor(drafts)
    accepted, token = accept_sampled(contexts[1:], draft_VV[contexts[:-1]], target_VV[contexts], generator)
    tokens = [*drafts[1 : accepted + 1], token]
    while len(tokens) <= num:
        tokens.append(int(torch.multinomial(target_VV[tokens[-1]], 1, generator=generator)))
    return tokens


def test_sampled_chain_has_the_target_distribution() -> None:
    """Joint distribution of four tokens, K=3, drafter and target truncated differently."""
    generator = torch.Generator().manual_seed(1)
    size, num, trials = 3, 3, 4000
    target_VV = torch.softmax(0.6 * torch.randn(size, size, generator=generator), -1)
    draft_VV = torch.softmax(1.5 * torch.randn(size, size, generator=generator), -1)
    draft_VV[1] = torch.tensor([0.0, 0.3, 0.7])  # what the drafter cannot propose must still appear
    counts = torch.zeros([size] * (num + 1))
    for _ in range(trials):
        counts[tuple(_sampled_chain(target_VV, draft_VV, num, generator))] += 1
    expected = target_VV[0]
    for _ in range(num):
        expected = expected[..., None] * target_VV
    observed, wanted = counts.flatten().double(), expected.flatten().double() * trials
    assert wanted.min() > 5
    assert chisquare(observed.numpy(), (wanted * trials / wanted.sum()).numpy()).pvalue > 0.01
