"""Masks and views under the habits of real template families; tool calls on policy."""

import string
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.data.config import SampleConfig
from slipstream.data.dialog import CALL_DIFFERS, CALL_UNRECORDED, Answer, Dialog, Job, turns_of
from slipstream.data.template import ChatTemplate, RefusedError
from slipstream.data.types import Conversation, GeneratedConversation, GeneratedTurn, Message
from tests.unit.data.templates import FAMILIES, TOOLS, Family

Q1, Q2 = "A?", "C?"


def tokenizer_of(template: str, markers: Sequence[str], stop: str) -> PreTrainedTokenizerFast:
    """One token for each character and each marker."""
    entries = [*markers, *string.printable, "\ufffd"]
    core = Tokenizer(models.WordLevel({text: i for i, text in enumerate(entries)}, unk_token="\ufffd"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|begin|>" if "<|begin|>" in markers else None,
        eos_token=stop,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def marked(tokenizer: PreTrainedTokenizerFast, view: Any) -> str:
    """Text of a view, supervised runs in brackets."""
    pieces = []
    pairs = zip(view.input_ids_T.tolist(), view.loss_mask_T.tolist(), strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        pieces.append(f"[{text}]" if supervised else text)
    return "".join(pieces)


def chat_of(family: Family, tokenizer: PreTrainedTokenizerFast, **texts: str) -> GeneratedConversation:
    contents = [Q1, family.answers[0], Q2, family.answers[1]]
    messages = tuple(Message(role=("user", "assistant")[i % 2], content=c) for i, c in enumerate(contents))
    system = (Message(role="system", content=texts["system"]),) if texts else ()
    turns = tuple(
        GeneratedTurn(text=text, token_ids=tuple(ids_of(tokenizer, text + family.stop)), finish_reason="stop")
        for text in family.answers
    )
    return GeneratedConversation(id="x", prompt_id="x", messages=system + messages, turns=turns)


def plain(text: str) -> str:
    """An answer as its template keeps it in the history."""
    return text.split("</think>")[-1].split("<|message|>")[-1].strip()


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_and_views(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family.template, family.markers, family.stop)
    stop_ids = ids_of(tokenizer, family.stop)
    template = ChatTemplate(tokenizer, stop_ids, on_inserted="stop")
    found = [marked(tokenizer, view) for view in template.views(chat_of(family, tokenizer))]
    r1, r2 = family.answers
    texts = {"q1": Q1, "q2": Q2, "r1": r1, "r2": r2, "a1": plain(r1), "a2": plain(r2)}
    assert found == [view.format(**texts) for view in family.views]
    assert len(found) == (2 if family.thinks else 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_system_prompts(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family.template, family.markers, family.stop)
    template = ChatTemplate(tokenizer, ids_of(tokenizer, family.stop), on_inserted="stop")
    chat = chat_of(family, tokenizer, system="S")
    if family.system is None:
        with pytest.raises(RefusedError, match="template_refused"):
            template.views(chat)
    else:
        shown = marked(tokenizer, template.views(chat)[0])
        assert family.system in shown.partition("[")[0]
        assert "You are kind" not in shown


def test_the_empty_think_block_is_nobodys_text() -> None:
    family = FAMILIES["qwen3"]
    tokenizer = tokenizer_of(family.template, family.markers, family.stop)
    messages = (Message(role="user", content=Q1), Message(role="assistant", content="Bb."))
    chat = GeneratedConversation(id="x", prompt_id="x", messages=messages)
    stop_ids = ids_of(tokenizer, family.stop)
    with pytest.raises(ValueError, match="template_inserted_response_text"):
        ChatTemplate(tokenizer, stop_ids, on_inserted="stop").views(chat)
    [view] = ChatTemplate(tokenizer, stop_ids, on_inserted="mask").views(chat)
    prompt = f"<|im_start|>user\n{Q1}<|im_end|>\n<|im_start|>assistant\n"
    assert marked(tokenizer, view) == f"{prompt}{family.inserts}[Bb.<|im_end|>]"
    [view] = ChatTemplate(tokenizer, stop_ids, on_inserted="keep").views(chat)
    assert marked(tokenizer, view) == f"{prompt}[{family.inserts}Bb.<|im_end|>]"


# Tools

MARKERS = ("<|im_start|>", "<|im_end|>", "<|tools|>")
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
PROMPT = (
    Message(role="user", content="1+2?"),
    Message(role="assistant", content="", extra={"tool_calls": [CALL]}),
    Message(role="tool", content="3", extra={"name": "add"}),
    Message(role="user", content="And?"),
)
RIGHT = 'I add.\n<tool_call>\n{"arguments": {"b": 2, "a": 1}, "name": "add"}\n</tool_call>'
WRONG = RIGHT.replace("2", "3")


def play(*answers: str) -> tuple[Dialog, list[str]]:
    """A dialog with these answers, and the prompts that it gave."""
    tokenizer = tokenizer_of(TOOLS, MARKERS, "<|im_end|>")
    prompt = Conversation(id="p", messages=PROMPT, tools=(SCHEMA,))
    job = Job(id="p-0", prompt=prompt, sampling=SampleConfig(), num_turns=3)
    dialog, prompts = Dialog(job, tokenizer, keep_truncated=True), []
    for text in answers:
        ids = dialog.next_prompt()
        assert ids is not None
        prompts.append(tokenizer.decode(ids))
        dialog.add(Answer(token_ids=(*ids_of(tokenizer, text), 1), finish_reason="stop"))
    assert dialog.next_prompt() is None
    return dialog, prompts


def test_recorded_results_follow_the_recorded_call() -> None:
    assert len(turns_of(PROMPT)) == 3
    dialog, prompts = play(RIGHT, "It is 3.", "No.")
    assert (dialog.cut, len(dialog.turns)) == ("", 3)
    assert prompts[0] == "<|tools|>add <|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[1].startswith(prompts[0] + 'I add.<tool_call>\n{"name": "add", "arguments": {"a": 1')
    assert "<|im_start|>tool\n3<|im_end|>" in prompts[1]
    row = dialog.row()
    assert [m["role"] for m in row["messages"]] == [
        "user", "assistant", "tool", "assistant", "user", "assistant"
    ]  # fmt: skip
    assert row["turns"][0]["text"] == RIGHT  # exactly as generated


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((WRONG,), CALL_DIFFERS),
        (("It is 3.",), CALL_DIFFERS),
        ((RIGHT + " Done.",), CALL_DIFFERS),
        ((RIGHT, RIGHT), CALL_UNRECORDED),
    ],
)
def test_another_call_cuts_the_row(answers: tuple[str, ...], reason: str) -> None:
    dialog, _ = play(*answers)
    row = dialog.row()
    assert (row["cut"], len(row["turns"])) == (reason, len(answers))
    assert row["messages"][-1] == {"role": "assistant", "content": answers[-1]}


def test_calls_are_part_of_masks() -> None:
    dialog, _ = play(RIGHT, "It is 3.", "No.")
    row = dialog.row()
    tokenizer = tokenizer_of(TOOLS, MARKERS, "<|im_end|>")
    chat = GeneratedConversation(
        id="x",
        prompt_id="p",
        messages=tuple(
            Message(role=m.pop("role"), content=m.pop("content"), extra=m) for m in row["messages"]
        ),
        turns=tuple(GeneratedTurn(**turn) for turn in row["turns"]),
        tools=(SCHEMA,),
    )
    views = ChatTemplate(tokenizer, [1], on_inserted="stop").views(chat)
    # The call came with its keys in another order than the template writes: a view of its own.
    assert [marked(tokenizer, view).count("[") for view in views] == [1, 2]
    assert f"[{RIGHT}<|im_end|>]" in marked(tokenizer, views[0])
