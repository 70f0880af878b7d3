"""A conversation that grows answer by answer, the same whichever engine writes the answers.

Nothing here knows how a model writes a tool call: the chat template writes the recorded call, and
the target's answer agrees with it when it ends in the same text, but for blanks and the order of
JSON keys. Text in front of the call, such as reasoning, is the target's own.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from slipstream.data.config import SampleConfig
from slipstream.data.template import RefusedError, encode, render
from slipstream.data.types import Conversation, GeneratedTurn, Message

CALL_DIFFERS, CALL_UNRECORDED, TRUNCATED = "tool_call_differs", "tool_call_unrecorded", "truncated"
"""Reasons why a dialog ends early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Token ids with the stop token, and why the answer ends: "stop" or "length"."""

    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One conversation to be answered, turn by turn."""

    id: str
    prompt: Conversation
    sampling: SampleConfig
    num_turns: int


def turns_of(messages: Sequence[Message]) -> list[tuple[tuple[Message, ...], Message | None]]:
    """For every answer the messages in front of it, and the recorded tool call it is compared with."""
    turns: list[tuple[tuple[Message, ...], Message | None]] = []
    before: list[Message] = []
    for i, message in enumerate(messages):
        if message.role == "assistant":
            turns[-1] = (turns[-1][0], message)
            continue
        before.append(message)
        follower = messages[i + 1].role if i + 1 < len(messages) else ""
        if message.role == "user" or (message.role == "tool" and follower != "tool"):
            turns.append((tuple(before), None))
            before = []
    return turns


class Dialog:
    """One job in work: gives the next prompt, takes the answer to it."""

    def __init__(self, job: Job, tokenizer: PreTrainedTokenizerFast, *, keep_truncated: bool) -> None:
        self.job = job
        self.turns: list[GeneratedTurn] = []
        self.cut = ""
        self._tokenizer, self._keep_truncated = tokenizer, keep_truncated
        self._plan = turns_of(job.prompt.messages)
        self._messages: list[Message] = []
        self._text = ""

    def next_prompt(self) -> list[int] | None:
        """Token ids to be continued; None at the end."""
        if self.cut or len(self.turns) == len(self._plan):
            return None
        messages = [*self._messages, *self._plan[len(self.turns)][0]]
        try:
            self._text = render(self._tokenizer, messages, self.job.prompt.tools)
        except RefusedError as refused:
            self.cut = str(refused)
            return None
        self._messages = messages
        return encode(self._tokenizer, self._text)

    def seed(self, seed: int) -> int:
        """Of the next answer, from that of the run."""
        digest = hashlib.sha256(f"{seed}/{self.job.id}/{len(self.turns)}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def add(self, answer: Answer) -> None:
        """Takes the answer to the last prompt."""
        stopped = answer.finish_reason == "stop"
        if not stopped and not self._keep_truncated:
            self.cut = TRUNCATED
            num_before = len(self._plan[len(self.turns)][0])
            self._messages = self._messages[: len(self._messages) - num_before]
            return
        text_ids = list(answer.token_ids[:-1] if stopped else answer.token_ids)
        text = str(self._tokenizer.decode(text_ids, skip_special_tokens=False))
        turn = GeneratedTurn(text=text, token_ids=answer.token_ids, finish_reason=answer.finish_reason)
        recorded = self._plan[len(self.turns)][1]
        if recorded is None:
            message = Message(role="assistant", content=text)
            if self._calls_a_tool(text):
                self.cut = CALL_UNRECORDED
        else:
            stop_text = str(self._tokenizer.decode(list(answer.token_ids[-1:]))) if stopped else ""
            message = self._agreeing(text, recorded, stop_text)
        self.turns.append(turn)
        self._messages.append(message)

    def _agreeing(self, text: str, recorded: Message, stop_text: str) -> Message:
        """The answer as the recorded call with the target's text before it, or the dialog is cut."""
        call = canonical(self._rendered(recorded, stop_text))
        if not call or not canonical(text).endswith(call):
            self.cut = CALL_DIFFERS
            return Message(role="assistant", content=text)
        start = next(i for i in range(len(text), -1, -1) if canonical(text[i:]) == call)
        return replace(recorded, content=text[:start].rstrip())

    def _rendered(self, call: Message, stop_text: str) -> str:
        """How the template writes a call behind the last prompt, without the stop token."""
        messages = [*self._messages, call]
        try:
            whole = render(self._tokenizer, messages, self.job.prompt.tools, generation_prompt=False)
        except RefusedError:  # a template without tools
            return ""
        if not whole.startswith(self._text):
            return ""
        rest = whole[len(self._text) :]
        return rest[: rest.rfind(stop_text)] if stop_text in rest else rest

    def _calls_a_tool(self, text: str) -> bool:
        """Whether an answer holds what the template writes in front of a call, or the call as JSON."""
        return any(
            (marker in text and name in text) if marker else f'"name":"{name}"' in canonical(text)
            for name, marker in self._markers.items()
        )

    @functools.cached_property
    def _markers(self) -> dict[str, str]:
        """The line in front of a call, by the tool's name; empty where a call is JSON alone."""
        markers = {}
        for tool in self.job.prompt.tools:
            name = str(tool.get("function", tool).get("name", ""))
            call = {"type": "function", "id": "000000000", "function": {"name": name, "arguments": {}}}
            written = self._rendered(Message(role="assistant", content="", extra={"tool_calls": [call]}), "")
            before, found, _ = written.partition(name)
            if name and found:
                markers[name] = (before.partition("{")[0].split() or [""])[-1]
        return markers

    def row(self) -> dict[str, Any]:
        """Row of the answers file."""
        prompt = self.job.prompt
        optional: Mapping[str, Any] = {"tools": list(prompt.tools), "cut": self.cut}
        return {
            "id": self.job.id,
            "prompt_id": prompt.id,
            "category": prompt.category,
            "messages": [message.row() for message in self._messages],
            "turns": [asdict(turn) for turn in self.turns],
            "sampling": asdict(self.job.sampling),
            **{key: value for key, value in optional.items() if value},
        }


def canonical(text: str) -> str:
    """The text without blanks, JSON values in it with sorted keys.

    >>> canonical('<call> {"b": 1, "a": [2]} </call>')
    '<call>{"a":[2],"b":1}</call>'
    """
    decoder = json.JSONDecoder()
    pieces, i = [], 0
    while i < len(text):
        if text[i] in "{[":
            try:
                value, i = decoder.raw_decode(text, i)
            except ValueError:
                pass
            else:
                pieces.append(json.dumps(value, sort_keys=True, separators=(",", ":")))
                continue
        if not text[i].isspace():
            pieces.append(text[i])
        i += 1
    return "".join(pieces)
