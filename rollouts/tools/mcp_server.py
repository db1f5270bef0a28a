"""Tools of a Model Context Protocol (MCP) server, started as a process (stdio) or reached over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from core.errors import UserError, name_error
from core.tasks import start_task
from core.timing.deadlines import MCP_START_TIMEOUT_S
from core.timing.progress import say
from core.types.messages import Message
from rollouts.output import Output
from rollouts.tools.calls import ToolFailed, ToolUnavailable
from rollouts.tools.env import ToolEnv, check_names
from rollouts.tools.functions import Tool

if TYPE_CHECKING:
    from mcp.client.session import MessageHandlerFnT


class McpEnv(ToolEnv):
    """Environment with the tools of an MCP server, and the class's own. A reply without calls ends the episode.

    Calls to a dead server are answered with one sentence. A server that cannot start fails the sample.
    """

    server: ClassVar[str | Sequence[str]]
    """URL of a server (http://...), or the command that starts it."""
    server_env: ClassVar[Mapping[str, str]] = {}
    """Environment variables of the command, besides the usual ones (PATH, HOME, USER, ...)."""
    shared: ClassVar[bool] = False
    """False: each episode has a connection, and with a command a process. True: concurrent episodes of an engine
    process share them; the tools must be stateless."""

    async def open(self) -> list[Message]:
        """Connect to the server, and show its tools to the policy. Raises ToolUnavailable."""
        if self.shared:
            self._shared = _share(type(self))
            self._connection = await self._shared.wait()
        else:
            self._connection = await _connect(type(self))
        self.tools = [*type(self).tools, *(tool.spec for tool in self._connection.tools)]
        check_names([spec["function"]["name"] for spec in self.tools], type(self).__qualname__)
        return []

    def find_tools(self) -> Sequence[Tool]:
        """Return the tools of this class and of the server."""
        return [*super().find_tools(), *self._connection.tools]

    async def close(self) -> None:
        """Close the connection, or release a shared one."""
        if "_shared" in self.__dict__:
            await _unshare(type(self), self._shared)
        elif "_connection" in self.__dict__:
            await self._connection.close()


class McpConnection:
    """Connection to an MCP server. One task opens and closes it, as the library requires."""

    def __init__(self, server: str | Sequence[str], env: Mapping[str, str]) -> None:
        self.server, self.env = server, env
        self.name = server if isinstance(server, str) else " ".join(server)
        self.tools: list[Tool] = []
        self.is_lost = False
        """True after an error of the connection itself, for which no later call is answered."""
        self._opened, self._closing = asyncio.Event(), asyncio.Event()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect, and list the tools. Raises ToolUnavailable, and UserError without the library."""
        client = _make_client(self.server, self.env)
        self._task = start_task(self._hold(client))
        # the connection's task ends early on an error, and then never sets the event
        opened = asyncio.create_task(self._opened.wait())
        try:
            await asyncio.wait({self._task, opened}, timeout=MCP_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if self._opened.is_set():
                return
            why = "it does not respond"
            if self._task.done() and (error := self._task.exception()):
                why = name_error(_find_cause(error))
            raise ToolUnavailable(f"the MCP server {self.name} cannot be used: {why}")
        finally:
            opened.cancel()
            if not self._opened.is_set():
                self._task.cancel()

    async def close(self) -> None:
        """Close the connection. A started server ends, or is killed."""
        self._closing.set()
        if self._task is not None:
            # wait() does not raise: the error of a dead server is no error of closing
            await asyncio.wait({self._task})

    async def _hold(self, client: Any) -> None:
        async with client as self._client:
            cursor: str | None = None
            # a server with many tools lists them in pages
            while True:
                page = await self._client.list_tools(cursor=cursor)
                self.tools += [self._make_tool(found) for found in page.tools]
                cursor = page.next_cursor
                if cursor is None:
                    break
            self._opened.set()
            await self._closing.wait()

    def _make_tool(self, found: Any) -> Tool:
        described = {"name": found.name, "description": found.description or "", "parameters": found.input_schema}
        return Tool(spec={"type": "function", "function": described}, call=self._make_call(found.name))

    def _make_call(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str:
            try:
                result = await self._client.call_tool(name, arguments)
            except Exception as error:  # the border to the server: the library raises its own errors and its streams'
                has_ended = self._task is not None and self._task.done()
                self.is_lost = self.is_lost or has_ended or _is_of_connection(error)
                raise ToolFailed(f"the MCP server did not answer {name}: {name_error(_find_cause(error))}") from error
            # parts other than text, such as images, are only named
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
            if result.is_error:
                raise ToolFailed(text)
            return text

        return call


@dataclass(eq=False)
class _Shared:
    """Connection shared by episodes, with their number."""

    connecting: asyncio.Future[McpConnection]
    users: int = 0

    async def wait(self) -> McpConnection:
        """Return the connection when it is open. Raises ToolUnavailable."""
        # shielded: the end of one episode must not cancel the connection of the others
        return await asyncio.shield(self.connecting)

    def is_usable(self) -> bool:
        """Tell whether a new episode may use it: it is opening, or open and not lost."""
        future = self.connecting
        if not future.done():
            return True
        return not future.cancelled() and future.exception() is None and not future.result().is_lost


_SHARED: dict[type[McpEnv], _Shared] = {}
"""Connection for the next episode of each class. Earlier episodes may still have one that was lost."""


async def _connect(of: type[McpEnv]) -> McpConnection:
    connection = McpConnection(of.server, of.server_env)
    await connection.open()
    return connection


def _share(of: type[McpEnv]) -> _Shared:
    """Return the shared connection, with one more user. The first episode opens it, and the first after its loss."""
    shared = _SHARED.get(of)
    if shared is None or not shared.is_usable():
        shared = _SHARED[of] = _Shared(asyncio.ensure_future(_connect(of)))
    shared.users += 1
    return shared


async def _unshare(of: type[McpEnv], shared: _Shared) -> None:
    """Release a shared connection. The last episode closes it."""
    shared.users -= 1
    if shared.users:
        return
    if _SHARED.get(of) is shared:
        del _SHARED[of]
    if not shared.connecting.done():
        shared.connecting.cancel()
    elif not shared.connecting.cancelled() and shared.connecting.exception() is None:
        await shared.connecting.result().close()


def _make_client(server: str | Sequence[str], env: Mapping[str, str]) -> AbstractAsyncContextManager[Any]:
    try:
        from mcp import Client
    except ImportError as error:
        raise UserError(
            "an environment uses an MCP server, and the package mcp is not installed: pip install mcp"
        ) from error
    return Client(server) if isinstance(server, str) else _start_server(server, env)


@asynccontextmanager
async def _start_server(command: Sequence[str], env: Mapping[str, str]) -> AsyncGenerator[Any]:
    """Start a server, and connect to it. Its log is bounded, and cannot command the terminal."""
    from mcp import Client, StdioServerParameters, stdio_client

    # the library logs a traceback for each line that is no message
    logging.getLogger("mcp.client.stdio").addFilter(_is_not_of_a_line)
    name = f"the MCP server {' '.join(command)}"
    output = Output(bytearray(), whose=name)
    # read from the start: a server that fills the pipe before its first answer would wait for ever
    with os.fdopen(os.dup(output.far_ends[1]), "w") as errors:
        output.begin()
        try:
            started = StdioServerParameters(command=command[0], args=[*command[1:]], env=dict(env))
            async with Client(stdio_client(started, errlog=errors), message_handler=_say_once(name)) as client:
                yield client
        finally:
            await output.finish()


def _is_not_of_a_line(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Failed to parse")


def _say_once(name: str) -> MessageHandlerFnT:
    """Return a handler of messages that reports the first line that is none."""
    said = False

    async def handle(message: Any) -> None:
        nonlocal said
        if isinstance(message, Exception) and not said:
            said = True
            say(f"{name} prints to its standard output, which is for messages alone: print to standard error")

    return handle


def _is_of_connection(error: Exception) -> bool:
    """Tell whether a call failed without an answer of the server."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

    # over HTTP, a server that has started again no longer knows the session, and calls each request invalid
    if isinstance(error, MCPError):
        return error.code in (CONNECTION_CLOSED, INVALID_REQUEST)
    return not isinstance(error, RuntimeError)  # an answer that does not fit the tool's schema


def _find_cause(error: BaseException) -> BaseException:
    """Return the first error of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
