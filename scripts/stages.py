"""The stages of a recipe, wired: every command runs one of them, `pipeline` runs them in order.

Heavy libraries are imported by the stages that need them, so bad input is answered at once.
"""

import dataclasses
import functools
import os
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
    stage_fingerprint,
    value_hash,
    write_text,
)
from slipstream.data.progress import is_main_process, say
from slipstream.drafters.config import DraftGeometry, Engine, resolve_geometry, sglang_refusals
from slipstream.eval.config import uses_export
from slipstream.recipes.schema import Recipe
from slipstream.scripts.clock import read_seconds, seconds_before, write_seconds
from slipstream.scripts.graph import DATA_STAGES, inputs_of, stages_of
from slipstream.train.config import NOT_IDENTITY

if TYPE_CHECKING:
    from slipstream.data.target.resolve import Target
    from slipstream.data.types import Conversation
    from slipstream.drafters.importer import ImportedHead
    from slipstream.eval.comparison import Comparison
    from slipstream.scripts.sources import States

RECIPE = "recipe.yaml"
"""What a run was started with, in its folder."""


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
        return self._home(stage) / stage

    def _home(self, stage: str) -> Path:
        return Path(self.recipe.data_dir) if stage in DATA_STAGES else self.folder

    def run(self, stage: str) -> Any:
        """Runs what is missing of a stage; where that is something, the run's folder tells time and recipe.

        Raises:
            ValueError: bad input, or a stage before this one is missing or was made with other settings.
        """
        if stage == "train":
            self._prepare_data()
        if stage != "evaluation" or uses_export(self.recipe.eval):
            for needed in inputs_of(self.recipe, stage):
                self.require(needed)
        if is_complete(self.path(stage)) or not is_main_process():
            return self.method(stage)()
        home, folder = self._home(stage), self.path(stage)
        seconds, start = seconds_before(home, folder), time.monotonic()
        result = self.method(stage)()
        write_seconds(home, folder, seconds + time.monotonic() - start)
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
        if stage not in self._sound and all(
            is_complete(self.path(needed)) for needed in inputs_of(self.recipe, stage)
        ):
            for needed in inputs_of(self.recipe, stage):
                self.require(needed)
            self.method(stage)()  # complete: it compares settings and returns
            self._sound.add(stage)

    def seconds(self) -> dict[str, float]:
        """Seconds that stages took, over all restarts, by folder."""
        return read_seconds(Path(self.recipe.data_dir)) | read_seconds(self.folder)

    def seconds_key(self, stage: str) -> str:
        """Key of a stage in `seconds`."""
        return str(self.path(stage).relative_to(self._home(stage)))

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
        from slipstream.eval.room import check_room

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
        from slipstream.eval.engines.environment import engine_python

        if self.recipe.data.regenerate.backend == RECORDED:
            return recorded.run(self.path("prompts"), self.path("regenerated"))

        if not is_complete(self.path("regenerated")):
            self.check_head()
        regenerate.run(
            self.recipe.data.regenerate,
            self.target,
            self.path("prompts"),
            self.path("regenerated"),
            self.recipe.seed,
            lambda: engine_python("vllm", self.recipe.engines.vllm_python),
        )

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

    @property
    def states(self) -> "States":
        """The target's states for the tokens, on disk or live."""
        from slipstream.scripts.sources import States

        return States(
            recipe=self.recipe,
            target=self.target,
            aux_layers=self.geometry.aux_layers,
            tokens=self.path("tokens"),
            hidden_states=self.path("hidden_states"),
        )

    def _capture(self) -> None:
        """Caches the target's hidden states; under torchrun every rank calls this."""
        self.states.capture()

    def _train(self) -> None:
        """Trains the head; under torchrun every rank calls this."""
        folder = self.path("train")
        is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
        if is_alone and is_complete(folder):
            Stage(folder, "train", self._train_settings())
            return
        import torch

        from slipstream.scripts.assembly import frozen_target, make_unroller, new_head
        from slipstream.scripts.selecting import make_selection
        from slipstream.train import engine, trainer
        from slipstream.train.checkpoint import has_checkpoint
        from slipstream.train.nodes import check_copies

        device = engine.init_distributed()
        inputs = [self.path("vocab_map"), self.path("hidden_states")]
        settings = check_copies(self._train_settings, inputs)
        if engine.from_rank_0(is_complete(folder)):
            Stage(folder, "train", settings)
            return
        engine.deepspeed_settings(self.recipe.train, engine.world_size())
        if engine.rank() == 0 and not has_checkpoint(folder):
            (folder / MANIFEST).unlink(missing_ok=True)  # nothing is there that other settings would spoil
        engine.barrier()
        stage = Stage(folder, "train", settings)
        frozen = frozen_target(self.target, self.path("vocab_map"))
        imported = None if has_checkpoint(folder) else self.imported  # a resumed run needs it no more
        source, start = self.states.sources()
        selection = make_selection(self, source)
        state = trainer.fit(
            make_unroller(
                self.recipe,
                new_head(self.recipe, self.geometry, frozen, start, imported),
                frozen.to(device, getattr(torch, self.recipe.train.deepspeed.dtype.value)),
            ),
            source,
            self.recipe.train,
            frozen=frozen,
            stage=stage,
            seed=self.recipe.train_seed,
            device=device,
            selection=selection,
            shuffle_shards=self.recipe.data.shuffle_shards,
        )
        if engine.rank() == 0:
            last = f"step-{state.step:07d}/head.safetensors"
            best = selection.best_file or last
            stage.complete(list({best, last}), best=best, last=last, **dataclasses.asdict(state))
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
        chosen = self.recipe.export.head.value
        file = self.path("train") / read_manifest(self.path("train"))["facts"][chosen]
        say(f"export       the {chosen} head: {file}")
        tensors = read_head(file)
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
        from slipstream.eval.room import without_unfit
        from slipstream.eval.suites import load_suites

        config = self.recipe.eval
        suites = load_suites(config)
        if config.suite:
            suites = {
                name: without_unfit(self.target, name, prompts, config.max_new_tokens)
                for name, prompts in suites.items()
            }
        if config.robustness:
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
        """Runs the data stages that are missing: rank 0 by itself, but for the capture."""
        stages = stages_of(self.recipe)
        for stage in stages[: stages.index("train")]:
            if is_main_process() or stage == "hidden_states":
                self.run(stage)
            while not is_complete(self.path(stage)):
                time.sleep(0.5)

    def _train_settings(self) -> dict[str, Any]:
        recipe = self.recipe
        train = plain(recipe.train)
        del train["deepspeed"]["zero_stage"]  # a run goes on under another one
        settings = {
            "hidden_states": self.states.identity(),
            "vocab_map": stage_fingerprint(self.path("vocab_map")),
            "drafter": plain(recipe.drafter),
            "train": {key: value for key, value in train.items() if key not in NOT_IDENTITY},
            "seed": recipe.train_seed,
        }
        if recipe.data.shuffle_shards:
            settings["shuffle_shards"] = recipe.data.shuffle_shards
        return settings


def plain(config: Any) -> dict[str, Any]:
    """A config section as JSON-able values."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
