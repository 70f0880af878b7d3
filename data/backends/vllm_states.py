"""Captures hidden states with vLLM: `python -m slipstream.data.backends.vllm_states`, in vLLM's environment.

The first line of the standard input is the settings, every further line the token ids of some
documents. The answer to each is a line with the file that holds their states, `0`, `1`, ...
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READY = "ready"
SLACK = 4
"""Of the memory for keys, values and states on a CPU: pages of one size serve layers of several."""
LEAST_CACHE_BYTES = 256 << 20


class _Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True


def _write_now(connector: Any, pending: Any) -> None:
    """Writes the states of a finished request; the connector's own way needs a CUDA device."""
    import torch
    from safetensors.torch import save_file
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own

    size = connector._block_size
    slots = (torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)).flatten()
    states = own.extract_from_kv_cache(connector._kv_cache, slots, len(pending.token_ids))
    save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids}, pending.filename)
    os.close(connector._lock_fds.pop(pending.req_id))
    connector._req_copy_events[pending.req_id] = _Done()


def start(settings: dict[str, Any]) -> Any:
    """An engine whose requests leave the states at `layers` of their prompts on the disk."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own
    from vllm.platforms import current_platform

    more: dict[str, Any] = {}
    if current_platform.is_cpu():
        own.ExampleHiddenStatesConnector._submit_async_write = _write_now
        needed = SLACK * settings["tokens"] * settings["bytes_per_token"]
        more["kv_cache_memory_bytes"] = max(needed, LEAST_CACHE_BYTES)
    return vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=settings["max_length"],
        max_num_batched_tokens=max(settings["tokens"], settings["max_length"]),
        enable_prefix_caching=False,  # states of a cached prefix are not computed
        enable_chunked_prefill=False,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": settings["layers"]}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": settings["folder"]},
        },
        **more,
    )


def capture(llm: Any, documents: Sequence[Sequence[int]], path: Path) -> None:
    """Writes the states [T, layers, D] of each document, by its number."""
    import vllm
    from safetensors.torch import save_file
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own

    prompts = [{"prompt_token_ids": list(ids)} for ids in documents]
    one = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    finished = llm.generate(prompts, one, use_tqdm=False)
    # The last states are written in the step after that of the last token, which nobody waits for.
    while llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
        llm.llm_engine.step()
    states = {}
    for number, done in enumerate(finished):
        file = done.kv_transfer_params["hidden_states_path"]
        states[str(number)] = own.load_hidden_states(file)["hidden_states"]
        own.cleanup_hidden_states(file)
    save_file(states, path)


def main() -> None:
    """Answers until the input ends."""
    # What vLLM prints is not for the reader of the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    llm = start(settings)
    print(READY, file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        capture(llm, json.loads(line), Path(settings["folder"]) / str(number))
        print(number, file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
