"""The tests of sampled answers accept equal distributions and find a biased one."""

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from slipstream.eval.lossless import chi_square_p, compare_answers


def answers(seed: int, probs: list[float], num: int = 400) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [tuple(random.choice(len(probs), size=4, p=probs).tolist()) for _ in range(num)]


def test_chi_square_equals_scipy() -> None:
    counts = np.array([[10, 20, 33, 0], [14, 28, 12, 5]])
    expected = chi2_contingency(counts, correction=False).pvalue
    assert chi_square_p(counts) == pytest.approx(expected, rel=1e-9)


def test_equal_distributions_pass_and_a_bias_is_found() -> None:
    fair, biased = [0.5, 0.3, 0.2], [0.62, 0.23, 0.15]
    level = 0.01 / 4
    same = compare_answers("p", answers(1, fair), answers(2, fair), level)
    assert [look.what for look in same] == ["token 2", "token 3", "token 4", "answer"]
    assert all(look.accepted for look in same)
    other = compare_answers("p", answers(1, fair), answers(2, biased), level)
    assert not all(look.accepted for look in other)
    found = min(other, key=lambda look: look.p_value)
    assert found.p_value < level
    assert found.total_variation > found.band


def test_false_alarms_are_rare() -> None:
    fair = [0.4, 0.3, 0.2, 0.1]
    looks = [
        look
        for i in range(10)
        for look in compare_answers("p", answers(i, fair), answers(99 + i, fair), 1e-3)
    ]
    assert sum(not look.accepted for look in looks) == 0
