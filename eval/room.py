"""Whether a chat with its answers fits the target's positions, told before anything is decoded."""

from collections.abc import Sequence

from slipstream.data.progress import say
from slipstream.data.target.resolve import Target
from slipstream.data.template import RefusedError, render_prompt
from slipstream.data.types import Conversation, first_turn

MAX_NAMED = 3
"""Chats that are named; all are counted."""


def check_room(target: Target, conversations: Sequence[Conversation], max_new_tokens: int) -> None:
    """Holds every chat with its answers against the target's positions.

    Raises:
        ValueError: one does not fit, or the chat template refuses it.
    """
    for conversation in conversations:
        if problem := _problem(target, conversation, max_new_tokens):
            raise ValueError(f"eval.prompts: {problem}: lower eval.max_new_tokens, or leave the prompt out")


def without_unfit(
    target: Target, suite: str, conversations: Sequence[Conversation], max_new_tokens: int
) -> list[Conversation]:
    """A public suite without the chats that do not fit this target, which are named and counted.

    Raises:
        ValueError: none fits.
    """
    problems = {chat.id: _problem(target, chat, max_new_tokens) for chat in conversations}
    left_out = [problem for problem in problems.values() if problem]
    if left_out:
        more = "; ..." if len(left_out) > MAX_NAMED else ""
        named = f"{'; '.join(left_out[:MAX_NAMED])}{more}"
        if len(left_out) == len(conversations):
            raise ValueError(f"eval.suite={suite}: no prompt fits: {named}: lower eval.max_new_tokens")
        say(f"eval.suite={suite}: {len(left_out)} of {len(conversations)} prompts skipped: {named}")
    return [chat for chat in conversations if not problems[chat.id]]


def _problem(target: Target, conversation: Conversation, max_new_tokens: int) -> str:
    """Why a chat cannot be played; empty when it can."""
    tokenizer, room = target.tokenizer(), target.config.max_position_embeddings
    first = first_turn(conversation)
    num_turns = sum(message.role == "user" for message in conversation.messages)
    try:
        needed = len(render_prompt(tokenizer, first)) + num_turns * max_new_tokens
    except RefusedError as refused:
        return f"the target's template refuses {conversation.id} ({refused})"
    later = conversation.messages[len(first) :]
    needed += sum(len(tokenizer(message.content, verbose=False)["input_ids"]) for message in later)
    if needed <= room:
        return ""
    return (
        f"{conversation.id} with {num_turns} answers of eval.max_new_tokens={max_new_tokens} takes {needed} "
        f"tokens, and target.name={target.name} has {room} positions"
    )
