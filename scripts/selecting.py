"""Brings the decoder to the training loop, which knows none: heads are chosen by what they decode."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slipstream.data.cache import HiddenStateSource
from slipstream.data.target.resolve import Target
from slipstream.data.template import stop_token_ids
from slipstream.data.vocab_map import read_vocab_map
from slipstream.eval.decoder import SpeculativeDecoder
from slipstream.eval.drafters.eagle1 import target_head_on_device
from slipstream.eval.drafters.live import make_drafter
from slipstream.eval.verify import Sampling
from slipstream.train.config import SelectionConfig
from slipstream.train.selection import DecodePrompt, Selection, validation_prompts

if TYPE_CHECKING:
    from slipstream.scripts.stages import Run


def make_selection(run: "Run", source: HiddenStateSource) -> Selection:
    """The measurements of a training run; the target is loaded now, so that it is known to fit."""
    config, target, folder = run.recipe.train.selection, run.target, run.path("train")
    if config.every == 0:
        return Selection(config, folder)
    longest = target.config.max_position_embeddings - config.max_new_tokens
    prompts = validation_prompts(source, config.num_prompts, longest=longest)
    target_ids_W = read_vocab_map(run.path("vocab_map")).target_ids_W
    return Selection(config, folder, prompts, HeadDecoder(config, target, target_ids_W))


class HeadDecoder:
    """The built-in decoder with a copy of a head in training: see `slipstream.train.selection.Decode`."""

    def __init__(self, config: SelectionConfig, target: Target, target_ids_W: Tensor) -> None:
        """Loads the target."""
        self._config, self._target = config, target
        self._model, self._stop_ids = target.model(), stop_token_ids(target)
        self._target_head = target_head_on_device(target)
        self._target_ids_W = target_ids_W.to(target.device)
        self._copy: Any = None

    def __call__(self, head: Any) -> DecodePrompt:
        """Takes the present weights, in the type in which the target runs."""
        if self._copy is None:
            self._copy = type(head)(head.geometry).to(self._target.device, self._target.dtype).eval()
        self._copy.load_state_dict(head.state_dict())
        decoder = SpeculativeDecoder(
            self._model,
            make_drafter(self._copy, self._target_head, self._target_ids_W),
            num_draft_tokens=self._config.num_draft_tokens,
            sampling=Sampling(),
            stop_ids=self._stop_ids,
        )

        def decode(prompt_ids: Sequence[int]) -> tuple[int, int]:
            rounds = decoder.generate(prompt_ids, self._config.max_new_tokens).rounds
            return len(rounds), sum(r.accepted for r in rounds)

        return decode
