"""From the command line to a checked recipe, and from an exception to one line and exit code 2."""

import os
import signal
import sys
import time
from collections.abc import Callable

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slipstream.data.progress import is_main_process
from slipstream.recipes.schema import Recipe, check_keys, register, unknown_key

BAD = (HydraException, OmegaConfBaseException, ValueError, OSError)
BAD_INPUT, INTERRUPTED = 2, 130

RANK_0_SECONDS = 5.0
"""How long another rank waits: torchrun ends it meanwhile when rank 0 failed as well."""


def command(task: Callable[[Recipe], object]) -> Callable[[], None]:
    """Makes the `main` of a command: `recipe=NAME key=value ...` composes the recipe of `task`."""
    register()
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path="pkg://slipstream.recipes", config_name="pipeline")
    def compose(composed: DictConfig) -> None:
        try:
            check_keys(composed)
            recipe: Recipe = OmegaConf.to_object(composed)  # type: ignore[assignment]
            recipe.check()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            task(recipe)
        except BAD as error:
            failures.append(error)  # raised here, Hydra would print a line of its own
        except RuntimeError:
            _let_rank_0_speak()  # a collective fails where rank 0 is gone
            raise

    def main() -> None:
        # Hydra would print its own page and exit with 1.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        # Inside Hydra a KeyboardInterrupt would become another error; nothing is written there.
        signal.signal(signal.SIGINT, lambda *_: os._exit(_interrupted()))
        try:
            compose()
            if failures:
                raise failures[0]
        except BAD as error:
            fail(error)
        except KeyboardInterrupt:
            sys.exit(_interrupted())

    return main


def _interrupted() -> int:
    if is_main_process():
        print("interrupted: run the same command again to go on", file=sys.stderr)
    return INTERRUPTED


def _let_rank_0_speak() -> None:
    """Keeps an error of another rank back; it mostly repeats rank 0's, and torchrun ends this process."""
    if not is_main_process():
        time.sleep(RANK_0_SECONDS)


def _explain(error: Exception) -> str:
    """One line; for a mistyped key with the key that was probably meant."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is not set and the recipe has no value for it: add {error.full_key}=VALUE"
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return str(error)
    lines = [str(error), *([str(error.__cause__)] if error.__cause__ else [])]
    text = " ".join(dict.fromkeys(line.strip() for part in lines for line in part.splitlines()))
    quoted = text.split("'")
    if text.startswith("Could not override") and len(quoted) > 1:
        return unknown_key(quoted[1])
    return text


def fail(error: Exception) -> None:
    """Prints one line and ends the program."""
    _let_rank_0_speak()
    if "SLIPSTREAM_TRACEBACK" in os.environ:
        raise error
    where = "" if is_main_process() else f" on rank {os.environ['RANK']}"
    print(f"error{where}: {' '.join(_explain(error).split())}", file=sys.stderr)
    sys.exit(BAD_INPUT)
