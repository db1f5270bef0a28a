"""Which types a tool's arguments may have, and which tools an environment has: in tables."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.tools.env import ToolEnv
from rollouts.tools.functions import Tool, make_spec, tool
from unit_tests.helpers.episodes import PROMPT, calls_of, said
from unit_tests.helpers.sentences import tell


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


def now() -> str:
    """Tell the time."""
    return "noon"


# Specifications -------------------------------------------------------------------------------------------------------

ONE = {"type": "object", "properties": {"a": {}, "b": {}}}


@pytest.mark.parametrize(
    ("schema", "arguments", "told"),
    [
        ({"type": "object"}, {}, ""),
        ({"type": "object"}, {"x": 1}, "find has no argument x; it has none."),
        (ONE, {"a": 1, "b": 2}, ""),
        (ONE, {"a": 1, "x": 1, "y": 2}, "find has no argument x; it has a, b."),
        (ONE | {"additionalProperties": True}, {"x": 1}, ""),
        (ONE | {"additionalProperties": {"type": "integer"}}, {"x": 1}, ""),
        (
            ONE | {"additionalProperties": False},
            {"x": 1},
            "The arguments of find do not fit its schema: Additional properties are not allowed ('x' was unexpected).",
        ),
    ],
)
def test_arguments_that_a_schema_does_not_name_are_mostly_refused(schema, arguments, told):
    spec: Any = {"type": "function", "function": {"name": "find", "description": "", "parameters": schema}}
    assert Tool(spec=spec, call=print).find_misfit({"name": "find", "arguments": arguments}) == told


class Other:
    pass


def take(hint: Any) -> Any:
    """Return a function with an argument of this type."""

    def use(a: Any) -> Other:
        """Use it.

        Args:
            a: What to use.
        """
        return Other()

    use.__annotations__ = {"a": hint, "return": Other}
    return use


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (str, {"type": "string"}),
        (bool, {"type": "boolean"}),
        (list, {"type": "array"}),
        (tuple, {"type": "array"}),
        (dict, {"type": "object"}),
        (None, {"type": "null"}),
        (Any, {}),
        (list[Any], {"type": "array", "items": {}}),
        (dict[str, bool], {"type": "object", "additionalProperties": {"type": "boolean"}}),
        (Literal[1, "a"], {"type": ["integer", "string"], "enum": [1, "a"]}),
    ],
)
def test_an_argument_may_be_of_every_type_that_json_has(hint, schema):
    properties = make_spec(take(hint))["function"]["parameters"]["properties"]
    assert properties == {"a": schema | {"description": "What to use."}}


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (bytes, "bytes"),
        (Other, "Other"),
        (list[Other], "Other"),
        (dict[str, set], "set"),
        (tuple[int, Other], "Other"),
        (int | Other, "Other"),
        (int | list[bytes] | None, "bytes"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_its_name(hint, name):
    assert tell(lambda: make_spec(take(hint))) == (
        f"the tool 'use': the argument 'a' has the type {name}, which is not one of JSON's: use int, float, str, bool, "
        "list, dict, Literal, or unions of them"
    )


def test_a_type_that_is_nowhere_defined_is_refused():
    assert tell(lambda: make_spec(take("Nowhere"))) == (
        "the tool 'use' cannot be described to the policy: name 'Nowhere' is not defined; give every argument a type, "
        "and the function a docstring with a line for each under `Args:`"
    )


# Environments ---------------------------------------------------------------------------------------------------------


class Shop(ToolEnv):
    """Two tools of its own, and a function."""

    functions = (add,)

    @tool
    def buy(self) -> str:
        """Buy."""
        return "bought"

    @tool
    def sell(self) -> str:
        """Sell."""
        return "sold"


class Market(Shop):
    """The shop with another way to buy, and one tool more."""

    @tool
    def ask(self) -> str:
        """Ask."""
        return "asked"

    @tool
    def buy(self) -> str:
        """Buy for less."""
        return "bought for less"


class Closed(Shop):
    """The shop with one tool less, and another function."""

    functions = (now,)

    def sell(self) -> str:
        """No tool."""
        return ""


@pytest.mark.parametrize(
    ("env", "tools"),
    [
        (ToolEnv, {}),
        (Shop, {"buy": "Buy.", "sell": "Sell.", "add": "Add two numbers."}),
        (Market, {"buy": "Buy for less.", "sell": "Sell.", "ask": "Ask.", "add": "Add two numbers."}),
        (Closed, {"buy": "Buy.", "now": "Tell the time."}),
    ],
)
def test_a_subclass_has_the_tools_of_its_base_first(env, tools):
    found = [(spec["function"]["name"], spec["function"]["description"]) for spec in env.tools]
    assert found == [*tools.items()]
    assert [(one.name, one.spec) for one in env(PROMPT).find_tools()] == [
        (name, spec) for name, spec in zip(tools, env.tools, strict=True)
    ]


def test_a_tool_of_a_subclass_is_called_in_place_of_the_base_s():
    calls = [(name, {}) for name in ("ask", "buy", "sell")]
    told = asyncio.run(Market(PROMPT).step(calls_of(*calls, ("add", {"a": 1})))) or []
    assert [one["content"] for one in told] == ["asked", "bought for less", "sold", "3"]


def test_calls_and_errors_of_an_episode_add_up():
    env = Shop(PROMPT)
    assert env.counts() == {"tool_calls": 0, "tool_errors": 0, "tool_seconds": 0}
    broken = ParsedReply(message={"role": "assistant", "content": "{"}, refusal="it ends too early")

    async def play() -> None:
        await env.step(calls_of(("buy", {}), ("steal", {}), ("buy", {"a": 1}), ("steal", {})))
        assert await env.step(broken) == [{"role": "tool", "content": "Error: it ends too early"}]
        await env.step(calls_of(("sell", {})))
        assert await env.step(said("done")) is None

    asyncio.run(play())
    assert {**env.counts(), "tool_seconds": 0} == {
        **{"tool_calls": 6, "tool_errors": 4, "tool_seconds": 0},
        **{"tool_errors/unknown": 2, "tool_errors/arguments": 1, "tool_errors/unreadable": 1},
    }
    assert Shop(PROMPT).counts()["tool_calls"] == 0, "each episode counts for itself"


class Ahead(asyncio.SelectorEventLoop):
    """Event loop whose clock a tool puts forward."""

    seconds = 0.0

    def time(self) -> float:
        return super().time() + self.seconds


class Slow(ToolEnv):
    """A tool that takes ten seconds."""

    @tool
    async def wait(self) -> str:
        """Wait."""
        loop: Any = asyncio.get_running_loop()
        loop.seconds += 10.0
        return ""


def test_the_seconds_of_tools_add_up():
    env = Slow(PROMPT)

    async def play() -> None:
        for _ in range(2):
            await env.step(calls_of(("wait", {})))

    with asyncio.Runner(loop_factory=Ahead) as runner:
        runner.run(play())
    assert 20.0 <= env.counts()["tool_seconds"] < 30.0
    assert (ToolEnv.tool_timeout_s, ToolEnv.parallel_calls) == (30.0, True), "as documented"
