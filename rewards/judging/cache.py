"""Cache of verdicts: equal requests in flight share one call, and readable verdicts survive a resume.

Each process appends to a file of its own in <run folder>/judge_cache, and reads all files there at the start.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from core.errors import writing
from core.text.json_text import decode_json

FOLDER = "judge_cache"
Answer = dict[str, Any]
"""Text and value of a verdict."""


class VerdictCache:
    """Verdicts by the hash of their requests."""

    def __init__(self, folder: Path | None, earlier: Path | None = None) -> None:
        """Read the verdicts of run folders. folder: that of this run; None keeps verdicts in memory only."""
        self._path = None if folder is None else folder / FOLDER / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        folders = [path / FOLDER for path in (earlier, folder) if path is not None]
        self._known: dict[str, Answer] = {key: answer for path in folders for key, answer in _read_folder(path)}
        self._asked: dict[str, asyncio.Task[Answer]] = {}

    async def get(self, key: str, ask: Callable[[], Awaitable[Answer]]) -> tuple[Answer, bool]:
        """Return the answer to a request, and whether it cost no call. Errors of `ask` are those of all who wait."""
        if key in self._known:
            return self._known[key], True
        is_shared = key in self._asked
        if not is_shared:
            self._asked[key] = asyncio.ensure_future(self._ask(key, ask))
            self._asked[key].add_done_callback(_see_error)
        # shielded: a sample whose deadline passes must not cancel the call of its siblings
        return await asyncio.shield(self._asked[key]), is_shared

    async def _ask(self, key: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            answer = await ask()
        finally:
            del self._asked[key]
        if answer["value"] is not None:  # an unreadable verdict may be readable next time
            self._keep(key, answer)
        return answer

    def _keep(self, key: str, answer: Answer) -> None:
        self._known[key] = answer
        if self._path is None:
            return
        with writing(self._path, meaning="verdicts of the judge are kept there"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **answer}) + "\n")


def _see_error(task: asyncio.Task[Answer]) -> None:
    # those who waited may be gone, and Python would print an error that nobody retrieves
    if not task.cancelled():
        task.exception()


def hash_request(*parts: Any) -> str:
    """Return the hash of a request: address, body, and how the verdict is read."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read_folder(folder: Path) -> Iterator[tuple[str, Answer]]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                answer = decode_json(line)
                yield answer.pop("key"), answer
            except (ValueError, KeyError, AttributeError):
                continue  # the line that a killed process was writing
