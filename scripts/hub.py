"""Heads from and to the Hugging Face hub: fetched ones are checked, what is sent is scanned first."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token

from slipstream.data.files import Stage, file_hash, write_text
from slipstream.data.hub import fetch, with_retries
from slipstream.data.progress import say
from slipstream.data.target.weights import read_target_head
from slipstream.data.types import VocabMap
from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS
from slipstream.drafters.config import DraftGeometry
from slipstream.drafters.importer import ImportedHead, import_head, refuse_other_geometry
from slipstream.recipes.schema import Recipe
from slipstream.scripts.bundle import write_bundle
from slipstream.scripts.card import CARD, write_card

if TYPE_CHECKING:
    from slipstream.data.target.resolve import Target
    from slipstream.scripts.stages import Run

FILES = (CARD, CONFIG, WEIGHTS)
"""What a head is on the hub; nothing else is ever sent."""
CAN_WRITE = ("write", "fineGrained")
"""Roles of tokens; what a fine-grained one may do shows when it is used."""
ABSOLUTE_PATH = re.compile(
    r"(?:^|[\s\"'`=(\[{,:|])((?:~|file://)?/(?:[\w.+@-]+/)+[\w.+@-]*|[A-Za-z]:\\[\w\\.]+)"
)
SECRETS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{20,}"),
    "an API key": re.compile(r"\b(?:sk-[\w-]{20,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|xox[baprs]-[\w-]{10,})"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
    "a password in an address": re.compile(r"\w+://[^\s/:@]+:[^\s/@]+@"),
}
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL")
"""Environment variables whose values must not leave this machine."""


def fetch_head(name: str, target: "Target", geometry: DraftGeometry, *, key: str) -> ImportedHead:
    """The checked head of a folder or of the hub.

    Raises:
        ValueError: it is not there, damaged, or does not fit the recipe and its target.
    """
    return _read(fetch(name, FILES, key=key), target, geometry, f"{key}={name}")


def _read(folder: Path, target: "Target", geometry: DraftGeometry, source: str) -> ImportedHead:
    embedding_VD, num_layers = read_target_head(target).embedding_VD, target.config.num_hidden_layers
    try:
        found = import_head(folder, embedding_VD=embedding_VD, num_target_layers=num_layers)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    refuse_other_geometry(found.head.geometry, geometry, source)
    return found


def map_of(imported: ImportedHead | None) -> VocabMap:
    """The vocabulary map of an imported head."""
    assert imported is not None
    return VocabMap(d2t_W=imported.d2t_W, t2d_V=imported.t2d_V)


def pull(run: "Run") -> None:
    """Brings a head into the run's export folder, in the form that the recipe exports.

    Raises:
        ValueError: as `fetch_head`; or the folder holds another export.
    """
    from slipstream.scripts.stages import plain

    recipe, name = run.recipe, run.recipe.pull
    source, folder = fetch(name, FILES, key="pull"), run.path("export")
    found = _read(source, run.target, run.geometry, f"pull={name}")
    settings = {
        "target_fingerprint": run.target.fingerprint,
        "pulled": {file: file_hash(source / file) for file in (CONFIG, WEIGHTS)},
        **plain(recipe.export),
    }
    stage = Stage(folder, "export", settings)
    if not stage.is_complete:
        stage.begin()
        names = write_bundle(
            folder,
            tensors={name: tensor.to(found.dtype) for name, tensor in found.head.state_dict().items()},
            geometry=run.geometry,
            vocab_map=map_of(found),
            target=run.target,
            recipe=recipe,
        )
        if (source / CARD).is_file():
            write_text(folder / CARD, (source / CARD).read_text(encoding="utf-8"))
        stage.complete(names)
    for file in (CONFIG, WEIGHTS):
        same = file_hash(folder / file) == file_hash(source / file)
        say(f"{folder / file}: {'as fetched' if same else 'written anew, in the form of this recipe'}")


def push(run: "Run") -> None:
    """Sends the export with a card that has the recipe's measurement, in one commit.

    Nothing that is there already is sent again, so an interrupted push is simply repeated.

    Raises:
        ValueError: a file holds what must not leave this machine, or the hub refuses.
    """
    recipe, folder = run.recipe, run.path("export")
    check_target_id(recipe)
    if not write_card(run):
        say("warning: the head is not measured with these eval settings: run scripts/evaluate.py first")
    files = {name: folder / name for name in FILES}
    check_clean(files)
    for name, path in files.items():
        say(f"{'would send' if recipe.push_dry_run else 'sends'} {name}, {path.stat().st_size:,} bytes")
    if recipe.push_dry_run:
        return
    check_token(recipe.push)
    api, what = HfApi(), f"push={recipe.push}"
    private = True if recipe.push_private else None
    with_retries(what, lambda: api.create_repo(recipe.push, private=private, exist_ok=True))

    def commit() -> str:
        # Made anew for every try: what the hub has meanwhile is asked for again.
        operations = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        return str(api.create_commit(recipe.push, operations, commit_message=f"{recipe.name}").commit_url)

    say(f"pushed: {with_retries(what, commit)}")


def check_target_id(recipe: Recipe) -> None:
    """Raises ValueError where the card could only name a folder of this machine as the target."""
    if not recipe.export.target_id and Path(recipe.target.name).expanduser().is_dir():
        raise ValueError(
            f"push={recipe.push}: the target is the folder {recipe.target.name}: name it for others by "
            f"export.target_id=OWNER/NAME"
        )


def check_token(repo_id: str) -> None:
    """Asks the hub who we are, so that a missing right shows before anything is trained.

    Raises:
        ValueError: no token, not a valid one, or not one that may write to `repo_id`.
    """
    what, owner = f"push={repo_id}", repo_id.partition("/")[0]
    if get_token() is None:
        raise ValueError(f"{what}: there is no hub token: `hf auth login`, or set HF_TOKEN")
    try:
        me: dict[str, Any] = with_retries(what, HfApi().whoami)
    except ValueError as error:
        raise ValueError(f"{error}: check the token (`hf auth login`, HF_TOKEN), or leave push out") from None
    role = me.get("auth", {}).get("accessToken", {}).get("role", "write")
    if role not in CAN_WRITE:
        raise ValueError(f"{what}: the token of {me['name']} may only {role}: make one that may write")
    orgs = {org["name"]: org.get("roleInOrg", "write") for org in me.get("orgs", [])}
    if owner != me["name"] and owner not in orgs:
        known = ", ".join([me["name"], *orgs])
        raise ValueError(f"{what}: {me['name']} does not belong to {owner}: choose one of {known}")
    if orgs.get(owner) == "read":
        raise ValueError(f"{what}: {me['name']} may only read in {owner}: ask for the right to write")


def check_clean(files: Mapping[str, Path]) -> None:
    """Looks for secrets and paths of this machine in everything that is text.

    Raises:
        ValueError: names file and kind; the secret itself is not repeated.
    """
    own = {name: value for name, value in os.environ.items() if SECRET_NAMES.search(name) and len(value) > 7}
    if token := get_token():
        own["the hub token"] = token
    for path in files.values():
        text = _text_of(path)
        found = [kind for kind, pattern in SECRETS.items() if pattern.search(text)]
        found += [f"the value of {variable}" for variable, value in own.items() if value in text]
        if found:
            raise ValueError(f"{path} holds {found[0]}: take it out of the recipe before the head is sent")
        if match := ABSOLUTE_PATH.search(text):
            raise ValueError(
                f"{path} holds the path {match[1]} of this machine: name the target by its hub id with "
                f"export.target_id=OWNER/NAME, delete {path.parent} and export again"
            )


def _text_of(path: Path) -> str:
    """Content of a text file; of a weight file its header, behind which there are numbers alone."""
    if path.suffix != ".safetensors":
        return path.read_text(encoding="utf-8")
    with path.open("rb") as stream:
        header = stream.read(int.from_bytes(stream.read(8), "little"))
    return json.dumps(json.loads(header))
