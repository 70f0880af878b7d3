"""Runs in vLLM's environment: reads settings, then prompts, from stdin; writes answers as they end.

It ends with its parent, whose death closes stdin. Answers go to what was stdout; whatever vLLM prints
goes to stderr.
"""

import json
import os
import queue
import sys
import threading
from typing import Any

READY = -1
"""Number of the line that says that prompts are taken."""


def _read(inbox: "queue.SimpleQueue[Any]") -> None:
    for line in sys.stdin:
        inbox.put(json.loads(line))
    os._exit(0)


def _add(engine: Any, task: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    number, prompt_ids = str(task.pop("id")), task.pop("prompt")
    params = SamplingParams(**task, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request(number, {"prompt_token_ids": prompt_ids}, params)


def main() -> None:
    """Answers until stdin ends."""
    settings = json.loads(sys.stdin.readline())
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()

    import vllm

    engine = vllm.LLM(**settings).llm_engine
    print(json.dumps({"id": READY}), file=results)
    while True:
        while not inbox.empty() or not engine.has_unfinished_requests():
            task = inbox.get()
            number = task["id"]
            try:
                _add(engine, task)
            except ValueError as error:  # a prompt that it refuses
                print(json.dumps({"id": number, "error": str(error)[:200]}), file=results)
        for output in engine.step():
            if output.finished:
                made = output.outputs[0]
                found = {"token_ids": list(made.token_ids), "finish_reason": made.finish_reason}
                print(json.dumps({"id": int(output.request_id), **found}), file=results)


if __name__ == "__main__":
    main()
