"""The `evaluation` stage: every way to draft on the same prompts, in the same decoder.

One line of rounds.jsonl for each finished prompt; an interrupted stage continues behind them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.data.files import Stage, append_jsonl, file_hash, read_jsonl, value_hash, write_json
from slipstream.data.progress import Meter
from slipstream.data.target.model import fastest_threads
from slipstream.data.target.resolve import Target
from slipstream.data.types import Conversation
from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS
from slipstream.eval.acceptance import AcceptanceReport, PromptResult, acceptance_length, summarise
from slipstream.eval.breakdown import Breakdown, break_down
from slipstream.eval.config import EvalConfig, as_list
from slipstream.eval.drafters.registry import BASELINE, Contender, make_contender, parse
from slipstream.eval.player import NEAR_TIE_STEPS, PlayedPrompt, Player, parse_played
from slipstream.eval.room import check_room

ROUNDS, REPORT = "rounds.jsonl", "acceptance.json"

Observer = Callable[[PlayedPrompt], None]
"""Called after each prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What was measured, by drafter in the order of `eval.drafter`."""

    reports: dict[str, AcceptanceReport]
    breakdowns: dict[str, Breakdown]
    overheads: dict[str, float]
    """Share of the time that is spent outside the two models."""
    played: Sequence[PlayedPrompt]

    @property
    def first(self) -> AcceptanceReport:
        """Of the first drafter."""
        return next(iter(self.reports.values()))


def measure(
    target: Target,
    export_folder: Path,
    config: EvalConfig,
    suites: Mapping[str, Sequence[Conversation]],
    folder: Path,
    observe: Observer | None = None,
) -> Comparison:
    """The evaluation stage in `folder`: of exported heads, read as a server reads them.

    `suites` are held-out prompts, user turns only, that `config` chose.

    Raises:
        ValueError: a bundle is broken or made for another target, a prompt is too long, or the
            folder holds another measurement.
    """
    entries = measured_entries(config)
    contenders = [
        make_contender(entry, target=target, export=export_folder, config=config) for entry in entries
    ]
    todo = [(suite, prompt) for suite, prompts in suites.items() for prompt in prompts]
    stage = Stage(folder, "evaluation", _identity(target, export_folder, config, suites))
    rows = read_jsonl(folder / ROUNDS, parse_played) if (folder / ROUNDS).exists() else []
    played = {(row.suite, row.id): row for row in rows}
    missing = [(suite, prompt) for suite, prompt in todo if (suite, prompt.id) not in played]
    if missing:
        check_room(target, [prompt for _, prompt in missing], config.max_new_tokens)
        player = Player(target, contenders, config)
        player.warm_up(missing[0][1])
        stage.begin()
        with (
            fastest_threads(lambda: player.warm_up(missing[0][1])),
            Meter("evaluation", len(todo), unit="prompt") as meter,
        ):
            meter.skip(len(played))
            for suite, prompt in missing:
                result = played[suite, prompt.id] = player.play(suite, prompt)
                append_jsonl(folder / ROUNDS, [dataclasses.asdict(result)])
                meter.advance(1, f"tau {_tau_so_far(played.values(), entries[0]):.3f}")
                if observe is not None:
                    observe(result)
    comparison = compare([played[suite, prompt.id] for suite, prompt in todo], contenders, config)
    if not stage.is_complete:
        write_json(folder / REPORT, as_json(comparison))
        stage.complete([ROUNDS, REPORT], acceptance_length=comparison.first.acceptance_length)
    return comparison


def measured_entries(config: EvalConfig) -> list[str]:
    """The entries of eval.drafter beside plain decoding, which is measured always."""
    return [entry for entry in as_list(config.drafter) if entry != BASELINE] or ["prompt_lookup"]


def compare(
    played: Sequence[PlayedPrompt], contenders: Sequence[Contender], config: EvalConfig
) -> Comparison:
    """Puts the results of all prompts together."""
    return Comparison(
        reports={
            contender.name: summarise(
                [_result(prompt, contender.name) for prompt in played],
                num_draft_tokens=contender.depth,
                is_greedy=config.temperature == 0,
            )
            for contender in contenders
        },
        breakdowns={contender.name: break_down(played, contender.name) for contender in contenders},
        overheads={contender.name: _overhead(played, contender.name) for contender in contenders},
        played=played,
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Content of acceptance.json: the first drafter's numbers, then those of all."""
    return {
        **dataclasses.asdict(comparison.first),
        "drafters": {
            name: {
                **dataclasses.asdict(report),
                **dataclasses.asdict(comparison.breakdowns[name]),
                "overhead": comparison.overheads[name],
            }
            for name, report in comparison.reports.items()
        },
    }


def weights_hash(config: EvalConfig, export_folder: Path) -> str:
    """Hash of the bundles that are measured."""
    folders = [Path(parse(entry)[2] or export_folder) for entry in measured_entries(config)]
    files = [folder / name for folder in folders for name in (CONFIG, WEIGHTS)]
    return value_hash([file_hash(file) for file in files if file.is_file()])


def _identity(
    target: Target,
    export_folder: Path,
    config: EvalConfig,
    suites: Mapping[str, Sequence[Conversation]],
) -> dict[str, Any]:
    """Everything the measured numbers depend on."""
    return {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.dtype),
        "weights": weights_hash(config, export_folder),
        "prompt_ids": value_hash({suite: [p.id for p in prompts] for suite, prompts in suites.items()}),
        **dataclasses.asdict(config),
    }


def _result(prompt: PlayedPrompt, name: str) -> PromptResult:
    turns, plain = prompt.answers[name], prompt.answers[BASELINE]
    ties = [turn for turn in turns if turn.tie_gap is not None and turn.tie_gap <= NEAR_TIE_STEPS]
    differing = sum(not turn.same for turn in turns)
    return PromptResult(
        id=prompt.id,
        category=prompt.category,
        rounds=tuple(r for turn in turns for r in turn.rounds),
        new_tokens=sum(len(turn.token_ids) for turn in turns),
        baseline_new_tokens=sum(len(turn.token_ids) for turn in plain),
        seconds=sum(turn.seconds for turn in turns),
        baseline_seconds=sum(turn.seconds for turn in plain),
        identical=differing == len(ties),
        near_ties=len(ties),
    )


def _overhead(played: Sequence[PlayedPrompt], name: str) -> float:
    turns = [turn for prompt in played for turn in prompt.answers[name]]
    models = sum(turn.draft_seconds + turn.verify_seconds for turn in turns)
    return 1.0 - models / max(sum(turn.seconds for turn in turns), 1e-9)


def _tau_so_far(played: "Sequence[PlayedPrompt] | Any", name: str) -> float:
    return acceptance_length([r for p in played for turn in p.answers[name] for r in turn.rounds])
