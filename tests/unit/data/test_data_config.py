"""Every mistake in the settings is found before anything runs."""

from typing import Any

import pytest

from slipstream.data.config import (
    CaptureConfig,
    DataConfig,
    OpenAIConfig,
    PromptsConfig,
    RegenerateConfig,
    SampleConfig,
    Source,
    Store,
    TargetConfig,
    TokenizeConfig,
)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"prompts": PromptsConfig()}, "prompts.paths"),
        ({"prompts": PromptsConfig(paths=["a"], limit=-1)}, "prompts.limit"),
        ({"prompts": PromptsConfig(paths=["a"], max_dropped_share=-0.1)}, "prompts.max_dropped_share"),
        ({"prompts": PromptsConfig(paths=["a"], max_dropped_share=1.1)}, "prompts.max_dropped_share"),
        ({"prompts": PromptsConfig(paths=["a"], max_dropped_share=float("nan"))}, "prompts.max_dropped"),
        ({"regenerate": RegenerateConfig(batch_size=0)}, "regenerate.batch_size"),
        (
            {"regenerate": RegenerateConfig(backend="tgi")},
            "regenerate.backend=tgi: hf, vllm, openai or rec",
        ),
        ({"regenerate": RegenerateConfig(shard="2/2")}, "regenerate.shard=2/2"),
        ({"regenerate": RegenerateConfig(shard="a/b")}, "regenerate.shard=a/b"),
        ({"regenerate": RegenerateConfig(max_failed_share=2.0)}, "regenerate.max_failed_share"),
        ({"regenerate": RegenerateConfig(samples=[SampleConfig(weight=0)])}, "regenerate.samples[0]"),
        ({"regenerate": RegenerateConfig(openai=OpenAIConfig(concurrency=0))}, "regenerate.openai.concurr"),
        ({"tokenize": TokenizeConfig(max_length=7)}, "tokenize.max_length"),
        ({"tokenize": TokenizeConfig(min_supervised=0)}, "tokenize.min_supervised"),
        ({"capture": CaptureConfig(tokens_per_forward=0)}, "capture.tokens_per_forward"),
        ({"capture": CaptureConfig(tokens_per_shard=0)}, "capture.tokens_per_shard"),
        ({"capture": CaptureConfig(backend="sglang")}, "capture.backend=sglang"),
        ({"capture": CaptureConfig(topk=1)}, "capture.topk"),
        ({"source": Source.live, "live_gib": 0.0}, "live_gib"),
        ({"source": Source.live, "capture": CaptureConfig(store=Store.int8)}, "source=live stores nothing"),
        ({"shuffle_shards": -1}, "shuffle_shards"),
    ],
)
def test_a_mistake_is_named_alone(sections: dict[str, Any], key: str) -> None:
    [problem] = DataConfig(**{"prompts": PromptsConfig(paths=["a"]), **sections}).problems()
    assert problem.startswith(f"data.{key}")


@pytest.mark.parametrize(
    ("device", "num"), [("auto", 0), ("cpu", 0), ("cuda:1", 0), ("spread", 0), ("gpu", 1), ("cuda:", 1)]
)
def test_device(device: str, num: int) -> None:
    problems = TargetConfig(name="toy", device=device).problems()
    assert len(problems) == num and all(p.startswith(f"target.device={device}: auto, cpu") for p in problems)
