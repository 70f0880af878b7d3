"""Renders a conversation with the target's chat template and marks what the target generated.

Spans come from true prefixes: the template renders everything before an assistant turn, and what
follows is that turn. Nothing here knows a role marker. A server renders the whole history anew for
every request, so where the next prefix does not continue what was rendered (templates that strip
thinking from the history) a second *view* of the conversation begins.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from slipstream.data.files import read_json
from slipstream.data.target.resolve import Target
from slipstream.data.types import GeneratedConversation, GeneratedTurn, Message

INSERTED = "template_inserted_response_text"


class RefusedError(Exception):
    """Why one conversation cannot be rendered; its text is the reason to count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A token row as the target saw it."""

    input_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """One assistant turn behind its prefix."""

    inserted: str
    """Written by the template in front of the answer, not supervised."""
    text: str
    """With the stop token."""
    token_ids: Sequence[int]


def stop_token_ids(target: Target) -> tuple[int, ...]:
    """Every token that ends an answer: of the model's, its generation and the tokenizer's settings."""
    declared: list[Any] = [target.config.eos_token_id, target.tokenizer().eos_token_id]
    generation_file = target.path / "generation_config.json"
    if generation_file.is_file():
        declared.append(read_json(generation_file).get("eos_token_id"))
    lists = [ids if isinstance(ids, list) else [ids] for ids in declared if ids is not None]
    return tuple(sorted({int(i) for ids in lists for i in ids}))


class ChatTemplate:
    """The chat template and tokenizer of one target."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stop_ids: Sequence[int], *, on_inserted: str
    ) -> None:
        """Keeps the settings.

        Args:
            tokenizer: with a chat template.
            stop_ids: tokens that end an answer.
            on_inserted: stop, mask or keep; see `TokenizeConfig.on_inserted`.
        """
        self._tokenizer = tokenizer
        self._stop_texts = [text for text in tokenizer.convert_ids_to_tokens(list(stop_ids)) if text]
        self._on_inserted = on_inserted

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; nothing is added, the template writes BOS itself."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _render(self, messages: Iterable[Message], *, generation_prompt: bool) -> str:
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    chat, add_generation_prompt=generation_prompt, tokenize=False
                )
            )
        except jinja2.TemplateError:
            raise RefusedError("template_refused") from None

    def views(self, conversation: GeneratedConversation) -> list[View]:
        """Token rows in which every assistant turn is supervised exactly once.

        Raises:
            RefusedError: the template cannot render the conversation.
            ValueError: the template inserts text and `on_inserted` is stop.
        """
        messages = conversation.messages
        places = [i for i, message in enumerate(messages) if message.role == "assistant"]
        turns = conversation.turns or (None,) * len(places)
        pieces: list[list[tuple[Sequence[int], bool]]] = []
        rendered = ""
        for place, turn in zip(places, turns, strict=True):
            prefix = self._render(messages[:place], generation_prompt=True)
            if turn is None:
                answer = self._rendered_answer(messages[: place + 1], prefix)
            else:
                answer = self._sampled_answer(turn)
            if not pieces or not prefix.startswith(rendered):
                pieces.append([])
                rendered = ""
            context = prefix[len(rendered) :] + answer.inserted
            pieces[-1] += [(self.encode(context), False), (answer.token_ids, True)]
            rendered = prefix + answer.inserted + answer.text
        return [_joined(view) for view in pieces]

    def _sampled_answer(self, turn: GeneratedTurn) -> _Answer:
        """The tokens the target sampled; what the template would make of them does not matter."""
        stop = turn.token_ids[-1:] if turn.finish_reason == "stop" else ()
        stop_text = "".join(self._tokenizer.convert_ids_to_tokens(list(stop)))
        return _Answer(inserted="", text=turn.text + stop_text, token_ids=turn.token_ids)

    def _rendered_answer(self, messages: Sequence[Message], prefix: str) -> _Answer:
        """The last message as the template writes it, up to and with the stop token."""
        whole = self._render(messages, generation_prompt=False)
        rest = whole[len(prefix) :]
        stops = [(rest.rfind(text), text) for text in self._stop_texts if text in rest]
        stop, stop_text = max(stops, default=(len(rest), ""))
        content = messages[-1].content
        body = content if content in rest else content.strip()
        start = rest.rfind(body, 0, stop)  # the last one: inserted text may hold a short answer too
        if start < 0 or not whole.startswith(prefix):
            raise RefusedError("template_rewrites_answer")
        end = stop + len(stop_text) if stops else start + len(body)
        inserted = rest[:start]
        if inserted.strip() and self._on_inserted == "stop":
            raise ValueError(
                f"{INSERTED}: the chat template writes {inserted!r} in front of an answer, which nobody "
                f"generated: set data.tokenize.on_inserted to mask or keep"
            )
        if self._on_inserted == "keep" or not inserted.strip():
            inserted = ""
        text = rest[len(inserted) : end]
        return _Answer(inserted=inserted, text=text, token_ids=self.encode(text))


def _joined(pieces: Sequence[tuple[Sequence[int], bool]]) -> View:
    ids = [np.asarray(token_ids, dtype=np.int32) for token_ids, _ in pieces]
    masks = [np.full(len(token_ids), supervised) for token_ids, supervised in pieces]
    return View(input_ids_T=np.concatenate(ids), loss_mask_T=np.concatenate(masks))
