"""The toy target is reproducible and behaves like an instruct model."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.data.files import file_hash
from slipstream.data.target.toy import save_toy, toy_tokenizer
from tests.tiny import make_prompts, make_tiny_target


def test_same_seed_same_files(tmp_path: Path) -> None:
    names = ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json")
    folders = [save_toy(tmp_path / name, seed=3, steps=2) for name in "ab"]
    first, second = ([file_hash(folder / name) for name in names] for folder in folders)
    assert first == second
    other = save_toy(tmp_path / "c", seed=4, steps=2)
    assert file_hash(other / names[0]) != first[0]
    assert file_hash(other / names[1]) == first[1]


def test_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "tiny")
    (folder / "stale").touch()
    make_tiny_target(folder, seed=1)
    assert not (folder / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_markers_are_single_tokens_and_text_survives() -> None:
    tokenizer = toy_tokenizer(300)
    text = "<|im_start|>user\nCount from 2 to 9 \u00e9\u4e2d.<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.eos_token_id in ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) <= 300


def test_trained_target_answers_and_stops(trained_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained_target)
    model = AutoModelForCausalLM.from_pretrained(trained_target, dtype=torch.float32)
    answers = []
    for row in make_prompts(6):
        prompt = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0]
        assert out[-1] == tokenizer.eos_token_id
        answers.append(tokenizer.decode(out[prompt["input_ids"].shape[1] : -1]))
    assert all(answer.endswith(".") for answer in answers)
    assert len(set(answers)) > 1, "the answer does not depend on the question"
