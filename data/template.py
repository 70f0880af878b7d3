"""Renders a conversation with the target's chat template and marks what the target generated.

Spans come from true prefixes: the template renders everything before an assistant turn, and what
follows is that turn. Nothing here knows a role marker. A server renders the whole history anew for
every request, so where the next prefix does not continue what was rendered (templates that strip
thinking from the history) a second *view* of the conversation begins, a document of its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import PreTrainedTokenizerFast

from slipstream.data.files import read_json
from slipstream.data.target.resolve import Target
from slipstream.data.types import GeneratedConversation, Message, TokenizedSample

Tools = Sequence[Mapping[str, Any]]


class RefusedError(Exception):
    """Why one conversation cannot be rendered; its text is the reason to count."""


def stop_token_ids(target: Target) -> tuple[int, ...]:
    """Every token that ends an answer: of the model's, its generation and the tokenizer's settings."""
    declared: list[Any] = [target.config.eos_token_id, target.tokenizer().eos_token_id]
    generation_file = target.path / "generation_config.json"
    if generation_file.is_file():
        declared.append(read_json(generation_file).get("eos_token_id"))
    lists = [ids if isinstance(ids, list) else [ids] for ids in declared if ids is not None]
    return tuple(sorted({int(i) for ids in lists for i in ids}))


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of rendered text; nothing is added, the template writes BOS itself."""
    token_ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return token_ids


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    tools: Tools = (),
    *,
    generation_prompt: bool = True,
) -> str:
    """Text of a chat, up to where the next answer begins.

    Raises:
        RefusedError: the template refuses this chat.
        ValueError: the template is broken.
    """
    chat = [message.row() for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(
                chat,
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        )
    except (jinja2.TemplateSyntaxError, jinja2.TemplateRuntimeError, TypeError, ValueError) as error:
        folder = Path(tokenizer.name_or_path)
        names = ("chat_template.jinja", "tokenizer_config.json")
        file = next((folder / name for name in names if (folder / name).is_file()), folder)
        raise ValueError(
            f"{file}: the chat template is broken ({type(error).__name__}: {error}): mend it, or fetch the "
            f"target again"
        ) from None
    except jinja2.TemplateError as error:  # its own raise_exception
        raise RefusedError(f"template_refused: {error}") from None


def render_prompt(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], tools: Tools = ()
) -> list[int]:
    """Token ids of a chat up to where the next answer begins; raises as `render` does."""
    return encode(tokenizer, render(tokenizer, messages, tools))


class ChatTemplate:
    """The chat template and tokenizer of one target."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stop_ids: Sequence[int], *, on_inserted: str
    ) -> None:
        """Keeps the settings; for `on_inserted` see `TokenizeConfig`."""
        self._tokenizer, self._on_inserted = tokenizer, on_inserted
        self._stop_texts = [text for text in tokenizer.convert_ids_to_tokens(list(stop_ids)) if text]

    def views(self, conversation: GeneratedConversation) -> list[TokenizedSample]:
        """Documents `ID` or `ID.00`, `ID.01`, ... that supervise every assistant turn exactly once.

        Raises:
            RefusedError: the template cannot render the conversation.
            ValueError: the template inserts text and `on_inserted` is stop.
        """
        messages = conversation.messages
        places = [i for i, message in enumerate(messages) if message.role == "assistant"]
        turns = conversation.turns or (None,) * len(places)
        views: list[list[tuple[Sequence[int], bool]]] = []
        rendered = ""
        for place, turn in zip(places, turns, strict=True):
            prefix = render(self._tokenizer, messages[:place], conversation.tools)
            token_ids: Sequence[int]
            if turn is None:
                inserted, answer = self._rendered_answer(messages[: place + 1], conversation.tools, prefix)
                token_ids = encode(self._tokenizer, answer)
            else:  # what the template would make of the sampled tokens does not matter
                stop = turn.token_ids[-1:] if turn.finish_reason == "stop" else ()
                answer = turn.text + "".join(self._tokenizer.convert_ids_to_tokens(list(stop)))
                inserted, token_ids = "", turn.token_ids
            if not views or not prefix.startswith(rendered):
                views.append([])
                rendered = ""
            context = prefix[len(rendered) :] + inserted
            views[-1] += [(encode(self._tokenizer, context), False), (token_ids, True)]
            rendered = prefix + inserted + answer
        return [
            TokenizedSample(
                id=conversation.id if len(views) == 1 else f"{conversation.id}.{i:02d}",
                prompt_id=conversation.prompt_id,
                input_ids_T=torch.tensor([token for ids, _ in pieces for token in ids]),
                loss_mask_T=torch.tensor([mask for ids, mask in pieces for _ in ids]),
            )
            for i, pieces in enumerate(views)
        ]

    def _rendered_answer(self, messages: Sequence[Message], tools: Tools, prefix: str) -> tuple[str, str]:
        """What the template writes in front of the last message, and the message with its stop token."""
        whole = render(self._tokenizer, messages, tools, generation_prompt=False)
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
                f"template_inserted_response_text: the chat template writes {inserted!r} in front of an "
                f"answer, which nobody generated: set data.tokenize.on_inserted to mask or keep"
            )
        if self._on_inserted == "keep" or not inserted.strip():
            return "", rest[:end]
        return inserted, rest[start:end]
