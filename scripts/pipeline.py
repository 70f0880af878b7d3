"""All stages of a recipe in order: `scripts/pipeline.py recipe=NAME [plan=true]`.

What is complete is skipped, what was interrupted goes on. The last line printed is JSON.
"""

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.data.files import is_complete, read_manifest
from slipstream.data.progress import say
from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command
from slipstream.scripts.stages import INPUTS, Run

if TYPE_CHECKING:
    from slipstream.eval.acceptance import AcceptanceReport


def pipeline(recipe: Recipe) -> None:
    """Runs what is missing and prints the acceptance table and the summary line."""
    run = Run(recipe)
    if recipe.plan:
        from slipstream.scripts.plan import print_plan

        print_plan(run)
        return
    from slipstream.eval.report import print_comparison
    from slipstream.scripts import hub
    from slipstream.scripts.card import write_card

    run.check()
    if recipe.push:
        hub.check_target_id(recipe)
        hub.check_token(recipe.push)
    report: Any = None
    for stage in INPUTS:
        say(f"-- {stage}: {'complete' if is_complete(run.path(stage)) else 'running'}")
        if stage == "train":
            _train_on_all_gpus(run)
        else:
            report = run.run(stage)
    print_comparison(report, Console())
    write_card(run)
    if recipe.push:
        hub.push(run)
    print(json.dumps(summary(run, report.first)))


def _train_on_all_gpus(run: Run) -> None:
    """Trains in this process, or by torchrun where there are several GPUs."""
    import torch

    if is_complete(run.path("train")) or torch.cuda.device_count() < 2:
        run.run("train")
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
    words = [str(torch.cuda.device_count()), "-m", "slipstream.scripts.train", *sys.argv[1:]]
    if (code := subprocess.run(launcher + words, check=False).returncode) != 0:
        raise ValueError(f"training stopped with exit code {code}: see its message above")


def summary(run: Run, report: "AcceptanceReport") -> dict[str, Any]:
    """What a script wants to know of a finished run."""
    seconds = run.seconds()
    keys = {stage: run.seconds_key(stage) for stage in INPUTS}
    return {
        "target": run.recipe.target.name,
        "drafter": run.recipe.drafter.kind,
        "num_draft_tokens": report.num_draft_tokens,
        "acceptance_length": round(report.acceptance_length, 4),
        "acceptance_rate_per_position": [round(rate, 4) for rate in report.unconditional_K],
        "speedup": round(report.speedup, 3),
        "lossless": report.lossless,
        "train_tokens": read_manifest(run.path("train"))["facts"]["train_tokens"],
        "seconds_per_stage": {stage: round(seconds[key], 1) for stage, key in keys.items() if key in seconds},
        "export": str(run.path("export")),
    }


main = command(pipeline)

if __name__ == "__main__":
    main()
