"""Numbers that a setting may have, written as intervals: each end just inside and just outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from core.strict_model import StrictModel


def list_ends(interval: str, step: float) -> list[tuple[float, bool]]:
    """Return the ends of an interval, and the numbers beside them, each with whether it is inside.

    >>> list_ends("(0 1]", 0.1)
    [(0.0, False), (0.1, True), (1.0, True), (1.1, False)]
    """
    low, _, high = interval.partition(" ")
    ends = [(float(low[1:]), low[0] == "[", step)]
    ends += [(float(high[:-1]), high[-1] == "]", -step)] if high else []
    return [pair for at, has, inwards in ends for pair in ((at, has), (at - inwards if has else at + inwards, not has))]


def check_interval(
    cls: type[StrictModel],
    settings: dict[str, Any],
    key: str,
    interval: str,
    *,
    wrap: Callable[[float], Any] = lambda number: number,
) -> None:
    """Assert that a key takes the numbers of its interval and no others. wrap: makes the key's value of a number."""
    step = 1 if "int" in str(cls.model_fields[key].annotation) else 1e-9
    for number, is_inside in list_ends(interval, step):
        given = settings | {key: wrap(int(number) if step == 1 else number)}
        if is_inside:
            assert getattr(cls(**given), key) == given[key], (key, number)
        else:
            with pytest.raises(ValidationError, match=rf"(?m)^{key}(\.|$)"):
                cls(**given)
