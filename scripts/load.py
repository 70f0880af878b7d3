"""Batches with and without the head: `scripts/load.py recipe=NAME eval.batch_sizes=[1,2,4,8]`."""

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from slipstream.data.files import write_json
from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run

if TYPE_CHECKING:
    from slipstream.eval.load import LoadPoint

LOAD = "load/load.json"
"""In the run's folder; scripts/evaluate.py puts the curve into its report."""


def load(recipe: Recipe) -> None:
    """Serves the held-out prompts in batches of every size; prints curve, threshold and settings."""
    from slipstream.eval.load import engine_settings, threshold

    run, console = Run(recipe), Console()
    points = load_points(run)
    limit, largest = threshold(points), max(point.batch_size for point in points)
    settings = engine_settings(limit, num_draft_tokens=recipe.eval.num_draft_tokens, largest=largest)
    show(points, limit, console)
    for engine, text in settings.items():
        console.print(f"{engine}: {text or 'nothing to set'}", highlight=False)
    content = {"points": [_as_json(p) for p in points], "threshold": limit, "settings": dict(settings)}
    write_json(run.folder / LOAD, content)


def load_points(run: Run) -> "list[LoadPoint]":
    """The measured curve."""
    import torch

    from slipstream.data.target.weights import read_target_head
    from slipstream.data.template import render_prompt, stop_token_ids
    from slipstream.data.types import first_turn
    from slipstream.drafters.checkpoint_format import load_head
    from slipstream.eval.batched import BatchedHead
    from slipstream.eval.load import measure_load
    from slipstream.eval.verify import Sampling

    run.require("export")
    config, target, served = run.recipe.eval, run.target, load_head(run.path("export"))
    embedding_VD = read_target_head(target).embedding_VD.to(target.device, target.dtype)
    target_ids_W = (torch.arange(served.head.geometry.draft_vocab_size) + served.d2t_W).to(target.device)
    head = BatchedHead(served.head.to(target.device, target.dtype), embedding_VD, target_ids_W)
    prompts = [render_prompt(target.tokenizer(), first_turn(prompt)) for prompt in run.held_out]
    return measure_load(
        target.model(),
        head,
        prompts,
        batch_sizes=list(config.batch_sizes),
        num_draft_tokens=config.num_draft_tokens,
        max_new_tokens=config.max_new_tokens,
        stop_ids=stop_token_ids(target),
        sampling=Sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k),
    )


def show(points: "list[LoadPoint]", limit: int | None, console: Console) -> None:
    """Prints the curve."""
    columns = (
        "batch",
        "tau",
        "plain tokens/s",
        "tokens/s",
        "speed-up",
        "step",
        "draft",
        "verify",
        "expected",
    )
    table = Table(*(Column(c, justify="right") for c in columns), title="Speculation under load")
    for p in points:
        table.add_row(
            str(p.batch_size),
            f"{p.acceptance_length:.3f}",
            f"{p.plain_tokens_per_second:,.1f}",
            f"{p.tokens_per_second:,.1f}",
            f"{p.speedup:.2f}x",
            *(f"{1000 * s:.1f} ms" for s in (p.step_seconds, p.draft_seconds, p.verify_seconds)),
            f"{p.expected_speedup:.2f}x",
        )
    console.print(table)
    advice = "at every measured size" if limit is None else f"up to {limit} requests at a time"
    console.print(f"speculate {advice}", highlight=False)


def _as_json(point: "LoadPoint") -> dict[str, float]:
    expected = {"speedup": point.speedup, "expected_speedup": point.expected_speedup}
    return {**dataclasses.asdict(point), **expected}


main = command(load)

if __name__ == "__main__":
    main()
