"""Trees: the accepted branch and the distribution of the tokens against exhaustive references."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.data.target.kv_cache import PreallocatedCache
from slipstream.data.target.model import load_model
from slipstream.eval.shapes import make_tree
from slipstream.eval.tree import accept_tree_greedy, accept_tree_sampled, refuse_sliding, tree_inputs
from slipstream.eval.verify import Dice
from tests.tiny import make_tiny_target

VOCAB = 4
NUM_TREES = 200


class ReplayedDice(Dice):
    """Takes the decisions of a script, then the first of each choice; notes every choice's chances."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(None)
        self.taken: list[int] = []
        self.chances: list[list[float]] = []
        self.script = script

    def _choose(self, chances: list[float]) -> int:
        place = len(self.taken)
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        self.taken.append(self.script[place] if place < len(self.script) else possible[0])
        self.chances.append(chances)
        return self.taken[-1]

    def coin(self, chance: float) -> bool:
        chance = min(chance, 1.0)
        return self._choose([chance, 1.0 - chance]) == 0

    def token(self, probs_V: Tensor) -> int:
        return self._choose((probs_V / probs_V.sum()).tolist())


def every_outcome(accept) -> Iterator[tuple[tuple[list[int], int], float]]:  # type: ignore[no-untyped-def]
    """All results of a verification with their exact probabilities, by depth-first search."""
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        dice = ReplayedDice(script)
        result = accept(dice)
        chance = 1.0
        for taken, chances in zip(dice.taken, dice.chances, strict=True):
            chance *= chances[taken]
        yield result, chance
        for place in range(len(script), len(dice.taken)):
            for other, share in enumerate(dice.chances[place]):
                if share > 0 and other != dice.taken[place]:
                    scripts.append([*dice.taken[:place], other])


def random_parents(rng: random.Random) -> list[int]:
    parents: list[int] = []
    depth = {-1: 0}
    for place in range(rng.randint(1, 7)):
        parent = rng.choice([p for p in range(-1, place) if depth[p] < 4])
        depth[place] = depth[parent] + 1
        parents.append(parent)
    return parents


def random_probs(generator: torch.Generator, num: int) -> Tensor:
    """Rows of which some hold zeros, as top-k and top-p make them."""
    probs = torch.softmax(1.5 * torch.randn(num, VOCAB, generator=generator), -1)
    probs = probs.masked_fill(torch.rand(num, VOCAB, generator=generator) < 0.25, 0.0) + 1e-9
    probs = torch.where(probs < 1e-6, 0.0, probs)
    probs[:, 0] += (probs.sum(-1) == 0).float()
    return (probs / probs.sum(-1, keepdim=True)).double()


@pytest.mark.parametrize("seed", range(NUM_TREES))
def test_distribution_equals_the_targets(seed: int) -> None:
    """For siblings drawn without replacement and for certain ones, averaged over what is drafted."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parents = random_parents(rng)
    certain = seed % 2 == 0
    tree = make_tree(torch.tensor(parents), 4)
    target: dict[tuple[int, ...], Tensor] = {}
    draft: dict[tuple[int, ...], Tensor] = {}

    def of(table: dict[tuple[int, ...], Tensor], context: tuple[int, ...]) -> Tensor:
        if context not in table:
            table[context] = random_probs(generator, 1)[0]
        return table[context]

    emitted: dict[tuple[int, ...], float] = {}
    for ids, probs_KV, drafted in _every_draft(parents, certain, lambda context: of(draft, context)):
        texts = [_text(parents, ids, place) for place in range(len(ids))]
        target_probs_NV = torch.stack([of(target, text) for text in [(), *texts]])
        q = None if certain else torch.stack(probs_KV)

        def accept(dice: Dice, ids=ids, q=q, p=target_probs_NV) -> tuple[list[int], int]:  # type: ignore[no-untyped-def]
            return accept_tree_sampled(torch.tensor(ids), tree, q, p, dice)

        for (path, token), chance in every_outcome(accept):
            text = (*(ids[place] for place in path), token)
            assert all(parents[b] == a for a, b in itertools.pairwise([-1, *path]))
            emitted[text] = emitted.get(text, 0.0) + drafted * chance
    _compare(emitted, lambda context: of(target, context))


def _every_draft(parents, certain, of):  # type: ignore[no-untyped-def]
    """All token assignments of the tree, what each token was drawn from, and their probability."""

    def go(place: int, ids: list[int], probs: list[Tensor], chance: float):  # type: ignore[no-untyped-def]
        if place == len(parents):
            yield ids, probs, chance
            return
        parent = parents[place]
        context = _text(parents, ids, parent) if parent >= 0 else ()
        left = of(context).clone()
        for elder in range(place):
            if parents[elder] == parent:
                left[ids[elder]] = 0.0
        if certain or left.sum() == 0:
            free = [v for v in range(VOCAB) if all(ids[e] != v for e in range(place) if parents[e] == parent)]
            choice = int(left.argmax()) if left.sum() > 0 else (free or [0])[0]
            one_hot = torch.zeros(VOCAB, dtype=torch.float64)
            one_hot[choice] = 1.0
            yield from go(place + 1, [*ids, choice], [*probs, one_hot], chance)
            return
        left = left / left.sum()
        for token in left.nonzero()[:, 0].tolist():
            yield from go(place + 1, [*ids, token], [*probs, left], chance * float(left[token]))

    yield from go(0, [], [], 1.0)


def _text(parents: list[int], ids: list[int], place: int) -> tuple[int, ...]:
    text: list[int] = []
    while place >= 0:
        text.append(ids[place])
        place = parents[place]
    return tuple(reversed(text))


def _compare(emitted: dict[tuple[int, ...], float], of) -> None:  # type: ignore[no-untyped-def]
    """Every prefix of the emitted texts is as likely as the target makes it.

    A text that ends early goes on with samples of the target, so its share is spread by the target.
    """
    assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-9)
    length = max(map(len, emitted))
    for size in range(1, length + 1):
        got: dict[tuple[int, ...], float] = {}
        for text, chance in emitted.items():
            for rest, share in _continuations(text, size, of):
                got[rest] = got.get(rest, 0.0) + chance * share
        for text, chance in _continuations((), size, of):
            assert got.pop(text, 0.0) == pytest.approx(chance, abs=1e-6)
        assert sum(got.values()) < 1e-6
        if size == 3:
            break  # longer texts add nothing but time


def _continuations(text, size, of):  # type: ignore[no-untyped-def]
    if len(text) >= size:
        yield text[:size], 1.0
        return
    probs = of(text)
    for token in probs.nonzero()[:, 0].tolist():
        for rest, share in _continuations((*text, token), size, of):
            yield rest, share * float(probs[token])


@pytest.mark.parametrize("seed", range(NUM_TREES))
def test_greedy_path_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    parents = random_parents(rng)
    ids = [rng.randrange(VOCAB) for _ in parents]
    while any(
        ids[a] == ids[b] and parents[a] == parents[b] for a, b in itertools.combinations(range(len(ids)), 2)
    ):
        ids = [rng.randrange(VOCAB + 4) for _ in parents]
    targets = [rng.randrange(VOCAB) for _ in range(len(ids) + 1)]
    tree = make_tree(torch.tensor(parents), 4)
    path, token = accept_tree_greedy(torch.tensor(ids), tree, torch.tensor(targets))
    best: list[int] = []
    for place in range(len(ids)):
        chain = []
        at = place
        while at >= 0:
            chain.insert(0, at)
            at = parents[at]
        wanted = [targets[0], *(targets[node + 1] for node in chain[:-1])]
        if [ids[node] for node in chain] == wanted and len(chain) > len(best):
            best = chain
    assert path == best
    assert token == targets[best[-1] + 1 if best else 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = make_tiny_target(
        tmp_path_factory.mktemp("target") / "tiny", tie=False, initializer_range=0.3, vocab=300
    )
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_each_node_is_verified_as_if_it_were_alone(model: PreTrainedModel) -> None:
    """Logits under the tree mask equal those of each branch in a pass of its own, also after a commit."""
    prompt, ids = [1, 17, 5, 80], [9, 30, 30, 44, 101, 7]
    parents = [-1, -1, 0, 0, 3, 1]
    tree = make_tree(torch.tensor(parents), 3)
    cache = PreallocatedCache(8, 64)
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt[:-1]]), cache=cache, use_cache=True)
        inputs = tree_inputs(tree, 3, torch.float32)
        input_ids = torch.tensor([[prompt[-1], *ids]])
        logits_NV = model(input_ids=input_ids, cache=cache, use_cache=True, **inputs).logits[0]
        for place in range(len(ids)):
            alone = torch.tensor([[*prompt, *_text(parents, ids, place)]])
            expected = model(input_ids=alone, use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits_NV[place + 1], expected, atol=1e-4, rtol=1e-4)
        before = cache.layers[0].keys.data_ptr()
        cache.keep_tail(4, [0, 3, 4])
        assert cache.layers[0].keys.data_ptr() == before
        assert cache.get_seq_length() == 7
        after = model(input_ids=torch.tensor([[55]]), cache=cache, use_cache=True).logits[0, -1]
        whole = torch.tensor([[*prompt, 9, 44, 101, 55]])
        expected = model(input_ids=whole, use_cache=False).logits[0, -1]
        torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, MistralConfig

    refuse_sliding(LlamaConfig())
    with pytest.raises(ValueError, match="sliding-window"):
        refuse_sliding(MistralConfig(sliding_window=8))
