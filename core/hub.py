"""Ask the Hugging Face hub only where it answers; else go on with its cache, and say so.

The libraries that read the hub retry for more than a minute before they look into the cache or give up.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from core.timing.deadlines import HUB_TIMEOUT_S
from core.timing.probe_with_timeout import probe_with_timeout
from core.timing.progress import say


@dataclass
class _State:
    """State of the hub, as far as this process has asked."""

    is_checked: bool = False
    unreachable: str = ""
    """Why the hub cannot be reached; "" where it answers or was not asked."""


_state = _State()


def prepare_hub(wanted: str) -> None:
    """Say what is asked of the hub and where; if it does not answer, use the cache alone from here on.

    wanted: the key and the name, `model.path=OWNER/NAME`. The hub is tried once per process.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return
    if not _state.is_checked:
        say(f"{wanted}: asking the hub, {constants.ENDPOINT}")
        _state.is_checked, _state.unreachable = True, find_hub_failure()
    if _state.unreachable:
        say(
            f"{wanted}: {constants.ENDPOINT} does not answer ({_state.unreachable}): going on with what is cached in "
            f"{constants.HF_HUB_CACHE}"
        )
        _go_offline()


def find_hub_failure() -> str:
    """Return why the hub does not answer within HUB_TIMEOUT_S; "" where it does."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    def ask() -> str | None:
        answer = get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
        return f"status {answer.status_code}" if answer.status_code >= 500 else None

    return probe_with_timeout(ask, timeout_s=HUB_TIMEOUT_S, silence=f"nothing within {HUB_TIMEOUT_S:g} s")


def describe_hub() -> str:
    """Return what was tried and how to do without the hub, to end a sentence about a name that was not found."""
    from huggingface_hub import constants

    mend = "name a local folder or file, or fill the cache where there is a network and set HF_HUB_OFFLINE=1"
    if _state.unreachable:
        tried = f"{constants.ENDPOINT} did not answer ({_state.unreachable}), and the cache {constants.HF_HUB_CACHE}"
        return f"{tried} does not hold it: {mend}"
    if constants.is_offline_mode():
        return f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not hold it: {mend}"
    return f"{constants.ENDPOINT} was asked: check the name, or name a local folder or file"


def _go_offline() -> None:
    """Switch off the hub for the libraries of this process, and for the processes that it starts."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if (config := sys.modules.get("datasets.config")) is not None:
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]
