"""Decodes jobs with vLLM: `python -m slipstream.eval.engines.run_vllm JOBS`, in vLLM's environment."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.eval.engines.job import (
    ROOM,
    STATES,
    EngineAnswer,
    EngineJob,
    EngineResult,
    read_jobs,
    rendered,
)

ROUNDS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"
KV_CACHE_BYTES = 256 << 20


class _Recorder:
    """Looks on while the drafter works."""

    def __init__(self, num_traced: int) -> None:
        self.drafts: list[list[int]] = []
        self.states: dict[str, Any] = {}
        self._num_traced = num_traced

    def attach(self, worker: Any) -> None:
        """Called inside the engine; only EAGLE-3 has states to fuse."""
        drafter = worker.model_runner.drafter
        drafter.propose = self._drafting(drafter.propose)
        if self._num_traced:
            drafter.model.combine_hidden_states = self._fusing(drafter.model.combine_hidden_states)

    def begin(self) -> None:
        """The next prompt follows."""
        self.drafts = []

    def _drafting(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            ids_BK = propose(*args, **kwargs)
            self.drafts.append(ids_BK[0].tolist())
            return ids_BK

        return recorded

    def _fusing(self, fuse: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def recorded(aux: Any) -> Any:
            fused = fuse(aux)
            number = len(self.states) // 2
            if not self.drafts and number < self._num_traced:  # the prompt's pass
                self.states |= {f"{number}.aux": aux.clone(), f"{number}.fc": fused.clone()}
            return fused

        return recorded


def run(job: EngineJob) -> None:
    """Starts an engine for one job."""
    import vllm
    from safetensors.torch import save_file
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    settings: dict[str, Any] = {"model": job.target or job.draft}
    if job.draft and job.target:
        settings["speculative_config"] = {
            "method": job.method,
            "model": job.draft,
            "num_speculative_tokens": job.num_draft_tokens,
        }
    llm = vllm.LLM(
        **settings,
        dtype="float32" if current_platform.is_cpu() else "auto",
        enforce_eager=True,
        max_num_seqs=1,
        max_model_len=max(map(len, job.prompts)) + job.max_new_tokens + ROOM,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enable_prefix_caching=False,  # the drafter must see every prompt whole
        disable_log_stats=False,  # counts acceptance
    )
    recorder = _Recorder(job.num_traced)
    if job.draft:
        llm.collective_rpc(recorder.attach)
    before = _counters(llm, job.num_draft_tokens)
    chats = job.chats or [()] * len(job.prompts)
    answers = [_answer(llm, job, recorder, *pair) for pair in zip(job.prompts, chats, strict=True)]
    after = _counters(llm, job.num_draft_tokens)
    if recorder.states:
        save_file(recorder.states, Path(job.out) / STATES)
    counts = [late - early for early, late in zip(before, after, strict=True)]
    EngineResult(
        version=vllm.__version__, answers=answers, num_rounds=counts[0], accepted_K=counts[1:]
    ).write(job)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def _answer(llm: Any, job: EngineJob, recorder: _Recorder, prompt: Any, chat: Any) -> EngineAnswer:
    from vllm import SamplingParams

    recorder.begin()
    greedy = SamplingParams(temperature=0.0, max_tokens=job.max_new_tokens, stop_token_ids=list(job.stop_ids))
    (done,) = llm.generate([{"prompt_token_ids": list(prompt)}], greedy, use_tqdm=False)
    return EngineAnswer(
        token_ids=list(done.outputs[0].token_ids),
        drafts=recorder.drafts,
        rendered=rendered(llm.get_tokenizer(), chat),
    )


def _counters(llm: Any, num_draft_tokens: int) -> list[int]:
    """Rounds so far, and accepted drafts at each position."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    rounds = [int(found[ROUNDS].value)] if ROUNDS in found else [0]
    accepted = [int(value) for value in found[ACCEPTED].values] if ACCEPTED in found else []
    return rounds + (accepted or [0] * num_draft_tokens)


if __name__ == "__main__":
    for item in read_jobs(Path(sys.argv[1])):
        run(item)
