"""Prometheus metrics of a running evaluation, at http://127.0.0.1:PORT/metrics (`eval.metrics_port`)."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from slipstream.eval.drafters.registry import BASELINE
from slipstream.eval.player import PlayedPrompt

TOKENS_PER_ROUND = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counts every prompt by drafter."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels, registry = ["drafter"], self.registry
        self._prompts = Counter("slipstream_prompts", "Finished prompts", labels, registry=registry)
        self._tokens = Counter("slipstream_tokens", "Generated tokens", labels, registry=registry)
        self._rounds = Counter("slipstream_rounds", "Verification rounds", labels, registry=registry)
        self._drafted = Counter("slipstream_drafted_tokens", "Drafted tokens", labels, registry=registry)
        self._accepted = Counter("slipstream_accepted_tokens", "Accepted drafts", labels, registry=registry)
        self._rate = Gauge(
            "slipstream_acceptance_rate", "Accepted drafts of all drafted so far", labels, registry=registry
        )
        self._per_round = Histogram(
            "slipstream_tokens_per_round",
            "Tokens that a verification round yields",
            labels,
            buckets=TOKENS_PER_ROUND,
            registry=registry,
        )
        self._seconds = Histogram(
            "slipstream_prompt_seconds", "Time of a prompt", labels, buckets=SECONDS, registry=registry
        )
        self._sums: dict[str, tuple[int, int]] = {}

    def serve(self, port: int) -> None:
        """Answers on the port until the program ends."""
        start_http_server(port, addr="127.0.0.1", registry=self.registry)

    def observe(self, prompt: PlayedPrompt) -> None:
        """Counts a prompt by all its drafters."""
        for name, turns in prompt.answers.items():
            rounds = [r for turn in turns for r in turn.rounds]
            drafted, accepted = sum(r.num_tokens for r in rounds), sum(r.accepted for r in rounds)
            self._prompts.labels(name).inc()
            self._tokens.labels(name).inc(sum(len(turn.token_ids) for turn in turns))
            self._rounds.labels(name).inc(len(rounds))
            self._seconds.labels(name).observe(sum(turn.seconds for turn in turns))
            if name == BASELINE:
                continue
            self._drafted.labels(name).inc(drafted)
            self._accepted.labels(name).inc(accepted)
            before = self._sums.get(name, (0, 0))
            self._sums[name] = (before[0] + drafted, before[1] + accepted)
            self._rate.labels(name).set(self._sums[name][1] / max(self._sums[name][0], 1))
            for r in rounds:
                self._per_round.labels(name).observe(r.accepted + 1)
