"""Stateful Python session in a sandbox, for a tool of an episode."""

from __future__ import annotations

import json
from pathlib import Path

from core.text.json_text import decode_json
from rewards.sandbox.base import Limits
from rewards.sandbox.bubblewrap import Bubblewrap
from rewards.sandbox.running import Running

PROGRAM = Path(__file__).parent / "inside" / "cells.py"
ENDED = {
    "time": "it took longer than {seconds:g} s",
    "memory": "it took more than {memory_mib} MiB of memory",
    "files": "it made more than {files} files",
    "output": "it printed too much",
    None: "its process ended",
}


class PythonSession:
    """Python session with names that persist until `close`.

    Each piece of code has `limits.seconds`. Exceeding a limit ends the session. The answer says so, and the next piece
    starts a new session. Only on this machine, since a server's /run_code is stateless.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._box: Running | None = None

    async def run(self, source: str) -> str:
        """Run one piece of code, and return its output. Raises SandboxUnavailable if the sandbox fails."""
        if self._box is None:
            self._box = await Bubblewrap().open(
                ["python3", PROGRAM.name],
                files={PROGRAM.name: PROGRAM.read_bytes()},
                limits=self.limits,
                time_is_one_piece=True,
            )
        try:
            line = await self._box.ask(json.dumps({"source": source}).encode(), seconds=self.limits.seconds)
        except BaseException:  # cancelled: the pending response would be read by the next piece
            await self.close()
            raise
        try:
            return str(decode_json(line or b"")["output"])
        except (ValueError, LookupError, TypeError):  # the process ended, or code of the session wrote to its pipe
            reason = self._box.killed_for
            await self.close()
        why = ENDED[reason].format(
            seconds=self.limits.seconds, memory_mib=self.limits.memory_mib, files=self.limits.files
        )
        return f"error: the session was ended, because {why}; the next piece begins a new one without its names"

    async def close(self) -> None:
        """Kill the process and its descendants."""
        box, self._box = self._box, None
        if box is not None:
            await box.close()
