"""A toy target that trains itself in seconds: a small Llama that answers questions of a tiny grammar.

It stands in for a real instruct model where none can be downloaded and where seconds matter (the
`tiny` recipe and the tests): it has a chat template, answers what it is asked and stops.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream.data.progress import Meter

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORD = Regex(r" ?[A-Za-z]+| ?[0-9]|[^A-Za-z0-9]")
"""Digits stay single tokens, so that counting is learnable."""

PEAK_LR = 1.5e-3

COLOURS = ["red", "green", "blue", "yellow", "black", "white", "brown", "grey"]
THINGS = ["cat", "dog", "fox", "owl", "bear", "horse", "mouse", "frog", "duck", "goat"]
PLACES = ["in the old barn", "by the river", "under the bridge", "on the hill", "near the mill"]
FOODS = ["bread and honey", "apples", "fresh grass", "cheese"]


def toy_chat(rng: random.Random) -> list[dict[str, str]]:
    """One chat of the grammar, questions and answers, one or two rounds."""
    chat = []
    for _ in range(1 if rng.random() < 0.7 else 2):
        question, answer = _round(rng)
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return chat


def _round(rng: random.Random) -> tuple[str, str]:
    colour, thing = rng.choice(COLOURS), rng.choice(THINGS)
    place, food = PLACES[THINGS.index(thing) % len(PLACES)], FOODS[COLOURS.index(colour) % len(FOODS)]
    kind = rng.randrange(4)
    if kind == 0:
        return f"Where does the {colour} {thing} live?", f"The {colour} {thing} lives {place}."
    if kind == 1:
        return f"What does the {colour} {thing} eat?", f"The {colour} {thing} likes to eat {food} {place}."
    if kind == 2:
        first, last = sorted(rng.sample(range(10), 2))
        return f"Count from {first} to {last}.", " ".join(str(i) for i in range(first, last + 1)) + "."
    return (
        f"Tell me a story about a {colour} {thing}.",
        f"Once there was a {colour} {thing}. It lived {place}. Every day the {thing} ate {food}. The end.",
    )


def toy_prompts(num: int, *, seed: int = 1) -> list[dict[str, Any]]:
    """Prompt rows of the grammar in the OpenAI form, user turns only."""
    rng = random.Random(seed)
    chats = [toy_chat(rng) for _ in range(num)]
    return [{"messages": [turn for turn in chat if turn["role"] == "user"]} for chat in chats]


def toy_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the grammar, at most `vocab_size` entries (at least 259)."""
    rng = random.Random(0)
    corpus = [turn["content"] for _ in range(400) for turn in toy_chat(rng)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORD, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus, "user\n", "assistant\n", "system\n"] * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> None:
    """Trains on fresh chats of the grammar."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=0.1)
    with Meter("toy target", steps, unit="step") as meter:
        for _ in range(steps):
            texts = [tokenizer.apply_chat_template(toy_chat(rng), tokenize=False) for _ in range(4)]
            rows = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
            ids_BT = rows["input_ids"]
            logits_BTV = model(input_ids=ids_BT, attention_mask=rows["attention_mask"]).logits
            loss = functional.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1),
                ids_BT[:, 1:].flatten(),
                ignore_index=int(tokenizer.pad_token_id),
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            meter.advance(1, f"loss {loss.item():.3f}")


def save_toy(folder: Path, *, seed: int, steps: int, tokenizer_size: int = 448, **overrides: Any) -> Path:
    """Makes a toy target in the HF form in `folder`, emptied first; the same arguments give the same weights.

    Without `steps` of training the weights stay random; `overrides` are `LlamaConfig` keys.
    """
    tokenizer = toy_tokenizer(tokenizer_size)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.09,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).float()
            if steps:
                _train(model, tokenizer, steps=steps, seed=seed)
    finally:
        torch.set_num_threads(num_threads)
    model.generation_config.do_sample = False
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
