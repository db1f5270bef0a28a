"""The command of an MCP server: how it is started, where its log goes, and lines of it that are no messages."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.tools.mcp_server import McpEnv
from unit_tests.helpers.episodes import PROMPT


class Started:
    """Client of a started command, which prints a line and twice what is no message."""

    commands: list[Any]

    def __init__(self, transport: Any, *, message_handler: Any) -> None:
        command, self.log = transport
        self.commands.append(command)
        self.handle = message_handler

    async def __aenter__(self) -> Started:
        self.log.write("ready\n")
        self.log.flush()
        for message in ("a message", ValueError("a line"), "another", ValueError("a line")):
            await self.handle(message)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.log.write("gone\n")
        self.log.flush()

    async def list_tools(self, cursor: str | None) -> Any:
        return SimpleNamespace(tools=[], next_cursor=None)


@pytest.fixture
def library(monkeypatch) -> type[Started]:
    """The library with a client of its own for this test."""
    fresh = type("Fresh", (Started,), {"commands": []})
    parts: dict[str, Any] = {
        "Client": fresh,
        "StdioServerParameters": lambda **how: how,
        "stdio_client": lambda command, *, errlog: (command, errlog),
    }
    module: Any = SimpleNamespace(**parts)
    monkeypatch.setitem(sys.modules, "mcp", module)
    return fresh


class Desk(McpEnv):
    server, server_env = ("desk", "--port", "3"), {"A": "b"}


def test_a_command_has_its_words_and_variables_and_its_log_is_shown(library, capfd):
    def is_read() -> bool:
        return "output of the MCP server desk --port 3" in [thread.name for thread in threading.enumerate()]

    async def go() -> None:
        env = Desk(PROMPT)
        assert await env.open() == [] and is_read()
        await env.close()

    asyncio.run(go())
    assert not is_read()
    assert library.commands == [{"command": "desk", "args": ["--port", "3"], "env": {"A": "b"}}]
    shown = capfd.readouterr().err.splitlines()
    assert sorted(shown) == [
        "gone",
        "ready",
        "the MCP server desk --port 3 prints to its standard output, which is for messages alone: print to standard "
        "error",
    ]


def test_the_librarys_tracebacks_of_lines_are_left_out(library):
    async def go() -> None:
        env = Desk(PROMPT)
        await env.open()
        await env.close()

    asyncio.run(go())
    log = logging.getLogger("mcp.client.stdio")
    kept = {text: bool(log.filter(logging.makeLogRecord({"msg": text}))) for text in ("Failed to parse x", "Failed")}
    assert kept == {"Failed to parse x": False, "Failed": True}
