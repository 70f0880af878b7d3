"""Push to a hub on loopback that fails, pull from it, and what must never be sent."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from slipstream.data import hub as client
from slipstream.data.types import VocabMap
from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS
from slipstream.drafters.config import Init
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.scripts import hub
from slipstream.scripts.bundle import write_bundle
from slipstream.scripts.card import CARD
from slipstream.scripts.pipeline import pipeline
from slipstream.scripts.stages import Run
from tests.fake_hub import TOKEN, Hub, running_hub
from tests.unit.scripts.test_stages import tiny

FILES = [CARD, CONFIG, WEIGHTS]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that everything here talks to."""
    constants = huggingface_hub.constants
    with running_hub() as running:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(client, "WAITS", (0.0, 0.0, 0.0))
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", running.url)
        yield running


@pytest.fixture(scope="module")
def exported(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with an export and its measurement; tests copy what they change."""
    folder = tmp_path_factory.mktemp("pushed")
    run = make_run(tiny_target, folder)
    head = Eagle3Head(run.geometry)
    head.initialise(Init.random, lm_head_WD=torch.empty(0), norm_D=torch.empty(0), seed=0)
    t2d_V = torch.arange(run.geometry.vocab_size) < run.geometry.draft_vocab_size
    write_bundle(
        folder / "made",
        tensors=head.state_dict(),
        geometry=run.geometry,
        vocab_map=VocabMap(d2t_W=torch.zeros(run.geometry.draft_vocab_size, dtype=torch.int64), t2d_V=t2d_V),
        target=run.target,
        recipe=run.recipe,
    )
    hub.pull(make_run(tiny_target, folder, f"pull={folder / 'made'}"))
    run.run("evaluation")
    return folder


def make_run(target: Path, folder: Path, *overrides: str) -> Run:
    settings = ("eval.limit=2", "eval.max_new_tokens=8", "export.target_id=org/target", *overrides)
    return Run(tiny(folder, f"target.name={target}", *settings))


def pushing(target: Path, folder: Path, *overrides: str) -> Run:
    return make_run(target, folder, "push=org/head", *overrides)


def test_a_hub_that_fails_twice_gets_one_commit(fake: Hub, tiny_target: Path, exported: Path) -> None:
    fake.fail_commits = 2
    hub.push(pushing(tiny_target, exported))
    assert fake.commits == [sorted(FILES)]
    assert fake.files == {name: (exported / "export" / name).read_bytes() for name in FILES}
    assert fake.uploads == 1, "the weights are sent once"
    hub.push(pushing(tiny_target, exported))
    assert len(fake.commits) == 1, "nothing has changed"


def test_a_lost_answer_makes_no_second_commit(fake: Hub, tiny_target: Path, exported: Path) -> None:
    fake.lose_answers = 1
    hub.push(pushing(tiny_target, exported))
    assert fake.commits == [sorted(FILES)]


def test_a_dead_hub_is_told_and_the_same_command_goes_on(
    fake: Hub, tiny_target: Path, exported: Path
) -> None:
    fake.fail_commits = 99
    with pytest.raises(ValueError, match="push=org/head: the hub does not answer .* same command again"):
        hub.push(pushing(tiny_target, exported))
    fake.fail_commits = 0
    hub.push(pushing(tiny_target, exported))
    assert (len(fake.commits), fake.uploads) == (1, 1)


def test_a_dry_run_sends_nothing(
    fake: Hub, tiny_target: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.push(pushing(tiny_target, exported, "push_dry_run=true"))
    assert (fake.created, fake.commits, fake.objects) == ([], [], {})
    printed = capsys.readouterr().err
    assert all(f"would send {name}, " in printed for name in FILES)


def test_the_card_has_the_measurement(fake: Hub, tiny_target: Path, exported: Path) -> None:
    hub.push(pushing(tiny_target, exported))
    card = fake.files[CARD].decode()
    report = json.loads(next(exported.glob("evaluation/*/acceptance.json")).read_text())
    overall = report["drafters"]["head"]["overall"]
    row = f"| head | all | 3 | 2 | {overall['rounds']} | {overall['tau']:.3f} | {overall['low']:.3f} - "
    assert row in card
    for words in (
        "base_model: org/target",
        "recipe `tiny`",
        "data | the target's own answers to `builtin:toy`",
        "the loading rules of vllm 0.32.0, the loading rules of sglang 0.5.23",
        '"model": "org/head", "num_speculative_tokens": 3',
        "--speculative-draft-model-path org/head",
        "python scripts/export.py recipe=tiny pull=org/head",
    ):
        assert words in card
    assert str(exported) not in card
    assert "PATH_OR_ID" not in card
    hub.push(pushing(tiny_target, exported, "eval.max_new_tokens=9"))
    assert "has not been measured" in fake.files[CARD].decode(), "with these settings"


def test_pull_gives_the_same_bytes(fake: Hub, tiny_target: Path, exported: Path, tmp_path: Path) -> None:
    """Fetched, imported and written again; it can be measured, and served from there."""
    hub.push(pushing(tiny_target, exported))
    run = make_run(tiny_target, tmp_path / "run", "pull=org/head")
    hub.pull(run)
    for name in FILES:
        assert (tmp_path / "run" / "export" / name).read_bytes() == fake.files[name], name
    report = json.loads(next(exported.glob("evaluation/*/acceptance.json")).read_text())
    assert run.run("evaluation").first.rounds == report["rounds"]


def test_a_broken_head_is_not_pulled(fake: Hub, tiny_target: Path, exported: Path, tmp_path: Path) -> None:
    hub.push(pushing(tiny_target, exported))
    config = json.loads(fake.files[CONFIG])
    del config["norm_output"]
    fake.files[CONFIG] = json.dumps(config).encode()
    with pytest.raises(ValueError, match="pull=org/head: as vllm loads it: config.json: norm_output is miss"):
        hub.pull(make_run(tiny_target, tmp_path / "run", "pull=org/head"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"draft_vocab_size is 200 there and 100 here: add drafter.draft_v"):
        name = f"pull={exported / 'export'}"
        hub.pull(make_run(tiny_target, tmp_path / "run", name, "drafter.draft_vocab_size=100"))
    with pytest.raises(ValueError, match="no such folder, and not a hub id"):
        hub.pull(make_run(tiny_target, tmp_path / "run", "pull=./gone"))


def test_token_problems_are_told(fake: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.check_token("org/head")
    hub.check_token("me/head")
    with pytest.raises(ValueError, match="me does not belong to other: choose one of me, org"):
        hub.check_token("other/head")
    fake.role = "read"
    with pytest.raises(ValueError, match="the token of me may only read"):
        hub.check_token("org/head")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        ValueError, match="push=org/head: the hub refuses .*Invalid user token.*check the tok"
    ):
        hub.check_token("org/head")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    with pytest.raises(ValueError, match="there is no hub token: `hf auth login`"):
        hub.check_token("org/head")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('"name": "/home/someone/model"', "the path /home/someone/model of this machine"),
        ("vllm serve ~/models/x", "the path ~/models/x of this machine"),
        (r"from C:\Users\someone", "of this machine"),
        (f"token {TOKEN}", "holds a Hugging Face token"),
        ("https://me:secret@host", "holds a password in an address"),
        ("-----BEGIN RSA PRIVATE KEY-----", "holds a private key"),
        ("swordfish-42", "holds the value of MY_API_KEY"),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_nothing_private_is_sent(
    text: str, told: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "swordfish-42")
    clean = "see https://huggingface.co/a/b, docs/hub.md, 1/2 and a/b: `pull=org/head`\n"
    for file in (CARD, CONFIG):
        (tmp_path / file).write_text(clean + (text if file == name else ""))
    metadata = {"note": clean + (text if name == WEIGHTS else "")}
    save_file({"x": torch.zeros(2)}, tmp_path / WEIGHTS, metadata=metadata)
    files = {file: tmp_path / file for file in FILES}
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        hub.check_clean(files)
    assert str(tmp_path / name) in str(caught.value)
    assert "swordfish-42" not in str(caught.value)
    hub.check_clean({file: path for file, path in files.items() if file != name})


def test_a_target_folder_needs_a_name_for_others(fake: Hub, tiny_target: Path, exported: Path) -> None:
    run = pushing(tiny_target, exported)
    unnamed = dataclasses.replace(run.recipe.export, target_id="")
    with pytest.raises(ValueError, match="export.target_id=OWNER/NAME"):
        hub.push(Run(dataclasses.replace(run.recipe, export=unnamed)))
    assert fake.created == []


def test_a_pipeline_asks_for_the_token_first(tiny_target: Path, tmp_path: Path, fake: Hub) -> None:
    fake.role = "read"
    run = pushing(tiny_target, tmp_path / "run")
    with pytest.raises(ValueError, match="push=org/head: the token of me may only read"):
        pipeline(run.recipe)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("override", ["push=head", "push=a/b/c", "[push=a/b,pull=c/d]"])
def test_push_is_checked_with_the_recipe(override: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="push"):
        tiny(tmp_path, *override.strip("[]").split(","))
