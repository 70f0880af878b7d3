"""The model card of an exported head: what it is, what it measured, and the commands that serve it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.data.files import is_complete, read_json, read_manifest, write_text
from slipstream.drafters.config import Engine, Form
from slipstream.recipes.schema import Recipe
from slipstream.scripts.bundle import METHODS, served_depth
from slipstream.scripts.replay import checked_engines

if TYPE_CHECKING:
    from slipstream.scripts.stages import Run

CARD = "README.md"
KINDS = {"eagle1": "EAGLE-1", "medusa": "Medusa"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A finished evaluation of the bundle."""

    report: dict[str, Any]
    """Content of acceptance.json."""
    settings: dict[str, Any]
    """Everything the numbers depend on."""


def write_card(run: "Run") -> bool:
    """Writes the card beside the bundle; whether it has a measurement, made with the recipe's settings."""
    measured = _measured(run)
    path, text = run.path("export") / CARD, card(run, measured)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    return measured is not None


def _measured(run: "Run") -> Measured | None:
    from slipstream.eval.comparison import REPORT, weights_hash

    folder = run.path("evaluation")
    if not is_complete(folder):
        return None
    settings = read_manifest(folder)["settings"]
    if settings["weights"] != weights_hash(run.recipe.eval, run.path("export")):
        return None
    return Measured(report=read_json(folder / REPORT), settings=settings)


def card(run: "Run", measured: Measured | None) -> str:
    """The card's text."""
    recipe, geometry = run.recipe, run.geometry
    target = recipe.export.target_id or recipe.target.name
    kind = KINDS.get(recipe.drafter.kind, "EAGLE-3")
    if geometry.norm_output and geometry.fc_norm:
        kind = "EAGLE-3.1"
    facts = {
        "target": f"`{target}`",
        "captured boundaries (state entering layer b)": str(list(geometry.aux_layers)),
        "draft vocabulary": f"{geometry.draft_vocab_size} of {geometry.vocab_size}",
        **_training(run),
        "checked with": checked_engines(run),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
base_model: {target}
library_name: transformers
tags: [speculative-decoding, {recipe.drafter.kind}, draft-model]
---

# {kind} draft head for {target}

Trained with Slipstream, recipe `{recipe.name}`. The head drafts tokens that the target verifies:
greedy answers stay the same, token for token.

| | |
|---|---|
{rows}

{_acceptance(measured)}
{_commands(recipe, target, served_depth(geometry, recipe))}"""


def _training(run: "Run") -> dict[str, str]:
    """Data and recipe, with the counts of the stages whose folders are still there."""
    recipe = run.recipe
    train, data = recipe.train, recipe.data
    counts = {}
    shown = (("regenerated", "answers", "answers"), ("train", "train_tokens", "tokens seen"))
    for stage, fact, unit in shown:
        if is_complete(run.path(stage)) and fact in (facts := read_manifest(run.path(stage))["facts"]):
            counts[stage] = f", {facts[fact]:,} {unit}"
    names = [Path(path).name if Path(path).is_file() else path for path in data.prompts.paths]
    sources = ", ".join(f"`{name}`" for name in names)
    start = f", from `{Path(train.init_from).name}`" if train.init_from else ""
    return {
        "data": f"the target's own answers to {sources}{counts.get('regenerated', '')}",
        "training": f"{train.epochs} epochs, K={train.unroll.num_steps}, loss {train.loss.kind.value}, "
        f"learning rate {train.learning_rate:g}{counts.get('train', '')}{start}",
    }


def _acceptance(measured: Measured | None) -> str:
    if measured is None:
        return "The head has not been measured yet.\n"
    settings = measured.settings
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    lines = [
        "## Acceptance length",
        "",
        f"Tokens of a verification round, the target's own included ({how}, {settings['target_dtype']}, at "
        f"most {settings['max_new_tokens']} new tokens); 95 % bootstrap interval over prompts.",
        "",
        "| drafts | prompts from | K | prompts | rounds | tau | 95 % interval | speed-up at batch 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reports = {name: row for name, row in measured.report["drafters"].items() if "@" not in name}
    for name, row in reports.items():
        cuts = {"all": row["overall"], **(row["by_suite"] if len(row["by_suite"]) > 1 else {})}
        lines += [
            f"| {name} | {cut} | {row['num_draft_tokens']} | {tau['prompts']} | {tau['rounds']:,} "
            f"| {tau['tau']:.3f} | {tau['low']:.3f} - {tau['high']:.3f} "
            f"| {row['speedup']:.2f}x |"
            for cut, tau in cuts.items()
        ]
    first = next(iter(reports.values()))
    rates = " ".join(f"{rate:.3f}" for rate in first["unconditional_K"])
    same = {True: "yes", False: "no", None: "not compared, sampled"}[first["lossless"]]
    lines += [
        "",
        f"Accepted at each position, of all rounds: {rates}.",
        f"Equal to plain decoding: {same}.",
        "",
    ]
    return "\n".join(lines)


def _commands(recipe: Recipe, target: str, k: int) -> str:
    name = recipe.push or "PATH_OR_ID"
    told = "" if recipe.push else "Replace `PATH_OR_ID` by this folder or its hub id.\n"
    parts = [_how_to_serve(engine, target, name, recipe, k) for engine in recipe.export.engines]
    again = f"""
## Measure it again

```bash
python scripts/export.py recipe={recipe.name} pull={name} run_dir=runs/pulled
python scripts/evaluate.py recipe={recipe.name} run_dir=runs/pulled
```
"""
    return told + "".join(parts) + (again if recipe.push else "")


def _how_to_serve(engine: Engine, target: str, name: str, recipe: Recipe, k: int) -> str:
    if engine is Engine.sglang:
        return f"""
## SGLang

```bash
python -m sglang.launch_server --model-path {target} \\
  --speculative-algorithm EAGLE3 --speculative-draft-model-path {name} \\
  --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}
```
"""
    method = METHODS[recipe.drafter.kind]
    speculative = json.dumps({"method": method, "model": name, "num_speculative_tokens": k})
    command = f"vllm serve {target} --speculative-config '{speculative}'"
    if recipe.export.format is Form.speculators:
        command = f"vllm serve {name}"
    return f"""
## vLLM

```bash
{command}
```
"""
