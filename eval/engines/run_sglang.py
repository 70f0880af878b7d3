"""Decodes jobs with SGLang: `python -m slipstream.eval.engines.run_sglang JOBS`, in its environment.

SGLang's scheduler runs in a process of its own that imports this module again, and looks on there
when TRACE names a folder. Without a GPU the stand-in kernels take the place of the compiled ones.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.eval.engines.job import STATES, EngineAnswer, EngineJob, EngineResult, read_jobs

TRACE, NUM_TRACED = "SLIPSTREAM_TRACE", "SLIPSTREAM_NUM_TRACED"
DRAFTS = "drafts.jsonl"
MAX_TOKENS, MAX_CONTEXT = 8192, 2048
CPU = {
    "device": "cpu",
    "dtype": "float32",
    "prefill_attention_backend": "intel_amx",
    "decode_attention_backend": "intel_amx",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.3,
}


def run(job: EngineJob) -> None:
    """Starts an engine for one job."""
    import sglang
    import torch

    os.environ |= {TRACE: job.out, NUM_TRACED: str(job.num_traced)}
    drafts = Path(job.out) / DRAFTS
    drafts.write_text("", encoding="utf-8")
    settings: dict[str, Any] = {} if torch.cuda.is_available() else dict(CPU)
    if job.draft:
        settings |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": job.draft,
            "speculative_num_steps": job.num_draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": job.num_draft_tokens + 1,
        }
    engine = sglang.Engine(
        model_path=job.target,
        disable_radix_cache=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        page_size=1,
        max_running_requests=1,
        max_total_tokens=MAX_TOKENS,
        context_length=MAX_CONTEXT,
        skip_server_warmup=True,
        log_level="warning",
        **settings,
    )
    answers: list[EngineAnswer] = []
    counts_K1 = [0] * (job.num_draft_tokens + 1)
    greedy = {
        "temperature": 0.0,
        "max_new_tokens": job.max_new_tokens,
        "stop_token_ids": list(job.stop_ids),
    }
    seen = 0
    for prompt in job.prompts:
        done = engine.generate(input_ids=list(prompt), sampling_params=greedy)
        lines = drafts.read_text(encoding="utf-8").splitlines()
        answers.append(
            EngineAnswer(token_ids=done["output_ids"], drafts=[json.loads(line) for line in lines[seen:]])
        )
        seen = len(lines)
        for accepted, rounds in enumerate(done["meta_info"].get("spec_correct_drafts_histogram", ())):
            counts_K1[accepted] += rounds
    engine.shutdown()
    accepted_K = [sum(counts_K1[k:]) for k in range(1, len(counts_K1))]
    EngineResult(
        version=sglang.__version__, answers=answers, num_rounds=sum(counts_K1), accepted_K=accepted_K
    ).write(job)


def look_on(folder: Path, num_traced: int) -> None:
    """Records drafts and the states that reach fc, inside the scheduler."""
    from safetensors.torch import save_file
    from sglang.srt.models import llama_eagle3
    from sglang.srt.speculative import eagle_worker_v2

    states: dict[str, Any] = {}

    def drafting(draft: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = draft(*args, **kwargs)
            with (folder / DRAFTS).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(result[2][0].tolist()) + "\n")
            return result

        return recorded

    def forwarding(forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(model: Any, ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            aux, number = batch.spec_info.hidden_states, len(states) // 2
            # A prompt begins at position 0; the warm-up batches hold one row.
            if number < num_traced and len(positions) > 1 and int(positions[0]) == 0:
                hook = model.fc.register_forward_hook(
                    lambda _, inputs, out: states.update({f"{number}.fc": out.clone()})
                )
                states[f"{number}.aux"] = aux.clone()
                result = forward(model, ids, positions, batch, *args, **kwargs)
                hook.remove()
                save_file(states, folder / STATES)
                return result
            return forward(model, ids, positions, batch, *args, **kwargs)

        return recorded

    worker, model = eagle_worker_v2.EagleDraftWorker, llama_eagle3.LlamaModel
    worker.draft_forward = drafting(worker.draft_forward)
    model.forward = forwarding(model.forward)


def _prepare() -> None:
    import torch

    if not torch.cuda.is_available():
        from slipstream.eval.engines import sglang_kernels

        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        sglang_kernels.install()


if __name__ == "__main__":
    _prepare()
    for item in read_jobs(Path(sys.argv[1])):
        run(item)
elif TRACE in os.environ:
    _prepare()
    look_on(Path(os.environ[TRACE]), int(os.environ[NUM_TRACED]))
