"""A small target and heads of every form trained on it in seconds, for real engines to serve."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.data.batches import align, pack
from slipstream.data.config import TargetConfig
from slipstream.data.states import capture_batch
from slipstream.data.target.resolve import Target, resolve_target
from slipstream.data.target.toy import toy_chat, toy_prompts
from slipstream.data.target.weights import read_target_head
from slipstream.data.template import ChatTemplate, stop_token_ids
from slipstream.data.types import Conversation, GeneratedConversation, HiddenStateSample, Message
from slipstream.drafters.checkpoint_format import CONFIG as CONFIG_FILE
from slipstream.drafters.checkpoint_format import WEIGHTS, write_weights
from slipstream.drafters.config import DrafterConfig, DraftGeometry, Init, resolve_geometry
from slipstream.drafters.eagle1 import eagle1_config
from slipstream.drafters.medusa import medusa_config, medusa_tensors
from slipstream.drafters.registry import DRAFTERS
from slipstream.eval.config import EvalConfig
from slipstream.eval.drafters.registry import make_contender
from slipstream.eval.engines.replay import Replay, decode
from slipstream.train.config import LossConfig, UnrollConfig
from slipstream.train.rivals import Eagle1Unroller, MedusaUnroller
from slipstream.train.ttt import FrozenTarget, Unroller, plan_unroll
from tests.heads import write_export

NUM_DOCUMENTS, NUM_STEPS, DOCUMENTS_PER_STEP = 64, 40, 16
CONFIG = EvalConfig(num_draft_tokens=3, max_new_tokens=40)
UNROLLERS: dict[str, Any] = {
    "eagle3": lambda head, frozen: Unroller(head, frozen, LossConfig()),
    "eagle1": Eagle1Unroller,
    "medusa": lambda head, frozen: MedusaUnroller(head, frozen, survival=1.0),
}


class SmallTarget:
    """The target with everything that heads are trained from."""

    def __init__(self, folder: Path) -> None:
        self.target: Target = resolve_target(TargetConfig(name=str(folder)))
        self.model = self.target.model()
        self.num_layers: int = self.target.config.num_hidden_layers
        self._head = read_target_head(self.target)

    @functools.cached_property
    def documents(self) -> list[HiddenStateSample]:
        """Chats of the target's grammar with the states at every boundary but the first."""
        import random

        rng = random.Random(3)
        template = ChatTemplate(self.target.tokenizer(), stop_token_ids(self.target), on_inserted="stop")
        samples = []
        for number in range(NUM_DOCUMENTS):
            messages = tuple(Message(**turn) for turn in toy_chat(rng))
            samples += template.views(
                GeneratedConversation(id=str(number), prompt_id=str(number), messages=messages)
            )
        return capture_batch(self.model, samples, tuple(range(1, self.num_layers + 1)), torch.float32)

    def conversations(self, num: int) -> list[Conversation]:
        """Prompts that no head has seen."""
        rows = toy_prompts(num, seed=77)
        return [
            Conversation(id=str(i), messages=tuple(Message(**turn) for turn in row["messages"]))
            for i, row in enumerate(rows)
        ]

    def geometry(self, **settings: Any) -> DraftGeometry:
        """What a recipe's `drafter` section gives for this target."""
        return resolve_geometry(DrafterConfig(**settings), self.target.config.to_dict())

    def frozen(self, target_ids_W: torch.Tensor) -> FrozenTarget:
        """The target's tensors for a draft vocabulary."""
        draft_ids_V = torch.full((self.target.config.vocab_size,), -1)
        draft_ids_V[target_ids_W] = torch.arange(target_ids_W.numel())
        head = self._head
        return FrozenTarget(
            embedding_VD=head.embedding_VD,
            norm_D=head.norm_D,
            norm_eps=head.norm_eps,
            lm_head_WD=head.lm_head_VD[target_ids_W],
            draft_ids_V=draft_ids_V,
        )

    def draft_vocabulary(self, size: int) -> torch.Tensor:
        """The most frequent tokens of the documents, ascending."""
        ids = torch.cat([d.input_ids_T for d in self.documents])
        counts = torch.bincount(ids, minlength=self.target.config.vocab_size)
        return counts.argsort(descending=True, stable=True)[:size].sort().values

    def train(self, geometry: DraftGeometry, kind: str, *, seed: int = 0) -> tuple[Any, torch.Tensor]:
        """A head with some skill and with norms far from one, and its draft vocabulary."""
        ids_W = self.draft_vocabulary(geometry.draft_vocab_size)
        frozen = self.frozen(ids_W)
        head: Any = DRAFTERS[kind](geometry)
        head.initialise(Init.target, lm_head_WD=frozen.lm_head_WD, norm_D=frozen.norm_D, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.dim() == 1:
                    parameter *= 1 + 0.3 * torch.randn(parameter.shape, generator=generator)
        chosen = torch.tensor(geometry.aux_layers) - 1
        documents = [dataclasses.replace(d, aux_TLD=d.aux_TLD[:, chosen]) for d in self.documents]
        unroller = UNROLLERS[kind](head, frozen)
        optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, betas=(0.9, 0.95))
        unroll = UnrollConfig(num_steps=3)
        for step in range(NUM_STEPS):
            order = torch.randperm(len(documents), generator=generator)[:DOCUMENTS_PER_STEP]
            batch = pack([align(documents[i], seed=seed, epoch=step) for i in order.tolist()])
            plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=unroll, chunk_rows=1024)
            output = unroller(batch, plan, 0.8 ** torch.arange(3.0) / plan.count_K[0].item())
            optimizer.zero_grad()
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimizer.step()
        return head.eval(), ids_W

    def export(self, folder: Path, **settings: Any) -> Path:
        """Trains a head of these settings and writes its bundle."""
        engines, kind = settings.pop("engines"), settings.get("kind", "eagle3")
        head, ids_W = self.train(self.geometry(**settings), kind)
        if kind == "eagle3":
            return write_export(folder, head, ids_W, engines=engines)
        dtype, tensors = torch.float32, head.state_dict()
        if kind == "eagle1":
            config = eagle1_config(head.geometry, bos=0, eos=[1, 2], dtype=dtype)
        else:
            config = medusa_config(head.geometry, dtype=dtype)
            tensors = medusa_tensors(tensors, ids_W, head.geometry.vocab_size)
        folder.mkdir()
        write_weights(folder / WEIGHTS, tensors)
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        return folder

    def decode(self, export: Path, conversations: Sequence[Conversation]) -> Replay:
        """What the built-in decoder makes of an export."""
        made = make_contender("head", target=self.target, export=export, config=CONFIG)
        return decode(self.target, self.model, made.drafter, CONFIG, conversations)
