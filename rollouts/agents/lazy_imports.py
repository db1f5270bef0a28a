"""Modules that an episode imports lazily. After the first episode the launcher imports them, so forks have them.

OpenAI's client imports 85 modules with its first request: 0.08 of the 0.14 seconds of CPU that an episode of a fork
costs. Only modules of packages that the agent's file has imported itself are taken, and those of Python: others may
read the variables of an episode when they are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Set

LARGEST_REPORT = 60_000
"""Maximum size of a report, in bytes. It fits into a pipe, so writing it never waits."""


class LazyImports:
    """The launcher's side and the episode's side of one report."""

    def __init__(self) -> None:
        self.reading: int | None = None
        """Descriptor of the pipe, in the launcher, while a report is due."""
        self._known = {*sys.modules}
        self._said = b""
        self._is_done = False

    def open(self) -> int | None:
        """Return the descriptor for a report of the next episode; None if one is due, or has come."""
        if self._is_done or self.reading is not None:
            return None
        self.reading, writing = os.pipe()
        return writing

    def report(self, writing: int) -> None:
        """Report the modules that this process has imported since it was forked."""
        new = json.dumps([name for name in [*sys.modules] if name not in self._known]).encode()
        if len(new) < LARGEST_REPORT:
            os.write(writing, new + b"\n")

    def take(self) -> None:
        """Read the next piece of the report. Import the modules once it is whole."""
        assert self.reading is not None
        piece = os.read(self.reading, 2**16)
        self._said += piece
        if piece and not piece.endswith(b"\n"):
            return
        os.close(self.reading)
        self.reading, said, self._said = None, self._said, b""
        if not piece:  # the episode was killed: the next one reports
            return
        self._is_done = True
        for name in choose_modules(json.loads(said), self._known):
            # the border to libraries, whose modules may raise anything; the episode imports it again, and says so
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def choose_modules(names: Iterable[str], known: Set[str]) -> list[str]:
    """Return the modules of Python, and of packages of which a part is known.

    >>> choose_modules(["http.client", "openai.resources.chat", "my_tools"], {"openai", "os"})
    ['http.client', 'openai.resources.chat']
    """
    packages = {name.partition(".")[0] for name in known} | sys.stdlib_module_names
    return [name for name in names if name.partition(".")[0] in packages]
