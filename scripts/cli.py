"""From the command line to a checked recipe, and from an exception to one line and exit code 2."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slipstream.data.files import write_text
from slipstream.data.progress import is_main_process
from slipstream.recipes.schema import Recipe, nearest_key, register

BAD_INPUT, INTERRUPTED = 2, 130
RECIPE = "recipe.yaml"
"""What a run was started with, in its folder."""
USER_ERRORS = (OmegaConfBaseException, ValueError, OSError)


def command(task: Callable[[Recipe], None]) -> Callable[[], None]:
    """Makes the `main` of a command: `recipe=NAME key=value ...` composes the recipe of `task`."""
    register()
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path="pkg://slipstream.recipes", config_name="pipeline")
    def compose(composed: DictConfig) -> None:
        try:
            recipe: Recipe = OmegaConf.to_object(composed)  # type: ignore[assignment]
            recipe.check()
            if is_main_process() and not recipe.plan:
                write_text(Path(recipe.run_dir) / RECIPE, OmegaConf.to_yaml(composed, resolve=True))
            task(recipe)
        except USER_ERRORS as error:
            failures.append(error)  # raised here, Hydra would print a line of its own

    def main() -> None:
        # Hydra would print its own page and exit with 1.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            compose()
        except (HydraException, OmegaConfBaseException) as error:
            failures.append(error)
        except KeyboardInterrupt:
            print("interrupted: run the same command again to go on", file=sys.stderr)
            sys.exit(INTERRUPTED)
        if failures:
            fail(failures[0])

    return main


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


def _explain(error: Exception) -> str:
    """One line; for a mistyped key with the key that was probably meant."""
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return str(error)
    lines = [str(error), *([str(error.__cause__)] if error.__cause__ else [])]
    text = " ".join(dict.fromkeys(line.strip() for part in lines for line in part.splitlines()))
    quoted = text.split("'")
    if text.startswith("Could not override") and len(quoted) > 1:
        near = nearest_key(quoted[1])
        return f"unknown key {quoted[1]}: " + (f"did you mean {near}?" if near else "see --help for the keys")
    return text


def fail(error: Exception) -> None:
    """Prints one line and ends the program."""
    if "SLIPSTREAM_TRACEBACK" in os.environ:
        raise error
    print(f"error: {' '.join(_explain(error).split())}", file=sys.stderr)
    sys.exit(BAD_INPUT)
