"""Answers through any server with the OpenAI completions interface: vLLM serve, SGLang and others.

The prompt is sent as token ids, as training renders it, and the answer comes back unparsed: reasoning
and tool calls stay exactly as they were generated, whatever parsers the server runs for chats.
"""

import asyncio
import os
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx2 as httpx
from transformers import PreTrainedTokenizerFast

from slipstream.data.backends.remote import FailedError
from slipstream.data.config import OpenAIConfig, SampleConfig
from slipstream.data.dialog import Answer
from slipstream.data.template import encode

KEY = "data.regenerate.openai"
FATAL, FOR_NOW = (401, 403, 404), (408, 409, 425, 429)
"""HTTP states that every request would meet, and that pass, as all from 500 on."""
MAX_WAIT = 60.0


class OpenAICompleter:
    """See `Completer`."""

    def __init__(
        self,
        config: OpenAIConfig,
        tokenizer: PreTrainedTokenizerFast,
        *,
        stop_ids: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        """Reads the key; ValueError when its variable is not set."""
        self.concurrency = config.concurrency
        self._config, self._tokenizer = config, tokenizer
        self._stop_ids, self._max_new_tokens = list(stop_ids), max_new_tokens
        headers = {}
        if config.api_key_env:
            if config.api_key_env not in os.environ:
                raise ValueError(
                    f"{KEY}.api_key_env={config.api_key_env}: this variable is not set: export it"
                )
            headers["Authorization"] = f"Bearer {os.environ[config.api_key_env]}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # of the whole request, below
            limits=httpx.Limits(
                max_connections=config.concurrency, max_keepalive_connections=config.concurrency
            ),
        )
        self._model = config.model

    async def __aenter__(self) -> "OpenAICompleter":
        """Asks for the server's models; ValueError when there is no such server or model."""
        try:
            found = await self._request("GET", "models", None)
            names = [str(entry["id"]) for entry in found["data"]]
        except (FailedError, LookupError, TypeError) as error:
            await self._client.aclose()
            raise ValueError(
                f"{KEY}.base_url={self._config.base_url}: no OpenAI-compatible server answers there "
                f"({error}): start it, or correct the address"
            ) from None
        if self._model not in names and (self._model or len(names) != 1):
            await self._client.aclose()
            raise ValueError(f"{KEY}.model={self._model}: the server has {', '.join(names)}: choose one")
        self._model = self._model or names[0]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def complete(self, prompt_ids: Sequence[int], sampling: SampleConfig, seed: int) -> Answer:
        """See `Completer`."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": self._max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }
        if self._config.extensions:
            body |= {
                "stop_token_ids": self._stop_ids,
                "skip_special_tokens": False,
                "return_token_ids": True,
                # Named, or a server takes what the model's generation_config.json says.
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
        return self._answer(await self._request("POST", "completions", body))

    async def _request(self, method: str, path: str, body: Any) -> Any:
        """The JSON of the answer, after as many tries as allowed."""
        config, reason = self._config, ""
        for tries in range(config.retries + 1):
            if tries:
                wait = min(config.backoff_seconds * 2 ** (tries - 1), MAX_WAIT)
                await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            try:
                async with asyncio.timeout(config.timeout_seconds):
                    url = f"{config.base_url.rstrip('/')}/{path}"
                    response = await self._client.request(method, url, json=body)
                status = response.status_code
                if status == 200:
                    found = response.json()
                    if method == "GET" or _is_whole(found):
                        return found
                    reason = "broken_answer"
                    continue
            except TimeoutError:
                reason = "timeout"
                continue
            except (httpx.HTTPError, ValueError) as error:  # no connection, or half an answer
                reason = type(error).__name__
                continue
            reason = f"http_{status}"
            if status in FATAL and method == "POST":
                raise ValueError(f"{KEY}: the server refuses every request ({status}: {_said(response)})")
            if status < 500 and status not in FOR_NOW:
                raise FailedError(f"{reason}: {_said(response)}")
        raise FailedError(reason)

    def _answer(self, found: Any) -> Answer:
        choice = found["choices"][0]
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise FailedError(f"finish_reason_{reason}")
        token_ids = choice.get("token_ids") or encode(self._tokenizer, choice["text"])
        if reason == "stop" and (not token_ids or token_ids[-1] not in self._stop_ids):
            token_ids = [*token_ids, self._tokenizer.eos_token_id]
        return Answer(token_ids=tuple(map(int, token_ids)), finish_reason=reason)


def _is_whole(found: Any) -> bool:
    """Whether a completion holds what is read of it."""
    try:
        choice = found["choices"][0]
        return isinstance(choice["text"], str) and isinstance(choice["finish_reason"], str)
    except (LookupError, TypeError):
        return False


def _said(response: httpx.Response) -> str:
    return " ".join(response.text.split())[:200]
