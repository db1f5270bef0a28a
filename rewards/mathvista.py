r"""MathVista (https://arxiv.org/abs/2310.02255): a choice, a whole number, a number with some decimals, or a list.

    correct   1 if the reply's answer is the ground truth, in the form that the row asks for

The answer is the content of the last \boxed{}, else the text after the last "answer is", else the last line, outside of
reasoning. Rows have the original's columns question_type, answer_type, precision and choices, as data_prep.mathvista
writes them. A choice is its letter, its text, or both ("(B) 12"). The original's scorer
(https://github.com/lupantech/MathVista, evaluation/calculate_score.py) takes the choice with the smallest edit distance
instead, which would pay a guess, and cuts the decimals of a whole number off, so that 3.9 is 3; here both are wrong.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rewards.gsm8k import find_answer, until_closed
from rewards.replies import cut_reasoning

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt

BOX = re.compile(r"\\f?boxed\s*\{")
SAYS = re.compile(r"\banswer(?:(?: is\b| =) *:?| *:)", re.IGNORECASE)
TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")
LETTER = re.compile(r"\(?([A-Z])\)?[.:]?(?:\s+(.+))?")
"""A letter, with the text of the choice or without."""


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Compare the answer with the ground truth. Raises ValueError for a row without its columns."""
    kind, answer = prompt.extra.get("answer_type"), prompt.answer.strip()
    if not answer or kind not in ("text", "integer", "float", "list"):
        raise ValueError(
            f"{prompt.id} has no answer, or the answer_type {kind!r}: make the rows by data_prep.mathvista"
        )
    is_choice = prompt.extra.get("question_type") == "multi_choice"
    if (key := "choices" if is_choice else "precision" if kind == "float" else None) and prompt.extra.get(key) is None:
        raise ValueError(f"{prompt.id} has no {key}: make the rows by data_prep.mathvista")
    stated = find_stated(cut_reasoning(messages[-1]["content"]))
    if is_choice:
        correct = find_choice(stated, prompt.extra["choices"]) == answer
    elif kind == "list":
        expected = read_list(answer)
        correct = expected is not None and read_list(stated) == expected
    else:
        decimals = int(prompt.extra["precision"]) if kind == "float" else None
        correct = is_equal(find_answer(stated)[0], find_answer(answer)[0], decimals)
    return {"correct": float(correct)}


def find_stated(reply: str) -> str:
    r"""Return the text of a reply that states its answer.

    >>> find_stated(r"so \boxed{\text{(B) } 12}"), find_stated("The answer is 4.\nDone: 5"), find_stated("a\nb\n")
    ('(B)  12', '4.', 'b')
    """
    if boxes := list(BOX.finditer(reply)):
        return TEXT.sub(r"\1", until_closed(reply[boxes[-1].end() :])).strip()
    if said := list(SAYS.finditer(reply)):
        return reply[said[-1].end() :].strip().split("\n", 1)[0].strip()
    return reply.strip().rpartition("\n")[2].strip()


def find_choice(stated: str, choices: list[str]) -> str | None:
    """Return the choice that an answer names. None: none, or a letter beside another choice's text.

    >>> [find_choice(text, ["tokyo", "osaka"]) for text in ("B", "(A) tokyo", "Osaka.", "(A) osaka", "kyoto")]
    ['osaka', 'tokyo', 'osaka', None, None]
    """
    of_text = {choice.strip().casefold(): choice for choice in choices}
    plain = stated.strip().strip("$*").strip()
    # a text first, because choices may themselves be letters
    if found := of_text.get(plain.casefold()) or of_text.get(plain.removesuffix(".").casefold()):
        return found
    letter = LETTER.fullmatch(plain)
    if letter is None or ord(letter[1]) - ord("A") >= len(choices):
        return None
    choice = choices[ord(letter[1]) - ord("A")]
    beside = (letter[2] or "").removesuffix(".").strip().casefold()
    return choice if beside in ("", choice.strip().casefold()) else None


def is_equal(found: Fraction | None, expected: Fraction | None, decimals: int | None) -> bool:
    """Compare two numbers, rounded to a number of decimals; None: exactly.

    >>> is_equal(Fraction("1.249"), Fraction("1.2"), 1), is_equal(Fraction("3.9"), Fraction(3), None)
    (True, False)
    """
    if found is None or expected is None:
        return False
    return found == expected if decimals is None else round(found, decimals) == round(expected, decimals)


def read_list(text: str) -> list[Any] | None:
    """Return a list of numbers or texts; None for anything else.

    >>> read_list("[1, 2.0]."), read_list("1, 2"), read_list("[x]")
    ([1, 2.0], None, None)
    """
    found = re.search(r"\[[^\[\]]*\]", text)
    try:
        return None if found is None else ast.literal_eval(found.group())
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
