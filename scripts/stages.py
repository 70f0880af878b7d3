"""The stages of a recipe, wired: every command runs one of them, `pipeline` runs them in order.

Heavy libraries are imported by the stages that need them, so `--help` and bad input answer at once.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from slipstream.data.files import Stage, is_complete, stage_fingerprint, value_hash
from slipstream.data.progress import is_main_process
from slipstream.drafters.config import DraftGeometry, Engine, Init, resolve_geometry, sglang_refusals
from slipstream.eval.config import EvalConfig, as_list
from slipstream.recipes.schema import Recipe

if TYPE_CHECKING:
    from slipstream.data.cache import HiddenStateCache
    from slipstream.data.target.resolve import Target
    from slipstream.data.types import Conversation
    from slipstream.eval.comparison import Comparison
    from slipstream.train.ttt import FrozenTarget

NOT_IDENTITY = ("wandb", "log_every", "validate_every", "validate_tokens", "save_every", "keep_checkpoints")
"""Training settings that do not change the trained weights."""

REGRESSION_DOCUMENTS = 1000
"""Documents that drafter.init=regression looks at."""


class Run:
    """A recipe with the folders of its stages; each method runs or resumes one stage."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.folder = Path(recipe.run_dir)

    def path(self, stage: str) -> Path:
        """Folder of a stage; each way to evaluate has its own."""
        if stage == "evaluation":
            return self.folder / stage / value_hash(plain(self.recipe.eval))[:8]
        return self.folder / stage

    def require(self, stage: str) -> None:
        """Raises ValueError unless a stage ran to its end."""
        if not is_complete(self.path(stage)):
            raise ValueError(
                f"{self.path(stage)} is not complete: run that stage, or scripts/pipeline.py for all"
            )

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

    def prompts(self) -> None:
        """Reads the prompts into one normal form."""
        from slipstream.data import conversations

        conversations.run(self.recipe.data.prompts, self.path("prompts"))

    def regenerate(self) -> None:
        """Lets the target answer the prompts."""
        from slipstream.data import regenerate

        self.require("prompts")
        regenerate.run(
            self.recipe.data.regenerate,
            self.target,
            self.path("prompts"),
            self.path("regenerated"),
            self.recipe.seed,
        )

    def tokenize(self) -> None:
        """Renders the answers with the chat template and marks what the target generated."""
        from slipstream.data import tokenize

        self.require("regenerated")
        tokenize.run(
            self.recipe.data.tokenize,
            self.target,
            self.path("regenerated"),
            self.path("tokens"),
            self.recipe.data.validation_share,
        )

    def vocab_map(self) -> None:
        """Chooses the draft vocabulary from the generated tokens."""
        from slipstream.data import vocab_map

        self.require("tokens")
        vocab_map.run(
            self.geometry.draft_vocab_size, self.target, self.path("tokens"), self.path("vocab_map")
        )

    def capture(self) -> None:
        """Caches the target's hidden states."""
        from slipstream.data import capture

        self.require("tokens")
        capture.run(
            self.recipe.data.capture,
            self.target,
            self.geometry.aux_layers,
            self.path("tokens"),
            self.path("hidden_states"),
        )

    def train(self) -> None:
        """Trains the head; under torchrun every rank calls this."""
        from slipstream.train import engine, trainer

        self._prepare_data()
        stage = Stage(self.path("train"), "train", self._train_settings())
        if stage.is_complete:
            return
        device = engine.init_distributed()
        engine.deepspeed_settings(self.recipe.train, engine.world_size())
        from slipstream.data.cache import HiddenStateCache

        if engine.rank() == 0:
            stage.begin()
        frozen = self._frozen_target()
        source = HiddenStateCache(self.path("hidden_states"))
        state = trainer.fit(
            self._unroller(
                self._new_head(frozen, source),
                frozen.to(device, _torch_dtype(self.recipe.train.deepspeed.dtype.value)),
            ),
            source,
            self.recipe.train,
            frozen=frozen,
            folder=self.path("train"),
            seed=self.recipe.seed,
            device=device,
            settings=stage.settings,
        )
        if engine.rank() == 0:
            final = f"step-{state.step:07d}/head.safetensors"
            stage.complete([final], **dataclasses.asdict(state))
        engine.barrier()

    def export(self) -> None:
        """Writes the serving bundle of the newest checkpoint."""
        from slipstream.data.vocab_map import read_vocab_map
        from slipstream.scripts.bundle import write_bundle
        from slipstream.train.checkpoint import latest_checkpoint, read_head

        self.require("train")
        Stage(self.path("train"), "train", self._train_settings())  # refuses a recipe it was not trained with
        settings = {
            "target_fingerprint": self.target.fingerprint,
            "train": stage_fingerprint(self.path("train")),
            **plain(self.recipe.export),
        }
        stage = Stage(self.path("export"), "export", settings)
        if stage.is_complete:
            return
        checkpoint = latest_checkpoint(self.path("train"))
        assert checkpoint is not None, "a complete train stage has a checkpoint"
        stage.begin()
        names = write_bundle(
            self.path("export"),
            tensors=read_head(checkpoint),
            geometry=self.geometry,
            vocab_map=read_vocab_map(self.path("vocab_map")),
            target=self.target,
            recipe=self.recipe,
        )
        stage.complete(names)

    def held_out(self) -> "list[Conversation]":
        """The prompts that the head is measured on, of all suites."""
        return [prompt for prompts in self.suites().values() for prompt in prompts]

    def suites(self) -> "dict[str, list[Conversation]]":
        """The same by suite."""
        from slipstream.eval.robustness import with_variants
        from slipstream.eval.suites import load_suites

        suites = load_suites(self.recipe.eval)
        if self.recipe.eval.robustness:
            suites = with_variants(suites, self.target.config.max_position_embeddings)
        return suites

    def evaluate(self) -> "Comparison":
        """Measures the exported bundle, and what else eval.drafter names, with the built-in decoder."""
        from slipstream.eval.comparison import measure

        if uses_export(self.recipe.eval):
            self.require("export")
        config, folders = self.recipe.eval, (self.path("export"), self.path("evaluation"))
        observe = None
        if config.metrics_port:
            from slipstream.eval.metrics import Metrics

            metrics = Metrics()
            metrics.serve(config.metrics_port)
            observe = metrics.observe
        return measure(self.target, folders[0], config, self.suites(), folders[1], observe)

    def stages(self) -> dict[str, Callable[[], Any]]:
        """Every stage in order, by the name of its folder."""
        return {
            "prompts": self.prompts,
            "regenerated": self.regenerate,
            "tokens": self.tokenize,
            "vocab_map": self.vocab_map,
            "hidden_states": self.capture,
            "train": self.train,
            "export": self.export,
            "evaluation": self.evaluate,
        }

    def _prepare_data(self) -> None:
        """Runs the data stages that are missing: rank 0 works, the others wait for its files."""
        if is_main_process():
            for name in ("prompts", "regenerated", "tokens", "vocab_map", "hidden_states"):
                self.stages()[name]()
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

    def _frozen_target(self) -> "FrozenTarget":
        from slipstream.data.target.weights import read_target_head
        from slipstream.data.vocab_map import read_vocab_map
        from slipstream.train.ttt import FrozenTarget

        head, vocab_map = read_target_head(self.target), read_vocab_map(self.path("vocab_map"))
        return FrozenTarget(
            embedding_VD=head.embedding_VD,
            norm_D=head.norm_D,
            norm_eps=head.norm_eps,
            lm_head_WD=head.lm_head_VD[vocab_map.target_ids_W],
            draft_ids_V=vocab_map.draft_ids_V,
        )

    def _unroller(self, head: Any, frozen: "FrozenTarget") -> Any:
        """The module that is trained."""
        from slipstream.train.rivals import Eagle1Unroller, MedusaUnroller
        from slipstream.train.ttt import Unroller

        kind, train = self.recipe.drafter.kind, self.recipe.train
        if kind == "eagle1":
            return Eagle1Unroller(head, frozen)
        if kind == "medusa":
            return MedusaUnroller(head, frozen, survival=train.unroll.survival)
        return Unroller(head, frozen, kind=train.loss, chunk_rows=train.chunk_rows)

    def _new_head(self, frozen: "FrozenTarget", source: "HiddenStateCache") -> Any:
        from slipstream.drafters.registry import DRAFTERS
        from slipstream.train.warm_start import regression_start

        head: Any = DRAFTERS[self.recipe.drafter.kind](self.geometry)
        head.initialise(
            self.recipe.drafter.init,
            lm_head_WD=frozen.lm_head_WD.float(),
            norm_D=frozen.norm_D.float(),
            seed=self.recipe.seed,
        )
        if self.recipe.drafter.init is Init.regression and self.recipe.drafter.kind == "eagle3":
            regression_start(head, source, frozen, num_documents=REGRESSION_DOCUMENTS)
        return head


def uses_export(config: EvalConfig) -> bool:
    """Whether an entry of eval.drafter reads this run's own bundle."""
    without = ("prompt_lookup", "autoregressive")
    return any("@" not in entry and entry not in without for entry in as_list(config.drafter))


def plain(config: Any) -> dict[str, Any]:
    """A config section as JSON-able values."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
