"""Check once whether the Hugging Face hub responds; otherwise use the local cache and report that.

Libraries that read the hub retry for over a minute before they use the cache or fail.
"""

from __future__ import annotations

import os

from core.patches import forget_hub
from core.timing.deadlines import HUB_TIMEOUT_S
from core.timing.progress import say
from core.timing.timeouts import probe_with_timeout

_failures: list[str] = []
"""Reason why the hub cannot be reached, or "" if it responds; empty before this process's check."""


def prepare_hub(wanted: str) -> None:
    """Report a request to the hub. If the hub does not respond, use only the cache from now on.

    wanted: key and name, `model.path=OWNER/NAME`. The hub is tried once per process.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return
    if not _failures:
        say(f"{wanted}: asking the hub, {constants.ENDPOINT}")
        # Once per process: every further attempt would wait for the timeout again.
        _failures.append(find_hub_failure())
    if any(_failures):
        say(
            f"{wanted}: {constants.ENDPOINT} does not answer ({_failures[0]}): going on with what is cached in "
            f"{constants.HF_HUB_CACHE}"
        )
        _go_offline()


def find_hub_failure() -> str:
    """Return why the hub does not respond within HUB_TIMEOUT_S; "" if it does."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    def ask() -> str | None:
        # Below 500 the hub itself has answered. A name that it refuses fails later, with an error of its own.
        answer = get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
        return f"status {answer.status_code}" if answer.status_code >= 500 else None

    return probe_with_timeout(ask, timeout_s=HUB_TIMEOUT_S, silence=f"nothing within {HUB_TIMEOUT_S:g} s")


def describe_hub() -> str:
    """Return a clause for a name that was not found: the places tried, and the fix without the hub."""
    from huggingface_hub import constants

    fix = "name a local folder or file, or fill the cache where there is a network and set HF_HUB_OFFLINE=1"
    if any(_failures):
        tried = f"{constants.ENDPOINT} did not answer ({_failures[0]}), and the cache {constants.HF_HUB_CACHE}"
        return f"{tried} does not hold it: {fix}"
    if constants.is_offline_mode():
        return f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not hold it: {fix}"
    return f"{constants.ENDPOINT} was asked: check the name, or name a local folder or file"


def _go_offline() -> None:
    """Disable the hub for the libraries of this process and for its child processes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    forget_hub()
