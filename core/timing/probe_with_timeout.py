"""Ask something that may never answer, such as a server: the reason of its failure within a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable

from core.errors import first_line


def probe_with_timeout(ask: Callable[[], str | None], *, timeout_s: float, silence: str) -> str:
    """Return why `ask` failed: what it returns or raises, or `silence` after `timeout_s` seconds; "" if it succeeded.

    It runs in a thread, because the clients asked here have waits that no timeout of theirs covers.
    """
    failures = [silence]

    def run() -> None:
        try:
            failures.append(ask() or "")
        except Exception as error:  # a border: whatever a client, a proxy or the certificates raise
            failures.append(first_line(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return failures[-1]
