"""The target's states from vLLM, which runs beside this process in an environment of its own."""

import contextlib
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from slipstream.data.backends.vllm_states import READY
from slipstream.data.progress import say
from slipstream.data.states import assemble
from slipstream.data.target.resolve import Target
from slipstream.data.target.weights import read_target_head
from slipstream.data.types import HiddenStateSample, TokenizedSample

ROOM = 2
"""Positions behind a document, of the token that vLLM samples and of one it drafts."""


class VllmCapture:
    """A running engine; use as a context manager, call with documents."""

    def __init__(
        self,
        target: Target,
        python: Path,
        aux_layers: tuple[int, ...],
        *,
        tokens_per_forward: int,
        max_tokens: int,
        dtype: torch.dtype,
        topk: int,
        log: Path,
    ) -> None:
        """Starts nothing yet.

        Args:
            target: whose states.
            python: interpreter that has vLLM.
            aux_layers: boundaries.
            tokens_per_forward: of a batch.
            max_tokens: of the longest document.
            dtype: of the stored states.
            topk: see `slipstream.data.states.capture_batch`.
            log: where what the engine says goes.
        """
        model = target.config
        self._target, self._python, self._log = target, python, log
        self._layers = (*aux_layers, model.num_hidden_layers)
        self._asked = sorted(set(self._layers))
        self._dtype, self._topk = dtype, topk
        num_states = 2 * model.num_hidden_layers + len(self._layers)  # keys and values, at most
        self._settings = {
            "model": str(target.path.resolve()),
            "dtype": str(target.dtype).removeprefix("torch."),
            "layers": self._asked,
            "tokens": tokens_per_forward,
            "max_length": max_tokens + ROOM,
            "bytes_per_token": num_states * model.hidden_size * target.dtype.itemsize,
        }
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "VllmCapture":
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            # This package alone, without what training has installed beside it.
            (self._folder / "slipstream").symlink_to(Path(__file__).resolve().parents[2])
            stream = stack.enter_context(self._log.open("w", encoding="utf-8"))
            environment = {
                "PYTHONPATH": str(self._folder),
                "HF_HUB_OFFLINE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
            }
            say(f"vllm: starting, it reports to {self._log}")
            self._process = subprocess.Popen(
                [str(self._python), "-m", "slipstream.data.backends.vllm_states"],
                cwd=self._folder,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                start_new_session=True,
            )
            stack.callback(self._end)
            self._ask({**self._settings, "folder": str(self._folder)}, READY)
            self._read_head()
            self._stack = stack.pop_all()
        return self

    def _read_head(self) -> None:
        head, device = read_target_head(self._target), self._target.device
        self._eps, self._norm_D = head.norm_eps, head.norm_D.float().to(device)
        self._lm_head_VD = head.lm_head_VD.to(self._target.dtype).to(device)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def __call__(self, batch: Sequence[TokenizedSample]) -> list[HiddenStateSample]:
        """States and teachers of some documents."""
        number = self._ask([sample.input_ids_T.tolist() for sample in batch])
        path = self._folder / number
        found = load_file(path)
        path.unlink()
        places = [self._asked.index(layer) for layer in self._layers]
        states_TLD = torch.cat([found[str(i)] for i in range(len(batch))])[:, places]
        mask_T = torch.cat([sample.loss_mask_T for sample in batch])
        last_PD = states_TLD[mask_T, -1].to(self._norm_D)
        normed_PD = F.rms_norm(last_PD, last_PD.shape[-1:], self._norm_D, self._eps)
        return assemble(
            batch,
            states_TLD,
            normed_PD.to(self._lm_head_VD.dtype),
            functools.partial(F.linear, weight=self._lm_head_VD),
            self._layers,
            self._dtype,
            self._topk,
        )

    def _ask(self, question: Any, expected: str = "") -> str:
        """The engine's answer to a line.

        Raises:
            ValueError: it has ended instead.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline().strip()
        if not answer or (expected and answer != expected):
            code = self._process.wait()
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line]
            said = (errors or [line for line in lines if line] or ["it said nothing"])[-1]
            raise ValueError(f"vllm stopped (exit code {code}): {said.strip()}; see {self._log}")
        return answer

    def _end(self) -> None:
        """Ends the engine and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
