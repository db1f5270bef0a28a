"""Sandbox on another machine: an HTTP server with `POST /run_code`, as in ByteDance's SandboxFusion.

    request   {"code", "language", "stdin", "files": {name: base64},
               "compile_timeout", "run_timeout", "memory_limit_MB"}
    answer    {"status": "Success" | "Failed" | "SandboxError", "message",
               "compile_result" and "run_result": null or
                   {"status": "Finished" | "TimeLimitExceeded" | "Error", "return_code", "stdout", "stderr",
                    "execution_time"}}

Limits on time and memory are sent. All other limits are the server's (https://bytedance.github.io/SandboxFusion).
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from core.errors import UserError, name_error
from core.text.json_text import decode_json
from core.timing.deadlines import SANDBOX_HTTP_GRACE_S
from rewards.sandbox.base import Limits, Ran, SandboxUnavailable, check_names

ROUTE = "/run_code"
ROOM = 8 * 2**16
"""Maximum size of a response besides output, in bytes."""
WORST_QUOTE = 6
"""JSON bytes per byte of output, at worst, as \\u0000."""


class HttpSandbox:
    """Sandbox behind a URL. A command `python3 FILE` runs as Python; any other command runs in bash."""

    def __init__(self, url: str) -> None:
        """url: server address, with or without a path before /run_code. Raises UserError for an invalid address."""
        self.url = url
        parts = urlsplit(url)
        try:
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise UserError(f"the address of the sandbox {url!r:.200} cannot be read: {error}") from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise UserError(f"the address of the sandbox {url!r:.200} is not one like http://host:8080")
        self._secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix(ROUTE) + ROUTE

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Ran:
        """Run `command` on the server; see rewards/sandbox/base.py. Raises ValueError for input that is not UTF-8."""
        limits = limits or Limits()
        body = json.dumps(_make_request(command, dict(files or {}), stdin, limits)).encode()
        began = time.monotonic()
        # http.client blocks
        answer = await asyncio.to_thread(self._post, body, limits)
        return _read_answer(answer, limits, self.url, time.monotonic() - began)

    async def check(self) -> None:
        """Run a line of Python on the server."""
        ran = await self.run(["python3", "main.py"], files={"main.py": b"print(6 * 7)"})
        if ran.stdout.strip() != b"42":
            said = ran.stderr.decode(errors="replace")[-200:]
            raise SandboxUnavailable(f"the sandbox {self.url} cannot run Python: exit code {ran.exit_code} {said}")

    def _post(self, body: bytes, limits: Limits) -> bytes:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        assert self._host is not None
        connection = kind(self._host, self._port, timeout=limits.seconds + SANDBOX_HTTP_GRACE_S)
        # bounded, since the server is not trusted with this machine's memory
        most = 2 * WORST_QUOTE * limits.output_bytes + ROOM
        try:
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            # one byte more than allowed, to notice a longer answer
            answer = response.read(most + 1)
        except (OSError, http.client.HTTPException) as error:
            raise SandboxUnavailable(f"the sandbox {self.url} cannot be reached: {name_error(error)}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise SandboxUnavailable(f"the sandbox {self.url} answered {response.status} {response.reason}")
        if len(answer) > most:
            raise SandboxUnavailable(f"the sandbox {self.url} answered more than {most} bytes")
        return answer


def _make_request(command: Sequence[str], files: dict[str, bytes], stdin: bytes, limits: Limits) -> dict[str, Any]:
    check_names(files)
    language, code = "bash", shlex.join(command)
    # SandboxFusion runs Python as a language, with the source as `code`
    if len(command) == 2 and command[0] == "python3" and command[1] in files:
        language, code = "python", files.pop(command[1]).decode()
    return {
        "language": language,
        "code": code,
        "stdin": stdin.decode(),
        "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
        "compile_timeout": limits.seconds,
        "run_timeout": limits.seconds,
        "memory_limit_MB": limits.memory_mib,
    }


def _read_answer(answer: bytes, limits: Limits, url: str, seconds: float) -> Ran:
    """Parse a response. Raises SandboxUnavailable for a response without a result."""
    try:
        told = decode_json(answer)
        status, message = told["status"], told.get("message")
        # code that does not compile has no result of a run
        result = told.get("run_result") or told.get("compile_result")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SandboxUnavailable(
            f"the sandbox {url} does not answer as SandboxFusion does: {answer[:100]!r}"
        ) from error
    if status == "SandboxError" or not isinstance(result, dict) or result.get("status") not in _RESULTS:
        raise SandboxUnavailable(f"the sandbox {url} failed: {str(message or answer)[:300]}")
    stdout, stderr = ((result.get(stream) or "").encode() for stream in ("stdout", "stderr"))
    killed_for = _RESULTS[result["status"]]
    # the server is not sent this limit, so it is applied here
    if max(len(stdout), len(stderr)) > limits.output_bytes:
        killed_for = "output"
    code = result.get("return_code")
    if killed_for is None and not isinstance(code, int):
        raise SandboxUnavailable(f"the sandbox {url} returned no exit code: {answer[:100]!r}")
    # a negative code is Python's form for a signal; the rest of the system uses 128 + n
    return Ran(
        exit_code=None if killed_for else code if code >= 0 else 128 - code,
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: limits.output_bytes],
        seconds=result.get("execution_time") or seconds,
        killed_for=killed_for,
    )


# Every other status means that the server failed, not the code.
_RESULTS = {"Finished": None, "TimeLimitExceeded": "time"}
