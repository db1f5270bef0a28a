"""Base class of environments with Python functions as tools."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from core.errors import UserError
from core.types.messages import Message
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.base import Env
from rollouts.tools.calls import ToolResult, make_answer, run_calls
from rollouts.tools.functions import MARK, Tool, make_spec, make_tool


class ToolEnv(Env):
    """Environment that executes the calls of each reply. A reply without calls ends the episode.

    Tools are methods marked by `@tool`, and `functions`. An ordinary function runs in a new thread, a coroutine
    function in the event loop. Threads cannot be stopped: a function that never returns counts as a timeout, and keeps
    the thread until the run ends.
    """

    least_turns = 2
    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions offered as tools."""
    tool_timeout_s: float = 30.0
    """Deadline of each call, in seconds."""
    parallel_calls: bool = True
    """Run the calls of a reply concurrently. False: sequentially, for tools with shared state."""
    _marked: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        # in the order of definition, base classes first: the order is visible in the prompt
        names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
        cls._marked = [name for name in names if getattr(getattr(cls, name, None), MARK, False)]
        # Tools are described when the class is defined, so that loading data can count their tokens.
        described = [getattr(cls, name) for name in cls._marked]
        try:
            cls.tools = [make_spec(function) for function in (*described, *cls.functions)]
        except UserError as error:
            raise UserError(f"{cls.__qualname__}: {error}") from error
        check_names([spec["function"]["name"] for spec in cls.tools], cls.__qualname__)

    def find_tools(self) -> Sequence[Tool]:
        """Return the tools of this episode. An override must also add them to `tools`, shown to the policy."""
        # not strict: behind the methods, `tools` lists `functions`
        own = zip(self._marked, type(self).tools, strict=False)
        methods = [Tool(spec=spec, call=getattr(self, name)) for name, spec in own]
        return [*methods, *map(make_tool, self.functions)]

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        """Execute the calls of a reply. A reply without calls ends the episode."""
        calls = reply.message.get("tool_calls", [])
        if not calls and reply.problem:
            return self._note([make_answer(reply.problem, None, "unreadable")])
        if not calls:
            return None
        # the clock of the event loop, which a simulator replaces
        now = asyncio.get_running_loop().time
        start = now()
        answers = await run_calls(
            calls,
            self._tools_by_name(),
            seconds=self.tool_timeout_s,
            key=f"{type(self).__name__}.tool_timeout_s",
            parallel=self.parallel_calls,
        )
        self._counter["tool_seconds"] += now() - start
        return self._note(answers)

    def counts(self) -> dict[str, float]:
        """Return the number of calls, of errors by kind, and the seconds spent waiting for tools."""
        return {"tool_calls": 0.0, "tool_errors": 0.0, "tool_seconds": 0.0} | self._counter

    def _note(self, answers: list[ToolResult]) -> list[Message]:
        """Count results. Return their messages."""
        self._counter["tool_calls"] += len(answers)
        for answer in answers:
            if answer.error is not None:
                self._counter["tool_errors"] += 1
                self._counter[f"tool_errors/{answer.error}"] += 1
        return [answer.message for answer in answers]

    def _tools_by_name(self) -> Mapping[str, Tool]:
        if "_tools" not in self.__dict__:
            self._tools = {tool.name: tool for tool in self.find_tools()}
        return self._tools

    @property
    def _counter(self) -> dict[str, float]:
        """Counts of this episode. Created on first use, since a subclass may skip our constructor."""
        if "_counted" not in self.__dict__:
            self._counted: dict[str, float] = defaultdict(float)
        return self._counted


def check_names(names: Sequence[str], of: str) -> None:
    """Raise UserError for duplicate tool names."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{of} has two tools that are called {twice[0]}: rename one of them")
