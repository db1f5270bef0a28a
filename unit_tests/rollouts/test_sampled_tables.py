"""Rows of a sampler against a plain account: each block sees the results of the tickets before its bound, and no more.

The plain account keeps every draw and every result of the run, and counts anew for each block.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from core.types.samples import Group, Prompt
from data_feeds.feed import Feed, Source
from data_feeds.rows.mixture import Mixture, pick_row
from data_feeds.samplers.base import History, Sampler, take_best
from rollouts.scheduling import sampled_rows
from rollouts.scheduling.sampled_rows import SampledRows
from tools.benchmarks.simulated_run import answer
from unit_tests.helpers.sampled_play import make_feed

SIZES, PARTS, PER_BLOCK = (5, 3), (2, 1), 4


class Noting(Sampler):
    """Chooses rows that were drawn least, and notes what it is given."""

    pass_reward: float = 0.5
    forget: float = 0.25
    notes: list[Any] = []  # noqa: RUF012 (a field of pydantic, which copies it)

    def choose(self, pool, history, *, count, rng):
        columns = {field.name: getattr(history, field.name).tolist() for field in fields(History)}
        self.notes.append((pool.tolist(), columns, count, int(rng.integers(2**60))))
        return take_best(pool, -history.drawn[pool], count)


def roll_out(ticket: int) -> Group:
    """A group of graded rewards; some are missing, some samples are no episode of the policy or half of one."""
    draw = random.Random(ticket)
    rewards = [draw.choice([0.0, 0.5, 0.75, 1.0, None]) for _ in range(draw.randint(1, 4))]
    group = [replace(answer(ticket, 0), reward=reward) for reward in rewards]
    if ticket % 5 == 4:
        return [replace(one, reward=None) for one in group]
    return [
        *group,
        replace(
            answer(ticket, 0),
            reward=1.0,
            origin="demonstration",
            versions=np.array([-1, -1], "i4"),
            rollout_logp=np.zeros(2, "f4"),
        ),
    ]


@dataclass
class Plain:
    """All rows and groups of a run, by ticket."""

    rows: dict[int, tuple[int, int]]
    staleness: int

    @staticmethod
    @cache
    def rewards(ticket: int) -> list[float]:
        return [s.reward for s in roll_out(ticket) if s.reward is not None and s.origin == "policy"]

    def history(self, source: int, block: int, drawn_before: int) -> dict[str, list[float]]:
        """The columns that the sampler sees at a block, row by row."""
        found: dict[str, list[float]] = {}
        bound = max(0, (block - self.staleness - 1) * PER_BLOCK)
        for row in range(SIZES[source]):
            own = [t for t in range(bound) if self.rows[t] == (source, row) and self.rewards(t)]
            samples = passed = 0.0
            for t in own:
                samples = 0.25 * samples + len(self.rewards(t))
                passed = 0.25 * passed + sum(r >= 0.5 for r in self.rewards(t))
            last = self.rewards(own[-1]) if own else [0.0]
            mean = sum(last) / len(last)
            columns = {
                "drawn": sum(self.rows[t] == (source, row) for t in range(drawn_before)),
                "groups": len(own),
                "samples": samples,
                "passed": passed,
                "last_rate": sum(r >= 0.5 for r in last) / len(last) if own else 0.0,
                "spread": sum(abs(r - mean) for r in last) / len(last),
            }
            for name, value in columns.items():
                found.setdefault(name, []).append(value)
        return found

    def measure(self, tickets: range, block: int) -> dict[str, float]:
        """The metrics of a step that took these tickets, the last of them in `block`."""
        rates: list[float] = []
        for t in tickets:
            source, row = self.rows[t]
            before = self.history(source, t // PER_BLOCK, 0)
            if before["groups"][row]:
                rates.append(before["passed"][row] / before["samples"][row])
        every = Counter(self.rows[t] for t in range((block + 1) * PER_BLOCK))
        there = [self.rows[t][0] for t in range(block * PER_BLOCK, (block + 1) * PER_BLOCK)]
        means: dict[int, list[float]] = {}
        for s in (0, 1):
            last = self.history(s, block, 0)
            columns = zip(last["passed"], last["samples"], last["groups"], strict=True)
            means[s] = [passed / samples for passed, samples, groups in columns if groups]
        given = [(there.count(s), sum(means[s]) / len(means[s])) for s in (0, 1) if means[s] and s in there]
        found = {
            "data/new_rows": 1 - len(rates) / len(tickets),
            "data/effective_rows": sum(every.values()) ** 2 / sum(n * n for n in every.values()) / sum(SIZES),
        }
        if rates:
            found["data/drawn_pass_rate"] = sum(rates) / len(rates)
        if given:
            found["data/given_pass_rate"] = sum(n * mean for n, mean in given) / sum(n for n, _ in given)
        return found


def make(staleness: int) -> tuple[SampledRows, list[Any]]:
    sampler = Noting()
    return SampledRows(make_feed(*SIZES), sampler, per_block=PER_BLOCK, max_staleness=staleness), sampler.notes


def pool_of(source: int, first: int, n: int) -> list[int]:
    return [pick_row(f"0/s{source}", nth, SIZES[source]) for nth in range(first, first + n)]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_block_sees_the_results_before_its_bound_in_ticket_order(staleness, resumes):
    sampled, notes = make(staleness)
    plain, order, blocks = Plain({}, staleness), random.Random(staleness), 6
    seeds, noted = Counter[int](), set[int]()
    for block in range(blocks):
        tickets = range(block * PER_BLOCK, (block + 1) * PER_BLOCK)
        late = [t for t in plain.rows if t not in noted]
        bound = max(0, (block - staleness - 1) * PER_BLOCK)
        # groups finish in any order, and the block waits for those below the bound alone
        for ticket in sorted(late, key=lambda t: order.random()):
            assert sampled.is_known(tickets[0]) == noted.issuperset(range(bound))
            assert sampled.is_known(tickets[-1]) == noted.issuperset(range(bound))
            if ticket < bound or order.random() < 0.5:
                sampled.note(ticket, roll_out(ticket))
                noted.add(ticket)
        assert sampled.is_known(tickets[0])
        if resumes:
            state = json.loads(json.dumps(sampled.get_state()))
            sampled, fresh = make(staleness)
            sampled.set_state(state)
            assert json.loads(json.dumps(sampled.get_state())) == state
            notes = fresh
        del notes[:]
        drawn = {t: sampled.draw(t).id for t in order.sample(tickets, PER_BLOCK)}
        assert {t: sampled.draw(t).id for t in tickets} == drawn and len(notes) == 2
        plain.rows |= {t: tuple(map(int, name.split("/"))) for t, name in drawn.items()}
        counts = Counter(make_feed(*SIZES).mixture.place_ticket(t)[0] for t in tickets)
        for pool, columns, count, seed in notes:
            source = 0 if count == counts[0] and set(pool) == set(range(5)) else 1
            first = sum(s == source for t, (s, _) in plain.rows.items() if t < tickets[0])
            n = max(count, 2 * SIZES[source] - first % SIZES[source])
            assert pool == pool_of(source, first, n) and count == counts[source]
            expected = plain.history(source, block, tickets[0])
            assert {name: pytest.approx(values) for name, values in expected.items()} == columns
            seeds[seed] += 1
        assert sampled.measure([*tickets]) == pytest.approx(plain.measure(tickets, block))
        before = range(max(0, tickets[0] - 2), tickets[-1] + 1)  # a step may begin in the block before
        assert sampled.measure([*before]) == pytest.approx(plain.measure(before, block))
        begun = range(max(0, tickets[0] - 2), tickets[0] + 1)
        assert sampled.measure([*begun]) == pytest.approx(plain.measure(begun, block))
    assert len(seeds) == 2 * blocks and max(seeds.values()) == 1, "each source and block draws by chance of its own"


def test_blocks_are_kept_as_long_as_a_ticket_needs_them():
    sampled, _ = make(0)
    drawn = [sampled.draw(t).id for t in range(4)]
    for ticket in range(4):
        sampled.note(ticket, roll_out(ticket))
    later = sampled.draw(7).id
    sampled.forget(3)
    assert [sampled.draw(t).id for t in range(4)] == drawn
    sampled.forget(4)
    with pytest.raises(KeyError):
        sampled.draw(3)
    assert sampled.draw(7).id == later


def test_a_row_that_depends_on_a_running_group_cannot_be_chosen():
    sampled, _ = make(1)
    for ticket in range(12):
        sampled.draw(ticket)
    for ticket in (0, 1, 3, 4):
        sampled.note(ticket, roll_out(ticket))
    assert not sampled.is_known(12) and sampled.is_known(11)
    with pytest.raises(AssertionError) as refused:
        sampled.draw(12)
    assert str(refused.value) == "ticket 2 has not finished, and a row depends on it"


@pytest.mark.parametrize(("whole", "n"), [(5, 5 + 5), (4, 8 * 3)])
def test_a_large_source_is_chosen_from_as_many_rows_as_are_needed(monkeypatch, whole, n):
    """The first block draws three rows of the source 0, which has five rows."""
    monkeypatch.setattr(sampled_rows, "WHOLE_POOL", whole)
    sampled, notes = make(0)
    sampled.draw(0)
    assert notes[0][0] == pool_of(0, 0, n) and notes[0][2] == 3


def test_the_chance_of_a_block_stays_that_of_earlier_versions():
    """Or a run that is resumed with a newer version would draw other rows."""
    sampled, notes = make(0)
    for ticket in range(4):
        sampled.draw(ticket)
    assert [seed for *_, seed in notes] == [777430226939844256, 791123503778619668]


class OnDisk(Source[Prompt]):
    is_lazy = True


@pytest.mark.parametrize(("kind", "rows", "n"), [(Source, 100_000, 200_000), (Source, 100_001, 24), (OnDisk, 30, 24)])
def test_up_to_a_hundred_thousand_rows_in_memory_are_all_chosen_from(kind, rows, n):
    """Of more rows, or those on disk, eight for each that is needed; here three are."""
    source = kind(name="s0", items=[Prompt(id="p", messages=[])] * rows, stream="0/s0")
    sampler = Noting()
    sampled = SampledRows(Feed(sources=[source], mixture=Mixture((1,))), sampler, per_block=3, max_staleness=0)
    sampled.draw(0)
    assert len(sampler.notes[0][0]) == n
