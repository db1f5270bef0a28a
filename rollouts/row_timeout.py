"""Column `timeout_s` of a row: the seconds that an episode of it may take."""

from __future__ import annotations

import math

from core.errors import UserError
from core.numbers import is_finite
from core.types.samples import Prompt

TIMEOUT_COLUMN = "timeout_s"


def find_timeout(prompt: Prompt) -> float:
    """Return the seconds of a row; infinity without the column. Raises UserError for other values."""
    given = prompt.extra.get(TIMEOUT_COLUMN)
    if given is None:
        return math.inf
    if not is_finite(given) or given <= 0:
        raise UserError(f"row {prompt.id}: {TIMEOUT_COLUMN} is {given!r:.80}: give a number of seconds above 0")
    return float(given)
