"""The decoder that training is given counts what the exported head gives."""

from pathlib import Path

import pytest
import torch

from slipstream.data.config import TargetConfig
from slipstream.data.target.resolve import resolve_target
from slipstream.data.template import stop_token_ids
from slipstream.drafters.config import DrafterConfig, Init, resolve_geometry
from slipstream.drafters.registry import DRAFTERS
from slipstream.eval.decoder import SpeculativeDecoder
from slipstream.eval.drafters.eagle import load_eagle
from slipstream.eval.verify import Sampling
from slipstream.scripts.selecting import HeadDecoder
from slipstream.train.config import SelectionConfig
from tests.heads import write_export

PROMPT = [1, 17, 5, 80, 44, 3, 100]
CONFIG = SelectionConfig(every=1, num_draft_tokens=2, max_new_tokens=12)
LAYERS = {"eagle3": [2, 4, 5], "eagle1": [8], "medusa": [8]}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_kind_of_head(kind: str, tiny_target: Path, tmp_path: Path) -> None:
    target = resolve_target(TargetConfig(name=str(tiny_target)))
    config = DrafterConfig(kind=kind, aux_layers=LAYERS[kind], init=Init.random, num_heads=2)
    geometry = resolve_geometry(config, target.config.to_dict())
    head = DRAFTERS[kind](geometry)
    size = (geometry.vocab_size, geometry.hidden_size)
    head.initialise(Init.random, lm_head_WD=torch.zeros(size), norm_D=torch.ones(size[1]), seed=0)
    target_ids_W = torch.arange(geometry.vocab_size)
    make = HeadDecoder(CONFIG, target, target_ids_W)
    rounds, accepted = make(head)(PROMPT)
    assert 11 - 2 <= rounds + accepted <= 11, "twelve tokens, the first of which needs no round"
    if kind == "eagle3":
        drafter = load_eagle(target, write_export(tmp_path, head, target_ids_W))
        decoder = SpeculativeDecoder(
            target.model(), drafter, num_draft_tokens=2, sampling=Sampling(), stop_ids=stop_token_ids(target)
        )
        exported = decoder.generate(PROMPT, 12).rounds
        assert (rounds, accepted) == (len(exported), sum(r.accepted for r in exported))
        with torch.no_grad():
            head.lm_head.weight.zero_()
            head.lm_head.weight[7] = head.norm.weight  # now it always drafts token 7
        assert make(head)(PROMPT) != (rounds, accepted) or accepted == 0, "the present weights are taken"
