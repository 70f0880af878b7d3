"""Shows which tokens of a training row are supervised: `scripts/show_mask.py recipe=NAME row=N`."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run

if TYPE_CHECKING:
    from slipstream.data.target.resolve import Target
    from slipstream.data.types import TokenizedSample

SUPERVISED, CONTEXT = "bold black on green", "dim"


def show(target: "Target", tokens_folder: Path, row: str, console: Console) -> None:
    """Prints one row, supervised tokens coloured, special tokens and newlines visible.

    Args:
        target: whose tokenizer wrote the row.
        tokens_folder: folder of the tokenize stage.
        row: its id, or its number in id order.
        console: where to.

    Raises:
        ValueError: there is no such row.
    """
    from slipstream.data.tokenize import read_samples

    sample = _find(read_samples(tokens_folder), row)
    tokenizer = target.tokenizer()
    text = Text()
    for token, supervised in zip(sample.input_ids_T.tolist(), sample.loss_mask_T.tolist(), strict=True):
        shown = str(tokenizer.decode([token], skip_special_tokens=False)).replace("\n", "\\n\n")
        text.append(shown, style=SUPERVISED if supervised else CONTEXT)
    num_supervised = int(sample.loss_mask_T.sum())
    legend = Text.assemble((" supervised ", SUPERVISED), " ", (" context ", CONTEXT))
    console.print(
        f"row {sample.id}: {sample.loss_mask_T.numel()} tokens, {num_supervised} supervised", highlight=False
    )
    console.print(legend)
    console.print(text)


def _find(samples: "list[TokenizedSample]", row: str) -> "TokenizedSample":
    by_id = {sample.id: sample for sample in samples}
    if row in by_id:
        return by_id[row]
    if row.isdigit() and int(row) < len(samples):
        return samples[int(row)]
    raise ValueError(f"row={row}: no such row, give an id or a number below {len(samples)}")


def show_mask(recipe: Recipe) -> None:
    """Shows the row named by the recipe's `row`."""
    run = Run(recipe)
    run.require("tokens")
    show(run.target, run.path("tokens"), recipe.row, Console())


main = command(show_mask)

if __name__ == "__main__":
    main()
