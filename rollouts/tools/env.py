"""Base class of environments whose tools are Python functions."""

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
    """Environment that runs the calls of each reply; a reply without a call ends the episode.

    Its tools are the methods marked by `@tool`, and `functions`. An ordinary function runs in a thread of its own, a
    coroutine function on the event loop. A thread cannot be stopped: a function that never returns is answered as too
    slow, and keeps its thread until the run ends.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions that are tools too."""
    tool_timeout_s: float = 30.0
    """Deadline of each call, in seconds."""
    parallel_calls: bool = True
    """Run the calls of one reply at the same time. False: one after the other, for tools that change what others
    read."""
    _marked: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
        cls._marked = [name for name in names if getattr(getattr(cls, name, None), MARK, False)]
        described = [getattr(cls, name) for name in cls._marked]
        try:
            cls.tools = [make_spec(function) for function in (*described, *cls.functions)]
        except UserError as error:
            raise UserError(f"{cls.__qualname__}: {error}") from error
        check_names([spec["function"]["name"] for spec in cls.tools], cls.__qualname__)

    def find_tools(self) -> Sequence[Tool]:
        """Return the tools of this episode. An override that adds some shows them to the policy in `tools`."""
        own = zip(self._marked, type(self).tools, strict=False)
        methods = [Tool(spec=spec, call=getattr(self, name)) for name, spec in own]
        return [*methods, *map(make_tool, self.functions)]

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        """ToolResult the calls of a reply; end the episode after one without a call."""
        calls = reply.message.get("tool_calls", [])
        if reply.problem and not calls:
            return self._note([make_answer(reply.problem, None, "unreadable")])
        if not calls:
            return None
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
        """Return the number of calls, of errors by their kind, and the seconds waited for tools."""
        return {"tool_calls": 0.0, "tool_errors": 0.0, "tool_seconds": 0.0} | self._counter

    def _note(self, answers: list[ToolResult]) -> list[Message]:
        """Count answers; return their messages."""
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
        """Counts of this episode. A subclass need not call our constructor."""
        if "_counted" not in self.__dict__:
            self._counted: dict[str, float] = defaultdict(float)
        return self._counted


def check_names(names: Sequence[str], of: str) -> None:
    """Raise UserError where two tools have one name."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{of} has two tools that are called {twice[0]}: rename one of them")
