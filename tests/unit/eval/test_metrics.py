"""The metrics in Prometheus' text form, over HTTP."""

import socket
import urllib.request

from slipstream.eval.decoder import Round
from slipstream.eval.metrics import Metrics
from slipstream.eval.player import PlayedPrompt, Turn


def test_metrics_are_served() -> None:
    rounds = (Round(drafted=3, accepted=2), Round(drafted=3, accepted=1, nodes=5))
    turn = Turn(
        prompt_tokens=4,
        token_ids=(1,) * 6,
        rounds=rounds,
        seconds=0.7,
        draft_seconds=0.1,
        verify_seconds=0.5,
    )
    metrics = Metrics()
    for name in "ab":
        metrics.observe(
            PlayedPrompt(
                suite="s", id=name, category="", answers={"autoregressive": (turn,), "head": (turn,)}
            )
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    metrics.serve(port)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    for line in (
        'slipstream_acceptance_rate{drafter="head"} 0.375',
        'slipstream_drafted_tokens_total{drafter="head"} 16.0',
        'slipstream_accepted_tokens_total{drafter="head"} 6.0',
        'slipstream_tokens_total{drafter="autoregressive"} 12.0',
        'slipstream_tokens_per_round_bucket{drafter="head",le="2.0"} 2.0',
        'slipstream_tokens_per_round_count{drafter="head"} 4.0',
    ):
        assert line in text
