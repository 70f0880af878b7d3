"""What a recipe would do: stages, rows, disk, head size and steps, before anything heavy runs."""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from slipstream.data.cache import HiddenStateCache
from slipstream.data.config import Source
from slipstream.data.files import MANIFEST, is_complete, read_manifest
from slipstream.data.sizes import Counts, estimate_bytes
from slipstream.drafters.config import TARGET_KEYS, DraftGeometry, resolve_geometry
from slipstream.drafters.registry import DRAFTERS
from slipstream.scripts.graph import stages_of
from slipstream.scripts.stages import Run

COUNTS = {"prompts": "kept", "regenerated": "answers", "tokens": "kept", "hidden_states": "supervised_tokens"}
"""The fact of a complete stage that tells its size."""


def print_plan(run: Run) -> None:
    """Prints the plan of a recipe; needs neither the target's weights nor a network."""
    console = Console()
    table = Table(title=f"{run.recipe.name}: stages in {run.folder}")
    for column in ("stage", "state", "size"):
        table.add_column(column)
    for name in stages_of(run.recipe):
        table.add_row(name, *_state(run, name))
    console.print(table)
    facts = Table(show_header=False)
    for name, value in _facts(run).items():
        facts.add_row(name, value)
    console.print(facts)


def _state(run: Run, name: str) -> tuple[str, str]:
    folder = run.path(name)
    if not (folder / MANIFEST).exists():
        return "missing", "not known yet"
    if not is_complete(folder):
        return "begun", "not known yet"
    facts = read_manifest(folder)["facts"]
    key = COUNTS.get(name, "")
    return "complete", f"{facts[key]:,} {key.replace('_', ' ')}" if key in facts else ""


def _facts(run: Run) -> dict[str, str]:
    recipe = run.recipe
    geometry = plan_geometry(run)
    with torch.device("meta"):
        head: torch.nn.Module = DRAFTERS[recipe.drafter.kind](geometry)
    sizes = {name: p.numel() for name, p in head.named_parameters()}
    per_token = [
        estimate_bytes(
            recipe.data.capture,
            Counts(documents=1, tokens=1, supervised=supervised, rows=1),
            num_aux=len(geometry.aux_layers),
            hidden_size=geometry.hidden_size,
            vocab_size=geometry.vocab_size,
        )
        for supervised in (0, 1)
    ]
    unroll = recipe.train.unroll
    return {
        "target": f"{recipe.target.name}, hidden {geometry.hidden_size}, vocabulary {geometry.vocab_size:,}",
        "captured boundaries": str(list(geometry.aux_layers)),
        "draft vocabulary": f"{geometry.draft_vocab_size:,}",
        "parameters of the head": f"{sum(sizes.values()):,} (lm_head {sizes.get('lm_head.weight', 0):,})",
        "disk per token": "none, the target runs beside the head"
        if recipe.data.source is Source.live
        else f"{per_token[0]:,} bytes of prompt, {per_token[1]:,} bytes of answer",
        "unroll": f"{unroll.num_steps} steps, decay {unroll.step_decay}, survival {unroll.survival}",
        "optimizer steps": _steps(run),
    }


def plan_geometry(run: Run) -> DraftGeometry:
    """The head's geometry, from the recipe's own figures of the target where it gives them all."""
    expected: dict[str, Any] = dict(run.recipe.target.geometry)
    is_enough = expected.keys() >= TARGET_KEYS
    return resolve_geometry(run.recipe.drafter, expected) if is_enough else run.geometry


def _steps(run: Run) -> str:
    from slipstream.train.trainer import plan_steps

    train, data = run.recipe.train, run.recipe.data
    if data.source is Source.cached and is_complete(run.path("hidden_states")):
        rows = HiddenStateCache(run.path("hidden_states")).rows("train")
        return f"{len(plan_steps(rows, train, run.recipe.train_seed, data.shuffle_shards)):,}"
    shape = f"{train.packs_per_step} x {train.tokens_per_pack:,} tokens a step, {train.epochs} epochs"
    return f"known after capture ({shape})"
