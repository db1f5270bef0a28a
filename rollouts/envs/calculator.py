"""Calculator over several turns: a reply that ends in "= ?" receives the value of the expression.

Example: the policy writes "12*3 = ?", the environment returns "36", and the policy continues.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import ClassVar

from core.types.messages import Message
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.base import Env


class Calculator(Env):
    """Environment that computes sums, differences and products of integers."""

    OPERATORS: ClassVar[dict[type[ast.operator], Callable[[int, int], int]]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
    }

    def __init__(self, prompt: Prompt):
        super().__init__(prompt)
        self.calls = 0

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        question = reply.message["content"].strip()
        if not question.endswith("= ?"):
            return None
        self.calls += 1
        expression = question.removesuffix("= ?").rpartition("\n")[2]
        return [{"role": "user", "content": self.compute(expression)}]

    def compute(self, expression: str) -> str:
        """Return the value as text, or "error: ..." for anything but integers, +, - and *."""

        # a walk over the syntax tree, not eval(): the policy's text must not run code
        def value_of(node: ast.expr) -> int:
            match node:
                case ast.BinOp(left, op, right) if type(op) in self.OPERATORS:
                    return self.OPERATORS[type(op)](value_of(left), value_of(right))
                case ast.Constant(int(n)) if not isinstance(n, bool):
                    return n
                case _:
                    raise SyntaxError("only whole numbers, + - and *")

        try:
            return str(value_of(ast.parse(expression.strip(), mode="eval").body))
        except SyntaxError as error:
            return f"error: {error.msg}"
        except (ValueError, RecursionError, MemoryError):  # a NUL, many digits, many operations
            return "error: the expression is too long, or no text"

    def scores(self) -> dict[str, float]:
        return {"calculator_calls": float(self.calls)}
