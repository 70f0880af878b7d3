"""Decoding equals plain decoding whatever is drafted, and the head is fed as a server feeds it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.data.target.model import load_model
from slipstream.drafters.config import DrafterConfig, Init, resolve_geometry
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.layers import DraftCache
from slipstream.eval.decoder import DecodeResult, Round, SpeculativeDecoder
from slipstream.eval.drafters.eagle import EagleDrafter
from slipstream.eval.drafting import Draft, Drafter
from slipstream.eval.verify import Sampling
from tests.tiny import make_tiny_target

PROMPT = [1, 17, 5, 80, 44, 3, 100]
GREEDY = Sampling()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = make_tiny_target(
        tmp_path_factory.mktemp("target") / "tiny", tie=False, initializer_range=0.3, vocab=300
    )
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def decode(
    model: PreTrainedModel,
    drafter: Drafter,
    num_draft_tokens: int,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
) -> DecodeResult:
    decoder = SpeculativeDecoder(
        model, drafter, num_draft_tokens=num_draft_tokens, sampling=GREEDY, stop_ids=stop_ids
    )
    return decoder.generate(PROMPT, max_new_tokens)


def plain_greedy(model: PreTrainedModel, num: int) -> list[int]:
    """Without any cache."""
    ids = list(PROMPT)
    for _ in range(num):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


class ScriptedDrafter:
    """Drafts what `script` makes of the reference answer's next tokens."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, reference: Sequence[int], script: Callable[[list[int]], list[int]]) -> None:
        self.reference, self.script = [*reference, *[0] * 8], script

    def start(
        self, prompt_ids: Sequence[int], capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        self.num_generated = 1 - len(prompt_ids)

    def propose(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor], num_tokens: int) -> Draft:
        self.num_generated += len(next_ids_T)
        coming = self.reference[self.num_generated : self.num_generated + num_tokens]
        return Draft(ids_K=torch.tensor(self.script(coming)))


def perfect(coming: list[int]) -> list[int]:
    return coming


def adversarial(coming: list[int]) -> list[int]:
    return [(token + 1) % 300 for token in coming]


def mixed(coming: list[int]) -> list[int]:
    keep = torch.rand(len(coming), generator=torch.Generator().manual_seed(sum(coming))) < 0.7
    return [token if kept else 7 for token, kept in zip(coming, keep.tolist(), strict=True)]


def last_wrong(coming: list[int]) -> list[int]:
    return [*coming[:-1], (coming[-1] + 1) % 300]


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> list[int]:
    answer = plain_greedy(model, 31)
    assert len(set(answer)) > 8, "an answer that repeats itself proves little"
    return answer


def test_autoregressive_equals_decoding_without_cache(model: PreTrainedModel, reference: list[int]) -> None:
    result = decode(model, ScriptedDrafter(reference, perfect), 0, 31)
    assert list(result.token_ids) == reference
    assert result.rounds == (Round(drafted=0, accepted=0),) * 30


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("script", [perfect, adversarial, mixed, last_wrong])
def test_greedy_identity(
    model: PreTrainedModel,
    reference: list[int],
    script: Callable[[list[int]], list[int]],
    num_draft_tokens: int,
) -> None:
    result = decode(model, ScriptedDrafter(reference, script), num_draft_tokens, 31)
    assert list(result.token_ids) == reference
    assert 1 + sum(r.accepted + 1 for r in result.rounds) == 31
    if script is adversarial:
        assert all(r.accepted == 0 for r in result.rounds)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 5])
def test_perfect_drafts_give_k_plus_one_tokens_a_round(
    model: PreTrainedModel, reference: list[int], num_draft_tokens: int
) -> None:
    result = decode(model, ScriptedDrafter(reference, perfect), num_draft_tokens, 31)  # 30 = n * (K + 1)
    full = Round(drafted=num_draft_tokens, accepted=num_draft_tokens)
    assert result.rounds == (full,) * (30 // (num_draft_tokens + 1))


@pytest.mark.parametrize("script", [perfect, mixed, last_wrong])
def test_stop_token_ends_the_answer_inside_an_accepted_run(
    model: PreTrainedModel, reference: list[int], script: Callable[[list[int]], list[int]]
) -> None:
    for position in range(10, 18):
        stop = reference[position]
        expected = reference[: reference.index(stop) + 1]
        for num in (2, 4):
            result = decode(model, ScriptedDrafter(reference, script), num, 31, stop_ids=[stop])
            assert list(result.token_ids) == expected
            tokens = 1 + sum(r.accepted + 1 for r in result.rounds)
            assert tokens - len(expected) in (0, 1)  # no own token behind an accepted stop token


def test_drafts_behind_a_stop_token_do_not_count(model: PreTrainedModel, reference: list[int]) -> None:
    first = next(i for i in range(2, 31) if reference.index(reference[i]) == i)
    result = decode(model, ScriptedDrafter(reference, perfect), 30, 31, stop_ids=[reference[first]])
    assert result.rounds == (Round(drafted=first, accepted=first),)


def test_limit_is_never_exceeded(model: PreTrainedModel, reference: list[int]) -> None:
    for limit in range(1, 9):
        result = decode(model, ScriptedDrafter(reference, perfect), 5, limit)
        assert list(result.token_ids) == reference[:limit]


def test_too_long_for_the_positions(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="eval.max_new_tokens=1020 exceed the target's 1024 positions"):
        decode(model, ScriptedDrafter([], perfect), 0, 1020)


def make_head(model: PreTrainedModel, draft_vocab_size: int = 0, **flags: bool) -> Eagle3Head:
    config = DrafterConfig(aux_layers=[1, 4, 8], draft_vocab_size=draft_vocab_size, **flags)  # type: ignore[arg-type]
    head = Eagle3Head(resolve_geometry(config, model.config.to_dict())).eval().requires_grad_(False)
    head.initialise(Init.random, lm_head_WD=torch.empty(0), norm_D=torch.empty(0), seed=3)
    for weight in head.parameters():
        weight.mul_(8)  # else the hidden half is too weak to change a draft
    return head


class Recorder:
    """Notes what the head drafts and has the target verify something else."""

    def __init__(self, eagle: EagleDrafter, scripted: ScriptedDrafter) -> None:
        self.eagle, self.scripted, self.aux_layers = eagle, scripted, eagle.aux_layers
        self.noted: list[tuple[list[int], list[int]]] = []

    def start(
        self, prompt_ids: Sequence[int], capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        self.eagle.start(prompt_ids, capacity, sampling, generator)
        self.scripted.start(prompt_ids, capacity, sampling, generator)
        self.tokens = list(prompt_ids[:1])

    def propose(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor], num_tokens: int) -> Draft:
        self.tokens += next_ids_T.tolist()
        draft = self.eagle.propose(next_ids_T, aux_LTD, num_tokens)
        self.noted.append((list(self.tokens), draft.ids_K.tolist()))
        return self.scripted.propose(next_ids_T, aux_LTD, num_tokens)


def boundary_states(model: PreTrainedModel, ids: list[int], boundaries: Sequence[int]) -> Tensor:
    """States [T, L, D], read from the layers' outputs and not from their inputs."""
    outputs = [model.get_input_embeddings()(torch.tensor([ids]))]
    handles = [
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out))
        for layer in model.get_decoder().layers  # type: ignore[union-attr]
    ]
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([outputs[boundary][0] for boundary in boundaries], dim=1)


def plain_drafts(
    model: PreTrainedModel, head: Eagle3Head, target_ids_W: Tensor, tokens: list[int], num: int
) -> list[int]:
    """Drafts behind `tokens` with everything computed anew for each of them."""
    embedding = model.get_input_embeddings()
    hidden_TD = head.fuse(boundary_states(model, tokens[:-1], head.geometry.aux_layers))
    following, drafts = tokens[1:], []
    while len(drafts) < num:
        rows = len(following)
        cache = DraftCache(1, rows, head.geometry, torch.device("cpu"), torch.float32)
        carried, final = head(
            embedding(torch.tensor([following])), hidden_TD[None], torch.arange(rows)[None], cache
        )
        drafts.append(int(target_ids_W[head.logits(final[0, -1]).argmax()]))
        following = [*following, drafts[-1]]
        hidden_TD = torch.cat([hidden_TD, carried[0, -1:]])
    return drafts


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (0, {}),
        (50, {"fc_norm": True, "norm_output": True}),
        (50, {"norm_before_fc": True, "norm_before_residual": True}),
    ],
)
def test_head_drafts_as_without_caches(
    model: PreTrainedModel, reference: list[int], size: int, flags: dict[str, bool]
) -> None:
    head = make_head(model, size, **flags)
    every = torch.arange(model.config.vocab_size)
    target_ids_W = every[::6][:50] if size else every
    eagle = EagleDrafter(head, model.get_input_embeddings().weight, target_ids_W)  # type: ignore[arg-type]
    recorder = Recorder(eagle, ScriptedDrafter(reference, mixed))
    result = decode(model, recorder, 4, 31)
    assert list(result.token_ids) == reference
    accepted = {r.accepted for r in result.rounds}
    assert {0, 4} < accepted, "rounds of every kind: none, some and all accepted"
    for tokens, drafts in recorder.noted:
        assert drafts == plain_drafts(model, head, target_ids_W, tokens, len(drafts))
    assert len({token for _, drafts in recorder.noted for token in drafts}) > 5


def test_sampled_answers_have_the_target_distribution(tmp_path: Path) -> None:
    """Three tokens, two candidates each, through caches, vocabulary map and head."""
    folder = make_tiny_target(tmp_path / "tiny", num_layers=2, tie=False, initializer_range=0.15)
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    sampling = Sampling(temperature=1.0, top_k=2)
    config = DrafterConfig(aux_layers=[1, 2], draft_vocab_size=5)
    head = Eagle3Head(resolve_geometry(config, model.config.to_dict())).eval().requires_grad_(False)

    def next_probs(answer: list[int]) -> Tensor:
        logits = model(input_ids=torch.tensor([[*PROMPT, *answer]]), use_cache=False).logits[0, -1]
        return sampling.probs(logits)

    expected = {(): 1.0}
    for _ in range(4):
        expected = {
            (*answer, token): share * float(next_probs(list(answer))[token])
            for answer, share in expected.items()
            for token in next_probs(list(answer)).nonzero()[:, 0].tolist()
        }
    likely = sorted({token for answer in expected for token in answer[1:]})[:5]
    target_ids_W = torch.tensor(likely)  # the drafter knows some of the answers only
    head.lm_head.weight.zero_()  # uniform drafts: with five tokens and top_k=2 still wrong and right ones
    eagle = EagleDrafter(head, model.get_input_embeddings().weight, target_ids_W)  # type: ignore[arg-type]
    decoder = SpeculativeDecoder(model, eagle, num_draft_tokens=2, sampling=sampling, stop_ids=[])
    generator = torch.Generator().manual_seed(5)
    trials, accepted, counts = 300, 0, dict.fromkeys(expected, 0)
    for _ in range(trials):
        result = decoder.generate(PROMPT, 4, generator)
        counts[result.token_ids] += 1
        accepted += sum(r.accepted for r in result.rounds)
    assert accepted > 20
    wanted = [share * trials for share in expected.values()]
    scale = trials / sum(wanted)
    assert chisquare(list(counts.values()), [w * scale for w in wanted]).pvalue > 0.01
