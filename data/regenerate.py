"""The `regenerated` stage: the target answers every prompt, resumable after a kill at any moment.

With the hf backend the work is a fixed plan of batches. A batch is written in one append when all its
rows are done, and a batch that was written in part is computed again as a whole: so every row is
computed in the same company as in an undisturbed run, and `answers.jsonl` is the same to the byte.
Engines of the other backends mix rows as they like; their rows are written as they end.
"""

import functools
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from slipstream.data.answers import ANSWERS_FILE, AnswerLog
from slipstream.data.backends.hf import HFGenerator
from slipstream.data.backends.offline import VllmCompleter
from slipstream.data.backends.openai import OpenAICompleter
from slipstream.data.backends.remote import Completer, Outcome, answer_all, outcome
from slipstream.data.backends.workers import OnStep, num_workers, ordered
from slipstream.data.config import RegenerateConfig
from slipstream.data.conversations import PROMPTS_FILE, read_answers, read_conversations
from slipstream.data.dialog import Dialog, Job, turns_of
from slipstream.data.files import Stage, stage_fingerprint
from slipstream.data.progress import Meter, say
from slipstream.data.shards import in_shard, merge, part_folder, shard_of
from slipstream.data.target.resolve import Target
from slipstream.data.template import RefusedError, render_prompt, stop_token_ids
from slipstream.data.types import Conversation

NOT_IDENTITY = ("backend", "workers", "openai", "vllm", "shard", "max_failed_share")
"""Settings that do not change what is asked for."""

CPU_CACHE_BYTES = 1 << 30
"""vLLM's KV cache on a CPU, where it cannot see how much memory is free."""

EnginePython = Callable[[], Path]
"""Gives the interpreter of vLLM's environment."""


def run(
    config: RegenerateConfig,
    target: Target,
    prompts_folder: Path,
    folder: Path,
    seed: int,
    engine_python: EnginePython | None = None,
) -> None:
    """Answers the prompts of `prompts_folder` into `folder`, or one shard of them into a part of it.

    Raises:
        ValueError: other settings made the folder, another process writes it, no prompt fits, or the
            engine cannot be reached.
    """
    settings = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "dtype": str(target.dtype),
        "prompts": stage_fingerprint(prompts_folder),
        **{key: value for key, value in asdict(config).items() if key not in NOT_IDENTITY},
        "seed": seed,
    }
    stage = Stage(folder, "regenerated", settings)
    if stage.is_complete:
        return
    prompts = read_conversations(prompts_folder / PROMPTS_FILE)
    shard = shard_of(config.shard)
    if shard is None:
        _fill(stage, prompts, config, target, seed, engine_python)
        return
    part = Stage(part_folder(folder, *shard), "regenerated", {**settings, "shard": "/".join(map(str, shard))})
    if not part.is_complete:
        mine = [prompt for prompt in prompts if in_shard(prompt.id, *shard)]
        _fill(part, mine, config, target, seed, engine_python)
    merge(stage, shard[1], ANSWERS_FILE)


def _fill(
    stage: Stage,
    prompts: Sequence[Conversation],
    config: RegenerateConfig,
    target: Target,
    seed: int,
    engine_python: EnginePython | None,
) -> None:
    """Answers the prompts into a stage and completes it."""
    start = time.monotonic()
    batches, left_out = plan(config, target, prompts)
    stage.begin()
    num_jobs = sum(map(len, batches))
    log = AnswerLog(stage.folder, limit=int(config.max_failed_share * num_jobs))
    todo = [batch for batch in batches if any(job.id not in log.done for job in batch)]
    if todo:
        _answer_all(todo, batches, config, target, log, seed, engine_python)
    log.close()
    answers = read_answers(stage.folder / ANSWERS_FILE)
    turns = [turn for answer in answers for turn in answer.turns]
    facts: dict[str, Any] = {
        "backend": config.backend,
        "answers": len(answers),
        "tokens": sum(len(turn.token_ids) for turn in turns),
        "empty": sum(not turn.text.strip() for turn in turns),
        "finish_reasons": dict(Counter(turn.finish_reason for turn in turns)),
        "cut": dict(Counter(answer.cut for answer in answers if answer.cut)),
        "failed": log.reasons(),
    }
    stage.complete(log.files(), **facts, left_out=left_out, seconds=round(time.monotonic() - start, 1))
    lost = {**facts["cut"], **facts["failed"]}
    say(
        f"regenerated  {facts['answers']:,} answers, {facts['tokens']:,} tokens {facts['finish_reasons']}"
        f"{f', cut or left out: {lost}' if lost else ''}"
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
        num_turns = len(turns_of(prompt.messages))
        room = target.config.max_position_embeddings - num_turns * config.max_new_tokens
        try:
            num_tokens = _num_tokens(tokenizer, prompt)
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
    jobs: dict[int, list[Job]] = {index: [] for index in range(len(config.samples))}
    for num_turns, _, prompt in sized:
        for number, index in enumerate(_samples_of(prompt.id, config)):
            job = Job(
                id=f"{prompt.id}-{number}",
                prompt=prompt,
                sampling=config.samples[index],
                num_turns=num_turns,
            )
            jobs[index].append(job)
    size = config.batch_size
    batches = [rows[i : i + size] for rows in jobs.values() for i in range(0, len(rows), size)]
    return batches, dict(left_out)


def _samples_of(prompt_id: str, config: RegenerateConfig) -> list[int]:
    """Which of the samples answer a prompt: each once, or so many drawn by weight."""
    if not config.answers_per_prompt:
        return list(range(len(config.samples)))
    weights = [sample.weight for sample in config.samples]
    chosen = []
    for number in range(config.answers_per_prompt):
        digest = hashlib.sha256(f"{prompt_id}/{number}".encode()).digest()
        place = int.from_bytes(digest[:8], "little") / 2**64 * sum(weights)
        last = len(weights) - 1
        chosen.append(next((i for i in range(last) if place < sum(weights[: i + 1])), last))
    return chosen


def _num_tokens(tokenizer: PreTrainedTokenizerFast, prompt: Conversation) -> int:
    """Tokens of the first prompt as rendered and of the messages that follow it."""
    first = turns_of(prompt.messages)[0][0]
    later = [message.content for message in prompt.messages[len(first) :]]
    rendered = render_prompt(tokenizer, first, prompt.tools)
    return len(rendered) + sum(len(tokenizer(text, verbose=False)["input_ids"]) for text in later)


def _answer_all(
    todo: Sequence[Sequence[Job]],
    batches: Sequence[Sequence[Job]],
    config: RegenerateConfig,
    target: Target,
    log: AnswerLog,
    seed: int,
    engine_python: EnginePython | None,
) -> None:
    """Computes and appends what the log does not hold yet."""
    total, left = (sum(job.num_turns for batch in part for job in batch) for part in (batches, todo))
    num_tokens, num_done, start = 0, total - left, time.monotonic()
    with Meter("regenerate", total, unit="answers") as meter:
        meter.skip(total - left)

        def count(tokens: int, finished: int) -> None:
            nonlocal num_tokens, num_done
            num_tokens += tokens
            num_done += finished
            rate = f"{num_tokens / (time.monotonic() - start):,.0f} tokens/s"
            size = log.num_bytes / 1e6
            meter.advance(finished, f"{rate}, {size:,.1f} of {size * total / max(num_done, 1):,.1f} MB")

        if config.backend == "hf":
            make = functools.partial(Answerer, config=config, seed=seed)
            workers = num_workers(config.workers, target, len(todo))
            for outcomes in ordered(make, target, todo, workers=workers, on_step=count):
                log.write(outcomes)
            return
        answer_all(
            [job for batch in todo for job in batch if job.id not in log.done],
            _completer(config, target, log.folder, engine_python),
            target.tokenizer(),
            keep_truncated=config.keep_truncated,
            seed=seed,
            on_answer=lambda tokens: count(tokens, 1),
            write=log.write,
        )


def _completer(
    config: RegenerateConfig, target: Target, folder: Path, engine_python: EnginePython | None
) -> Completer:
    """The engine outside this process that the settings name."""
    stop_ids, max_new_tokens = stop_token_ids(target), config.max_new_tokens
    if config.backend == "openai":
        return OpenAICompleter(
            config.openai, target.tokenizer(), stop_ids=stop_ids, max_new_tokens=max_new_tokens
        )
    assert engine_python is not None, "vllm has an environment of its own"
    settings: dict[str, Any] = {
        "model": str(target.path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_num_seqs": config.vllm.concurrency,
        "max_model_len": target.config.max_position_embeddings,
        **({"kv_cache_memory_bytes": CPU_CACHE_BYTES} if target.device.type == "cpu" else {}),
    }
    return VllmCompleter(
        engine_python(),
        settings | config.vllm.settings,
        folder / "vllm.log",
        concurrency=config.vllm.concurrency,
        stop_ids=stop_ids,
        max_new_tokens=max_new_tokens,
        device=target.device.index if config.vllm.settings.get("tensor_parallel_size", 1) == 1 else None,
    )


class Answerer:
    """Answers a batch of jobs turn by turn with transformers; one for each process."""

    def __init__(self, target: Target, *, config: RegenerateConfig, seed: int) -> None:
        self._tokenizer, self._config, self._seed = target.tokenizer(), config, seed
        self._generator = HFGenerator(
            target.model(),
            stop_ids=stop_token_ids(target),
            vocab_size=min(len(self._tokenizer), target.config.vocab_size),
            max_new_tokens=config.max_new_tokens,
        )

    def __call__(self, batch: Sequence[Job], on_step: OnStep) -> list[Outcome]:
        """Rows of the answers file, or why there is none."""
        dialogs = [Dialog(job, self._tokenizer, keep_truncated=self._config.keep_truncated) for job in batch]
        while live := [(d, ids) for d in dialogs if (ids := d.next_prompt()) is not None]:
            answers = self._generator.generate(
                [ids for _, ids in live],
                batch[0].sampling,
                [dialog.seed(self._seed) for dialog, _ in live],
                on_step,
            )
            for (dialog, _), answer in zip(live, answers, strict=True):
                dialog.add(answer)
        return [outcome(dialog) for dialog in dialogs]
