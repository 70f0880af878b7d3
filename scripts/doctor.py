"""Looks for what would stop a recipe, before or after its run: `scripts/doctor.py recipe=NAME`.

Every check is a line with ok, warn or fail, and the fix. Where the run has a bundle, it is read by both
engines' rules. With `replay=true`, or `--replay RUN` for a finished run and its own recipe, the recorded
prompts also go through the built-in decoder and the real engines, and the first stage that differs is named.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import BAD, command, fail
from slipstream.scripts.setup_checks import Check, State, check_setup
from slipstream.scripts.stages import RECIPE, Run

REPLAY = "--replay"
COLOURS = {State.ok: "green", State.warn: "yellow", State.fail: "bold red"}


def doctor(recipe: Recipe) -> None:
    """Checks the set-up, then the bundle, then the engines.

    Raises:
        ValueError: a check failed, the bundle is broken, or an engine differs.
    """
    run, console = Run(recipe), Console()
    failed = []
    for check in (*check_setup(run), *_bundle_checks(run)):
        colour = COLOURS[check.state]
        console.print(f"[{colour}]{check.state.value:<4}[/] {check.name:<14}", end="", highlight=False)
        console.print(check.text, markup=False, highlight=False, soft_wrap=True)
        if check.state is State.fail:
            failed.append(f"{check.name}: {check.text}")
    if failed:
        raise ValueError("; ".join(failed))
    if not recipe.replay:
        return
    from slipstream.scripts.replay import replay

    if different := replay(run, console):
        raise ValueError("; ".join(different))
    console.print("equal")


def _bundle_checks(run: Run) -> Iterator[Check]:
    """Whether the engines read the bundle as it was trained; nothing before there is one."""
    from slipstream.drafters.emulated_loaders import load_as
    from slipstream.eval.drafters.registry import make_contender

    folder = run.path("export")
    if not folder.is_dir() and not run.recipe.replay:
        yield Check(name="bundle", state=State.ok, text=f"none yet in {folder}")
        return
    try:
        if run.recipe.drafter.kind == "eagle3":
            for engine in run.recipe.export.engines:
                load_as(engine, folder)
                text = "reads the bundle as it was trained"
                yield Check(name=engine.value, state=State.ok, text=text)
        make_contender("head", target=run.target, export=folder, config=run.recipe.eval)
    except ValueError as error:
        yield Check(name="bundle", state=State.fail, text=str(error))


def recorded_recipe(run_dir: str, overrides: list[str]) -> Recipe:
    """The recipe a run was started with, changed by `key=value` words.

    Raises:
        ValueError: the folder holds none.
    """
    path = Path(run_dir) / RECIPE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name the run_dir of a run")
    recorded = OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.load(path))
    folders = [f"run_dir={run_dir}"]
    if recorded.data_dir == recorded.run_dir:
        folders.append(f"data_dir={run_dir}")
    recorded = OmegaConf.merge(recorded, OmegaConf.from_dotlist([*folders, *overrides]))
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
