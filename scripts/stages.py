"""The stages of a recipe, wired: every command runs one of them, `pipeline` runs them in order.

Heavy libraries are imported by the stages that need them, so `--help` and bad input answer at once.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from slipstream.data.config import RECORDED
from slipstream.data.files import (
    MANIFEST,
    Stage,
    is_complete,
    read_manifest,
    reading,
    stage_fingerprint,
    value_hash,
    write_json,
    write_text,
)
from slipstream.data.progress import is_main_process
from slipstream.drafters.config import DraftGeometry, Engine, resolve_geometry, sglang_refusals
from slipstream.eval.config import EvalConfig, as_list
from slipstream.recipes.schema import Recipe

if TYPE_CHECKING:
    from slipstream.data.target.resolve import Target
    from slipstream.data.types import Conversation
    from slipstream.drafters.importer import ImportedHead
    from slipstream.eval.comparison import Comparison

INPUTS: dict[str, tuple[str, ...]] = {
    "prompts": (),
    "regenerated": ("prompts",),
    "tokens": ("regenerated",),
    "vocab_map": ("tokens",),
    "hidden_states": ("tokens",),
    "train": ("vocab_map", "hidden_states"),
    "export": ("train",),
    "evaluation": ("export",),
}
"""Every stage in order, by the name of its folder, with the stages it reads from."""

SECONDS = "seconds.json"

RECIPE = "recipe.yaml"
"""What a run was started with, in its folder."""

NOT_IDENTITY = ("wandb", "log_every", "validate_every", "validate_tokens", "save_every", "keep_checkpoints")
"""Training settings that do not change the trained weights."""


class Run:
    """A recipe with the folders of its stages; `run` runs or resumes one of them."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.folder = Path(recipe.run_dir)
        self._sound: set[str] = set()

    def path(self, stage: str) -> Path:
        """Folder of a stage; each way to evaluate has its own."""
        if stage == "evaluation":
            return self.folder / stage / value_hash(plain(self.recipe.eval))[:8]
        return self.folder / stage

    def run(self, stage: str) -> Any:
        """Runs what is missing of a stage; where that is something, the run's folder tells time and recipe.

        Raises:
            ValueError: bad input, or a stage before this one is missing or was made with other settings.
        """
        if stage == "train":
            self._prepare_data()
        for needed in INPUTS[stage] if stage != "evaluation" or uses_export(self.recipe.eval) else ():
            self.require(needed)
        if is_complete(self.path(stage)) or not is_main_process():
            return self.method(stage)()
        seconds, start = self._seconds_before(stage), time.monotonic()
        result = self.method(stage)()
        self._write_seconds(stage, seconds + time.monotonic() - start)
        if stage != "evaluation":
            settings = OmegaConf.to_yaml(OmegaConf.structured(self.recipe))
            write_text(self.folder / RECIPE, settings)
        return result

    def require(self, stage: str) -> None:
        """Raises ValueError unless a stage is complete, and made with the recipe's settings.

        So are the stages before it, as far back as their folders were kept.
        """
        if not is_complete(self.path(stage)):
            raise ValueError(
                f"{self.path(stage)} is not complete: run that stage, or scripts/pipeline.py for all"
            )
        if stage not in self._sound and all(is_complete(self.path(needed)) for needed in INPUTS[stage]):
            for needed in INPUTS[stage]:
                self.require(needed)
            self.method(stage)()  # complete: it compares settings and returns
            self._sound.add(stage)

    def seconds(self) -> dict[str, float]:
        """Seconds that stages took, over all restarts, by folder."""
        path = self.folder / SECONDS
        if not path.exists():
            return {}
        with reading(path, way_out="delete it"):
            return {str(key): float(value) for key, value in dict(json.loads(path.read_bytes())).items()}

    def seconds_key(self, stage: str) -> str:
        """Key of a stage in `seconds`."""
        return str(self.path(stage).relative_to(self.folder))

    def _seconds_before(self, stage: str) -> float:
        """Seconds of runs that were stopped: each counts up to the last file it wrote."""
        manifest, log = self.path(stage) / MANIFEST, self.folder / SECONDS
        if not manifest.exists():
            return 0.0
        counted = self.seconds().get(self.seconds_key(stage), 0.0)
        since = max(file.stat().st_mtime for file in (manifest, log) if file.exists())
        until = max(file.stat().st_mtime for file in self.path(stage).rglob("*"))
        if until > since:
            counted += until - since
            self._write_seconds(stage, counted)
        return counted

    def _write_seconds(self, stage: str, seconds: float) -> None:
        for leftover in self.folder.glob(".*.tmp"):
            if time.time() - leftover.stat().st_mtime > 60:  # of a killed process, not of one that writes now
                leftover.unlink()
        write_json(self.folder / SECONDS, self.seconds() | {self.seconds_key(stage): seconds})

    @functools.cached_property
    def target(self) -> "Target":
        """The target, found once."""
        from slipstream.data.target.resolve import resolve_target

        return resolve_target(self.recipe.target)

    @functools.cached_property
    def geometry(self) -> DraftGeometry:
        """The head's geometry; ValueError when an engine of export.engines cannot express it."""
        model = self.target.config
        geometry = resolve_geometry(self.recipe.drafter, model.to_dict())
        if Engine.sglang in self.recipe.export.engines and (
            refusals := sglang_refusals(geometry, model.num_hidden_layers)
        ):
            raise ValueError("; ".join(refusals))
        return geometry

    @functools.cached_property
    def imported(self) -> "ImportedHead | None":
        """The head that train.init_from names, found once."""
        from slipstream.scripts.hub import fetch_head

        name = self.recipe.train.init_from
        return fetch_head(name, self.target, self.geometry, key="train.init_from") if name else None

    def check(self) -> None:
        """Raises ValueError for what the last stages would find, before hours go into the first."""
        from slipstream.eval.comparison import check_room

        self.check_head()
        if self.recipe.data.prompts.heldout_share:
            self.run("prompts")  # what is measured on is set aside there
        check_room(self.target, self.held_out, self.recipe.eval.max_new_tokens)

    def check_head(self) -> None:
        """Raises ValueError where the target cannot have such a head."""
        import numpy as np

        from slipstream.data.template import stop_token_ids
        from slipstream.data.vocab_map import build_vocab_map
        from slipstream.drafters.checkpoint_format import required_shapes

        required_shapes(self.geometry)
        counts_V = np.zeros(self.geometry.vocab_size, dtype=np.int64)
        entries = self.target.tokenizer().get_vocab().values()
        build_vocab_map(counts_V, self.geometry.draft_vocab_size, stop_token_ids(self.target), entries)
        _ = self.imported

    def method(self, stage: str) -> Callable[[], Any]:
        """What runs or resumes a stage whose inputs are complete."""
        methods: dict[str, Callable[[], Any]] = {
            "prompts": self._prompts,
            "regenerated": self._regenerate,
            "tokens": self._tokenize,
            "vocab_map": self._vocab_map,
            "hidden_states": self._capture,
            "train": self._train,
            "export": self._export,
            "evaluation": self._evaluate,
        }
        return methods[stage]

    def _prompts(self) -> None:
        """Reads the prompts into one normal form."""
        from slipstream.data import choosing

        with_answers = self.recipe.data.regenerate.backend == RECORDED
        choosing.run(self.recipe.data.prompts, self.path("prompts"), with_answers=with_answers)

    def _regenerate(self) -> None:
        """Lets the target answer the prompts."""
        from slipstream.data import recorded, regenerate

        if self.recipe.data.regenerate.backend == RECORDED:
            return recorded.run(self.path("prompts"), self.path("regenerated"))

        if not is_complete(self.path("regenerated")):
            self.check_head()
        folders = self.path("prompts"), self.path("regenerated")
        regenerate.run(self.recipe.data.regenerate, self.target, *folders, self.recipe.seed)

    def _tokenize(self) -> None:
        """Renders the answers with the chat template and marks what the target generated."""
        from slipstream.data import tokenize

        tokenize.run(
            self.recipe.data.tokenize,
            self.target,
            self.path("regenerated"),
            self.path("tokens"),
            self.recipe.data.validation_share,
        )

    def _vocab_map(self) -> None:
        """Chooses the draft vocabulary from the generated tokens."""
        from slipstream.data import vocab_map
        from slipstream.scripts.hub import map_of

        source = self.recipe.train.init_from
        vocab_map.run(
            self.geometry.draft_vocab_size,
            self.target,
            self.path("tokens"),
            self.path("vocab_map"),
            given=(source, lambda: map_of(self.imported)) if source else None,
        )

    def _capture(self) -> None:
        """Caches the target's hidden states."""
        from slipstream.data import capture

        capture.run(
            self.recipe.data.capture,
            self.target,
            self.geometry.aux_layers,
            self.path("tokens"),
            self.path("hidden_states"),
        )

    def _train(self) -> None:
        """Trains the head; under torchrun every rank calls this."""
        folder = self.path("train")
        if is_complete(folder):
            Stage(folder, "train", self._train_settings())
            return
        import torch

        from slipstream.data.cache import HiddenStateCache
        from slipstream.scripts.assembly import frozen_target, make_unroller, new_head
        from slipstream.train import engine, trainer
        from slipstream.train.checkpoint import has_checkpoint

        device = engine.init_distributed()
        engine.deepspeed_settings(self.recipe.train, engine.world_size())
        if engine.rank() == 0 and not has_checkpoint(folder):
            (folder / MANIFEST).unlink(missing_ok=True)  # nothing is there that other settings would spoil
        engine.barrier()
        stage = Stage(folder, "train", self._train_settings())
        frozen = frozen_target(self.target, self.path("vocab_map"))
        imported = None if has_checkpoint(folder) else self.imported  # a resumed run needs it no more
        source = HiddenStateCache(self.path("hidden_states"))
        state = trainer.fit(
            make_unroller(
                self.recipe,
                new_head(self.recipe, self.geometry, frozen, source, imported),
                frozen.to(device, getattr(torch, self.recipe.train.deepspeed.dtype.value)),
            ),
            source,
            self.recipe.train,
            frozen=frozen,
            stage=stage,
            seed=self.recipe.seed,
            device=device,
        )
        if engine.rank() == 0:
            final = f"step-{state.step:07d}/head.safetensors"
            stage.complete([final], **dataclasses.asdict(state))
        engine.barrier()

    def _export(self) -> None:
        """Writes the serving bundle of the trained head."""
        from slipstream.data.vocab_map import read_vocab_map
        from slipstream.scripts.bundle import write_bundle
        from slipstream.scripts.card import write_card
        from slipstream.train.checkpoint import read_head

        settings = {
            "target_fingerprint": self.target.fingerprint,
            "train": stage_fingerprint(self.path("train")),
            **plain(self.recipe.export),
        }
        stage = Stage(self.path("export"), "export", settings)
        if stage.is_complete:
            return
        (final,) = read_manifest(self.path("train"))["files"]
        tensors = read_head(self.path("train") / final)
        stage.begin()
        names = write_bundle(
            self.path("export"),
            tensors=tensors,
            geometry=self.geometry,
            vocab_map=read_vocab_map(self.path("vocab_map")),
            target=self.target,
            recipe=self.recipe,
        )
        write_card(self)  # no output of the stage: it changes when the head is measured
        stage.complete(names)

    @functools.cached_property
    def suites(self) -> "dict[str, list[Conversation]]":
        """The chats that are measured on, by suite."""
        from slipstream.eval.robustness import with_variants
        from slipstream.eval.suites import load_suites

        suites = load_suites(self.recipe.eval)
        if self.recipe.eval.robustness:
            suites = with_variants(suites, self.target.config.max_position_embeddings)
        return suites

    @property
    def held_out(self) -> "list[Conversation]":
        """The chats of all suites."""
        return [prompt for prompts in self.suites.values() for prompt in prompts]

    def _evaluate(self) -> "Comparison":
        """Measures the exported bundle, and what else eval.drafter names, with the built-in decoder."""
        from slipstream.eval.comparison import measure

        config, export = self.recipe.eval, self.path("export")
        if uses_export(config):
            made_for = read_manifest(export)["settings"]["target_fingerprint"]
            if made_for != self.target.fingerprint:
                raise ValueError(
                    f"{export} was made for a target with fingerprint {made_for}, that of "
                    f"target.name={self.target.name} is {self.target.fingerprint}: name the target the head "
                    f"was trained for"
                )
        observe = None
        if config.metrics_port:
            from slipstream.eval.metrics import Metrics

            metrics = Metrics()
            metrics.serve(config.metrics_port)
            observe = metrics.observe
        return measure(self.target, export, config, self.suites, self.path("evaluation"), observe)

    def _prepare_data(self) -> None:
        """Runs the data stages that are missing: rank 0 works, the others wait for its files."""
        if is_main_process():
            for stage in ("prompts", "regenerated", "tokens", "vocab_map", "hidden_states"):
                self.run(stage)
        while not is_complete(self.path("hidden_states")):
            time.sleep(0.5)

    def _train_settings(self) -> dict[str, Any]:
        recipe = self.recipe
        train = plain(recipe.train)
        return {
            "hidden_states": stage_fingerprint(self.path("hidden_states")),
            "vocab_map": stage_fingerprint(self.path("vocab_map")),
            "drafter": plain(recipe.drafter),
            "train": {key: value for key, value in train.items() if key not in NOT_IDENTITY},
            "seed": recipe.seed,
        }


def uses_export(config: EvalConfig) -> bool:
    """Whether an entry of eval.drafter reads this run's own bundle."""
    without = ("prompt_lookup", "autoregressive")
    return any("@" not in entry and entry not in without for entry in as_list(config.drafter))


def plain(config: Any) -> dict[str, Any]:
    """A config section as JSON-able values."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
