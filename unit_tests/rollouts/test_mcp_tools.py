"""Tools of MCP servers: a real server, started over stdio, and reached over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import UserError
from core.types.samples import Prompt
from rollouts import output
from rollouts.tools.calls import ToolUnavailable
from rollouts.tools.functions import tool
from rollouts.tools.mcp_server import McpEnv
from unit_tests.helpers.episodes import PROMPT, calls_of, said
from unit_tests.helpers.processes import find_free_port, leftovers

pytest.importorskip("mcp", reason="the package mcp comes with vLLM")
from mcp import MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST

pytestmark = pytest.mark.one_core

SERVER = """
import os, sys, time
from mcp.server import MCPServer
server = MCPServer("desk")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def refuse() -> str:
    "Refuse."
    raise ValueError("the desk is closed")

@server.tool()
def process() -> str:
    "Return the process and a variable."
    return f"{os.getpid()} {os.environ.get('DESK', '')}"

@server.tool()
def die() -> str:
    "Die."
    os._exit(3)

if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "desk.py"
    path.write_text(SERVER)
    return path


def env_of(server, **more) -> type[McpEnv]:
    """An environment with the tools of a server and one of its own."""

    class Desk(McpEnv):
        @tool
        def own(self) -> str:
            """Return a word."""
            return "mine"

    Desk.server = server
    for name, value in more.items():
        setattr(Desk, name, value)
    return Desk


async def ask(env: McpEnv, *calls) -> list[str]:
    return [message["content"] for message in await env.step(calls_of(*calls)) or []]


def is_running(process: str) -> bool:
    return os.path.exists(f"/proc/{process}")


@pytest.mark.slow
def test_a_server_over_stdio_gives_its_tools_for_an_episode(file):
    async def play() -> str:
        env = env_of([sys.executable, str(file)], server_env={"DESK": "oak"})(PROMPT)
        assert await env.open() == []
        assert [spec["function"]["name"] for spec in env.tools] == ["own", "add", "refuse", "process", "die"]
        add = env.tools[1]["function"]
        assert add["description"] == "Add two numbers." and add["parameters"]["required"] == ["a", "b"]
        many = [("add", {"a": i, "b": 1}) for i in range(20)]
        assert await ask(env, *many, ("own", {})) == [*(str(i + 1) for i in range(20)), "mine"]
        [closed] = await ask(env, ("refuse", {}))
        assert closed == "Error: Error executing tool refuse", "what the server says of an error"
        assert await ask(env, ("add", {"a": "x", "b": 1})) == [
            "Error: The arguments of add do not fit its schema: a: 'x' is not of type 'integer'."
        ]
        [process] = await ask(env, ("process", {}))
        assert process.endswith(" oak"), "the command's own environment"
        assert await env.step(said("done")) is None
        await env.close()
        return process.split()[0]

    assert not is_running(asyncio.run(play()))


@pytest.mark.slow
def test_the_death_of_a_server_is_one_sentence_per_call(file):
    async def play() -> None:
        env = env_of([sys.executable, str(file)])(PROMPT)
        await env.open()
        answers = [*await ask(env, ("die", {})), *await ask(env, ("add", {"a": 1, "b": 2}), ("own", {}))]
        assert [a.startswith("Error: the MCP server did not answer") for a in answers] == [True, True, False], answers
        assert not any("\n" in a for a in answers)
        assert env.counts()["tool_errors/raised"] == 2
        await env.close()

    asyncio.run(play())


@pytest.mark.slow
def test_episodes_may_share_a_server_and_the_last_one_closes_it(file):
    Desk = env_of([sys.executable, str(file)], shared=True)

    async def play() -> str:
        envs = [Desk(Prompt(id=str(i), messages=PROMPT.messages)) for i in range(8)]
        await asyncio.gather(*(env.open() for env in envs))
        answers = await asyncio.gather(*(ask(env, ("process", {})) for env in envs))
        [process] = {a for [a] in answers}
        await asyncio.gather(*(env.close() for env in envs[1:]))
        assert await ask(envs[0], ("add", {"a": 1, "b": 2})) == ["3"], "one still uses it"
        await envs[0].close()
        return process.split()[0]

    processes = [asyncio.run(play()) for _ in range(2)]
    assert not any(map(is_running, processes)) and processes[0] != processes[1]


class FakeClient:
    """Client of a server that answers each call with an error."""

    def __init__(self, error: Exception) -> None:
        self.error, self.is_open = error, False

    async def __aenter__(self) -> FakeClient:
        self.is_open = True
        return self

    async def __aexit__(self, *error: object) -> None:
        self.is_open = False

    async def list_tools(self, cursor: str | None) -> Any:
        add = SimpleNamespace(name="add", description="", input_schema={"type": "object"})
        return SimpleNamespace(tools=[add], next_cursor=None)

    async def call_tool(self, name: str, arguments: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "opened"),
    [
        (MCPError(CONNECTION_CLOSED, "gone"), 2),
        (MCPError(INVALID_REQUEST, "no such session"), 2),
        (OSError("gone"), 2),
        (MCPError(INVALID_PARAMS, "no"), 1),
        (RuntimeError("no content"), 1),
    ],
)
def test_a_shared_connection_that_was_lost_is_opened_again(monkeypatch, error, opened):
    """Episodes that have the lost one keep it until their end."""
    clients: list[FakeClient] = []

    def make_client(*server: object) -> FakeClient:
        clients.append(FakeClient(error))
        return clients[-1]

    monkeypatch.setattr("rollouts.tools.mcp_server._make_client", make_client)
    Desk = env_of("http://desk", shared=True)

    async def play() -> None:
        first, second = Desk(PROMPT), Desk(PROMPT)
        await first.open()
        await ask(first, ("add", {}))
        await second.open()
        assert len(clients) == opened
        await second.close()
        assert clients[0].is_open, "the first still has it"
        await first.close()
        assert not any(client.is_open for client in clients)

    asyncio.run(play())


@pytest.mark.slow
def test_a_server_is_reached_over_http(file):
    port = find_free_port()
    server = subprocess.Popen([sys.executable, str(file), str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)

        async def play() -> None:
            env = env_of(f"http://127.0.0.1:{port}/mcp")(PROMPT)
            await env.open()
            assert await ask(env, ("add", {"a": 3, "b": 4})) == ["7"]
            await env.close()

        asyncio.run(play())
    finally:
        server.kill()
        server.wait()


def wait_for_port(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server did not start")


BROKEN = {
    "no such command": (["/no/such/command"], "the MCP server /no/such/command cannot be used: FileNotFoundError"),
    "one that ends": ([sys.executable, "-c", "pass"], "cannot be used: "),
    "nobody there": ("http://127.0.0.1:9/mcp", "the MCP server http://127.0.0.1:9/mcp cannot be used: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_an_unusable_server_fails_the_sample_and_is_no_tool_error(name):
    server, words = BROKEN[name]

    async def play() -> None:
        env = env_of(server)(PROMPT)
        try:
            await env.open()
        finally:
            await env.close()

    with pytest.raises(ToolUnavailable) as caught:
        asyncio.run(play())
    assert words in str(caught.value) and "\n" not in str(caught.value)


RAW = """
import json, sys, time
fault, moment = sys.argv[1:]
if fault == "prints":
    for i in range(20_000):
        sys.stderr.write(f"\\x1b]0;owned\\x07 \\u202e {i:050}\\n")
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    found = {
        "initialize": {"protocolVersion": asked.get("params", {}).get("protocolVersion"), "capabilities": {"tools": {}},
                       "serverInfo": {"name": "raw", "version": "1"}},
        "tools/list": {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": "7"}]},
    }.get(asked["method"])
    if asked["method"] == moment:
        if fault == "death":
            sys.exit(3)
        if fault == "hang":
            continue
        if fault == "garbage":
            print("what?", flush=True)
            continue
        if fault == "prints":
            for i in range(300):
                print("progress \\x1b[31m", i)
        if fault == "wrong schema":
            found = {"tools": 7, "content": 7}
        time.sleep(0.1)
    answer = {"result": found} if found else {"error": {"code": -32601, "message": "no such method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"]} | answer), flush=True)
"""
"""Server of MCP's lines that does one thing wrong at one moment, or is slow then."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["death", "hang", *(pytest.param(name, marks=pytest.mark.verify) for name in ("garbage", "wrong schema", "slow"))],
)
@pytest.mark.parametrize("moment", ["initialize", "tools/list", "tools/call"])
def test_a_server_that_fails_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch, fault, moment):
    monkeypatch.setattr("rollouts.tools.mcp_server.MCP_START_TIMEOUT_S", 2.0)
    (tmp_path / "raw.py").write_text(RAW)
    mark = str(tmp_path / "raw.py")

    async def play() -> str:
        env = env_of([sys.executable, "-I", mark, fault, moment], tool_timeout_s=0.5)(PROMPT)
        try:
            await env.open()
            [said] = await ask(env, ("add", {}))
            return said
        except ToolUnavailable as error:
            return f"the sample fails: {error}"
        finally:
            await env.close()

    said = asyncio.run(play())
    if fault == "slow":
        assert said == "7"
    else:
        assert said.startswith("Error: " if moment == "tools/call" else "the sample fails: "), said
    assert "\n" not in said and not leftovers(mark)


@pytest.mark.slow
def test_what_a_server_prints_is_bounded_and_commands_no_terminal(tmp_path, capfd):
    """On standard error before its first answer, and where only messages belong; its answers are taken."""
    (tmp_path / "raw.py").write_text(RAW)

    async def play() -> list[str]:
        env = env_of([sys.executable, "-I", "-X", "utf8", str(tmp_path / "raw.py"), "prints", "tools/call"])(PROMPT)
        await env.open()
        answers = await ask(env, ("add", {}), ("add", {}))
        await env.close()
        return answers

    assert asyncio.run(play()) == ["7", "7"]
    shown = capfd.readouterr().err
    assert len(shown) < 2 * output.SHOWN_OF_LOG and all(char.isprintable() or char == "\n" for char in shown)
    assert r"\x1b]0;owned\x07 \u202e 00" in shown and "more of this episode is not shown" in shown
    assert shown.count("prints to its standard output") == 1 and "Traceback" not in shown


def test_without_the_package_it_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match="the package mcp is not installed: pip install mcp"):
        asyncio.run(env_of(["true"])(PROMPT).open())
