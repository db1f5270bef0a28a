"""Environments: the other party in an episode. A module of your own is named by its path in `rollout.env`.

An environment is made for one episode and thrown away with it; there is no reset.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import ClassVar, Protocol

from core.types import Message, Prompt


class Env(Protocol):
    async def step(self, reply: str) -> Message | None:
        """Answer the policy's reply (a tool's result, a user's turn), or None to end the episode."""
        ...

    def scores(self) -> dict[str, float]:
        """What only the environment knows of how it went; joins the reward's parts by name."""
        ...


class SingleTurn:
    """The policy speaks once."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt

    async def step(self, reply: str) -> Message | None:
        return None

    def scores(self) -> dict[str, float]:
        return {}


class Calculator:
    """Two turns and more: a reply that ends in "= ?" is answered with the value of what stands before it.

    Example: the policy says "12*3 = ?", the environment "36", and the policy goes on.
    """

    OPERATORS: ClassVar[dict[type[ast.operator], Callable[[int, int], int]]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
    }

    def __init__(self, prompt: Prompt):
        self.calls = 0

    async def step(self, reply: str) -> Message | None:
        asked = reply.strip()
        if not asked.endswith("= ?"):
            return None
        self.calls += 1
        expression = asked.removesuffix("= ?").splitlines()[-1]
        return {"role": "user", "content": self.value(expression)}

    def value(self, expression: str) -> str:
        def of(node: ast.expr) -> int:
            match node:
                case ast.BinOp(left, op, right) if type(op) in self.OPERATORS:
                    return self.OPERATORS[type(op)](of(left), of(right))
                case ast.Constant(int(n)):
                    return n
                case _:
                    raise SyntaxError("only whole numbers, + - and *")

        try:
            return str(of(ast.parse(expression.strip(), mode="eval").body))
        except SyntaxError as error:
            return f"error: {error.msg}"

    def scores(self) -> dict[str, float]:
        return {"calculator_calls": float(self.calls)}


ENVIRONMENTS: dict[str, type[Env]] = {"single_turn": SingleTurn, "calculator": Calculator}
