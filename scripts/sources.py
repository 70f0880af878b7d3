"""Where training takes the target's states from, and which processes capture them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.data import capture
from slipstream.data.cache import HiddenStateCache, HiddenStateSource
from slipstream.data.config import Source, TeacherStore
from slipstream.data.files import stage_fingerprint
from slipstream.data.live import LiveSource
from slipstream.data.sizes import GIB
from slipstream.data.target.resolve import Target
from slipstream.data.tokenize import read_samples
from slipstream.eval.engines.environment import engine_python
from slipstream.recipes.schema import Recipe
from slipstream.train import engine


@dataclass(frozen=True, kw_only=True)
class States:
    """The target's states for the rows of `tokens`, on disk or made when they are read."""

    recipe: Recipe
    target: Target
    aux_layers: tuple[int, ...]
    tokens: Path
    hidden_states: Path

    def settings(self) -> dict[str, object]:
        """What the hidden_states stage is made with."""
        return capture.settings(self.recipe.data.capture, self.target, self.aux_layers, self.tokens)

    def capture(self) -> None:
        """The hidden_states stage; under torchrun every rank calls this."""
        python = self.recipe.engines.vllm_python
        capture.run(
            self.recipe.data.capture,
            self.target,
            self.aux_layers,
            self.tokens,
            self.hidden_states,
            ranks=_ranks(),
            engine_python=lambda: engine_python("vllm", python),
        )

    def sources(self) -> tuple[HiddenStateSource, HiddenStateSource]:
        """Where training reads, and where a start from the target's last states does."""
        data, model = self.recipe.data, self.target.config
        live = LiveSource(
            self.target.model,
            read_samples(self.tokens),
            self.aux_layers,
            data.capture,
            max_bytes=data.live_gib * GIB,
        )
        if data.source is Source.live:
            live.warn(model.hidden_size, model.vocab_size, data.shuffle_shards)
            return live, live
        cache = HiddenStateCache(self.hidden_states)
        return cache, cache if data.capture.teacher is TeacherStore.last_hidden else live

    def identity(self) -> Any:
        """What tells the states that training reads from all others."""
        if self.recipe.data.source is Source.cached:
            return stage_fingerprint(self.hidden_states)
        return {"source": "live", **self.settings()}


def _ranks() -> capture.Ranks | None:
    """The processes that torchrun started, if it did."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    engine.init_distributed()
    return capture.Ranks(rank=engine.rank(), world_size=engine.world_size(), barrier=engine.barrier)
