"""The Hugging Face hub: asked once and shortly before anything downloads for minutes; retries; fetching."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from slipstream.data.progress import say

T = TypeVar("T")

HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub before it counts as unreachable."""
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between tries."""
TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)
"""Answers that another try may change."""


def hub_answers(ask: Callable[..., object], name: str, **options: str) -> bool:
    """Whether the hub can be reached; `ask` is `model_info` or `dataset_info` of the hub's client.

    Raises:
        HfHubHTTPError: it can, and does not give `name` away.
        HFValidationError: no model or data set can have such a name.
    """
    try:
        ask(name, timeout=HUB_TIMEOUT, **options)
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception:  # the classes of network errors belong to the hub client's HTTP library
        return False
    return True


def with_retries(what: str, call: Callable[[], T]) -> T:
    """What `call` returns; it may be made again after an error of the network or the server.

    Raises:
        ValueError: the last try failed as well, or the hub refuses.
    """
    for wait in (*WAITS, None):
        try:
            return call()
        except HfHubHTTPError as error:
            reason = _first_line(error)
            if error.response.status_code not in TRANSIENT:
                raise ValueError(f"{what}: the hub refuses ({reason})") from None
        except json.JSONDecodeError:  # a ValueError, but of a server that answers with a page of its own
            reason = "the answer is no JSON"
        except ValueError:
            raise
        except Exception as error:  # as in hub_answers
            reason = _first_line(error)
        if wait is None:
            break
        say(f"{what}: {reason}; again in {wait:g} s")
        time.sleep(wait)
    raise ValueError(f"{what}: the hub does not answer ({reason}): run the same command again later")


def fetch(name: str, files: Sequence[str], *, key: str) -> Path:
    """The folder `name`, or that of the hub model `OWNER/NAME[@REVISION]` with `files` fetched.

    Raises:
        ValueError: neither is there; the message names `key`, the setting.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    repo_id, _, revision = name.partition("@")
    if name.startswith((".", "/", "~")) or repo_id.count("/") != 1:
        raise ValueError(f"{key}={name}: no such folder, and not a hub id (OWNER/NAME)")
    try:
        offline = not hub_answers(model_info, repo_id, revision=revision or "main")
        found = snapshot_download(
            repo_id, revision=revision or "main", allow_patterns=list(files), local_files_only=offline
        )
        return Path(found)
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{key}={name}: the hub cannot be reached and the head is not in its cache: name a folder"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise ValueError(
            f"{key}={name}: the hub refuses ({_first_line(error)}): check the name, or log in with "
            f"`hf auth login`"
        ) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
