"""The doctor finds nothing on a sound set-up and names each fault of a broken one, with the fix."""

import json
import shutil
from pathlib import Path

import pytest

from slipstream.scripts import setup_checks
from slipstream.scripts.doctor import doctor
from slipstream.scripts.setup_checks import CHECKS, State, check_setup
from slipstream.scripts.stages import Run
from tests.unit.scripts.test_stages import tiny


def states(target: Path, folder: Path, *overrides: str) -> dict[str, tuple[State, str]]:
    run = Run(tiny(folder / "run", f"target.name={target}", *overrides))
    return {check.name: (check.state, check.text) for check in check_setup(run)}


def test_a_sound_set_up(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = states(tiny_target, tmp_path)
    assert found.keys() == CHECKS.keys() - {"hub"}, "push is not configured"
    assert {state for state, _ in found.values()} == {State.ok}, found
    assert found["GPU"][1].startswith("none")
    assert found["aux layers"][1] == "[2, 4, 5] of 0..8"
    assert found["loss masks"][1].startswith("20 rows with a trial answer")
    assert "200 of 300 tokens" in found["head"][1]
    assert found["engines"][1] == "LlamaForCausalLM in vllm 0.32.0, sglang 0.5.23"
    doctor(tiny(tmp_path / "run", f"target.name={tiny_target}"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * (len(found) + 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "override", "told"),
    [
        ("aux layers", "drafter.aux_layers=[2,4,99]", r"boundaries within 0..8 .*: set drafter.aux_layers="),
        ("head", "drafter.draft_vocab_size=301", r"draft_vocab_size=301 is larger than .* 300: lower it"),
        ("head", "train.init_from=./gone", "train.init_from=./gone: no such folder"),
        (
            "disk",
            "train.keep_checkpoints=100000000",
            r"needs .* GB .* are free: free some space or set run_dir",
        ),
        (
            "memory",
            "data.regenerate.batch_size=100000000",
            "answering about .*: lower data.regenerate.batch_size",
        ),
        ("hub", "push=org/head", "there is no hub token: `hf auth login`"),
    ],
)
def test_a_fault_of_the_recipe(
    name: str, override: str, told: str, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.scripts.hub.get_token", lambda: None)
    recipe = tiny(tmp_path, f"target.name={tiny_target}", "export.target_id=org/target", override)
    found = {check.name: check for check in check_setup(Run(recipe))}
    assert [other for other, check in found.items() if check.state is State.fail] == [name]
    with pytest.raises(ValueError, match=f"^{name}: .*{told}"):
        doctor(recipe)


def broken_target(folder: Path, target: Path, *, template: str | None = None, **config: object) -> Path:
    """A copy with another chat template, or none, and other keys in its config."""
    shutil.copytree(target, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n%s{{ m.content }}<|im_end|>\n{% endfor %}"
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THOUGHT = "{% if m.role == 'assistant' %}<think></think>{% endif %}"


def test_a_target_without_template(tiny_target: Path, tmp_path: Path) -> None:
    found = states(broken_target(tmp_path / "t", tiny_target), tmp_path)
    assert found["chat template"][0] is State.fail
    assert "has no chat template: name an instruct model" in found["chat template"][1]
    assert found["loss masks"] == (State.warn, "not looked at: mend chat template first")


def test_a_template_that_writes_into_answers(tiny_target: Path, tmp_path: Path) -> None:
    sound = broken_target(tmp_path / "a", tiny_target, template=TURNS.replace("%s", "") + GENERATION)
    assert states(sound, tmp_path)["loss masks"][0] is State.ok
    text = TURNS.replace("%s", THOUGHT) + GENERATION
    broken = broken_target(tmp_path / "b", tiny_target, template=text)
    state, told = states(broken, tmp_path)["loss masks"]
    assert state is State.fail
    assert told.startswith("template_inserted_response_text: ")
    assert told.endswith("set data.tokenize.on_inserted to mask or keep")


def test_a_target_that_an_engine_does_not_know(tiny_target: Path, tmp_path: Path) -> None:
    template = (TURNS + GENERATION).replace("%s", "")
    classes = {
        "LlamaForCausalLM": "",
        "GraniteForCausalLM": r"set export.engines=[vllm]",
        "Odd": "another target",
    }
    for i, (name, told) in enumerate(classes.items()):
        target = broken_target(tmp_path / str(i), tiny_target, template=template, architectures=[name])
        state, text = states(target, tmp_path)["engines"]
        assert (state is State.fail) == bool(told), text
        assert told in text


def test_a_missing_target_and_wrong_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_checks, "_requirements", lambda: ["torch>=99", "no-such-package", "numpy"])
    found = states(tmp_path / "gone", tmp_path)
    state, text = found["versions"]
    assert state is State.fail
    assert text.startswith("torch>=99 (found 2.")
    assert "no-such-package (found nothing)" in text
    assert "numpy" not in text
    assert found["target"][0] is State.fail
    waiting = [name for name, (state, _) in found.items() if state is State.warn]
    assert waiting == ["chat template", "loss masks", "aux layers", "head", "engines", "disk", "memory"]
