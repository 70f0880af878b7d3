"""Disk and memory of a run, from the recipe before it begins and from its stages as they are complete."""

from typing import TYPE_CHECKING

import torch

from slipstream.data.cache import STORAGE_DTYPES
from slipstream.data.capture import estimate_bytes
from slipstream.data.choosing import load_prompts
from slipstream.data.config import Dtype, PromptsConfig
from slipstream.data.conversations import source_files
from slipstream.data.files import is_complete, read_manifest
from slipstream.data.template import RefusedError, render_prompt
from slipstream.drafters.registry import DRAFTERS
from slipstream.train.checkpoint import BYTES_PER_WEIGHT

if TYPE_CHECKING:
    from slipstream.data.types import Conversation
    from slipstream.scripts.stages import Run

NUM_MEASURED = 100
"""Prompts whose length is counted."""
STATE_BYTES = 8
"""Of a weight in float32, weight and gradient; bfloat16 has two copies, of half the size, and a master."""
MOMENT_BYTES = 8
"""Of a weight; ZeRO-1 and 2 share them among the ranks."""
LAYER_STATES = 14
"""Vectors of the hidden size that backward needs of a row and an unroll step, beside the MLP's."""


def num_weights(run: "Run") -> int:
    """Of the head."""
    with torch.device("meta"):
        head: torch.nn.Module = DRAFTERS[run.recipe.drafter.kind](run.geometry)
    return sum(parameter.numel() for parameter in head.parameters())


def local_prompts(run: "Run") -> "list[Conversation]":
    """The recipe's prompts where they are files, else our own held-out ones."""
    config = run.recipe.data.prompts
    if any(source_files(source.path) is None for source in config.sources()):
        config = PromptsConfig(paths=["builtin:heldout"])
    return load_prompts(config)


def disk_bytes(run: "Run") -> tuple[int, str]:
    """What the stages that are not complete will write at most, and how that is known."""
    recipe = run.recipe
    kept = 0
    if not is_complete(run.path("train")):
        kept = (recipe.train.keep_checkpoints + 1) * num_weights(run) * BYTES_PER_WEIGHT
    if is_complete(run.path("hidden_states")):
        return kept, "checkpoints"
    num_tokens, num_supervised, source = _num_tokens(run)
    itemsize = STORAGE_DTYPES[recipe.data.capture.dtype].itemsize
    geometry = run.geometry
    cache = estimate_bytes(
        num_tokens, num_supervised, len(geometry.aux_layers), geometry.hidden_size, itemsize
    )
    return kept + cache, f"checkpoints, and hidden states of {source}"


def _num_tokens(run: "Run") -> tuple[int, int, str]:
    """Tokens of all documents, how many of them are supervised, and where the numbers come from."""
    data = run.recipe.data
    if is_complete(run.path("tokens")):
        facts = read_manifest(run.path("tokens"))["facts"]
        return facts["tokens"], facts["supervised_tokens"], f"{facts['tokens']:,} tokens"
    prompts, is_local = local_prompts(run), all(source_files(path) is not None for path in data.prompts.paths)
    lengths = [_length(run, prompt) for prompt in prompts[:NUM_MEASURED]]
    num_prompts = len(prompts) if is_local else data.prompts.limit
    source = f"{num_prompts:,} prompts with full answers"
    if is_complete(run.path("prompts")):
        num_prompts = read_manifest(run.path("prompts"))["facts"]["kept"]
        source = f"{num_prompts:,} prompts with full answers"
    elif not num_prompts:
        source = "a data set whose size is known after the prompts stage"
    longest = data.tokenize.max_length
    documents = [(min(n + data.regenerate.max_new_tokens, longest), n) for n in lengths]
    total = sum(whole for whole, _ in documents)
    supervised = sum(max(whole - n, 0) for whole, n in documents)
    factor = num_prompts * len(data.regenerate.samples) / len(documents)
    return round(total * factor), round(supervised * factor), source


def _length(run: "Run", prompt: "Conversation") -> int:
    """Tokens of a rendered prompt; none where the template refuses it, as it is left out later."""
    try:
        return len(render_prompt(run.target.tokenizer(), prompt.messages))
    except RefusedError:
        return 0


def target_bytes(run: "Run") -> float:
    """The target's weights and the keys and values of a full batch of answers."""
    target, regenerate = run.target, run.recipe.data.regenerate
    model = target.config
    stored = model.dtype.itemsize if isinstance(model.dtype, torch.dtype) else 4
    size = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
    heads = model.num_key_value_heads or model.num_attention_heads
    head_dim = run.geometry.head_dim
    row = 2 * model.num_hidden_layers * heads * head_dim * target.dtype.itemsize
    length = min(regenerate.max_prompt_tokens + regenerate.max_new_tokens, model.max_position_embeddings)
    cache: float = regenerate.batch_size * length * row
    return cache + size * target.dtype.itemsize / stored


def training_bytes(run: "Run", num_ranks: int) -> float:
    """Weights and optimizer, the target's frozen tensors, one pack and its unroll."""
    train, geometry = run.recipe.train, run.geometry
    itemsize = 4 if train.deepspeed.dtype is Dtype.float32 else 2
    shared = num_ranks if train.deepspeed.zero_stage else 1
    weights = num_weights(run) * (STATE_BYTES + MOMENT_BYTES / shared)
    frozen = (geometry.vocab_size + geometry.draft_vocab_size) * geometry.hidden_size * itemsize
    states = (len(geometry.aux_layers) + 1) * geometry.hidden_size
    step = LAYER_STATES * geometry.hidden_size + 3 * geometry.intermediate_size
    pack = train.tokens_per_pack * itemsize * (states + train.unroll.num_steps * step)
    return weights + frozen + pack + 3 * (train.loss.chunk_mib << 20)
