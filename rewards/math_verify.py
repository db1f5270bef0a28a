r"""Mathematical equality by the math-verify library (https://github.com/huggingface/Math-Verify).

    correct   1 if the reply's last answer is the same mathematical object as the ground truth

The ground truth is bare LaTeX ("2\sqrt{3}"), LaTeX between dollars, several answers ("$2$ and $3$"), a number with a
unit, which does not count, or a solution with its answer in \boxed{}. If the library cannot read it, the sample fails.

The library's timeout uses SIGALRM, so this reward needs the main thread of a process, as in rewards/pool.py. A reply
that times out is wrong, not failed. Otherwise a policy could learn to avoid a bad reward.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from math_verify import parse, verify

from core.timing.deadlines import MATH_VERIFY_TIMEOUT_S
from rewards.replies import cut_reasoning

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
DOLLARS = re.compile(r"(?<!\\)\$\$?(.+?)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
"""LaTeX in text, with its delimiters."""
WORD = re.compile(r"\b(?!(?:and|or)\b)[A-Za-z]{2,}")
WORDS = re.compile(r"(?!infinity)(?:[A-Za-z]{4,}|[A-Za-z]+(?:[ '-][A-Za-z]+)+)", re.IGNORECASE)
NUMBER = r"[-+]?(?:\d[\d,]*)?\.?\d+"
WITH_UNIT = re.compile(
    rf"({NUMBER}(?:/\d+)?)\s+(?!and\b|per ?cent|pct\b|mod\b|sqrt|sin|cos|tan|log)[A-Za-z]{{3,}}\b[^\d\\]*"
)
SCALE = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen)\b", re.IGNORECASE)
EXPONENT = re.compile(rf"({NUMBER})[eE]([-+]?\d+)")
PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
SYMBOLS = str.maketrans(
    {
        **{"\u2212": "-", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u221a": r"\sqrt ", "\u00b0": r"^\circ "},
        **{"\u00b1": r"\pm ", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": r"\div ", "\u222a": r"\cup "},
        **{"\u2264": r"\le ", "\u2265": r"\ge "},
    }
)
"""Unicode of answers, which the library's LaTeX parser does not know."""


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Compare the last answer with the ground truth. Raises ValueError if the ground truth cannot be read."""
    try:
        expected = read_gold(prompt.answer)
    except ValueError as error:
        raise ValueError(f"{error} (row {prompt.id})") from error
    found = parse(cut_reasoning(messages[-1]["content"]), parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    return {"correct": float(verify(expected, found, timeout_seconds=MATH_VERIFY_TIMEOUT_S))}


def read_gold(answer: str) -> list[Any]:
    """Return a ground truth as math-verify parses it. Raises ValueError if it cannot."""
    found = parse(write_gold(answer), parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    # what cannot be parsed comes back as text, which pays only replies in the same notation
    if all(isinstance(one, str) for one in found):
        raise ValueError(f"math-verify cannot read the answer {answer!r:.100}")
    # a reply may also repeat the ground truth as it is, such as 4.5e33
    return [*found, answer.strip()]


def write_gold(answer: str) -> str:
    r"""Return a ground truth as a reply would state it. Raises ValueError if it is not clear what the answer is.

    >>> write_gold(r"2\sqrt{3}"), write_gold("$x=3$ or $x=5$"), write_gold("12 bananas"), write_gold("Tuesday")
    ('\\boxed{2\\sqrt{3}}', '\\boxed{x=3 or x=5}', '\\boxed{12}', '\\boxed{\\text{Tuesday}}')
    """
    text = answer.strip().removesuffix(".").translate(SYMBOLS)
    plain = text.replace(r"\{", "").replace(r"\}", "")
    if not text or plain.count("{") != plain.count("}"):
        raise ValueError(f"the answer {answer!r:.100} is empty, or its braces do not match")
    # a solution, which the library reads as it does a reply
    if BOX.search(text):
        return text.replace(r"\fbox", r"\boxed")
    formulas = [next(filter(None, found)) for found in DOLLARS.findall(text)]
    if formulas and WORD.search(DOLLARS.sub(" ", text)):
        if len(formulas) > 1:
            raise ValueError(f"the answer {answer!r:.100} is a sentence with several formulas: write the answer alone")
        text = formulas[0]
    text = DOLLARS.sub(lambda found: next(filter(None, found.groups())), text)
    if unit := WITH_UNIT.fullmatch(text):
        if SCALE.search(text):
            raise ValueError(f"the answer {answer!r:.100} has a part of its number in words: write it in digits")
        text = unit[1]
    elif scientific := EXPONENT.fullmatch(text):
        text = rf"{scientific[1]} \times 10^{{{int(scientific[2])}}}"
    # as letters, the words would be a product, equal to that of any other order
    elif WORDS.fullmatch(text):
        text = rf"\text{{{text}}}"
    text = PI.sub(lambda _: r"\pi ", text)
    return rf"\boxed{{{text}}}"
