"""Every way to draft by the name that `eval.drafter` uses.

An entry of `eval.drafter` is `KIND`, `KIND:SHAPE`, `KIND@FOLDER` or `KIND:SHAPE@FOLDER`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.data.target.resolve import Target
from slipstream.drafters.checkpoint_format import CONFIG, read_config
from slipstream.eval.config import EvalConfig, TreeConfig
from slipstream.eval.drafters.draft_model import load_language_model
from slipstream.eval.drafters.eagle import load_eagle
from slipstream.eval.drafters.eagle1 import load_eagle1
from slipstream.eval.drafters.medusa import load_medusa
from slipstream.eval.drafters.prompt_lookup import PromptLookup
from slipstream.eval.drafting import Drafter, ModelDrafter, Shape
from slipstream.eval.shapes import Chain, DynamicTree, EntropyTree, StaticTree, likely_paths
from slipstream.eval.tree import refuse_sliding

Builder = Callable[[Target, Path, Shape], Drafter]

DRAFTERS: dict[str, Builder] = {
    "prompt_lookup": lambda target, folder, shape: PromptLookup(),
    "draft_model": lambda target, folder, shape: ModelDrafter(load_language_model(target, folder), shape),
    "eagle3": load_eagle,
    "eagle1": load_eagle1,
    "medusa": load_medusa,
}
"""KIND -> what makes it from the target, the folder of its weights and the shape of its drafts."""

SHAPES: dict[str, Callable[[TreeConfig, int], Shape]] = {
    "chain": lambda tree, depth: Chain(),
    "tree": lambda tree, depth: DynamicTree(top_k=tree.top_k, num_nodes=tree.num_nodes),
    "static": lambda tree, depth: StaticTree(tree.paths or likely_paths(tree.num_nodes, depth)),
    "entropy": lambda tree, depth: EntropyTree(top_k=tree.top_k, num_nodes=tree.num_nodes),
}
"""SHAPE -> what makes it from `eval.tree` and the depth."""

WITHOUT_SHAPE = ("prompt_lookup", "autoregressive")
BASELINE = "autoregressive"
"""May be listed; it is measured always."""
HEAD = "head"
"""Whatever kind the bundle is of."""
ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "EagleLlamaForCausalLM": "eagle1",
    "MedusaModel": "medusa",
}
"""`architectures` of a bundle's config.json -> KIND."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to draft, ready to decode."""

    name: str
    drafter: Drafter
    depth: int
    """Positions drafted in a round."""


def parse(entry: str) -> tuple[str, str, str]:
    """Kind, shape and folder of an entry of `eval.drafter`; the last two may be empty.

    >>> parse("eagle3:tree@runs/demo/export")
    ('eagle3', 'tree', 'runs/demo/export')

    Raises:
        ValueError: no such kind or shape.
    """
    name, _, folder = entry.partition("@")
    kind, _, shape = name.partition(":")
    known = {"kind": (kind, (HEAD, *DRAFTERS, BASELINE)), "shape": (shape or "chain", tuple(SHAPES))}
    for what, (found, names) in known.items():
        if found not in names:
            raise ValueError(f"eval.drafter={entry}: {what} {found} is not one of {', '.join(names)}")
    if shape and kind in WITHOUT_SHAPE:
        raise ValueError(f"eval.drafter={entry}: {kind} drafts no trees, write eval.drafter={kind}")
    if kind == "draft_model" and not folder:
        raise ValueError(f"eval.drafter={entry}: name the model's folder, draft_model@FOLDER")
    return kind, shape, folder


def make_contender(entry: str, *, target: Target, export: Path, config: EvalConfig) -> Contender:
    """Makes what an entry of `eval.drafter` names; `export` is the folder where it names none.

    Raises:
        ValueError: the entry, or what lies in its folder, cannot be used with this target.
    """
    kind, shape, folder = parse(entry)
    depth = config.num_draft_tokens if shape in ("", "chain") else config.tree.depth
    if shape not in ("", "chain"):
        refuse_sliding(target.config)
    made = SHAPES[shape or "chain"](config.tree, depth)
    weights = Path(folder) if folder else export
    drafter = DRAFTERS[kind_of(weights) if kind == HEAD else kind](target, weights, made)
    return Contender(name=entry, drafter=drafter, depth=depth)


def short_name(entry: str) -> str:
    """An entry as tables show it: a folder by its run's name.

    >>> short_name("eagle3:tree@runs/demo/export"), short_name("draft_model@models/small")
    ('eagle3:tree@demo', 'draft_model@small')
    """
    name, _, folder = entry.partition("@")
    path = Path(folder)
    return f"{name}@{path.parent.name if path.name == 'export' else path.name}" if folder else name


def kind_of(folder: Path) -> str:
    """The kind of the head in a serving bundle.

    Raises:
        ValueError: there is none, or an architecture that nothing here drafts with.
    """
    found = read_config(folder).get("architectures")
    kind = ARCHITECTURES.get(found[0]) if isinstance(found, list) and found else None
    if kind is None:
        raise ValueError(
            f"{folder / CONFIG}: architectures is {found}, not one of {', '.join(ARCHITECTURES)}"
        )
    return kind
