"""Connections to MCP servers in tables, with a client that answers from a script."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.tools.calls import ToolUnavailable
from rollouts.tools.functions import tool
from rollouts.tools.mcp_server import McpEnv
from unit_tests.helpers.episodes import PROMPT, calls_of
from unit_tests.helpers.sentences import tell

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def offer(name: str, description: str | None = None) -> Any:
    return SimpleNamespace(name=name, description=description, input_schema=SCHEMA)


def result(*parts: str, is_error: bool = False) -> Any:
    """Return a result of texts; a part in brackets is no text."""
    content = [SimpleNamespace(type=p[1:-1]) if p[0] == "[" else SimpleNamespace(type="text", text=p) for p in parts]
    return SimpleNamespace(content=content, is_error=is_error)


class Refusal(Exception):
    """Error of the library, with a code of the protocol."""

    def __init__(self, code: int) -> None:
        super().__init__(f"refused: {code}")
        self.code = code


class Client:
    """Client of the server `url`. It fails with the next of `errors`, and waits for `go` where there is one."""

    made: list[Client]
    errors: list[Exception | None]
    pages: dict[str | None, tuple[list[Any], str | None]]
    results: dict[str, Any]
    go: asyncio.Event | None

    def __init__(self, url: str) -> None:
        self.url, self.asked, self.state = url, list[Any](), "made"
        self.made.append(self)

    async def __aenter__(self) -> Client:
        self.state = "opening"
        error = self.errors.pop(0) if self.errors else None
        try:
            if self.go is not None:
                await self.go.wait()
        except asyncio.CancelledError:
            self.state = "cancelled"
            raise
        if error is not None:
            raise error
        self.state = "open"
        return self

    async def __aexit__(self, *error: object) -> None:
        self.state = "closed"

    async def list_tools(self, cursor: str | None) -> Any:
        tools, following = self.pages[cursor]
        return SimpleNamespace(tools=tools, next_cursor=following)

    async def call_tool(self, name: str, arguments: Any) -> Any:
        self.asked.append((name, arguments))
        found = self.results[name]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def library(monkeypatch) -> type[Client]:
    """The library with a client of its own for this test."""
    script: dict[str, Any] = {"made": [], "errors": [], "pages": {None: ([offer("add")], None)}, "results": {}}
    fresh = type("Fresh", (Client,), {**script, "go": None})
    parts: dict[str, Any] = {
        "mcp": SimpleNamespace(Client=fresh, MCPError=Refusal),
        "mcp_types": SimpleNamespace(CONNECTION_CLOSED=-1, INVALID_REQUEST=-2),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    return fresh


def desk(**more: Any) -> type[McpEnv]:
    return type("Desk", (McpEnv,), {"server": "http://desk", **more})


def name_tools(env: McpEnv) -> list[str]:
    return [spec["function"]["name"] for spec in env.tools]


def test_the_tools_of_a_server_are_those_of_all_its_pages(library):
    library.pages = {None: ([offer("add", "Add."), offer("sub")], "p2"), "p2": ([offer("mul")], None)}

    async def go() -> McpEnv:
        env = desk()(PROMPT)
        assert await env.open() == []
        await env.close()
        return env

    env = asyncio.run(go())
    assert [(s["type"], s["function"]["name"], s["function"]["description"]) for s in env.tools] == [
        ("function", "add", "Add."),
        ("function", "sub", ""),
        ("function", "mul", ""),
    ]
    assert all(spec["function"]["parameters"] == SCHEMA for spec in env.tools)
    [client] = library.made
    assert (client.url, client.state) == ("http://desk", "closed")


def test_a_result_of_a_server_is_its_texts_and_the_names_of_other_parts(library):
    library.pages = {None: ([offer(name) for name in ("say", "draw", "fail", "rest")], None)}
    library.results = {
        "say": result("one", "two"),
        "draw": result("a circle:", "[image]"),
        "fail": result("no", "paper", is_error=True),
        "rest": result(),
    }

    async def go() -> list[Any]:
        env = desk()(PROMPT)
        await env.open()
        told = await env.step(calls_of(*((name, {"a": n}) for n, name in enumerate(library.results))))
        await env.close()
        return [message["content"] for message in told or []]

    assert asyncio.run(go()) == ["one\ntwo", "a circle:\n[image]", "Error: no\npaper", ""]
    assert library.made[0].asked == [("say", {"a": 0}), ("draw", {"a": 1}), ("fail", {"a": 2}), ("rest", {"a": 3})]


def test_two_tools_of_a_server_need_two_names(library):
    library.pages = {None: ([offer("add"), offer("sub"), offer("add")], None)}

    async def go() -> None:
        env = desk()(PROMPT)
        try:
            await env.open()
        finally:
            await env.close()

    assert tell(lambda: asyncio.run(go())) == "Desk has two tools that are called add: rename one of them"
    assert library.made[0].state == "closed"


GONE = ExceptionGroup("streams", [ExceptionGroup("inner", [OSError("gone"), ValueError("b")]), ValueError("c")])


@pytest.mark.parametrize(
    ("error", "why"), [(OSError("away"), "OSError: away"), (GONE, "OSError: gone"), (KeyError(), "KeyError")]
)
@pytest.mark.parametrize("shared", [True, False])
def test_a_server_that_cannot_be_used_is_one_sentence_and_asked_again(library, shared, error, why):
    library.errors = [error]
    Desk = desk(shared=shared)

    async def go() -> None:
        first, second = Desk(PROMPT), Desk(PROMPT)
        with pytest.raises(ToolUnavailable) as caught:
            await first.open()
        assert str(caught.value) == f"the MCP server http://desk cannot be used: {why}"
        await second.open()
        assert name_tools(second) == ["add"]
        await first.close()
        assert library.made[1].state == "open", "the second still has it"
        await second.close()
        assert [client.state for client in library.made] == ["opening", "closed"]

    asyncio.run(go())


def test_a_server_that_does_not_respond_is_left(library, monkeypatch):
    monkeypatch.setattr("rollouts.tools.mcp_server.MCP_START_TIMEOUT_S", 0.01)

    async def go() -> None:
        library.go = asyncio.Event()
        env = desk()(PROMPT)
        with pytest.raises(ToolUnavailable) as caught:
            await env.open()
        assert str(caught.value) == "the MCP server http://desk cannot be used: it does not respond"
        await env.close()
        await asyncio.sleep(0)
        assert library.made[0].state == "cancelled"

    asyncio.run(go())


def test_an_episode_that_ends_early_leaves_the_connection_to_the_others(library):
    Desk, Other = desk(shared=True), desk(shared=True)

    async def go() -> None:
        library.go = asyncio.Event()
        first, second, other = Desk(PROMPT), Desk(PROMPT), Other(PROMPT)
        opening = [asyncio.create_task(env.open()) for env in (first, second, other)]
        while len(library.made) < 2:
            await asyncio.sleep(0)
        opening[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening[0]
        await first.close()
        library.go.set()
        await asyncio.gather(*opening[1:])
        assert (name_tools(second), name_tools(other)) == (["add"], ["add"])
        third = Desk(PROMPT)
        await third.open()
        await second.close()
        assert [client.state for client in library.made] == ["open", "open"]
        await third.close()
        assert [client.state for client in library.made] == ["closed", "open"]
        await other.close()
        await (last := Desk(PROMPT)).open()
        assert [client.state for client in library.made] == ["closed", "closed", "open"]
        await last.close()

    asyncio.run(go())


def test_a_connection_that_nobody_waits_for_any_more_is_given_up(library):
    Desk = desk(shared=True)

    async def go() -> None:
        library.go = asyncio.Event()
        env = Desk(PROMPT)
        opening = asyncio.create_task(env.open())
        while not library.made:
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        await env.close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert library.made[0].state == "cancelled"
        library.go.set()
        await (again := Desk(PROMPT)).open()
        await again.close()
        assert [client.state for client in library.made] == ["cancelled", "closed"]

    asyncio.run(go())


def test_each_episode_has_a_connection_of_its_own_unless_its_class_shares(library):
    Desk = desk()

    async def go() -> None:
        first, second = Desk(PROMPT), Desk(PROMPT)
        await first.open()
        await second.open()
        await first.close()
        assert [client.state for client in library.made] == ["closed", "open"]
        await second.close()

    asyncio.run(go())


def test_tools_of_the_class_come_before_those_of_its_server(library):
    class Desk(McpEnv):
        server = "http://desk"

        @tool
        def own(self) -> str:
            """Return a word."""
            return "mine"

    library.results = {"add": result("3")}

    async def go() -> None:
        env = Desk(PROMPT)
        await env.open()
        assert name_tools(env) == ["own", "add"]
        told = await env.step(calls_of(("add", {"a": 1}), ("own", {})))
        assert [message["content"] for message in told or []] == ["3", "mine"]
        await env.close()

    asyncio.run(go())


LOST = [
    # the answers of the calls, and whether the next episode opens another connection
    ([OSError("gone")], True),
    ([Refusal(-1)], True),
    ([Refusal(-2)], True),
    ([Refusal(-3)], False),
    ([RuntimeError("no content")], False),
    ([OSError("gone"), RuntimeError("no content")], True),
    ([Refusal(-2), Refusal(-3)], True),
]


@pytest.mark.parametrize(("errors", "is_lost"), LOST)
def test_a_shared_connection_that_was_lost_once_is_opened_again(library, errors, is_lost):
    library.pages = {None: ([offer(f"call{n}") for n in range(len(errors))], None)}
    library.results = {f"call{n}": error for n, error in enumerate(errors)}
    Desk = desk(shared=True)

    async def go() -> list[str]:
        await (first := Desk(PROMPT)).open()
        told = [await first.step(calls_of((name, {"a": 1}))) for name in library.results]
        await (second := Desk(PROMPT)).open()
        assert len(library.made) == 1 + is_lost
        await second.close()
        assert library.made[0].state == "open", "the first still has it"
        await first.close()
        assert {client.state for client in library.made} == {"closed"}
        return [messages[0]["content"] for messages in told if messages]

    kinds = [f"{type(error).__name__}: {error}" for error in errors]
    assert asyncio.run(go()) == [
        f"Error: the MCP server did not answer call{n}: {kind}" for n, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("fault", [OSError("away"), None])
def test_a_server_that_cannot_be_used_leaves_no_task(library, monkeypatch, fault):
    monkeypatch.setattr("rollouts.tools.mcp_server.MCP_START_TIMEOUT_S", 0.01)

    async def go() -> None:
        library.errors, library.go = [fault], None if fault else asyncio.Event()
        env = desk()(PROMPT)
        with pytest.raises(ToolUnavailable):
            await env.open()
        await env.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(go())
