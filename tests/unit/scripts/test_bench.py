"""The bench: what is compared, what a row says, and one measurement of a step that takes no time."""

import sys

import pytest

from slipstream.scripts import bench
from slipstream.scripts.bench import Case

SIZES = {
    "hidden": 32,
    "heads": 2,
    "kv-heads": 1,
    "intermediate": 48,
    "vocab": 50,
    "draft-vocab": 40,
    "seq-len": 24,
}
LINE = '{"cpu_s": %s, "wall_s": 2.0, "step_mib": %s, "state_mib": 1.0}'


def say(text: str) -> list[str]:
    return [sys.executable, "-c", f"print('noise'); print({text!r})"]


def test_every_case_has_contenders() -> None:
    for quick in (True, False):
        for case in bench.cases(quick):
            commands = bench.contenders(case, "peers.py", quick)
            assert list(commands)[: len(case.ours)] == list(case.ours)
            assert set(bench.PEERS) <= set(commands) or not case.has_rivals
            assert "--freeze-head" not in commands["slipstream"] if "slipstream" in commands else True


def test_without_peers_the_small_sizes_meet_the_naive_step() -> None:
    rivals = {c.name: list(bench.contenders(c, "", False)) for c in bench.cases(False) if c.has_rivals}
    assert "naive" in rivals["D=256 V=W=4000 T=2048"]
    assert not any(set(bench.PEERS) & set(names) for names in rivals.values())


def test_ratios_are_against_the_best_rival() -> None:
    case = Case("all rows", "x", {"seq-len": 100}, has_rivals=True)
    peer = '{"cpu_s_min": 4.0, "s_min": 8.0, "step_mem_mb": 300, "trainable_params": 1048576}'
    commands = {"slipstream": say(LINE % (2.0, 30.0)), "a": say(LINE % (6.0, 200.0)), "b": say(peer)}
    ours, _, other = bench.run(case, commands, 2)
    assert (ours["speed_ratio"], ours["memory_ratio"]) == (2.0, 0.15)
    assert (ours["tokens_per_cpu_s"], ours["tokens_per_wall_s"], other["state_mib"]) == (50.0, 50.0, 12.0)
    assert "| x | slipstream | 2.00 | 50 | 50 | 30 | 1 | 2.00 | 15% |  |" in bench.markdown([ours])


def test_a_failing_contender_is_named() -> None:
    with pytest.raises(ValueError, match="failed: .*boom"):
        bench.measure([sys.executable, "-c", "raise SystemExit('boom')"])


def test_our_step_and_the_naive_one_measure_the_same_loss() -> None:
    words = [*bench.OURS, *bench.flags({**SIZES, "warmup": 0, "ttt": 3, "mask-frac": 0.5})]
    ours, naive = bench.measure(words), bench.measure([*words, "--naive"])
    assert ours["loss"] == pytest.approx(naive["loss"], rel=1e-5)
    assert ours["cpu_s"] > 0 and ours["step_mib"] >= 0 and ours["flops"] > 0
