r"""Grade-school maths (https://arxiv.org/abs/2110.14168): numeric comparison in any notation.

    correct   1 if the reply's last answer equals the ground truth as a number: "$1,200.00." equals 1200
    format    1 if the reply marks an answer, with "#### x" or \boxed{x}

The last marked answer counts, outside of reasoning. Without a mark, the reply's last number counts. A fraction is one
number. A box counts as its result, \boxed{2 \times 9} as 18, and with several numbers it is wrong.
"""

from __future__ import annotations

import ast
import operator
import re
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

from rewards.replies import cut_reasoning

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt

# A minus right after a digit or a bracket is an operator: "10-3=7" contains 10, 3 and 7.
NUMBER = re.compile(
    r"(?:(?<![\d)\]])-\s?)?[$€£]?\s?(-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+)(?:/(0*[1-9]\d*)(?![\d/]))?",
    re.ASCII,
)
MARK = re.compile(r"####|\\boxed\s*\{")
LATEX = (
    *((r"\$", "$"), (r"\%", "%"), ("{,}", ","), (r"\!", ""), (r"\,", ""), ("\u2212", "-")),
    *((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), ("\u00d7", "*"), ("\u00f7", "/")),
)
"""LaTeX inside numbers, and of calculations, with their replacements."""
FRACTION = re.compile(r"(\d\s*)?\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))")
UNIT = re.compile(
    r"\^\{?\\circ\}?|(?:\\(?:text|mbox|mathrm)\s*\{[^{}]*\}|\\?[A-Za-z]+)(?:\^\{?\d\}?)?|\\[;: ]|[$€£{}~%]"
)
"""Words and units in a box, with their exponents."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Compare the last answer with the ground truth. Raises ValueError if the ground truth contains no number."""
    expected, _ = find_answer(prompt.answer)
    if expected is None:
        raise ValueError(f"the answer {prompt.answer!r} of {prompt.id} holds no number")
    found, marked = find_answer(cut_reasoning(messages[-1]["content"]))
    return {"correct": float(found == expected), "format": float(marked)}


def find_answer(text: str) -> tuple[Fraction | None, bool]:
    r"""Return the last answer in `text`, and whether it was marked.

    >>> find_answer("3 x 4 = 12\n#### 12 apples.")
    (Fraction(12, 1), True)
    """
    for latex, plain in LATEX:
        text = text.replace(latex, plain)
    text = FRACTION.sub(_write_fraction, text)
    # from the end: an empty or broken last mark does not hide an earlier answer
    for mark in reversed(list(MARK.finditer(text))):
        rest = text[mark.end() :]
        if mark.group() != "####":
            box = until_closed(rest)
            if _find_numbers(box):
                return _read_box(box), True
        # after "####" the answer comes first and words may follow
        elif numbers := _find_numbers(rest.split("\n", 1)[0]):
            return numbers[0], True
    numbers = _find_numbers(text)
    return numbers[-1] if numbers else None, False


def _write_fraction(found: re.Match[str]) -> str:
    r"""Return \frac{a}{b} as a/b, and a mixed number as a sum."""
    whole, *parts = found.groups()
    above, below = (part.strip() for part in parts if part is not None)
    # brackets only where needed: a number a/b is also read outside of a box
    text = f"{above}/{below}" if (above + below).isdecimal() else f"({above})/({below})"
    return f"{whole}+{text}" if whole else text


def until_closed(text: str) -> str:
    """Return the text before the closing brace of a group opened just before `text`."""
    depth = 1
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:i]
    return text


def _read_box(box: str) -> Fraction | None:
    """Return the number in a box that holds a number. None: it holds several, as no calculation of them."""
    # without units, unless the number itself is in \text{}
    stated = next(text for text in (UNIT.sub(" ", box), box) if _find_numbers(text)).rpartition("=")[2]
    numbers = _find_numbers(stated)
    if len(numbers) == 1 and "^" not in stated:
        return numbers[0]
    try:
        return _calculate(ast.parse(re.sub(r"(?<=\d),(?=\d{3})", "", stated).strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _calculate(node: ast.expr) -> Fraction:
    """Return the result of a calculation with + - * and /, exactly."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(ast.unparse(node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right))
    raise ValueError("it is no calculation")


def _find_numbers(text: str) -> list[Fraction]:
    numbers: list[Fraction] = []
    for found in NUMBER.finditer(text):
        digits, below = found.groups()
        # not float, which would round long numbers and find different answers equal; int() refuses very long ones
        number = Fraction(Decimal(digits.replace(",", ""))) / Fraction(Decimal(below or 1))
        numbers.append(-number if found.group().startswith("-") and not digits.startswith("-") else number)
    return numbers
