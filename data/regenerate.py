"""The `regenerated` stage: the target answers every prompt, resumable after a kill at any moment.

The work is a fixed plan of batches. A batch is written in one append when all its rows are done,
and a batch that was written in part is computed again as a whole: so every row is computed in the
same company as in an undisturbed run, and `answers.jsonl` is the same to the byte.
"""

import functools
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from slipstream.data.backends.hf import HFGenerator
from slipstream.data.backends.workers import OnStep, num_workers, ordered
from slipstream.data.config import RegenerateConfig, SampleConfig
from slipstream.data.conversations import PROMPTS_FILE, read_answers, read_conversations
from slipstream.data.files import Stage, append_jsonl, stage_fingerprint
from slipstream.data.progress import Meter, say
from slipstream.data.target.resolve import Target
from slipstream.data.template import RefusedError, render_prompt, stop_token_ids
from slipstream.data.types import Conversation, GeneratedTurn, Message

ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One answer to be written, turn by turn."""

    id: str
    prompt: Conversation
    sampling: SampleConfig
    num_turns: int


def run(config: RegenerateConfig, target: Target, prompts_folder: Path, folder: Path, seed: int) -> None:
    """Answers the prompts of `prompts_folder` into `folder`.

    Raises:
        ValueError: other settings made the folder, another process writes it, or no prompt fits.
    """
    settings = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "dtype": str(target.dtype),
        "prompts": stage_fingerprint(prompts_folder),
        **{key: value for key, value in asdict(config).items() if key not in ("backend", "workers")},
        "seed": seed,
    }
    stage = Stage(folder, "regenerated", settings)
    if stage.is_complete:
        return
    start = time.monotonic()
    batches, left_out = plan(config, target, read_conversations(prompts_folder / PROMPTS_FILE))
    stage.begin()
    _answer_all(batches, config, target, folder / ANSWERS_FILE, seed)
    answers = read_answers(folder / ANSWERS_FILE)
    turns = [turn for answer in answers for turn in answer.turns]
    facts = {
        "answers": len(answers),
        "tokens": sum(len(turn.token_ids) for turn in turns),
        "empty": sum(not turn.text.strip() for turn in turns),
        "finish_reasons": dict(Counter(turn.finish_reason for turn in turns)),
    }
    stage.complete([ANSWERS_FILE], **facts, left_out=left_out, seconds=round(time.monotonic() - start, 1))
    say(f"regenerated  {facts['answers']:,} answers, {facts['tokens']:,} tokens {facts['finish_reasons']}")


def plan(
    config: RegenerateConfig, target: Target, prompts: Sequence[Conversation]
) -> tuple[list[list[Job]], dict[str, int]]:
    """Batches of answers, and prompts left out by reason.

    Rows of a batch have the same sampling and about the same length; long work comes first, so
    that the time left is not underestimated.

    Raises:
        ValueError: nothing is left.
    """
    tokenizer = target.tokenizer()
    sized: list[tuple[int, int, Conversation]] = []
    left_out: Counter[str] = Counter()
    for prompt in prompts:
        num_turns = sum(message.role == "user" for message in prompt.messages)
        room = target.config.max_position_embeddings - num_turns * config.max_new_tokens
        try:
            num_tokens = _num_tokens(tokenizer, prompt, num_turns)
        except RefusedError as refused:
            left_out[str(refused)] += 1
            continue
        if num_tokens > min(config.max_prompt_tokens, room):
            left_out["prompt_too_long"] += 1
        else:
            sized.append((num_turns, num_tokens, prompt))
    if left_out:
        say(f"regenerate   left out {dict(left_out)}")
    if not sized:
        raise ValueError(
            f"data.regenerate: none of {len(prompts)} prompts can be answered ({dict(left_out)}): if too "
            f"long, raise data.regenerate.max_prompt_tokens or lower data.regenerate.max_new_tokens; if the "
            f"chat template refuses them, take others"
        )
    sized.sort(key=lambda entry: (-entry[0], -entry[1], entry[2].id))
    batches = []
    for index, sampling in enumerate(config.samples):
        jobs = [
            Job(id=f"{prompt.id}-{index}", prompt=prompt, sampling=sampling, num_turns=num_turns)
            for num_turns, _, prompt in sized
        ]
        batches += [jobs[i : i + config.batch_size] for i in range(0, len(jobs), config.batch_size)]
    return batches, dict(left_out)


def _num_tokens(tokenizer: PreTrainedTokenizerFast, prompt: Conversation, num_turns: int) -> int:
    """Tokens of the first prompt as rendered and of the user turns that follow it."""
    first = len(prompt.messages) - num_turns + 1
    later = [message.content for message in prompt.messages[first:]]
    rendered = render_prompt(tokenizer, prompt.messages[:first])
    return len(rendered) + sum(len(tokenizer(text, verbose=False)["input_ids"]) for text in later)


def _answer_all(
    batches: Sequence[Sequence[Job]], config: RegenerateConfig, target: Target, path: Path, seed: int
) -> None:
    """Computes and appends what `path` does not hold yet."""
    done = {answer.id for answer in read_answers(path)} if path.exists() else set()
    todo = [batch for batch in batches if any(job.id not in done for job in batch)]
    if not todo:
        return
    total, left = (sum(job.num_turns for batch in part for job in batch) for part in (batches, todo))
    num_tokens, start = 0, time.monotonic()
    with Meter("regenerate", total, unit="answers") as meter:
        meter.skip(total - left)

        def count(tokens: int, finished: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            meter.advance(finished, f"{num_tokens / (time.monotonic() - start):,.0f} tokens/s")

        make = functools.partial(Answerer, max_new_tokens=config.max_new_tokens, seed=seed)
        workers = num_workers(config.workers, target, len(todo))
        for rows in ordered(make, target, todo, workers=workers, on_step=count):
            append_jsonl(path, (row for row in rows if row["id"] not in done))


class Answerer:
    """Answers a batch of jobs turn by turn; one for each process."""

    def __init__(self, target: Target, *, max_new_tokens: int, seed: int) -> None:
        self._tokenizer, self._seed = target.tokenizer(), seed
        self._generator = HFGenerator(
            target.model(),
            stop_ids=stop_token_ids(target),
            vocab_size=min(len(self._tokenizer), target.config.vocab_size),
            max_new_tokens=max_new_tokens,
        )

    def __call__(self, batch: Sequence[Job], on_step: OnStep) -> list[dict[str, Any]]:
        """Rows of the answers file: every turn of every job, answers between the user turns."""
        chats = [list(job.prompt.messages[: -job.num_turns]) for job in batch]  # a system message or none
        turns: list[list[GeneratedTurn]] = [[] for _ in batch]
        for turn in range(max(job.num_turns for job in batch)):
            live = [i for i, job in enumerate(batch) if turn < job.num_turns]
            for i in live:
                chats[i].append(batch[i].prompt.messages[turn - batch[i].num_turns])
            answers = self._generator.generate(
                [render_prompt(self._tokenizer, chats[i]) for i in live],
                batch[0].sampling,
                [_row_seed(self._seed, batch[i].id, turn) for i in live],
                on_step,
            )
            for i, answer in zip(live, answers, strict=True):
                stopped = answer.finish_reason == "stop"
                text_ids = list(answer.token_ids[:-1] if stopped else answer.token_ids)
                text = str(self._tokenizer.decode(text_ids, skip_special_tokens=False))
                turns[i].append(
                    GeneratedTurn(text=text, token_ids=answer.token_ids, finish_reason=answer.finish_reason)
                )
                chats[i].append(Message(role="assistant", content=text))
        return [_answer_row(job, chat, made) for job, chat, made in zip(batch, chats, turns, strict=True)]


def _answer_row(job: Job, chat: Sequence[Message], turns: Sequence[GeneratedTurn]) -> dict[str, Any]:
    return {
        "id": job.id,
        "prompt_id": job.prompt.id,
        "category": job.prompt.category,
        "messages": [asdict(message) for message in chat],
        "turns": [asdict(turn) for turn in turns],
        "sampling": asdict(job.sampling),
    }


def _row_seed(seed: int, answer_id: str, turn_index: int) -> int:
    digest = hashlib.sha256(f"{seed}/{answer_id}/{turn_index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
