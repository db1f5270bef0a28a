"""Check of numbers that others wrote: a row, a server, a judge."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is an int or a float, and finite as a float. A bool is no number.

    math.isfinite raises for an int beyond the largest float, which JSON can hold.

    >>> [is_finite(value) for value in (1, -0.5, 10**400, float("inf"), float("nan"), True, "1")]
    [True, True, False, False, False, False, False]
    """
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
