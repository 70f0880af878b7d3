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
from slipstream.recipes.schema import Recipe, nearest_key, register

BAD_INPUT = 2


def command(task: Callable[[Recipe], None]) -> Callable[[], None]:
    """Makes the `main` of a command: `recipe=NAME key=value ...` composes the recipe of `task`."""
    register()

    @hydra.main(version_base="1.3", config_path="pkg://slipstream.recipes", config_name="pipeline")
    def compose(composed: DictConfig) -> None:
        recipe: Recipe = OmegaConf.to_object(composed)  # type: ignore[assignment]
        recipe.check()
        if int(os.environ.get("RANK", "0")) == 0 and not recipe.plan:
            _keep(composed, Path(recipe.run_dir))
        task(recipe)

    def main() -> None:
        # Hydra would print its own page and exit with 1.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            compose()
        except (HydraException, OmegaConfBaseException) as error:
            _fail(_explain(error), error)
        except (ValueError, OSError) as error:
            _fail(str(error), error)
        except KeyboardInterrupt:
            print("interrupted: run the same command again to go on", file=sys.stderr)
            sys.exit(130)

    return main


def _keep(composed: DictConfig, run_dir: Path) -> None:
    write_text(run_dir / "recipe.yaml", OmegaConf.to_yaml(composed, resolve=True))


def _explain(error: Exception) -> str:
    cause = error.__cause__ or error
    lines = [line.strip() for line in f"{error}\n{cause}".splitlines() if line.strip()]
    text = " ".join(dict.fromkeys(lines))
    quoted = text.split("'")
    if "Could not override" in text and len(quoted) > 1:
        wrong = quoted[1]
        near = nearest_key(wrong)
        hint = f"did you mean {near}?" if near else "see --help for the keys"
        return f"unknown key {wrong}: {hint}" if "not in struct" in text or "not in" in text else text
    return text


def _fail(text: str, error: Exception) -> None:
    if "SLIPSTREAM_TRACEBACK" in os.environ:
        raise error
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(BAD_INPUT)
