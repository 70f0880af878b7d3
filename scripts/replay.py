"""Held-out prompts through the built-in decoder and real engines; what was found is kept for the card."""

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from slipstream.data.files import file_hash, read_json, write_json
from slipstream.drafters.checkpoint_format import WEIGHTS
from slipstream.drafters.config import Engine
from slipstream.scripts.bundle import METHODS, served_depth

if TYPE_CHECKING:
    from slipstream.eval.engines.replay import Finding
    from slipstream.scripts.stages import Run

CHECKED = "doctor/checked.json"
TIMEOUT = 3600.0
"""Seconds for one engine."""


def replay(run: "Run", console: Console) -> list[str]:
    """Prints the comparison of every engine; returns the first difference of each."""
    from slipstream.data.template import stop_token_ids
    from slipstream.eval.drafters.registry import make_contender
    from slipstream.eval.engines.environment import engine_python, run_jobs
    from slipstream.eval.engines.job import STATES
    from slipstream.eval.engines.replay import compare, decode

    recipe, folder = run.recipe, run.path("export")
    model = run.target.model()
    contender = make_contender("head", target=run.target, export=folder, config=recipe.eval)
    config = dataclasses.replace(recipe.eval, num_draft_tokens=served_depth(run.geometry, recipe))
    ours = decode(run.target, model, contender.drafter, config, run.held_out)
    pythons = {Engine.vllm: recipe.engines.vllm_python, Engine.sglang: recipe.engines.sglang_python}
    different, versions = [], {}
    for engine in recipe.export.engines:
        name = engine.value
        job = ours.job(
            run.folder / "doctor" / name,
            target=str(run.target.path.resolve()),
            draft=str(folder.resolve()),
            config=config,
            stop_ids=stop_token_ids(run.target),
            method=METHODS[recipe.drafter.kind],
        )
        python = engine_python(name, pythons[engine])
        (result,) = run_jobs(name, python, [job], timeout=TIMEOUT)
        findings = compare(ours, result, run.folder / "doctor" / name / STATES, model)
        _show(f"{name} {result.version}", findings, console)
        if wrong := next((finding for finding in findings if not finding.equal), None):
            different.append(f"{name} differs first in {wrong.stage}: {wrong.text}")
        else:
            versions[name] = result.version
    write_json(run.folder / CHECKED, {"weights": file_hash(folder / WEIGHTS), "versions": versions})
    return different


def checked_engines(run: "Run") -> str:
    """For the card: engines that drafted as the built-in decoder does, or whose loading rules were read."""
    from slipstream.eval.engines.environment import pinned_version

    path, names = run.folder / CHECKED, [engine.value for engine in run.recipe.export.engines]
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    versions = found["versions"] if found.get("weights") == file_hash(run.path("export") / WEIGHTS) else {}
    parts = [f"{name} {versions[name]} (token for token)" for name in names if name in versions]
    parts += [f"the loading rules of {name} {pinned_version(name)}" for name in names if name not in versions]
    return ", ".join(parts)


def _show(title: str, findings: "list[Finding]", console: Console) -> None:
    table = Table("stage", "", "", title=title)
    for finding in findings:
        table.add_row(finding.stage, "equal" if finding.equal else "DIFFERS", finding.text)
    console.print(table)
