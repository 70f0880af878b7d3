"""Small chat templates of our own that behave like those of well-known model families."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template, what its markers are, and what is expected of a chat of two rounds.

    `{q1} {a1} {q2} {a2}` stand for questions and for the answers without their reasoning, `{r1} {r2}`
    for the answers as generated; `[` and `]` enclose what is supervised.
    """

    template: str
    stop: str
    markers: tuple[str, ...]
    views: tuple[str, ...]
    thinks: bool = False
    system: str | None = None
    """What becomes of the system message S; None: the template refuses it."""
    inserts: str = ""
    """What it writes in front of an answer without reasoning."""
    answers: tuple[str, str] = field(default=("Bb.", "Dd."))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}" + CHATML
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thinking = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thinking) %}"
    "<think>\n{{ thinking }}\n</think>\n\n{{ content }}{% else %}{{ content }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }}</s>{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>Reasoning: low<|end|>"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content.split('<|channel|>final<|message|>')[-1] }}<|end|>"
    "{% else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

ONE_CHATML = (
    "<|im_start|>user\n{q1}<|im_end|>\n<|im_start|>assistant\n[{r1}<|im_end|>]\n"
    "<|im_start|>user\n{q2}<|im_end|>\n<|im_start|>assistant\n[{r2}<|im_end|>]"
)
THINKING = ("<think>\nt1\n</think>\n\nBb.", "<think>\nt2\n</think>\n\nDd.")
IM = ("<|im_start|>", "<|im_end|>")

FAMILIES = {
    "chatml": Family(
        template=CHATML, stop="<|im_end|>", markers=IM, views=(ONE_CHATML,),
        system="<|im_start|>system\nS<|im_end|>\n",
    ),
    "smollm and qwen2.5 (default system prompt)": Family(
        template=DEFAULT_SYSTEM, stop="<|im_end|>", markers=IM,
        views=("<|im_start|>system\nYou are kind.<|im_end|>\n" + ONE_CHATML,),
        system="<|im_start|>system\nS<|im_end|>\n",
    ),
    "llama-3": Family(
        template=LLAMA3, stop="<|eot_id|>",
        markers=("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        views=(
            "<|begin|><|start_header_id|>user<|end_header_id|>\n\n{q1}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[{r1}<|eot_id|>]"
            "<|start_header_id|>user<|end_header_id|>\n\n{q2}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[{r2}<|eot_id|>]",
        ),
        system="<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>",
    ),
    "qwen3": Family(
        template=QWEN3, stop="<|im_end|>", markers=IM, thinks=True, answers=THINKING,
        views=(
            "<|im_start|>user\n{q1}<|im_end|>\n<|im_start|>assistant\n[{r1}<|im_end|>]",
            "<|im_start|>user\n{q1}<|im_end|>\n<|im_start|>assistant\n{a1}<|im_end|>\n"
            "<|im_start|>user\n{q2}<|im_end|>\n<|im_start|>assistant\n[{r2}<|im_end|>]",
        ),
        system="<|im_start|>system\nS<|im_end|>\n", inserts="<think>\n\n</think>\n\n",
    ),
    "mistral": Family(
        template=MISTRAL, stop="</s>", markers=("<|begin|>", "[INST]", "[/INST]", "</s>"),
        answers=(" Bb.", " Dd."),
        views=("<|begin|>[INST] {q1} [/INST][{r1}</s>][INST] {q2} [/INST][{r2}</s>]",),
    ),
    "gemma": Family(
        template=GEMMA, stop="<end_of_turn>", markers=("<|begin|>", "<start_of_turn>", "<end_of_turn>"),
        views=(
            "<|begin|><start_of_turn>user\n{q1}<end_of_turn>\n<start_of_turn>model\n[{r1}<end_of_turn>]\n"
            "<start_of_turn>user\n{q2}<end_of_turn>\n<start_of_turn>model\n[{r2}<end_of_turn>]",
        ),
    ),
    "deepseek (opens the reasoning itself)": Family(
        template=DEEPSEEK, stop="<|end_of_sentence|>", thinks=True,
        markers=("<|begin|>", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>"),
        answers=("t1\n</think>Bb.", "t2\n</think>Dd."),
        views=(
            "<|begin|><|User|>{q1}<|Assistant|><think>\n[{r1}<|end_of_sentence|>]",
            "<|begin|><|User|>{q1}<|Assistant|>{a1}<|end_of_sentence|>"
            "<|User|>{q2}<|Assistant|><think>\n[{r2}<|end_of_sentence|>]",
        ),
        system="S",
    ),
    "harmony (reasoning in a channel)": Family(
        template=HARMONY, stop="<|return|>", thinks=True,
        markers=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        answers=tuple(  # type: ignore[arg-type]
            f"<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>{text}"
            for text in ("Bb.", "Dd.")
        ),
        views=(
            "<|start|>system<|message|>Reasoning: low<|end|><|start|>user<|message|>{q1}<|end|>"
            "<|start|>assistant[{r1}<|return|>]",
            "<|start|>system<|message|>Reasoning: low<|end|><|start|>user<|message|>{q1}<|end|>"
            "<|start|>assistant<|channel|>final<|message|>{a1}<|end|><|start|>user<|message|>{q2}<|end|>"
            "<|start|>assistant[{r2}<|return|>]",
        ),
        system="<|start|>developer<|message|>S<|end|>",
    ),
}  # fmt: skip

TOOLS = (
    "{% if tools %}<|tools|>{% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "\n<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's and Hermes's way to call."""
