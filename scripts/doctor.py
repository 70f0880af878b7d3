"""Tells whether engines run the exported head as it was trained: `scripts/doctor.py recipe=NAME`.

The bundle is read by both engines' rules. With `replay=true`, or `--replay RUN` for a finished run
and its own recipe, the recorded prompts also go through the built-in decoder and the real engines,
and the first stage that differs is named.
"""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from slipstream.drafters.config import Engine
from slipstream.recipes.schema import Recipe
from slipstream.scripts.bundle import METHODS, served_depth
from slipstream.scripts.cli import BAD, command, fail
from slipstream.scripts.stages import RECIPE, Run

if TYPE_CHECKING:
    from slipstream.eval.drafters.registry import Contender
    from slipstream.eval.engines.replay import Finding

REPLAY = "--replay"
TIMEOUT = 3600.0
"""Seconds for one engine."""


def doctor(recipe: Recipe) -> None:
    """Checks the bundle, then the engines.

    Raises:
        ValueError: the bundle is broken, or an engine differs; the message names the first stage.
    """
    from slipstream.drafters.emulated_loaders import load_as
    from slipstream.eval.drafters.registry import make_contender

    run, console = Run(recipe), Console()
    folder = run.path("export")
    if recipe.drafter.kind == "eagle3":
        for engine in recipe.export.engines:
            load_as(engine, folder)
            console.print(f"{engine.value}: reads the bundle as it was trained")
    contender = make_contender("head", target=run.target, export=folder, config=recipe.eval)
    if not recipe.replay:
        return
    if different := _replay(run, contender, console):
        raise ValueError("; ".join(different))
    console.print("equal")


def _replay(run: Run, contender: "Contender", console: Console) -> list[str]:
    """Prints the comparison of every engine; returns the first difference of each."""
    from slipstream.data.template import stop_token_ids
    from slipstream.eval.engines.environment import engine_python, run_jobs
    from slipstream.eval.engines.job import STATES
    from slipstream.eval.engines.replay import compare, decode

    recipe, folder = run.recipe, run.path("export")
    model = run.target.model()
    num_drafts = served_depth(run.geometry, recipe)
    config = dataclasses.replace(recipe.eval, num_draft_tokens=num_drafts)
    ours = decode(run.target, model, contender.drafter, config, run.held_out)
    pythons = {Engine.vllm: recipe.engines.vllm_python, Engine.sglang: recipe.engines.sglang_python}
    different = []
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
    return different


def _show(title: str, findings: "list[Finding]", console: Console) -> None:
    table = Table("stage", "", "", title=title)
    for finding in findings:
        table.add_row(finding.stage, "equal" if finding.equal else "DIFFERS", finding.text)
    console.print(table)


def recorded_recipe(run_dir: str, overrides: list[str]) -> Recipe:
    """The recipe a run was started with, changed by `key=value` words.

    Raises:
        ValueError: the folder holds none.
    """
    path = Path(run_dir) / RECIPE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name the run_dir of a run")
    changes = OmegaConf.from_dotlist([f"run_dir={run_dir}", *overrides])
    recorded = OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.load(path), changes)
    recipe: Recipe = OmegaConf.to_object(recorded)  # type: ignore[assignment]
    recipe.check()
    return recipe


_composed = command(doctor)


def main() -> None:
    """`recipe=NAME key=value ...`, or `--replay RUN key=value ...`."""
    if REPLAY not in sys.argv:
        _composed()
        return
    words = sys.argv[1:]
    place = words.index(REPLAY)
    try:
        if place + 1 == len(words):
            raise ValueError("--replay needs the run_dir of a finished run")
        doctor(recorded_recipe(words[place + 1], [*words[:place], *words[place + 2 :], "replay=true"]))
    except BAD as error:
        fail(error)


if __name__ == "__main__":
    main()
