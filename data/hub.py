"""Asks the Hugging Face hub once, shortly, before anything tries to download for minutes."""

from collections.abc import Callable

from huggingface_hub.errors import HfHubHTTPError, HFValidationError

HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub before it counts as unreachable."""


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
