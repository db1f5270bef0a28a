"""Rows of tickets as a sampler chooses them, block by block.

Block b has the tickets b n to (b + 1) n - 1, where n is the number of new groups per step. Its rows are chosen from the
results of the tickets below (b - max_staleness - 1) n. This bound depends on the number of the block alone, so the rows
are the same in whatever order groups finish, and after a resume. Without rejected groups, all of them have finished
when the block may start; with rejected groups the block may wait for one, never for a ticket of its own.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from core import metrics as names
from core.types.episodes import list_episodes
from core.types.samples import Group, Prompt
from data_feeds.feed import Feed, Source
from data_feeds.rows.mixture import pick_rows
from data_feeds.samplers.base import History, Rows, Sampler, choose_rows

WHOLE_POOL = 100_000
"""Largest number of rows of a source whose pool has all of them."""
POOL = 8
"""Rows in the pool of a larger source for each row that is chosen."""


class Row(NamedTuple):
    """Row of a source."""

    source: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a finished group for the history of its row."""

    row: Row
    samples: int
    """Samples with a reward."""
    passed: int
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Chosen rows of a block, and what the log says of them."""

    rows: list[Row]
    """Row of each ticket."""
    rates: list[float | None]
    """Pass rate of each row before the choice; None for a row without results."""
    given: float | None
    """Mean pass rate of all rows with results, each source with its share of the block; None without results."""
    effective: float
    """Kish's number of rows that are drawn: (sum of draws)^2 / sum of squared draws."""


class SampledRows:
    """Map from tickets to the rows that a sampler chooses. Blocks are chosen one after the other."""

    def __init__(self, feed: Feed[Prompt], sampler: Sampler, *, per_block: int, max_staleness: int):
        self.feed, self.sampler = feed, sampler
        self.per_block, self.max_staleness = per_block, max_staleness
        self.histories = [History.empty(source.rows) for source in feed.sources]
        self.blocks: dict[int, Block] = {}
        """Blocks with tickets that may still be needed."""
        self.n_blocks = 0
        """Number of chosen blocks."""
        self.results: dict[int, Result] = {}
        """Results that the histories do not have yet, by ticket."""
        self.n_folded = 0
        """Results of lower tickets are in the histories."""
        self.n_complete = 0
        """Every lower ticket has a result."""
        self.n_squared = 0
        """Sum over the rows of the squared number of draws."""

    def is_known(self, ticket: int) -> bool:
        """Tell whether all groups that the ticket's row depends on have finished."""
        return self.n_complete >= self._bound(ticket // self.per_block)

    def draw(self, ticket: int) -> Prompt:
        """Return the prompt of a ticket. Requires `is_known`. Raises UserError if the sampler fails."""
        block, place = divmod(ticket, self.per_block)
        while self.n_blocks <= block:
            self._choose_next()
        row = self.blocks[block].rows[place]
        return self.feed.sources[row.source].read(row.number)

    def note(self, ticket: int, group: Group) -> None:
        """Add the result of a finished group, accepted or not."""
        block, place = divmod(ticket, self.per_block)
        episodes = list_episodes([sample for sample in group if sample.origin == "policy"])
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        mean = sum(rewards) / max(1, len(rewards))
        self.results[ticket] = Result(
            row=self.blocks[block].rows[place],
            samples=len(rewards),
            passed=sum(reward >= self.sampler.pass_reward for reward in rewards),
            spread=sum(abs(reward - mean) for reward in rewards) / max(1, len(rewards)),
        )
        self._move_complete()

    def measure(self, tickets: Sequence[int]) -> dict[str, float]:
        """Measure the drawn rows of these tickets against the given ones."""
        found = [(self.blocks[t // self.per_block], t % self.per_block) for t in tickets]
        rates = [rate for block, place in found if (rate := block.rates[place]) is not None]
        last = found[-1][0]
        measured = {
            names.DATA_NEW: 1 - len(rates) / len(tickets),
            names.DATA_EFFECTIVE: last.effective / sum(source.rows for source in self.feed.sources),
        }
        if rates:
            measured[names.DATA_DRAWN_RATE] = sum(rates) / len(rates)
        if last.given is not None:
            measured[names.DATA_GIVEN_RATE] = last.given
        return measured

    def forget(self, ticket: int) -> None:
        """Drop the blocks whose tickets are all below `ticket`."""
        for block in [b for b in self.blocks if (b + 1) * self.per_block <= ticket]:
            del self.blocks[block]

    def _bound(self, block: int) -> int:
        """Return the ticket below which all results are in the history of a block."""
        return max(0, (block - self.max_staleness - 1) * self.per_block)

    def _move_complete(self) -> None:
        while self.n_complete in self.results:
            self.n_complete += 1

    def _choose_next(self) -> None:
        block = self.n_blocks
        self._fold(self._bound(block))
        tickets = range(block * self.per_block, (block + 1) * self.per_block)
        places = [self.feed.mixture.place_ticket(ticket) for ticket in tickets]
        draws: defaultdict[int, list[int]] = defaultdict(list)
        for source, nth in places:
            draws[source].append(nth)
        chosen = {source: self._choose(source, nths, block) for source, nths in draws.items()}
        given = [(len(nths), _mean_rate(self.histories[source])) for source, nths in draws.items()]
        left = {source: iter(rows.tolist()) for source, rows in chosen.items()}
        rows = [Row(source, next(left[source])) for source, _ in places]
        rates = [_rate(self.histories[row.source], row.number) for row in rows]
        for row in rows:
            times = self.histories[row.source].drawn
            self.n_squared += 2 * int(times[row.number]) + 1  # (n + 1)^2 - n^2
            times[row.number] += 1
        self.n_blocks += 1
        effective = (self.n_blocks * self.per_block) ** 2 / self.n_squared
        self.blocks[block] = Block(rows=rows, rates=rates, given=_weighted_mean(given), effective=effective)

    def _choose(self, source: int, nths: list[int], block: int) -> Rows:
        one = self.feed.sources[source]
        pool = _make_pool(one, nths[0], len(nths))
        seed = hashlib.blake2b(f"{one.stream}/sampler/{block}".encode(), digest_size=16).digest()
        rng = np.random.default_rng(int.from_bytes(seed, "big"))
        return choose_rows(self.sampler, pool, self.histories[source], count=len(nths), rng=rng)

    def _fold(self, bound: int) -> None:
        """Move the results of the tickets below `bound` into the histories, in the order of tickets."""
        assert bound <= self.n_complete, f"ticket {self.n_complete} has not finished, and a row depends on it"
        for ticket in range(self.n_folded, bound):
            result = self.results.pop(ticket)
            if result.samples:
                _add_result(self.histories[result.row.source], result, self.sampler.forget)
        self.n_folded = max(self.n_folded, bound)

    def get_state(self) -> dict[str, Any]:
        """Return the histories of the rows that were drawn, the results and the blocks, for JSON."""
        return {
            "histories": [_history_to_json(history) for history in self.histories],
            "blocks": {str(number): asdict(block) for number, block in self.blocks.items()},
            "results": {str(ticket): asdict(result) for ticket, result in self.results.items()},
            "n_blocks": self.n_blocks,
            "n_folded": self.n_folded,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a stopped run."""
        for history, found in zip(self.histories, state["histories"], strict=True):
            for name, values in found["columns"].items():
                getattr(history, name)[found["rows"]] = values
        self.blocks = {int(number): _block_from_json(block) for number, block in state["blocks"].items()}
        self.results = {int(ticket): _result_from_json(result) for ticket, result in state["results"].items()}
        self.n_blocks, self.n_folded = state["n_blocks"], state["n_folded"]
        self.n_complete, self.n_squared = self.n_folded, sum(int((h.drawn**2).sum()) for h in self.histories)
        self._move_complete()


def _make_pool(source: Source[Any], first: int, count: int) -> Rows:
    """Return the rows of the next draws: to the end of the next pass, or for a large source POOL times `count`."""
    if source.rows <= WHOLE_POOL and not source.is_lazy:
        # the rest of this pass and a whole one: all rows, whatever is left of this one
        return pick_rows(source.stream, first, max(count, 2 * source.rows - first % source.rows), source.rows)
    return np.array([source.pick(nth) for nth in range(first, first + POOL * count)])


def _add_result(history: History, result: Result, forget: float) -> None:
    row = result.row.number
    history.groups[row] += 1
    history.samples[row] = forget * history.samples[row] + result.samples
    history.passed[row] = forget * history.passed[row] + result.passed
    history.last_rate[row] = result.passed / result.samples
    history.spread[row] = result.spread


def _rate(history: History, row: int) -> float | None:
    return float(history.passed[row] / history.samples[row]) if history.groups[row] else None


def _mean_rate(history: History) -> float | None:
    seen = history.seen
    return float((history.passed[seen] / history.samples[seen]).mean()) if seen.any() else None


def _weighted_mean(given: list[tuple[int, float | None]]) -> float | None:
    there = [(weight, value) for weight, value in given if value is not None]
    return sum(w * v for w, v in there) / sum(w for w, _ in there) if there else None


def _history_to_json(history: History) -> dict[str, Any]:
    """Return the columns of the rows that were drawn; all others are 0."""
    rows = np.flatnonzero(history.drawn)
    columns = ("drawn", "groups", "samples", "passed", "last_rate", "spread")
    return {"rows": rows.tolist(), "columns": {name: getattr(history, name)[rows].tolist() for name in columns}}


def _block_from_json(block: dict[str, Any]) -> Block:
    rows = [Row(*row) for row in block["rows"]]
    return Block(rows=rows, rates=block["rates"], given=block["given"], effective=block["effective"])


def _result_from_json(result: dict[str, Any]) -> Result:
    row = Row(*result["row"])
    return Result(row=row, samples=result["samples"], passed=result["passed"], spread=result["spread"])
