"""Shows which tokens are supervised: `scripts/show_mask.py recipe=NAME row=N [stage=STAGE html=FILE]`."""

import io
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from slipstream.data.files import write_text
from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run

if TYPE_CHECKING:
    from slipstream.data.target.resolve import Target
    from slipstream.data.types import TokenizedSample

SUPERVISED, CONTEXT = "bold black on green", "dim"
HTML_COLUMNS = 120
STAGES = ("prompts", "regenerated", "tokens", "hidden_states")
"""Those with rows."""


def documents(target: "Target", stage: str, folder: Path, row: str) -> "list[TokenizedSample]":
    """A row of a stage as training sees it: an answered chat may give several documents.

    Args:
        target: whose tokenizer wrote the row.
        stage: one of STAGES.
        folder: of the stage.
        row: its id, or its number in id order.

    Raises:
        ValueError: there is no such row.
    """
    import torch

    from slipstream.data import answers, cache, conversations, template, tokenize
    from slipstream.data.dialog import turns_of
    from slipstream.data.types import TokenizedSample

    if stage == "prompts":
        prompts = {p.id: p for p in conversations.read_conversations(folder / conversations.PROMPTS_FILE)}
        prompt = prompts[_find(prompts, row)]
        first = turns_of(prompt.messages)[0][0]
        ids_T = torch.tensor(template.render_prompt(target.tokenizer(), first, prompt.tools))
        mask_T = torch.zeros_like(ids_T, dtype=torch.bool)
        return [TokenizedSample(id=prompt.id, input_ids_T=ids_T, loss_mask_T=mask_T)]
    if stage == "regenerated":
        chats = {chat.id: chat for chat in conversations.read_answers(folder / answers.ANSWERS_FILE)}
        stop_ids = template.stop_token_ids(target)
        chat_template = template.ChatTemplate(target.tokenizer(), stop_ids, on_inserted="mask")
        return chat_template.views(chats[_find(chats, row)])
    if stage == "tokens":
        samples = {sample.id: sample for sample in tokenize.read_samples(folder)}
        return [samples[_find(samples, row)]]
    source = cache.HiddenStateCache(folder)
    infos = [info.id for split in ("train", "validation") for info in source.rows(split)]
    cached = source.load(_find(infos, row))
    return [TokenizedSample(id=cached.id, input_ids_T=cached.input_ids_T, loss_mask_T=cached.loss_mask_T)]


def _find(ids: Collection[str], row: str) -> str:
    if row in ids:
        return row
    if row.isdigit() and int(row) < len(ids):
        return sorted(ids)[int(row)]
    raise ValueError(f"row={row}: no such row, give an id or a number below {len(ids)}")


def show(target: "Target", sample: "TokenizedSample", console: Console) -> None:
    """Prints a document, supervised tokens coloured, special tokens and newlines visible."""
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


def show_mask(recipe: Recipe) -> None:
    """Shows the row that the recipe names, and writes it as a page where `html` says so."""
    if recipe.stage not in STAGES:
        raise ValueError(f"stage={recipe.stage} has no rows to show: {', '.join(STAGES)}")
    run = Run(recipe)
    run.require(recipe.stage)
    page = Console(record=True, width=HTML_COLUMNS, file=io.StringIO(), force_terminal=True)
    consoles = [Console(), *([page] if recipe.html else [])]
    for sample in documents(run.target, recipe.stage, run.path(recipe.stage), recipe.row):
        for console in consoles:
            show(run.target, sample, console)
    if recipe.html:
        write_text(Path(recipe.html), page.export_html())


main = command(show_mask)

if __name__ == "__main__":
    main()
