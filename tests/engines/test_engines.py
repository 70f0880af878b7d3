"""Real vLLM and real SGLang serve every form of head and accept exactly what our decoder accepts."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.template import stop_token_ids
from slipstream.drafters.checkpoint_format import CONFIG as CONFIG_FILE
from slipstream.drafters.checkpoint_format import speculators_config
from slipstream.drafters.config import Engine, sglang_refusals
from slipstream.drafters.emulated_loaders import load_as
from slipstream.eval.engines.environment import engine_python, run_jobs
from slipstream.eval.engines.job import STATES, EngineJob, EngineResult
from slipstream.eval.engines.replay import Finding, Replay, compare
from slipstream.scripts.bundle import METHODS
from tests.engines.small import CONFIG, SmallTarget

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

EAGLE31 = {"fc_norm": True, "norm_output": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 200},
    "whole vocabulary": {},
    "eagle3.1": {"draft_vocab_size": 200, **EAGLE31},
    "norm before fc": {"norm_before_fc": True, "draft_vocab_size": 200},
    "five states": {"aux_layers": [1, 2, 4, 6, 7], "draft_vocab_size": 200},
    "other layers, 3.1": {"aux_layers": [1, 3, 6], "draft_vocab_size": 200, **EAGLE31},
    "two layers": {"num_layers": 2, "draft_vocab_size": 200},
    "two layers, five states, 3.1": {"num_layers": 2, "aux_layers": [1, 2, 4, 6, 7], **EAGLE31},
    "norm before residual": {"norm_before_residual": True, "draft_vocab_size": 200},
    "last state": {"aux_layers": [2, 4, 8], "draft_vocab_size": 200},
    "qwen3": {"qk_norm": True, "draft_vocab_size": 200},
    "qwen3, two layers, 3.1": {"qk_norm": True, "num_layers": 2, **EAGLE31},
}
RIVALS: dict[str, dict[str, Any]] = {
    "eagle-1": {"kind": "eagle1"},
    "medusa": {"kind": "medusa", "num_heads": 3},
    "medusa, two layers, map": {"kind": "medusa", "num_heads": 3, "num_layers": 2, "draft_vocab_size": 200},
}
VLLM_ONLY = {"norm before residual", "last state", "qwen3", "qwen3, two layers, 3.1"}
IN_SGLANG = ["eagle3", "whole vocabulary", "norm before fc", "eagle3.1", "two layers, five states, 3.1"]
PLAIN, SPECULATORS = "plain decoding", "speculators form"
NUM_PROMPTS = 6


@dataclass
class Served:
    """An export, our decoder's view of it, and the job for an engine."""

    export: Path
    ours: Replay
    refused_by_sglang: bool


@pytest.fixture(scope="module")
def small(trained_target: Path) -> SmallTarget:
    return SmallTarget(trained_target)


@pytest.fixture(scope="module")
def served(small: SmallTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    root = tmp_path_factory.mktemp("exports")
    found = {}
    for name, settings in VARIANTS.items():
        geometry = small.geometry(**settings)
        refused = bool(sglang_refusals(geometry, small.num_layers))
        engines = [Engine.vllm] if refused else list(Engine)
        export = small.export(root / name.replace(" ", "-"), engines=engines, **settings)
        ours = small.decode(export, small.conversations(NUM_PROMPTS))
        found[name] = Served(export=export, ours=ours, refused_by_sglang=refused)
    return found


def job(
    small: SmallTarget,
    ours: Replay,
    out: Path,
    *,
    draft: str,
    target: str | None = None,
    method: str = "eagle3",
) -> EngineJob:
    return ours.job(
        out,
        target=str(small.target.path) if target is None else target,
        draft=draft,
        config=CONFIG,
        stop_ids=stop_token_ids(small.target),
        method=method,
    )


def damaged(export: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    shutil.copytree(export, folder)
    config = json.loads((folder / CONFIG_FILE).read_text())
    change(config)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def shift_layers(config: dict[str, Any]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [b + 1 for b in config["eagle_aux_hidden_state_layer_ids"]]


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "layer ids off by one": (shift_layers, "captured states"),
    "other carried state": (lambda config: config.update(norm_output=True), "later drafts"),
    "other residual": (lambda config: config.update(norm_before_residual=True), "first drafts"),
}


@pytest.fixture(scope="module")
def rivals(small: SmallTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    root, found = tmp_path_factory.mktemp("rivals"), {}
    for name, settings in RIVALS.items():
        export = small.export(root / name.replace(" ", "-"), engines=[Engine.vllm], **settings)
        ours = small.decode(export, small.conversations(NUM_PROMPTS))
        found[name] = Served(export=export, ours=ours, refused_by_sglang=True)
    return found


@pytest.fixture(scope="module")
def vllm(
    small: SmallTarget,
    served: dict[str, Served],
    rivals: dict[str, Served],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, EngineJob], dict[str, EngineResult]]:
    """All of vLLM's jobs in one process, since its import takes longer than the rest."""
    root, first = tmp_path_factory.mktemp("vllm"), served["eagle3"]
    jobs = {
        name: job(small, item.ours, root / str(i), draft=str(item.export))
        for i, (name, item) in enumerate(served.items())
    }
    for name, item in rivals.items():
        method = METHODS[RIVALS[name]["kind"]]
        jobs[name] = job(small, item.ours, root / name, draft=str(item.export), method=method)
    jobs[PLAIN] = job(small, first.ours, root / "plain", draft="")
    for name, (change, _) in DAMAGE.items():
        folder = damaged(first.export, root / f"{name} export".replace(" ", "-"), change)
        jobs[name] = job(small, first.ours, root / name, draft=str(folder))

    def names_target(config: dict[str, Any]) -> None:
        plain = dict(config)
        config.clear()
        config |= speculators_config(
            plain,
            target_name=str(small.target.path),
            target_architectures=["LlamaForCausalLM"],
            num_draft_tokens=CONFIG.num_draft_tokens,
        )

    folder = damaged(first.export, root / "speculators-export", names_target)
    jobs[SPECULATORS] = job(small, first.ours, root / "speculators", draft=str(folder), target="")
    results = run_jobs("vllm", engine_python("vllm"), list(jobs.values()), timeout=1500)
    return jobs, dict(zip(jobs, results, strict=True))


@pytest.fixture(scope="module")
def sglang(
    small: SmallTarget, served: dict[str, Served], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, EngineJob], dict[str, EngineResult]]:
    root = tmp_path_factory.mktemp("sglang")
    jobs = {
        name: job(small, served[name].ours, root / str(i), draft=str(served[name].export))
        for i, name in enumerate(IN_SGLANG)
    }
    jobs[PLAIN] = job(small, served["eagle3"].ours, root / "plain", draft="")
    results = run_jobs("sglang", engine_python("sglang"), list(jobs.values()), timeout=1500)
    return jobs, dict(zip(jobs, results, strict=True))


def findings(small: SmallTarget, ours: Replay, job: EngineJob, result: EngineResult) -> dict[str, Finding]:
    found = compare(ours, result, Path(job.out) / STATES, small.model)
    return {finding.stage: finding for finding in found}


STAGES = [
    "prompt ids",
    "captured states",
    "fc output",
    "first drafts",
    "later drafts",
    "token ids",
    "acceptance",
]
TRACED = {"captured states", "fc output"}
"""Of EAGLE-3 alone."""


def check(small: SmallTarget, item: Served, job: EngineJob, result: EngineResult) -> None:
    """Everything equal, and the head drafts well enough for that to mean something."""
    found = findings(small, item.ours, job, result)
    assert list(found) == [stage for stage in STAGES if stage not in TRACED or item.ours.states]
    assert all(finding.equal for finding in found.values()), found
    assert result.accepted_K == item.ours.result.accepted_K
    assert result.num_rounds == item.ours.result.num_rounds
    assert result.accepted_K[0] > 0.2 * result.num_rounds
    assert result.accepted_K[1] > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_vllm_accepts_what_we_accept(name, small, served, vllm):
    check(small, served[name], vllm[0][name], vllm[1][name])


@pytest.mark.parametrize("name", RIVALS)
def test_vllm_accepts_what_we_accept_of_other_heads(name, small, rivals, vllm):
    check(small, rivals[name], vllm[0][name], vllm[1][name])


@pytest.mark.parametrize("name", IN_SGLANG)
def test_sglang_accepts_what_we_accept(name, small, served, sglang):
    check(small, served[name], sglang[0][name], sglang[1][name])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_greedy_output_is_lossless(engine, request):
    """Against the engine's own decoding without a head."""
    results = request.getfixturevalue(engine)[1]
    plain = [answer.token_ids for answer in results[PLAIN].answers]
    for name in set(results) & {*VARIANTS, *RIVALS, SPECULATORS}:
        assert [answer.token_ids for answer in results[name].answers] == plain, name


def test_speculators_form_finds_its_target(served, vllm):
    """`LLM(FOLDER)` alone, as `vllm serve FOLDER`."""
    assert vllm[1][SPECULATORS].accepted_K == served["eagle3"].ours.result.accepted_K


def test_what_sglang_cannot_express_is_refused(served):
    assert {name for name, item in served.items() if item.refused_by_sglang} == VLLM_ONLY
    for item in served.values():
        load_as(Engine.vllm, item.export)
        if item.refused_by_sglang:
            with pytest.raises(ValueError, match="as sglang loads it"):
                load_as(Engine.sglang, item.export)


@pytest.mark.parametrize("name", DAMAGE)
def test_the_first_stage_that_differs_is_named(name, small, served, vllm):
    """vLLM serves these without a word."""
    found = findings(small, served["eagle3"].ours, vllm[0][name], vllm[1][name])
    assert next(f.stage for f in found.values() if not f.equal) == DAMAGE[name][1], found
    assert found["token ids"].equal  # lossless all the same: only the speed suffers
