r"""Grade-school maths (https://arxiv.org/abs/2110.14168): numeric comparison in any notation.

    correct   1 if the reply's last answer equals the ground truth as a number: "$1,200.00." equals 1200
    format    1 if the reply marks an answer, with "#### x" or \boxed{x}

The last marked answer counts. Without a mark, the reply's last number counts.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt

# A minus right after a digit or a bracket is an operator: "10-3=7" contains 10, 3 and 7.
NUMBER = re.compile(r"(?:(?<![\d)\]])-\s?)?[$€£]?\s?(-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+)", re.ASCII)
MARK = re.compile(r"####|\\boxed\s*\{")
LATEX = ((r"\$", "$"), (r"\%", "%"), ("{,}", ","), (r"\!", ""), (r"\,", ""), ("\u2212", "-"))
"""LaTeX inside numbers, and the Unicode minus sign, with their replacements."""


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Compare the last answer with the ground truth. Raises ValueError if the ground truth contains no number."""
    expected, _ = find_answer(prompt.answer)
    if expected is None:
        raise ValueError(f"the answer {prompt.answer!r} of {prompt.id} holds no number")
    found, marked = find_answer(messages[-1]["content"])
    return {"correct": float(found == expected), "format": float(marked)}


def find_answer(text: str) -> tuple[Decimal | None, bool]:
    r"""Return the last answer in `text`, and whether it was marked.

    >>> find_answer("3 x 4 = 12\n#### 12 apples.")
    (Decimal('12'), True)
    """
    for latex, plain in LATEX:
        text = text.replace(latex, plain)
    # from the end: an empty or broken last mark does not hide an earlier answer
    for mark in reversed(list(MARK.finditer(text))):
        rest = text[mark.end() :]
        held = rest.split("\n", 1)[0] if mark.group() == "####" else _until_closed(rest)
        if numbers := _find_numbers(held):
            # after "####" the answer comes first and words may follow; a box may contain "x = 18"
            return numbers[0 if mark.group() == "####" else -1], True
    numbers = _find_numbers(text)
    return numbers[-1] if numbers else None, False


def _until_closed(text: str) -> str:
    """Return the text before the closing brace of a group opened just before `text`."""
    depth = 1
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:i]
    return text


def _find_numbers(text: str) -> list[Decimal]:
    numbers: list[Decimal] = []
    for found in NUMBER.finditer(text):
        digits = found.group(1)
        # not float, which would round long numbers and find different answers equal
        number = Decimal(digits.replace(",", ""))
        numbers.append(-number if found.group().startswith("-") and not digits.startswith("-") else number)
    return numbers
