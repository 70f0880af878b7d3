"""Small targets for the tests."""

from pathlib import Path
from typing import Any

from slipstream.data.target.toy import save_toy, toy_prompts


def make_tiny_target(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 8,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    vocab: int = 300,
    tie: bool = True,
    steps: int = 0,
    **overrides: Any,
) -> Path:
    """A small Llama with random weights (trained for `steps`) in the HF form.

    `vocab` limits the tokenizer; pass `vocab_size` among the overrides for a padded model vocabulary.
    """
    return save_toy(
        folder,
        seed=seed,
        steps=steps,
        tokenizer_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tie,
        **overrides,
    )


def train_tiny_target(folder: Path, *, steps: int = 200, seed: int = 0) -> Path:
    """The same model after a few seconds of training: it answers grammar questions and stops."""
    return make_tiny_target(folder, seed=seed, steps=steps, vocab=448)


def make_prompts(num: int) -> list[dict[str, Any]]:
    """Rows with `messages` for the grammar of the trained target."""
    return toy_prompts(num)
