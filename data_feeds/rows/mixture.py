"""Stateless map from a ticket to a source and a row.

A ticket is the number of a draw, counted from 0 over the whole run. A resumed run continues exactly at the next ticket.
The distribution of tickets over steps and processes does not matter.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from core.errors import UserError

MOST_SLOTS = 100_000
"""Maximum length of the repeating pattern. Ratios that need more have too many digits."""


@dataclass(frozen=True)
class Mixture:
    """Repeating pattern of W slots, with w_d slots for source d.

    In the first t tickets, the count of source d differs from t * w_d / W by less than one row.
    """

    parts: tuple[int, ...]
    """Integer weights w_d without a common divisor; [sources]. A source of weight 0 is never drawn."""

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
        # closed form: a resumed run need not replay earlier tickets
        block, slot = divmod(ticket, sum(self.parts))
        sources, ranks = self.pattern
        return sources[slot], block * self.parts[sources[slot]] + ranks[slot]

    def count_drawn(self, tickets: int) -> list[int]:
        """Count the first `tickets` tickets by source; [sources]."""
        block, slot = divmod(tickets, sum(self.parts))
        begun = self.pattern[0][:slot]
        return [block * part + begun.count(d) for d, part in enumerate(self.parts)]


@dataclass(frozen=True)
class Curriculum:
    """Curriculum: mixtures one after the other, each for a number of tickets; the last has no end."""

    phases: tuple[tuple[int, Mixture], ...]
    last: Mixture

    def place_ticket(self, ticket: int) -> tuple[int, int]:
        """Return the source of a ticket, and the number of the draw within that source."""
        earlier, rest, mixture = self._find_phase(ticket)
        source, nth = mixture.place_ticket(rest)
        return source, earlier[source] + nth

    def count_drawn(self, tickets: int) -> list[int]:
        """Count the first `tickets` tickets by source; [sources]."""
        earlier, rest, mixture = self._find_phase(tickets)
        return [a + b for a, b in zip(earlier, mixture.count_drawn(rest), strict=True)]

    def _find_phase(self, ticket: int) -> tuple[list[int], int, Mixture]:
        """Return the draws of each source before a ticket's phase, the number of the ticket in it, and its mixture."""
        earlier = [0] * len(self.last.parts)
        for tickets, mixture in self.phases:
            if ticket < tickets:
                return earlier, ticket, mixture
            earlier = [a + b for a, b in zip(earlier, mixture.count_drawn(tickets), strict=True)]
            ticket -= tickets
        return earlier, ticket, self.last


def whole_parts(ratios: list[float], *, where: str) -> tuple[int, ...]:
    """Return ratios as the smallest integers in the same proportion.

    >>> whole_parts([0.7, 0.3], where="data.train")
    (7, 3)
    """
    exact = [Fraction(str(ratio)) for ratio in ratios]  # as written: the float 0.7 is not exactly 7/10
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
    """Spread every source as evenly as possible over W slots; [W].

    Row j of source d has the earliest slot floor(j W / w_d) and the deadline ceil((j + 1) W / w_d). Each slot takes the
    eligible row with the earliest deadline. No row is ever late, since earliest deadline first is optimal for unit jobs
    on one machine. Smooth round robin takes the source furthest behind its share. With many small sources it is off by
    more than one row.

    >>> interleave_sources((3, 1))
    [0, 0, 0, 1]
    """
    slots = sum(parts)
    given = [0] * len(parts)
    pattern: list[int] = []
    for slot in range(slots):
        may = [d for d, part in enumerate(parts) if part and given[d] * slots // part <= slot]
        first = min(may, key=lambda d: -(-(given[d] + 1) * slots // parts[d]))  # -(-a // b) is ceil(a / b)
        given[first] += 1
        pattern.append(first)
    return pattern


def pick_row(stream: str, draw: int, rows: int) -> int:
    """Return the row of a draw, 0..rows-1. Every pass contains each row once, in a new order."""
    return _shuffle_rows(stream, draw // rows, rows)[draw % rows]


def pick_rows(stream: str, first: int, count: int, rows: int) -> NDArray[np.int64]:
    """Return the rows of `count` draws from `first` on; [count]. As `pick_row` for each."""
    passes = range(first // rows, (first + count - 1) // rows + 1)
    whole = np.concatenate([np.frombuffer(_shuffle_rows(stream, nth, rows), dtype=np.uint32) for nth in passes])
    return whole[first % rows :][:count].astype(np.int64)


def pick_row_with_replacement(stream: str, draw: int, rows: int) -> int:
    """Return the row of a draw, 0..rows-1, uniformly at random."""
    # a generator for each draw, so that a resumed run needs no state
    return random.Random(f"{stream}/anew/{draw}").randrange(rows)


@lru_cache(maxsize=64)
def _shuffle_rows(stream: str, nth: int, rows: int) -> array[int]:
    # 4 bytes per row, since shuffles of several passes are cached
    order = array("I", range(rows))
    # seeded by text: the same order in every process, and another one for every pass
    random.Random(f"{stream}/{nth}").shuffle(order)
    return order
