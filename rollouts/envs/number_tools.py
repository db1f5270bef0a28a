"""Tools on two numbers, for the generated task of data_prep/function_calls.py. Each row offers some."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.types.messages import name_of_tool
from rollouts.tools.env import ToolEnv
from rollouts.tools.functions import Tool, make_tool


# The docstrings of these functions are part of the prompt: the policy reads them as descriptions of the tools.
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def sub(a: int, b: int) -> int:
    """Subtract the second number from the first.

    Args:
        a: first number
        b: second number
    """
    return a - b


# The names of max and min are those of the tools. This file does not need Python's functions.
def max(a: int, b: int) -> int:
    """Return the larger number.

    Args:
        a: first number
        b: second number
    """
    return a if a > b else b


def min(a: int, b: int) -> int:
    """Return the smaller number.

    Args:
        a: first number
        b: second number
    """
    return a if a < b else b


TOOLS: dict[str, Callable[[int, int], int]] = {"add": add, "sub": sub, "max": max, "min": min}


class NumberTools(ToolEnv):
    """Environment with the tools in the row's column `tools`."""

    def find_tools(self) -> Sequence[Tool]:
        """Return the tools that the row offers."""
        offered = {name_of_tool(spec) for spec in self.prompt.tools}
        return [make_tool(function) for name, function in TOOLS.items() if name in offered]
