"""Generation by a server that speaks the OpenAI completions protocol: vLLM, SGLang and others.

Prompts go as token ids, rendered here with the target's own chat template, so no template of the
server can differ. Token ids come back where the server gives them (`return_token_ids`); else the
text is tokenized again.
"""

import asyncio
import os
import random
from collections.abc import Sequence
from typing import Any

import httpx
from transformers import PreTrainedTokenizerFast

from slipstream.data.backends.hf import Answer
from slipstream.data.config import SampleConfig, ServerConfig

PASSING = {408, 409, 425, 429}
"""Status codes below 500 that another try may not meet."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between tries; each wait is twice as long as the one before, and drawn."""
KEY = "data.regenerate.server"


class RefusedPromptError(Exception):
    """The server will never answer this prompt; its text says why."""


class CompletionServer:
    """Sends prompts and brings answers, however often the server stumbles; an async context manager."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        model: str,
        tokenizer: PreTrainedTokenizerFast,
        stop_ids: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        """Keeps the settings.

        Args:
            config: where the server is.
            model: asked for where the recipe names none and the server has several.
            tokenizer: of the target.
            stop_ids: tokens that end an answer.
            max_new_tokens: of one answer.
        """
        self._config, self._model, self._tokenizer = config, config.model or model, tokenizer
        self._stop_ids, self._max_new_tokens = list(stop_ids), max_new_tokens
        key = os.environ.get(config.api_key_env, "")
        self._client = httpx.AsyncClient(
            base_url=config.url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(config.timeout, connect=min(30.0, config.timeout)),
            limits=httpx.Limits(max_connections=config.concurrency),
        )

    async def __aenter__(self) -> "CompletionServer":
        """Checks that the server is there and serves the model.

        Raises:
            ValueError: it is not reached, refuses the key, or serves other models.
        """
        listed = await self._asked("GET", "models")
        names = [str(entry["id"]) for entry in listed["data"]]
        if not self._config.model and self._model not in names and len(names) == 1:
            self._model = names[0]  # a folder, or --served-model-name
        if self._model not in names:
            raise ValueError(f"{KEY}.model={self._model} is not served by {self._config.url}: {names}")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def complete(self, prompt: Sequence[int], sampling: SampleConfig, seed: int) -> Answer:
        """The answer to a prompt.

        Raises:
            RefusedPromptError: the server refuses this prompt (too long, filtered).
            ValueError: the server failed at every try.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": self._max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % 2**31,
            "stop_token_ids": self._stop_ids,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        return self._answer((await self._asked("POST", "completions", body))["choices"][0])

    def _answer(self, choice: dict[str, Any]) -> Answer:
        stopped = choice["finish_reason"] == "stop"
        given = choice.get("token_ids")
        token_ids = (
            list(given)
            if given is not None
            else self._tokenizer(choice["text"], add_special_tokens=False, verbose=False)["input_ids"]
        )
        if stopped and (not token_ids or token_ids[-1] not in self._stop_ids):
            reason = choice.get("stop_reason")  # vLLM: the token, where it is not the first of all
            token_ids.append(reason if reason in self._stop_ids else self._default_stop())
        return Answer(token_ids=tuple(map(int, token_ids)), finish_reason=choice["finish_reason"])

    def _default_stop(self) -> int:
        eos = self._tokenizer.eos_token_id
        return eos if eos in self._stop_ids else self._stop_ids[0]

    async def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The checked JSON of a request that is tried again while that may help."""
        said = ""
        for attempt in range(self._config.max_tries):
            if attempt:
                wait = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)
                await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            try:
                response = await self._client.request(method, path, json=body)
            except httpx.HTTPError as error:
                said = f"{type(error).__name__} {error}".strip()
                continue
            said = f"HTTP {response.status_code}: {' '.join(response.text.split())[:200]}"
            if response.status_code in PASSING or response.status_code >= 500:
                continue
            if response.status_code == 400 and body is not None:
                raise RefusedPromptError(said)
            if response.status_code >= 400:
                raise ValueError(
                    f"{KEY}.url={self._config.url} answers {said}: check {KEY}.url, {KEY}.model and the "
                    f"key in ${self._config.api_key_env}"
                )
            content = _checked(response, "choices" if body is not None else "data")
            if content is not None:
                return content
        raise ValueError(
            f"{KEY}.url={self._config.url} failed {self._config.max_tries} times (last: {said}): start or "
            f"mend the server and run the same command again; what was answered is kept"
        )


def _checked(response: httpx.Response, key: str) -> dict[str, Any] | None:
    """The body, or None where it is cut or no answer."""
    try:
        content = response.json()
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        return None
    if key == "choices":
        choice = content[key][0] if content[key] else {}
        if choice.get("finish_reason") not in ("stop", "length") or not isinstance(choice.get("text"), str):
            return None  # aborted by the server
    return content
