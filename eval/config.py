"""Settings of the acceptance measurement."""

from dataclasses import dataclass, field
from math import inf


@dataclass
class EvalConfig:
    """Speculative decoding on held-out prompts."""

    prompts: list[str] = field(default_factory=lambda: ["builtin:heldout"])
    """As data.prompts.paths."""
    limit: int = 0
    """First N prompts; 0 takes all."""
    num_draft_tokens: int = 4
    """K, tokens drafted per verification round."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy; above, lossless speculative sampling."""
    top_p: float = 1.0
    top_k: int = 0

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = []
        if self.num_draft_tokens < 1:
            found.append("eval.num_draft_tokens must be at least 1")
        if self.max_new_tokens < 2:
            found.append("eval.max_new_tokens must be at least 2: the first token comes without a draft")
        if self.limit < 0:
            found.append("eval.limit must be at least 0 (0 takes all)")
        if not 0 <= self.temperature < inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            found.append("eval: temperature >= 0, 0 < top_p <= 1, top_k >= 0")
        return found
