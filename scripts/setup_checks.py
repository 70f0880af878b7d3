"""What scripts/doctor.py looks at before a run: each check answers in one line, with the fix.

A check returns its text, or `Warn`; what stops a run is the ValueError that the stage itself would
raise, hours later.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.data.config import Dtype
from slipstream.data.files import check_disk, is_complete, read_json
from slipstream.data.sizes import GIB
from slipstream.drafters.config import FEATURE_KINDS, resolve_aux_layers
from slipstream.scripts import estimates

if TYPE_CHECKING:
    from slipstream.data.types import Conversation, GeneratedConversation
    from slipstream.scripts.stages import Run

NUM_ROWS = 20
"""Rows whose loss masks are looked at."""
TRIAL_ANSWER = "A trial answer: 1, 2 and 3."
MEMORY_MARGIN = 0.8
"""Share of the memory that an estimate may fill without a warning."""


class State(Enum):
    """How a check ended."""

    ok = "ok"
    warn = "warn"
    fail = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the doctor."""

    name: str
    state: State
    text: str


class Warn(str):
    """The text of a check that found something to think about."""


def check_setup(run: "Run") -> Iterator[Check]:
    """Every check in an order in which what comes later builds on what came before."""
    failed: set[str] = set()
    for name, (look, needs) in CHECKS.items():
        if missing := [need for need in needs if need in failed]:
            failed.add(name)
            text = f"not looked at: mend {missing[0]} first"
            yield Check(name=name, state=State.warn, text=text)
            continue
        try:
            text = look(run)
            state = State.warn if isinstance(text, Warn) else State.ok
        except (ValueError, OSError) as error:
            failed.add(name)
            state, text = State.fail, " ".join(str(error).split())
        if text:
            yield Check(name=name, state=state, text=text)


def _versions(run: "Run") -> str:
    wrong = wrong_versions(_requirements())
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: `make dev`, or `pip install` what is named")
    return (
        f"Python and {len(_requirements())} packages as pyproject.toml wants them, torch {torch.__version__}"
    )


def _requirements() -> list[str]:
    """What pyproject.toml asks for: of a clone the file itself, else what was installed with the package."""
    import tomllib

    file = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if file.is_file():
        return list(tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"])
    return [line for line in metadata.requires("slipstream") or [] if "extra ==" not in line]


def wrong_versions(requirements: list[str]) -> list[str]:
    """Requirements that this environment does not meet, each with what is there.

    >>> wrong_versions(["torch>=2", "numpy>=99"])[0].startswith("numpy>=99 (found ")
    True
    """
    from packaging.requirements import Requirement

    wrong = []
    for requirement in map(Requirement, requirements):
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found = "nothing"
        if found == "nothing" or not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement} (found {found})")
    return wrong


def _target(run: "Run") -> str:
    target = run.target
    return f"{target.name}, {_class_name(run)}, {target.dtype} on {target.device}"


def _class_name(run: "Run") -> str:
    return str(read_json(run.target.path / "config.json")["architectures"][0])


def _gpu(run: "Run") -> str:
    wants_bf16 = run.recipe.train.deepspeed.dtype is Dtype.bfloat16
    if not torch.cuda.is_available():
        text = "none: everything runs on the CPU"
        return Warn(f"{text}, and train.deepspeed.dtype=bfloat16 is slow there") if wants_bf16 else text
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    major, minor = torch.cuda.get_device_capability()
    text = (
        f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, compute capability {major}.{minor}, "
        f"bfloat16 {'yes' if has_bf16 else 'no'}"
    )
    if wants_bf16 and not has_bf16:
        raise ValueError(f"{text}: set train.deepspeed.dtype=float32 and target.dtype=float16")
    return text


def _template(run: "Run") -> str:
    return f"of {type(run.target.tokenizer()).__name__}, {len(run.target.tokenizer()):,} entries"


def _masks(run: "Run") -> str:
    from slipstream.data.template import ChatTemplate, RefusedError, stop_token_ids
    from slipstream.data.tokenize import MaskCounts, check_masks, read_samples

    recipe = run.recipe
    if is_complete(run.path("tokens")):
        rows = read_samples(run.path("tokens"))[:NUM_ROWS]
        when = f"in {len(rows)} rows of {run.path('tokens')}"
        facts = check_masks(MaskCounts.of(rows), recipe.data.tokenize, when)
        return f"{facts['rows']} rows, {facts['coverage']:.0%} of the tokens supervised"
    tokenizer = run.target.tokenizer()
    stops = stop_token_ids(run.target)
    template = ChatTemplate(tokenizer, stops, on_inserted=recipe.data.tokenize.on_inserted)
    prompts, refused = _some_prompts(run), []
    for prompt in prompts:
        try:
            views = template.views(_answered(prompt))
        except RefusedError as reason:
            refused.append(f"{prompt.id} ({reason})")
            continue
        for view in views:
            text = tokenizer.decode(view.input_ids_T[view.loss_mask_T])
            if TRIAL_ANSWER not in text or view.loss_mask_T.all():
                raise ValueError(
                    f"row {view.id}: a trial answer is to be supervised and {text!r} is: check the target's "
                    f"chat template"
                )
    if len(refused) == len(prompts):
        raise ValueError(f"the chat template refuses every row, first {refused[0]}: check it or the prompts")
    if refused:
        return Warn(f"the chat template refuses {len(refused)} of {len(prompts)} rows, first {refused[0]}")
    return f"{len(prompts)} rows with a trial answer: it is supervised and nothing else"


def _some_prompts(run: "Run") -> "list[Conversation]":
    """Of the recipe where that needs no network."""
    return estimates.local_prompts(run)[:NUM_ROWS]


def _answered(prompt: "Conversation") -> "GeneratedConversation":
    from slipstream.data.types import GeneratedConversation, Message

    messages: list[Message] = []
    for message in prompt.messages:
        messages.append(message)
        if message.role == "user":
            messages.append(Message(role="assistant", content=TRIAL_ANSWER))
    return GeneratedConversation(id=prompt.id, prompt_id=prompt.id, messages=tuple(messages))


def _aux_layers(run: "Run") -> str:
    drafter, num_layers = run.recipe.drafter, run.target.config.num_hidden_layers
    if drafter.kind in FEATURE_KINDS:
        return f"none: {drafter.kind} reads the last state of {num_layers} layers"
    return f"{list(resolve_aux_layers(list(drafter.aux_layers), num_layers))} of 0..{num_layers}"


def _head(run: "Run") -> str:
    run.check_head()
    geometry = run.geometry
    start = f", from {run.recipe.train.init_from}" if run.recipe.train.init_from else ""
    words = f"{geometry.draft_vocab_size:,} of {geometry.vocab_size:,} tokens"
    return f"{estimates.num_weights(run):,} weights, draft vocabulary {words}{start}"


def _disk(run: "Run") -> str:
    needed, source = estimates.disk_bytes(run)
    check_disk(run.folder, needed, what=f"the run ({source})")
    existing = next(path for path in (run.folder.absolute(), *run.folder.absolute().parents) if path.exists())
    cap = run.recipe.data.capture.max_gib
    text = f"{needed / 1e9:.2f} GB needed ({source}), {shutil.disk_usage(existing).free / 1e9:.2f} GB free"
    if needed / GIB > cap:
        return Warn(f"{text}; data.capture.max_gib={cap:g} may stop the capture stage: raise it")
    return text


def _memory(run: "Run") -> str:
    stages = {
        "answering": estimates.target_bytes(run),
        "training": estimates.training_bytes(run, max(torch.cuda.device_count(), 1)),
    }
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if run.target.device.type == "cuda":
        has = torch.cuda.get_device_properties(run.target.device).total_memory
    told = ", ".join(f"{name} about {num_bytes / 1e9:.2f} GB" for name, num_bytes in stages.items())
    text = f"a rank: {told}, of {has / 1e9:.1f} GB"
    worst = max(stages, key=lambda name: stages[name])
    fix = {
        "answering": "lower data.regenerate.batch_size or max_new_tokens",
        "training": "lower train.tokens_per_pack, or set train.deepspeed.zero_stage=2",
    }
    if stages[worst] > has:
        raise ValueError(f"{text}: {fix[worst]}")
    return Warn(f"{text}, which is close: {fix[worst]}") if stages[worst] > MEMORY_MARGIN * has else text


def _engines(run: "Run") -> str:
    from slipstream.eval.engines.environment import pinned_version
    from slipstream.eval.engines.targets import TARGETS

    name, engines = _class_name(run), run.recipe.export.engines
    if run.recipe.drafter.kind in FEATURE_KINDS:
        return f"{', '.join(engine.value for engine in engines)}, which ask nothing of the target's class"
    without = [e for e in engines if name not in TARGETS[e]]
    if without:
        can = [engine.value for engine, classes in TARGETS.items() if name in classes]
        told = ", ".join(f"{engine.value} {pinned_version(engine.value)}" for engine in without)
        way_out = (
            f"set export.engines=[{','.join(can)}]" if can else "use a version that does, or another target"
        )
        raise ValueError(f"{told} serves no EAGLE-3 head for a {name}: {way_out}")
    return f"{name} in {', '.join(f'{e.value} {pinned_version(e.value)}' for e in engines)}"


def _hub(run: "Run") -> str:
    from slipstream.scripts import hub

    push = run.recipe.push
    if not push:
        return ""
    hub.check_target_id(run.recipe)
    hub.check_token(push)
    return f"the token may write to {push}"


CHECKS: dict[str, tuple[Callable[["Run"], str], tuple[str, ...]]] = {
    "versions": (_versions, ()),
    "GPU": (_gpu, ()),
    "target": (_target, ()),
    "chat template": (_template, ("target",)),
    "loss masks": (_masks, ("chat template",)),
    "aux layers": (_aux_layers, ("target",)),
    "head": (_head, ("chat template", "aux layers")),
    "engines": (_engines, ("target",)),
    "disk": (_disk, ("head",)),
    "memory": (_memory, ("head",)),
    "hub": (_hub, ()),
}
"""Name of each check -> what looks, and the checks that it builds on."""
