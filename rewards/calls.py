"""Calls of a recipe's reward functions in a reward process: from a prompt and conversations to checked results."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core.errors import UserError
from rewards import RewardFn
from rewards.kinds import Kind
from rewards.scored import (
    LONGEST_FAILURE,
    Failed,
    RewardResult,
    merge_results,
    read_failure,
    read_numbers,
    read_result,
)
from rewards.several import RewardPlan

Conversation = list[dict[str, Any]]


class RewardCalls:
    """Loaded functions of one kind. A `score` is called with one conversation, a `score_group` with all."""

    def __init__(self, plan: RewardPlan) -> None:
        """Load the functions. Raises UserError if one cannot be loaded."""
        self.plan, self.functions = plan, plan.load()
        # the functions of a worker's plan are of one kind
        self.kind = plan.functions[0].kind if plan.functions else Kind()

    def score(self, prompt: Any, conversations: list[Conversation]) -> list[RewardResult]:
        """Call the plain functions of the prompt's source; return a result per conversation."""
        results: dict[str, list[RewardResult]] = {}
        for name, function in self._choose(prompt.source).items():
            try:
                returned = function(prompt, self._argument(conversations))
                results[name] = self._read(name, returned, len(conversations))
            except Exception as error:  # the border to the user's code
                results[name] = [read_error(error)] * len(conversations)
        return join_functions(results, len(conversations))

    async def score_async(self, prompt: Any, conversations: list[Conversation]) -> list[RewardResult]:
        """Call the async functions of the prompt's source; return a result per conversation."""

        async def call(name: str, function: RewardFn) -> list[RewardResult]:
            try:
                returned = await function(prompt, self._argument(conversations))
                return self._read(name, returned, len(conversations))
            except Exception as error:  # the border to the user's code
                return [read_error(error)] * len(conversations)

        chosen = self._choose(prompt.source)
        found = await asyncio.gather(*(call(name, function) for name, function in chosen.items()))
        return join_functions(dict(zip(chosen, found, strict=True)), len(conversations))

    def _choose(self, source: str) -> Mapping[str, RewardFn]:
        return {name: self.functions[name] for name in self.plan.list_names(source)}

    def _argument(self, conversations: list[Conversation]) -> Any:
        return conversations if self.kind.is_group else conversations[0]

    def _read(self, name: str, returned: Any, n: int) -> list[RewardResult]:
        who = f"{self.kind.name}()" + (f" of {name}" if name else "")
        if not self.kind.is_group:
            return [read_result(returned, who)]
        if not isinstance(returned, list | tuple) or len(returned) != n:  # pyright: ignore[reportUnknownArgumentType]
            said = f"{who} must return a list of {n} results, one per conversation, it returned {returned!r}"
            return [RewardResult(failure=said[:LONGEST_FAILURE])] * n
        return [read_result(one, who) for one in returned]  # pyright: ignore[reportUnknownVariableType]


def join_functions(results: Mapping[str, list[RewardResult]], n: int) -> list[RewardResult]:
    """Return a result per conversation, joined over functions."""
    return [
        merge_results([(f"{name}." if name else "", found[i]) for name, found in results.items()]) for i in range(n)
    ]


def read_error(error: Exception) -> RewardResult:
    """Return the result of a function that raised."""
    match error:
        case UserError():
            return RewardResult(stop=str(error))
        case Failed():
            return read_failure(error)
        case _:
            return RewardResult(failure=last_line(error))


def call_user_code(call: Callable[[], Any], who: str) -> tuple[dict[str, float], str]:
    """Return named finite numbers from the user's code, or the reason why they are invalid."""
    try:
        parts = call()
    except Exception as error:  # the border to the user's code
        return {}, last_line(error)
    try:
        return read_numbers(parts, who), ""
    except TypeError as error:
        return {}, str(error)


def last_line(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_FAILURE]
    return f"{said} ({Path(frame.filename).name}, line {frame.lineno})"
