"""Probe a server that may never respond, within a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable

from core.errors import first_line


def probe_with_timeout(ask: Callable[[], str | None], *, timeout_s: float, silence: str) -> str:
    """Return why `ask` failed: its result or error, or `silence` after `timeout_s` seconds; "" on success."""
    failures = [silence]

    def run() -> None:
        try:
            failures.append(ask() or "")
        except Exception as error:  # a border: whatever a client, a proxy or the certificates raise
            failures.append(first_line(error))

    # Some clients wait in places that their own timeout does not cover. A thread can be abandoned there.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return failures[-1]
