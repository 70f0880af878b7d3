"""The same prompts under other circumstances than the head was trained in (`eval.robustness=true`).

Each suite gets variants, which the report shows beside it: another system prompt, another chat
template, and a long context of other text before the question.
"""

import copy
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerFast

from slipstream.data.types import Conversation, Message

SYSTEM, TEMPLATE, PADDING = "+system", "+template", "+padding"
SYSTEM_PROMPT = "You are a careful editor. Answer briefly, in plain words, and never apologise."
OTHER_TEMPLATE = (
    "{% for m in messages %}{{ '### ' + m['role'] | capitalize + ':\\n' }}"
    "{{ m['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"
)
PARAGRAPH = (
    "The ferry leaves the island at seven and returns at nine. In winter it carries mail, flour and "
    "the doctor; in summer it carries people who want to see the lighthouse. The keeper counts them. "
)
NUM_PARAGRAPHS = 12
"""About 450 words of padding."""
POSITIONS_PER_PARAGRAPH = 256
"""A paragraph has about 40 tokens, and many more where the tokenizer does not know its words."""


def with_variants(
    suites: Mapping[str, Sequence[Conversation]], num_positions: int
) -> dict[str, list[Conversation]]:
    """Every suite, followed by its variants; the padding leaves room in the target's positions."""
    num_paragraphs = min(NUM_PARAGRAPHS, num_positions // POSITIONS_PER_PARAGRAPH)
    found: dict[str, list[Conversation]] = {}
    for name, prompts in suites.items():
        found[name] = list(prompts)
        found[name + SYSTEM] = [_with_system(prompt) for prompt in prompts]
        found[name + TEMPLATE] = list(prompts)
        found[name + PADDING] = [_padded(prompt, num_paragraphs) for prompt in prompts]
    return found


def tokenizer_of(suite: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer that renders a suite: with another template for that variant."""
    if not suite.endswith(TEMPLATE):
        return tokenizer
    other = copy.copy(tokenizer)
    other.chat_template = OTHER_TEMPLATE
    return other


def _with_system(prompt: Conversation) -> Conversation:
    users = tuple(message for message in prompt.messages if message.role != "system")
    messages = (Message(role="system", content=SYSTEM_PROMPT), *users)
    return Conversation(id=prompt.id, messages=messages, category=prompt.category)


def _padded(prompt: Conversation, num_paragraphs: int) -> Conversation:
    place = next(i for i, message in enumerate(prompt.messages) if message.role == "user")
    text = f"{PARAGRAPH * num_paragraphs}\n\n{prompt.messages[place].content}"
    padded = (Message(role="user", content=text),)
    messages = prompt.messages[:place] + padded + prompt.messages[place + 1 :]
    return Conversation(id=prompt.id, messages=messages, category=prompt.category)
