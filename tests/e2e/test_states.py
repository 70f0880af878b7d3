"""The target's states as a user handles them: cached, live, damaged, mended, made smaller."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.data.files import read_json, read_jsonl
from tests.e2e.commands import run

pytestmark = pytest.mark.slow
SETTINGS = (
    "recipe=tiny",
    "data.prompts.limit=40",
    "data.capture.dtype=bfloat16",
    "data.capture.tokens_per_forward=256",
    "data.capture.tokens_per_shard=512",
    "train.max_steps=4",
    "train.log_every=1",
    "train.epochs=2",
)


def curve(folder: Path) -> list[list[float]]:
    """Loss of every unroll step at every optimizer step."""
    rows = read_jsonl(folder / "train" / "metrics.jsonl")
    return [row["train/loss"] for row in rows if "train/loss" in row]


def head(folder: Path) -> dict[str, torch.Tensor]:
    (final,) = read_json(folder / "train" / "manifest.json")["files"]
    return load_file(folder / "train" / final)


def test_live_equals_cached_and_a_damaged_cache_is_mended(trained_target: Path, tmp_path: Path) -> None:
    cached, live, small = (tmp_path / name for name in ("cached", "live", "small"))
    settings = [*SETTINGS, f"target.name={trained_target}", f"data_dir={cached}"]

    def command(*words: str, code: int = 0) -> str:
        done = run([words[0], *words[1:], *settings], tmp_path)
        assert done.returncode == code, done.stderr
        return done.stderr

    command("train.py", f"run_dir={cached}")
    command("train.py", f"run_dir={live}", "data.source=live", "data.live_gib=0.0001")
    assert len(curve(cached)) == 4
    assert curve(live) == curve(cached)
    ours, theirs = head(live), head(cached)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    shard = cached / "hidden_states" / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    said = command("scripts/cache.py", "verify", f"run_dir={cached}", code=2)
    assert said.splitlines()[-1].startswith("error: ")
    assert "shard-00001.safetensors (" in said
    command("scripts/cache.py", "repair", f"run_dir={cached}")
    content[len(content) // 2] ^= 1
    assert shard.read_bytes() == content
    command("scripts/cache.py", "trim", f"run_dir={cached}", "data.capture.store=int8")
    command("train.py", f"run_dir={small}", "data.capture.store=int8")
    assert curve(small) != curve(cached)
    for one, other in zip(curve(small), curve(cached), strict=True):
        assert one == pytest.approx(other, rel=0.02)
