"""The `regenerated` stage: the target answers every prompt, resumable after a kill at any moment.

The work is a fixed plan of batches. A batch is written in one append when all its rows are done,
and a batch that was written in part is computed again as a whole: so every row is computed in the
same company as in an undisturbed run, and `answers.jsonl` is the same to the byte.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from slipstream.data.backends.hf import HFGenerator
from slipstream.data.config import RegenerateConfig, SampleConfig
from slipstream.data.conversations import PROMPTS_FILE, read_conversations
from slipstream.data.files import Stage, stage_fingerprint
from slipstream.data.progress import Meter, say
from slipstream.data.target.resolve import Target
from slipstream.data.template import stop_token_ids
from slipstream.data.types import Conversation, GeneratedConversation, GeneratedTurn, Message

ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One answer to be written."""

    id: str
    prompt: Conversation
    sampling: SampleConfig
    num_turns: int


def read_answers(path: Path) -> list[GeneratedConversation]:
    """Reads `answers.jsonl`."""
    with path.open("rb") as stream:
        return [_answer(json.loads(line)) for line in stream]


def _answer(row: Mapping[str, Any]) -> GeneratedConversation:
    return GeneratedConversation(
        id=row["id"],
        prompt_id=row["prompt_id"],
        category=row["category"],
        messages=tuple(Message(**message) for message in row["messages"]),
        turns=tuple(
            GeneratedTurn(
                text=turn["text"], token_ids=tuple(turn["token_ids"]), finish_reason=turn["finish_reason"]
            )
            for turn in row["turns"]
        ),
    )


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
        "samples": [asdict(sampling) for sampling in config.samples],
        "max_new_tokens": config.max_new_tokens,
        "batch_size": config.batch_size,
        "max_prompt_tokens": config.max_prompt_tokens,
        "seed": seed,
    }
    stage = Stage(folder, "regenerated", settings)
    if stage.is_complete:
        return
    with _locked(folder):
        start = time.monotonic()
        batches, left_out = plan(config, target, read_conversations(prompts_folder / PROMPTS_FILE))
        _answer_all(batches, config, target, folder / ANSWERS_FILE, seed)
        facts = _facts(read_answers(folder / ANSWERS_FILE))
        stage.complete([ANSWERS_FILE], **facts, left_out=left_out, seconds=round(time.monotonic() - start, 1))
        say(
            f"regenerated  {facts['answers']:,} answers, {facts['tokens']:,} tokens {facts['finish_reasons']}"
        )


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
            num_tokens = _num_tokens(tokenizer, prompt)
        except jinja2.TemplateError:
            left_out["template_refused"] += 1
            continue
        if num_tokens > min(config.max_prompt_tokens, room):
            left_out["prompt_too_long"] += 1
        else:
            sized.append((num_turns, num_tokens, prompt))
    if left_out:
        say(f"regenerate   left out {dict(left_out)}")
    if not sized:
        raise ValueError(
            f"data.regenerate: none of {len(prompts)} prompts can be answered ({dict(left_out)}): raise "
            f"data.regenerate.max_prompt_tokens or lower data.regenerate.max_new_tokens"
        )
    sized.sort(key=lambda entry: (-entry[0], -entry[1], entry[2].id))
    batches = []
    for index, sampling in enumerate(config.samples):
        jobs = [
            Job(id=f"{prompt.id}-{index}", prompt=prompt, sampling=sampling, num_turns=turns)
            for turns, _, prompt in sized
        ]
        batches += [jobs[i : i + config.batch_size] for i in range(0, len(jobs), config.batch_size)]
    return batches, dict(left_out)


def _num_tokens(tokenizer: PreTrainedTokenizerFast, prompt: Conversation) -> int:
    """Tokens of the first prompt as rendered and of the user turns that follow it."""
    first = next(i for i, message in enumerate(prompt.messages) if message.role == "user") + 1
    later = [message.content for message in prompt.messages[first:]]
    rendered = _render(tokenizer, prompt.messages[:first])
    return len(rendered) + sum(len(tokenizer(text, verbose=False)["input_ids"]) for text in later)


def _render(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> list[int]:
    chat = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return token_ids


def _answer_all(
    batches: Sequence[Sequence[Job]], config: RegenerateConfig, target: Target, path: Path, seed: int
) -> None:
    """Computes and appends what `path` does not hold yet."""
    done = _ids_after_repair(path)
    todo = [batch for batch in batches if any(job.id not in done for job in batch)]
    if not todo:
        return
    tokenizer = target.tokenizer()
    generator = HFGenerator(
        target.model(),
        stop_ids=stop_token_ids(target),
        vocab_size=min(len(tokenizer), target.config.vocab_size),
        max_new_tokens=config.max_new_tokens,
    )
    total_turns = sum(job.num_turns for batch in batches for job in batch)
    with path.open("ab") as log, Meter("regenerate", total_turns, unit="answers") as meter:
        meter.skip(total_turns - sum(job.num_turns for batch in todo for job in batch))
        answerer = _Answerer(generator, tokenizer, seed, meter)
        for batch in todo:
            lines = [line for job, line in answerer.lines(batch) if job.id not in done]
            log.write(b"".join(lines))
            log.flush()
            os.fsync(log.fileno())


class _Answerer:
    """Turns batches of jobs into lines of the answers file."""

    def __init__(
        self, generator: HFGenerator, tokenizer: PreTrainedTokenizerFast, seed: int, meter: Meter
    ) -> None:
        self._generator, self._tokenizer, self._seed, self._meter = generator, tokenizer, seed, meter
        self._tokens, self._start = 0, time.monotonic()

    def lines(self, batch: Sequence[Job]) -> list[tuple[Job, bytes]]:
        """Every turn of every job, in order; answers go between the user turns."""
        chats: list[list[Message]] = [[] for _ in batch]
        waiting = [list(job.prompt.messages) for job in batch]
        turns: list[list[GeneratedTurn]] = [[] for _ in batch]
        for turn_index in range(max(job.num_turns for job in batch)):
            rows = [i for i, job in enumerate(batch) if turn_index < job.num_turns]
            for i in rows:
                while waiting[i] and (not chats[i] or chats[i][-1].role != "user"):
                    chats[i].append(waiting[i].pop(0))
            answers = self._generator.generate(
                [_render(self._tokenizer, chats[i]) for i in rows],
                batch[rows[0]].sampling,
                [_row_seed(self._seed, batch[i].id, turn_index) for i in rows],
                self._count,
            )
            for i, answer in zip(rows, answers, strict=True):
                stop = answer.finish_reason == "stop"
                text_ids = list(answer.token_ids[:-1] if stop else answer.token_ids)
                text = str(self._tokenizer.decode(text_ids, skip_special_tokens=False))
                turns[i].append(
                    GeneratedTurn(text=text, token_ids=answer.token_ids, finish_reason=answer.finish_reason)
                )
                chats[i].append(Message(role="assistant", content=text))
        return [(job, _line(job, chat, made)) for job, chat, made in zip(batch, chats, turns, strict=True)]

    def _count(self, tokens: int, finished: int) -> None:
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
        self._meter.advance(finished, f"{rate:,.0f} tokens/s")


def _row_seed(seed: int, answer_id: str, turn_index: int) -> int:
    digest = hashlib.sha256(f"{seed}/{answer_id}/{turn_index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _line(job: Job, messages: Sequence[Message], turns: Sequence[GeneratedTurn]) -> bytes:
    row = {
        "id": job.id,
        "prompt_id": job.prompt.id,
        "category": job.prompt.category,
        "messages": [asdict(message) for message in messages],
        "turns": [asdict(turn) for turn in turns],
        "sampling": asdict(job.sampling),
        "empty": any(not turn.text.strip() for turn in turns),
    }
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _ids_after_repair(path: Path) -> set[str]:
    """Ids of the complete lines; what a kill left of an incomplete last line is cut off."""
    if not path.exists():
        return set()
    ids, end = set(), 0
    with path.open("r+b") as log:
        for line in log:
            if not line.endswith(b"\n"):
                break
            ids.add(json.loads(line)["id"])
            end += len(line)
        log.truncate(end)
    return ids


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder for this process; the system releases it however the process ends."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is being written by another process: wait for it, or set run_dir"
            ) from None
        yield


def _facts(answers: Sequence[GeneratedConversation]) -> dict[str, Any]:
    turns = [turn for answer in answers for turn in answer.turns]
    return {
        "answers": len(answers),
        "tokens": sum(len(turn.token_ids) for turn in turns),
        "empty": sum(not turn.text.strip() for turn in turns),
        "finish_reasons": dict(Counter(turn.finish_reason for turn in turns)),
    }
