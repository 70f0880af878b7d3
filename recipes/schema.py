"""The typed schema of a recipe: one recipe describes all stages, each command reads its section."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from slipstream.data.config import DataConfig, Dtype, TargetConfig
from slipstream.drafters.config import FEATURE_KINDS, DrafterConfig, Engine, Form, sglang_refusals
from slipstream.eval.config import EvalConfig
from slipstream.train.config import DraftModelConfig, TrainConfig

OPEN = "target.geometry"
"""The one key whose entries the schema does not list."""


@dataclass
class ExportConfig:
    """The serving bundle."""

    dtype: Dtype = Dtype.auto
    """Type of the written tensors; auto: as trained."""
    format: Form = Form.eagle3
    engines: list[Engine] = field(default_factory=lambda: [Engine.vllm, Engine.sglang])
    """What has to be able to serve the head; a head that one of them cannot express is refused."""
    target_id: str = ""
    """Hub id of the target where target.name is a folder; for the card and the speculators form."""

    def problems(self, drafter: DrafterConfig) -> list[str]:
        """Every mistake in these settings, one line each, as far as they show without the target."""
        found = []
        if not self.engines:
            found.append("export.engines is empty: name vllm, sglang or both")
        if Engine.sglang in self.engines:
            found += sglang_refusals(drafter, num_target_layers=None)
            if self.format is Form.speculators:
                found.append("export.format=speculators: SGLang does not read it; set export.engines=[vllm]")
        return found


@dataclass
class EnginesConfig:
    """Where scripts/doctor.py finds the serving engines."""

    vllm_python: str = ""
    """A Python that has vLLM; empty: a cached environment for CPUs, made on first use."""
    sglang_python: str = ""
    """The same for SGLang."""


@dataclass
class Recipe:
    """Everything a run needs."""

    name: str = MISSING
    """Names the run."""
    run_dir: str = MISSING
    """Every stage writes below this folder."""
    seed: int = 0
    plan: bool = False
    """scripts/pipeline.py prints what it would do and stops."""
    row: str = "0"
    """Row that scripts/show_mask.py shows: an id, or a number."""
    replay: bool = False
    """scripts/doctor.py also decodes the held-out prompts in the engines of export.engines."""
    push: str = ""
    """Hub id (OWNER/NAME) that scripts/export.py, or scripts/pipeline.py at its end, sends the head to."""
    push_private: bool = False
    """Whether a repository that push has to make is private."""
    push_dry_run: bool = False
    """List what push would send, and stop."""
    pull: str = ""
    """Hub id (OWNER/NAME or OWNER/NAME@REVISION) or folder of a head that scripts/export.py brings here."""
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    draft_model: DraftModelConfig = field(default_factory=DraftModelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    engines: EnginesConfig = field(default_factory=EnginesConfig)

    def check(self) -> None:
        """Raises ValueError with every mistake in the recipe at once."""
        sections = (self.target, self.data, self.drafter, self.train, self.draft_model, self.eval)
        found = [problem for section in sections for problem in section.problems()]
        if not self.run_dir.strip():
            found.append("run_dir is empty: name a folder")
        if not 0 <= self.seed < 2**31:
            found.append(f"seed={self.seed} must lie in 0..{2**31 - 1}")
        found += self._hub_problems()
        found += self.export.problems(self.drafter)
        found += self._kind_problems()
        if found:
            raise ValueError("; ".join(found))

    def _hub_problems(self) -> list[str]:
        found = []
        if self.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push):
            found.append(f"push={self.push} is no hub id: OWNER/NAME")
        if self.push and self.pull:
            found.append("push and pull exclude each other: leave one out")
        if self.train.init_from and self.drafter.kind != "eagle3":
            found.append(f"train.init_from reads EAGLE-3 heads, not drafter.kind={self.drafter.kind}")
        return found

    def _kind_problems(self) -> list[str]:
        """What an EAGLE-1 or Medusa head cannot be trained or served with."""
        kind, unroll = self.drafter.kind, self.train.unroll
        if kind not in FEATURE_KINDS:
            return []
        found = []
        if Engine.sglang in self.export.engines or self.export.format is not Form.eagle3:
            found.append(f"drafter.kind={kind} is served by vLLM alone: set export.engines=[vllm]")
        if kind == "medusa" and unroll.num_steps != self.drafter.num_heads:
            found.append(
                f"train.unroll.num_steps={unroll.num_steps} and drafter.num_heads={self.drafter.num_heads} "
                f"must be equal for medusa"
            )
        return found


def register() -> None:
    """Makes the schema known to Hydra."""
    ConfigStore.instance().store(name="schema", node=Recipe)


def known_keys(node: Any = Recipe, prefix: str = "") -> list[str]:
    """Every dotted key of the schema."""
    keys = []
    for entry in fields(node):
        keys.append(prefix + entry.name)
        if is_dataclass(entry.type):
            keys += known_keys(entry.type, f"{prefix}{entry.name}.")
    return keys


def check_keys(values: Mapping[Any, Any], node: Any = Recipe, prefix: str = "") -> None:
    """Raises ValueError where `+key=value` has added a key that does not exist, or `~key` deleted one."""
    types = {entry.name: entry.type for entry in fields(node)}
    for key in values.keys() - types.keys():
        raise ValueError(unknown_key(f"{prefix}{key}"))
    for key in types.keys() - values.keys():
        raise ValueError(f"~{prefix}{key} deletes a setting that every recipe has: give it a value instead")
    for key, kind in types.items():
        if is_dataclass(kind):
            check_keys(values[key], kind, f"{prefix}{key}.")


def unknown_key(key: str) -> str:
    """The answer to a key that does not exist."""
    if key.startswith(OPEN):
        return f"{key}: an entry that the recipe does not have is added by +{OPEN}.ENTRY=VALUE, one by one"
    near = nearest_key(key)
    return f"unknown key {key}: " + (f"did you mean {near}?" if near else "see --help for the keys")


def nearest_key(key: str) -> str:
    """The known key closest to a mistyped one, or an empty string."""
    known = known_keys()
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not matches:
        leaf = key.rsplit(".", 1)[-1]
        matches = [k for k in known if k.rsplit(".", 1)[-1] == leaf]
    return matches[0] if matches else ""
