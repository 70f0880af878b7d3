"""Plays prompts turn by turn, each turn without a drafter and with every one that is compared.

All of them decode one turn after another, so they see the same machine; the answer of plain
decoding is the history of the next turn for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.data.files import value_hash
from slipstream.data.target.resolve import Target
from slipstream.data.template import render_prompt, stop_token_ids
from slipstream.data.types import Conversation, Message
from slipstream.eval.config import EvalConfig
from slipstream.eval.decoder import DecodeResult, Round, SpeculativeDecoder
from slipstream.eval.drafters.registry import BASELINE, Contender
from slipstream.eval.robustness import tokenizer_of
from slipstream.eval.verify import Sampling

NUM_WARM_UP_TOKENS = 8
NEAR_TIE_STEPS = 4
"""In half precision two logits this many rounding steps apart may swap between one row and several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One answer."""

    prompt_tokens: int
    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    seconds: float
    draft_seconds: float
    verify_seconds: float
    same: bool = True
    """Whether plain decoding gives these tokens."""
    tie_gap: float | None = None
    """Where it does not: how far apart the target's two best logits are at the first difference, in
    rounding steps of its type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedPrompt:
    """One prompt by every way to draft; a line of rounds.jsonl."""

    suite: str
    id: str
    category: str
    answers: dict[str, tuple[Turn, ...]]
    """Plain decoding's under `BASELINE`, then those of every contender."""


def parse_played(row: dict[str, Any]) -> PlayedPrompt:
    """A line of rounds.jsonl read back."""
    answers = {
        name: tuple(
            Turn(
                **turn
                | {
                    "token_ids": tuple(turn["token_ids"]),
                    "rounds": tuple(Round(**r) for r in turn["rounds"]),
                }
            )
            for turn in turns
        )
        for name, turns in row["answers"].items()
    }
    return PlayedPrompt(**row | {"answers": answers})


class Player:
    """Decodes with a target and several drafters."""

    def __init__(self, target: Target, contenders: Sequence[Contender], config: EvalConfig) -> None:
        self._model, self._tokenizer = target.model(), target.tokenizer()
        self._device, self._stop_ids = target.device, stop_token_ids(target)
        self._max_new_tokens = config.max_new_tokens
        self._sampling = Sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)
        self._decoders = {BASELINE: self._decoder(contenders[0], 0)} | {
            contender.name: self._decoder(contender, contender.depth) for contender in contenders
        }

    def _decoder(self, contender: Contender, depth: int) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            self._model,
            contender.drafter,
            num_draft_tokens=depth,
            sampling=self._sampling,
            stop_ids=self._stop_ids,
        )

    def warm_up(self, conversation: Conversation) -> None:
        """Takes one-time costs out of the first times."""
        first_user = next(message for message in conversation.messages if message.role == "user")
        prompt_ids = render_prompt(self._tokenizer, [first_user])
        for decoder in self._decoders.values():
            decoder.generate(prompt_ids, min(NUM_WARM_UP_TOKENS, self._max_new_tokens))

    def play(self, suite: str, conversation: Conversation) -> PlayedPrompt:
        """Decodes every turn of a prompt."""
        seed = int(value_hash(conversation.id), 16) >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        history: list[Message] = []
        answers: dict[str, list[Turn]] = {name: [] for name in self._decoders}
        for message in conversation.messages:
            history.append(message)
            if message.role != "user":
                continue
            prompt_ids = render_prompt(tokenizer_of(suite, self._tokenizer), history)
            plain: DecodeResult | None = None
            for name, decoder in self._decoders.items():
                result = decoder.generate(prompt_ids, self._max_new_tokens, generator)
                plain = plain or result
                answers[name].append(self._turn(prompt_ids, result, plain))
            assert plain is not None
            answer = list(plain.token_ids)
            if answer[-1] in self._stop_ids:
                answer.pop()
            text = str(self._tokenizer.decode(answer, skip_special_tokens=False))
            history.append(Message(role="assistant", content=text))
        return PlayedPrompt(
            suite=suite,
            id=conversation.id,
            category=conversation.category,
            answers={name: tuple(turns) for name, turns in answers.items()},
        )

    def _turn(self, prompt_ids: Sequence[int], result: DecodeResult, plain: DecodeResult) -> Turn:
        same, gap = result.token_ids == plain.token_ids, None
        if not same and self._sampling.is_greedy:
            gap = tie_gap(self._model, prompt_ids, plain.token_ids, result.token_ids)
        return Turn(
            prompt_tokens=len(prompt_ids),
            token_ids=result.token_ids,
            rounds=result.rounds,
            seconds=result.seconds,
            draft_seconds=result.draft_seconds,
            verify_seconds=result.verify_seconds,
            same=same,
            tie_gap=gap,
        )


@torch.inference_mode()
def tie_gap(
    model: PreTrainedModel, prompt_ids: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> float:
    """How far apart the two best logits are where two answers part, in rounding steps at their size."""
    pairs = zip(first, second, strict=False)
    num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    ids_1T = torch.tensor([[*prompt_ids, *first[:num_same]]], device=model.device)
    best = model(input_ids=ids_1T, logits_to_keep=1).logits[0, -1].topk(2).values
    step = torch.finfo(best.dtype).eps * float(best[0].abs())
    return float(best[0] - best[1]) / max(step, 1e-30)
