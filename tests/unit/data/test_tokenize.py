"""Loss masks: exactly what the target generated, for templates of every temper; length rules and gate."""

import json
import string
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from slipstream.data import tokenize
from slipstream.data.config import Overlong, TokenizeConfig
from slipstream.data.files import Stage, file_hash, read_json
from slipstream.data.target.resolve import Target
from slipstream.data.template import ChatTemplate, RefusedError, render_prompt, stop_token_ids
from slipstream.data.tokenize import (
    TOKENS_FILE,
    MaskCounts,
    as_table,
    check_masks,
    fit_length,
    read_samples,
    validation_prompts,
    write_tables,
)
from slipstream.data.types import GeneratedConversation, GeneratedTurn, Message, TokenizedSample

MARKERS = ["<|e|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHARACTERS = [*MARKERS, *string.printable, "\ufffd"]
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRIPS_THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>\n\n')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INSERTS_THINKING = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}",
)
TRIMS = PLAIN.replace("m.content", "m.content | trim")
REWRITES = PLAIN.replace("m.content", "m.content | upper")
REFUSES = "{{ raise_exception('no') }}"
BROKEN = {
    "{% for m in messages %}": "TemplateSyntaxError: Unexpected end of template",
    "{{ missing.content }}": "UndefinedError: 'missing' is undefined",
    "{{ messages[0].content + 1 }}": "TypeError: can only concatenate str",
}

QUESTION_A, THINKING_B, QUESTION_C, THINKING_D = (
    "A?",
    "<think>\nt1\n</think>\n\nB",
    "C?",
    "<think>\nt2\n</think>\n\nD",
)


def char_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per character, each marker one token."""
    core = Tokenizer(models.WordLevel({text: i for i, text in enumerate(CHARACTERS)}, unk_token="\ufffd"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|e|>", chat_template=template, clean_up_tokenization_spaces=False
    )


def make_target(folder: Path, template: str = PLAIN) -> Target:
    """A target of which only tokenizer and config are there."""
    config = LlamaConfig(vocab_size=len(CHARACTERS) + 5, eos_token_id=0)
    config.save_pretrained(folder)
    char_tokenizer(template).save_pretrained(folder)
    return Target(
        name="chars",
        path=folder,
        config=config,
        fingerprint="f",
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def ids_of(text: str) -> list[int]:
    """Ids of text with markers."""
    return list(char_tokenizer(PLAIN)(text, add_special_tokens=False)["input_ids"])


def chat(
    *contents: str, recorded: bool, stop: Sequence[bool] = (), name: str = "p0-0"
) -> GeneratedConversation:
    """User and assistant in turn; the answers as sampled tokens or as text only."""
    messages = [Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(contents)]
    answers = contents[1::2]
    stops = stop or [True] * len(answers)
    turns = [
        GeneratedTurn(
            text=text,
            token_ids=tuple(ids_of(text + "<|e|>" * stopped)),
            finish_reason="stop" if stopped else "length",
        )
        for text, stopped in zip(answers, stops, strict=True)
    ]
    prompt_id = name.partition("-")[0]
    return GeneratedConversation(
        id=name, prompt_id=prompt_id, messages=tuple(messages), turns=tuple(turns) if recorded else ()
    )


def views(
    template: str, conversation: GeneratedConversation, on_inserted: str = "stop"
) -> list[tuple[str, list[str]]]:
    """Text and supervised spans of each view."""
    found = ChatTemplate(char_tokenizer(template), [0], on_inserted=on_inserted).views(conversation)
    return [(text_of(view.input_ids_T), spans(view)) for view in found]


def text_of(token_ids: Any) -> str:
    """Text of token ids, markers included."""
    return "".join(CHARACTERS[i] for i in token_ids)


def spans(view: TokenizedSample) -> list[str]:
    """Text of each supervised run."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], view.loss_mask_T, [False]])))
    return [text_of(view.input_ids_T[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("recorded", [True, False])
def test_stripped_thinking_gives_a_view_for_each_answer(recorded: bool) -> None:
    found = views(STRIPS_THINKING, chat(QUESTION_A, THINKING_B, QUESTION_C, THINKING_D, recorded=recorded))
    first = f"<|user|>A?<|e|>\n<|assistant|>{THINKING_B}<|e|>"
    second = f"<|user|>A?<|e|>\n<|assistant|>B<|e|>\n<|user|>C?<|e|>\n<|assistant|>{THINKING_D}<|e|>"
    assert found == [(first, [f"{THINKING_B}<|e|>"]), (second, [f"{THINKING_D}<|e|>"])]


@pytest.mark.parametrize("recorded", [True, False])
def test_untouched_history_gives_one_view_with_two_spans(recorded: bool) -> None:
    found = views(PLAIN, chat(QUESTION_A, THINKING_B, QUESTION_C, THINKING_D, recorded=recorded))
    text = f"<|user|>A?<|e|>\n<|assistant|>{THINKING_B}<|e|>\n<|user|>C?<|e|>\n<|assistant|>{THINKING_D}<|e|>"
    assert found == [(text, [f"{THINKING_B}<|e|>", f"{THINKING_D}<|e|>"])]


def test_an_answer_cut_by_the_token_limit_has_no_stop_token() -> None:
    found = views(PLAIN, chat("A?", "Bb", "C?", "Dd", recorded=True, stop=[False, False]))
    text = "<|user|>A?<|e|>\n<|assistant|>Bb<|e|>\n<|user|>C?<|e|>\n<|assistant|>Dd"
    assert found == [(text, ["Bb", "Dd"])]


def test_sampled_tokens_are_kept_as_they_are() -> None:
    odd = GeneratedTurn(text="ab", token_ids=(*ids_of("a"), *ids_of("b"), 0), finish_reason="stop")
    messages = (Message(role="user", content="q"), Message(role="assistant", content="ab"))
    conversation = GeneratedConversation(id="x", prompt_id="x", messages=messages, turns=(odd,))
    [view] = ChatTemplate(char_tokenizer(INSERTS_THINKING), [0], on_inserted="stop").views(conversation)
    assert tuple(view.input_ids_T[view.loss_mask_T]) == odd.token_ids
    assert text_of(view.input_ids_T) == "<|user|>q<|e|>\n<|assistant|>ab<|e|>"


def test_inserted_text_stops_is_masked_or_kept() -> None:
    conversation = chat("A?", "i", recorded=False)  # "i" also occurs in <think>
    text = "<|user|>A?<|e|>\n<|assistant|><think>\n\n</think>\n\ni<|e|>"
    with pytest.raises(ValueError, match=r"template_inserted_response_text.*on_inserted"):
        views(INSERTS_THINKING, conversation)
    assert views(INSERTS_THINKING, conversation, "mask") == [(text, ["i<|e|>"])]
    assert views(INSERTS_THINKING, conversation, "keep") == [(text, ["<think>\n\n</think>\n\ni<|e|>"])]


def test_trimmed_and_rewritten_answers() -> None:
    assert views(TRIMS, chat("A?", " b ", recorded=False))[0][1] == ["b<|e|>"]
    assert views(TRIMS, chat("A?", " b ", recorded=True))[0][1] == [" b <|e|>"]
    with pytest.raises(RefusedError, match="template_rewrites_answer"):
        views(REWRITES, chat("A?", "b", recorded=False))
    with pytest.raises(RefusedError, match="template_refused: no"):
        views(REFUSES, chat("A?", "b", recorded=True))


@pytest.mark.parametrize(
    ("num_prompt", "num_answer", "flag", "num_kept"),
    [
        (20, 5, "prompt_too_long", 0),
        (16, 5, "prompt_too_long", 0),
        (10, 10, "truncated", 16),
        (15, 5, "too_few_targets", 0),
        (4, 4, "", 8),
        (4, 3, "too_few_targets", 0),
    ],
)
def test_length_rules(num_prompt: int, num_answer: int, flag: str, num_kept: int) -> None:
    mask_T = torch.arange(num_prompt + num_answer) >= num_prompt
    row = TokenizedSample(id="r", input_ids_T=torch.arange(len(mask_T)), loss_mask_T=mask_T)
    kept, found = fit_length(row, TokenizeConfig(max_length=16, min_supervised=4))
    assert found == flag
    assert (0 if kept is None else len(kept.input_ids_T)) == num_kept
    if flag == "truncated":
        assert kept is not None
        assert kept.input_ids_T[-1] != row.input_ids_T[-1]
        assert kept.loss_mask_T.sum() == 6
        drop = TokenizeConfig(max_length=16, overlong=Overlong.drop)
        assert fit_length(row, drop) == (None, "too_long")


def test_a_cut_inside_a_later_prompt_drops_the_useless_tail() -> None:
    mask_T = torch.tensor([0] * 4 + [1] * 5 + [0] * 20 + [1] * 5, dtype=torch.bool)
    row = TokenizedSample(id="r", input_ids_T=torch.arange(34), loss_mask_T=mask_T)
    kept, flag = fit_length(row, TokenizeConfig(max_length=16))
    assert kept is not None
    assert (len(kept.input_ids_T), flag) == (9, "truncated")


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([], r"coverage=0\.000"),
        ([[0, 0, 0]], r"coverage=0\.000 in the test is below data.tokenize.min_coverage"),
        ([[0] * 99 + [1]], r"coverage=0\.010 .*min_coverage"),
        ([[1, 1], [0, 1]], "user tokens are supervised in row 0"),
        ([[0] + [1] * 99], "max_coverage"),
    ],
)
def test_mask_gate(masks: list[list[int]], message: str) -> None:
    rows = [
        TokenizedSample(
            id=str(i),
            input_ids_T=torch.zeros(len(mask), dtype=torch.int64),
            loss_mask_T=torch.tensor(mask, dtype=torch.bool),
        )
        for i, mask in enumerate(masks)
    ]
    with pytest.raises(ValueError, match=message):
        check_masks(MaskCounts.of(rows), TokenizeConfig(), "in the test")


def test_split_is_by_prompt_and_never_empty() -> None:
    prompts = [f"p{i}" for i in range(2000)]
    share = len(validation_prompts(prompts, 0.05)) / 2000
    assert 0.03 < share < 0.07
    assert validation_prompts(prompts[:500], 0.05) <= validation_prompts(prompts, 0.05)
    assert len(validation_prompts(prompts[:20], 1e-9)) == 1
    assert validation_prompts(prompts, 0.0) == set()
    assert validation_prompts(["only"], 0.999) == set()


def write_answers(folder: Path, conversations: Sequence[GeneratedConversation]) -> Path:
    """A complete regenerate stage."""
    stage = Stage(folder, "regenerated", {"answers": len(conversations)})
    stage.begin()
    (folder / "answers.jsonl").write_text("".join(json.dumps(asdict(c)) + "\n" for c in conversations))
    stage.complete(["answers.jsonl"])
    return folder


def many_chats(num: int) -> list[GeneratedConversation]:
    """Two samples for each of `num` prompts."""
    return [
        chat(f"Question {i}?", f"Answer {sample} to {i}.", recorded=True, name=f"p{i:03d}-{sample}")
        for i in range(num)
        for sample in range(2)
    ]


def test_stage_writes_sorted_rows_and_equal_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = make_target(tmp_path / "target")
    long, short = (
        chat("x" * 100, "abcdef", recorded=True, name="q-0"),
        chat("x", "a", recorded=True, name="r-0"),
    )
    conversations = [*many_chats(25), long, short]
    answers = write_answers(tmp_path / "regenerated", conversations)
    shuffled = write_answers(tmp_path / "shuffled", conversations[::-1])
    config = TokenizeConfig(max_length=48)
    for source, name in ((answers, "one"), (shuffled, "two")):
        tokenize.run(config, target, source, tmp_path / name, 0.05)
    assert file_hash(tmp_path / "one/tokens.parquet") == file_hash(tmp_path / "two/tokens.parquet")
    facts = read_json(tmp_path / "one/manifest.json")["facts"]
    assert (facts["rows"], facts["dropped"]) == (50, {"prompt_too_long": 1, "too_few_targets": 1})
    train, validation = (read_samples(tmp_path / "one", split) for split in ("train", "validation"))
    assert validation
    assert len(train) + len(validation) == 50
    assert not {s.id.partition("-")[0] for s in train} & {s.id.partition("-")[0] for s in validation}
    rows = read_samples(tmp_path / "one")
    assert [row.id for row in rows] == sorted(row.id for row in rows)
    assert (rows[0].input_ids_T.dtype, rows[0].loss_mask_T.dtype) == (torch.int64, torch.bool)
    assert text_of(rows[0].input_ids_T[rows[0].loss_mask_T]) == "Answer 0 to 0.<|e|>"
    table = pq.read_table(tmp_path / "one/tokens.parquet")
    assert table.column_names == ["id", "prompt_id", "split", "input_ids", "loss_mask"]
    before = (tmp_path / "one/tokens.parquet").stat().st_mtime_ns
    tokenize.run(config, target, answers, tmp_path / "one", 0.05)
    assert (tmp_path / "one/tokens.parquet").stat().st_mtime_ns == before
    assert "50 rows" in capsys.readouterr().err


def test_stage_stops_at_the_gate_and_leaves_nothing(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    answers = write_answers(tmp_path / "regenerated", many_chats(3))
    with pytest.raises(ValueError, match=r"coverage=0\.000 after the length rules .*'prompt_too_long': 6"):
        tokenize.run(TokenizeConfig(max_length=8), target, answers, tmp_path / "tokens", 0.0)
    assert not (tmp_path / "tokens").exists()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    target, folder = make_target(tmp_path / "target"), tmp_path / "tokens"
    answers = write_answers(tmp_path / "regenerated", [])
    with pytest.raises(ValueError, match=rf"answers\.jsonl holds no answer: delete {answers} to make it"):
        tokenize.run(TokenizeConfig(), target, answers, folder, 0.0)
    file = folder / TOKENS_FILE
    write_tables(file, [as_table([])])
    assert read_samples(folder) == []
    for content in (file.read_bytes()[:-20], b"", None):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{file} cannot be read .*: delete {folder} to make it again"):
            read_samples(folder)
    pq.write_table(pa.table({"id": [1]}), file)
    with pytest.raises(ValueError, match=f"^{file} cannot be read .*columns are .*: delete {folder} to make"):
        read_samples(folder)


@pytest.mark.parametrize("template", BROKEN)
def test_a_broken_template_is_named(tmp_path: Path, template: str) -> None:
    tokenizer = make_target(tmp_path, template).tokenizer()
    with pytest.raises(ValueError, match=rf"^{tmp_path}/chat_template\.jinja: .*{BROKEN[template]}"):
        render_prompt(tokenizer, [Message(role="user", content="x")])


def test_stop_tokens_come_from_every_declaration(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    assert stop_token_ids(target) == (0,)
    (target.path / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    assert stop_token_ids(target) == (0, 3)
