"""Box that plays a script: results of commands, and the files of a verifier."""

from __future__ import annotations

from typing import Any

from rewards.sandbox.base import Ran


def ran(stdout: bytes = b"", *, code: int | None = 0, seconds: float = 1.0, killed_for: Any = None) -> Ran:
    return Ran(exit_code=code, stdout=stdout, stderr=b"", seconds=seconds, killed_for=killed_for)


class Scripted:
    """Box with a result for each command, and the verifier's files. A text is the reason why it breaks then."""

    path = "/bin"

    def __init__(self, *results: Any, files: dict[str, bytes] | None = None, broken_by_put: str = "") -> None:
        self.results, self.files, self.broken_by_put = list(results), files or {}, broken_by_put
        self.broken, self.closed, self.asked = "", 0, list[Any]()

    async def run(self, command: Any, *, seconds: float, environment: Any = None) -> Ran:
        self.asked.append((*command, seconds) if environment is None else (*command, seconds, environment))
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        if isinstance(result, str):
            self.broken, result = result, ran(b"last")
        return result

    async def put(self, folder: str, files: Any) -> None:
        self.asked.append((folder, dict(files)))
        self.broken = self.broken or self.broken_by_put

    async def get(self, path: str, *, most: int) -> bytes | None:
        self.asked.append((path, most))
        return self.files.get(path)

    async def stop_processes(self) -> None:
        self.asked.append("stop")

    async def close(self) -> None:
        self.closed += 1
