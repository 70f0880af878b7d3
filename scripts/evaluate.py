"""Every way to draft on the same prompts: `scripts/evaluate.py recipe=NAME eval.drafter=[head,head:tree]`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.data.files import read_json, write_json, write_text
from slipstream.eval.config import EvalConfig
from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command
from slipstream.scripts.load import LOAD
from slipstream.scripts.stages import Run

if TYPE_CHECKING:
    from slipstream.eval.comparison import Comparison
    from slipstream.eval.drafters.registry import Contender

REPORT, LOSSLESS, DRIFT = "report.html", "lossless.json", "drift.json"
NUM_DRIFT_PROMPTS = 20


def evaluate(recipe: Recipe) -> None:
    """Measures, prints the table and writes report.html.

    Raises:
        ValueError: bad input, or a drafter whose sampled answers differ from the target's.
    """
    from slipstream.eval.page import page
    from slipstream.eval.report import print_comparison

    run, console = Run(recipe), Console()
    comparison = run.run("evaluation")
    print_comparison(comparison, console)
    folder = run.path("evaluation")
    extra: dict[str, str] = {}
    failed = prove_lossless(run, folder, console, extra) if recipe.eval.lossless else []
    if recipe.eval.drift:
        extra["Drift"] = measure_drifts(run, comparison, folder)
    if (run.folder / LOAD).is_file():
        extra["Speed-up by batch size"] = load_section(read_json(run.folder / LOAD))
    title = f"Drafting for {recipe.target.name}"
    text = page(comparison, title=title, tokenizer=run.target.tokenizer(), extra=extra)
    write_text(folder / REPORT, text)
    console.print(f"report: {folder / REPORT}", highlight=False)
    if failed:
        raise ValueError(
            f"sampled answers differ from the target's: {', '.join(failed)} ({folder / LOSSLESS})"
        )


def load_section(load: dict[str, Any]) -> str:
    """The curve that scripts/load.py measured."""
    from slipstream.eval.charts import lines

    curves = {
        name: [(point["batch_size"], point[key]) for point in load["points"]]
        for name, key in {"measured": "speedup", "from the times of a round": "expected_speedup"}.items()
    }
    limit = load["threshold"]
    advice = "at every measured size" if limit is None else f"up to {limit} requests at a time"
    return f"<p class=note>Speculate {advice}.</p>" + lines(curves, x="batch size", y="speed-up")


def contenders(run: Run) -> "list[Contender]":
    """What eval.drafter names, without plain decoding."""
    from slipstream.eval.config import as_list
    from slipstream.eval.drafters.registry import BASELINE, make_contender

    config: EvalConfig = run.recipe.eval
    return [
        make_contender(entry, target=run.target, export=run.path("export"), config=config)
        for entry in as_list(config.drafter)
        if entry != BASELINE
    ]


def prove_lossless(run: Run, folder: Path, console: Console, extra: dict[str, str]) -> list[str]:
    """Tests every drafter by sampling; returns those that fail."""
    from slipstream.eval.lossless import prove
    from slipstream.eval.report import proof_rows
    from slipstream.eval.verify import Sampling

    config = run.recipe.eval
    sampling = Sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)
    prompts = run.held_out[: config.lossless_prompts]
    proofs = prove(run.target, contenders(run), prompts, sampling, config.lossless_samples)
    write_json(folder / LOSSLESS, [dataclasses.asdict(proof) for proof in proofs])
    extra["Sampled answers"] = proof_rows(proofs, console)
    return [proof.drafter for proof in proofs if not proof.lossless]


def measure_drifts(run: Run, comparison: "Comparison", folder: Path) -> str:
    """Measures every EAGLE-3 head on the answers that were decoded; the section of the page."""
    from slipstream.data.template import render_prompt
    from slipstream.data.types import first_turn
    from slipstream.eval.drafters.eagle import EagleDrafter
    from slipstream.eval.drafters.registry import BASELINE, short_name
    from slipstream.eval.drift import drift_section, measure_drift

    model, tokenizer = run.target.model(), run.target.tokenizer()
    prompts = {prompt.id: prompt for prompt in run.held_out}
    texts = [
        (render_prompt(tokenizer, first_turn(prompts[p.id])), p.answers[BASELINE][0].token_ids)
        for p in comparison.played[:NUM_DRIFT_PROMPTS]
    ]
    drifts = {
        short_name(contender.name): measure_drift(model, contender.drafter.model, texts)
        for contender in contenders(run)
        if isinstance(contender.drafter, EagleDrafter)
    }
    if not drifts:
        raise ValueError("eval.drift=true looks at EAGLE-3 heads, and eval.drafter names none")
    write_json(folder / DRIFT, {name: dataclasses.asdict(drift) for name, drift in drifts.items()})
    return drift_section(drifts)


main = command(evaluate)

if __name__ == "__main__":
    main()
