"""Settings of the acceptance measurement."""

from dataclasses import dataclass, field
from math import inf
from typing import Any


@dataclass
class TreeConfig:
    """Drafts with a shape behind their name, as in eval.drafter=head:tree."""

    depth: int = 5
    """Positions drafted in a round."""
    top_k: int = 4
    """Children of a node, and nodes of a level that are expanded."""
    num_nodes: int = 16
    """Tokens drafted in a round."""
    paths: list[Any] = field(default_factory=list)
    """Static tree: the rank of the child at each level, for every node; empty: chosen by num_nodes."""

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = []
        for key in ("depth", "top_k", "num_nodes"):
            if getattr(self, key) < 1:
                found.append(f"eval.tree.{key} must be at least 1")
        return found


@dataclass
class EvalConfig:
    """Speculative decoding on held-out prompts."""

    drafter: Any = "head"
    """KIND[:SHAPE][@FOLDER] or a list of them to compare. KIND: head (the exported one, whatever its
    kind), eagle3, eagle1, medusa, prompt_lookup, draft_model. SHAPE: chain, tree (dynamic), static,
    entropy. FOLDER: of a head's bundle or of the draft model; left out, this run's export."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    prompts: list[str] = field(default_factory=lambda: ["builtin:heldout"])
    """As data.prompts.paths; used unless suite names something else."""
    suite: Any = ""
    """Name of a public suite (`slipstream.eval.suites.SUITES`) or a list of them; empty: prompts."""
    path: Any = ""
    """File or hub id of the suite, or a list in its order; empty: the hub id that is known."""
    limit: int = 0
    """First N prompts, of each suite; 0 takes all."""
    num_draft_tokens: int = 4
    """K, positions a chain drafts per verification round."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy; above, lossless speculative sampling."""
    top_p: float = 1.0
    top_k: int = 0
    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    """Requests at a time of scripts/load.py."""
    robustness: bool = False
    """Also run every suite with another system prompt, another chat template and a long padding."""
    drift: bool = False
    """Also measure, by draft depth, the carried state and where the head looks (EAGLE-3 kinds)."""
    metrics_port: int = 0
    """Where Prometheus finds the running evaluation's metrics; 0: nowhere."""
    lossless: bool = False
    """Also test sampled answers against plain sampling (`slipstream.eval.lossless`)."""
    lossless_prompts: int = 3
    lossless_samples: int = 400
    """Answers to each of the prompts, with and without each drafter."""

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = self.tree.problems()
        for key in ("drafter", "suite", "path"):
            if any(not isinstance(entry, str) for entry in as_list(getattr(self, key))):
                found.append(f"eval.{key} must be a name or a list of names")
        if self.lossless and self.temperature == 0:
            found.append("eval.lossless=true compares sampled answers: set eval.temperature above 0")
        if min(self.batch_sizes, default=0) < 1:
            found.append("eval.batch_sizes must hold sizes of at least 1")
        if not as_list(self.drafter):
            found.append("eval.drafter is empty: eval.drafter=head measures the exported head")
        if self.num_draft_tokens < 1:
            found.append("eval.num_draft_tokens must be at least 1")
        if self.max_new_tokens < 2:
            found.append("eval.max_new_tokens must be at least 2: the first token comes without a draft")
        if self.limit < 0:
            found.append("eval.limit must be at least 0 (0 takes all)")
        if not 0 <= self.temperature < inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            found.append("eval: temperature >= 0, 0 < top_p <= 1, top_k >= 0")
        return found


def as_list(value: Any) -> list[Any]:
    """A setting that is one value or a list of them; an empty string is nothing.

    >>> as_list("a"), as_list(["a", "b"]), as_list("")
    (['a'], ['a', 'b'], [])
    """
    if isinstance(value, list | tuple):
        return list(value)
    return [value] if value != "" else []


def uses_export(config: EvalConfig) -> bool:
    """Whether an entry of eval.drafter reads this run's own bundle."""
    without = ("prompt_lookup", "autoregressive")
    return any("@" not in entry and entry not in without for entry in as_list(config.drafter))
