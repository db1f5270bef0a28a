"""Which source a ticket draws from, and which of its rows: functions of the ticket, without a state.

A ticket is the number of a draw, counted from 0 over the whole run. A run that goes on at a ticket goes on exactly,
and how tickets are dealt over steps and processes changes nothing.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import gcd, lcm

from core.errors import UserError

MOST_SLOTS = 100_000
"""The longest pattern that is worth its memory; ratios that need a longer one are typed with too many digits."""


@dataclass(frozen=True)
class Mixture:
    """A pattern of W slots that repeats: source d has w_d of any W tickets in a row, and of the first t tickets
    less than one row more or fewer than its share t * w_d / W."""

    parts: tuple[int, ...]
    """w_d, whole numbers without a common divisor; [sources]."""

    @cached_property
    def pattern(self) -> tuple[list[int], list[int]]:
        """Of each slot: the source, and how many slots before it are that source's; [W] each."""
        sources = spread(self.parts)
        seen = [0] * len(self.parts)
        ranks: list[int] = []
        for d in sources:
            ranks.append(seen[d])
            seen[d] += 1
        return sources, ranks

    def place(self, ticket: int) -> tuple[int, int]:
        """The source a ticket draws from, and the number of that draw within the source."""
        block, slot = divmod(ticket, sum(self.parts))
        sources, ranks = self.pattern
        return sources[slot], block * self.parts[sources[slot]] + ranks[slot]

    def drawn(self, tickets: int) -> list[int]:
        """How many of the first `tickets` tickets each source has had; [sources]."""
        block, slot = divmod(tickets, sum(self.parts))
        begun = self.pattern[0][:slot]
        return [block * part + begun.count(d) for d, part in enumerate(self.parts)]


def whole_parts(ratios: list[float], *, where: str) -> tuple[int, ...]:
    """Ratios as the smallest whole numbers, taken as they are written: 0.7 and 0.3 are 7 and 3.

    >>> whole_parts([0.7, 0.3], where="data.train")
    (7, 3)
    """
    exact = [Fraction(str(ratio)) for ratio in ratios]
    common = lcm(*(ratio.denominator for ratio in exact))
    whole = [int(ratio * common) for ratio in exact]
    divisor = gcd(*whole)
    parts = tuple(n // divisor for n in whole)
    if sum(parts) > MOST_SLOTS:
        raise UserError(
            f"{where}: the ratios {', '.join(map(str, ratios))} are exact only over {sum(parts)} rows, and a mixture "
            f"repeats after at most {MOST_SLOTS}: round them to fewer digits"
        )
    return parts


def spread(parts: tuple[int, ...]) -> list[int]:
    """The sources of W slots, each part as even as it can be; [W].

    The j-th row of source d may come from slot floor(j W / w_d) on, and must have come before slot
    ceil((j + 1) W / w_d). Of those that may, the one that must come first does: so none is ever late (unit jobs on
    one machine, where the earliest deadline first is optimal). Taking the source furthest behind its share, the usual
    smooth round robin, strays by more than one row when many sources are small.

    >>> spread((3, 1))
    [0, 0, 0, 1]
    """
    slots = sum(parts)
    given = [0] * len(parts)
    pattern: list[int] = []
    for slot in range(slots):
        may = [d for d, part in enumerate(parts) if given[d] * slots // part <= slot]
        first = min(may, key=lambda d: -(-(given[d] + 1) * slots // parts[d]))
        given[first] += 1
        pattern.append(first)
    return pattern


def row_of(stream: str, draw: int, rows: int) -> int:
    """Which of `rows` rows a draw takes: every row once per pass, in an order of its own for each stream and pass."""
    return _order(stream, draw // rows, rows)[draw % rows]


def row_anew(stream: str, draw: int, rows: int) -> int:
    """The same with replacement: every draw takes any row."""
    return random.Random(f"{stream}/anew/{draw}").randrange(rows)


@lru_cache(maxsize=64)
def _order(stream: str, nth: int, rows: int) -> array[int]:
    order = array("I", range(rows))
    random.Random(f"{stream}/{nth}").shuffle(order)
    return order
