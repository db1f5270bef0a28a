"""Map a ticket to a source and to one of its rows: functions of the ticket, without state.

A ticket is the number of a draw, counted from 0 over the whole run. A run that resumes at a ticket continues exactly,
and the distribution of tickets over steps and processes changes nothing.
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
"""Longest pattern that is kept in memory; ratios that need a longer one have too many digits."""


@dataclass(frozen=True)
class Mixture:
    """Repeating pattern of W slots: source d has w_d of any W consecutive tickets.

    Its count in the first t tickets differs from its share t * w_d / W by less than one row.
    """

    parts: tuple[int, ...]
    """Weights w_d of the sources, whole numbers without a common divisor; [sources]."""

    @cached_property
    def pattern(self) -> tuple[list[int], list[int]]:
        """Source of each slot, and number of earlier slots of the same source; [W] each."""
        sources = interleave_sources(self.parts)
        seen = [0] * len(self.parts)
        ranks: list[int] = []
        for d in sources:
            ranks.append(seen[d])
            seen[d] += 1
        return sources, ranks

    def place_ticket(self, ticket: int) -> tuple[int, int]:
        """Return the source of a ticket, and the number of the draw within that source."""
        block, slot = divmod(ticket, sum(self.parts))
        sources, ranks = self.pattern
        return sources[slot], block * self.parts[sources[slot]] + ranks[slot]

    def count_drawn(self, tickets: int) -> list[int]:
        """Count the first `tickets` tickets by source; [sources]."""
        block, slot = divmod(tickets, sum(self.parts))
        begun = self.pattern[0][:slot]
        return [block * part + begun.count(d) for d, part in enumerate(self.parts)]


def whole_parts(ratios: list[float], *, where: str) -> tuple[int, ...]:
    """Return ratios as the smallest whole numbers, taken as they are written: 0.7 and 0.3 are 7 and 3.

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


def interleave_sources(parts: tuple[int, ...]) -> list[int]:
    """Return the source of each of W slots, every source spread as evenly as possible; [W].

    The j-th row of source d may come at slot floor(j W / w_d) at the earliest, and must come before slot
    ceil((j + 1) W / w_d). Among the rows that may come, the one with the earliest deadline does, so no row is ever
    late (unit jobs on one machine: earliest deadline first is optimal). The usual smooth round robin takes the source
    furthest behind its share, and is off by more than one row when many sources are small.

    >>> interleave_sources((3, 1))
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


def pick_row(stream: str, draw: int, rows: int) -> int:
    """Return the row of a draw, 0..rows-1: every row once per pass, in a new order for each stream and pass."""
    return _shuffle_rows(stream, draw // rows, rows)[draw % rows]


def pick_row_with_replacement(stream: str, draw: int, rows: int) -> int:
    """Return the row of a draw, 0..rows-1, uniformly at random."""
    return random.Random(f"{stream}/anew/{draw}").randrange(rows)


@lru_cache(maxsize=64)
def _shuffle_rows(stream: str, nth: int, rows: int) -> array[int]:
    order = array("I", range(rows))
    random.Random(f"{stream}/{nth}").shuffle(order)
    return order
