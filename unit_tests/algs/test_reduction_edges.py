"""Reductions and totals at their edges: one value, none, fewer than asked for, ties, and mixed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algs.base import PolicyGradient, assign_advantages
from algs.grpo import GRPO
from algs.m2po import M2PO, find_limit, measure_moved
from algs.reductions import count, exact_sum, gather, kth, largest, quantile
from algs.totals import Alone, Totals, measure_near, prepare_update, sum_totals, total_alone
from core.errors import RunStopped
from core.types.samples import Group, Policy, Sample, Tokens
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.lock_step import reduce_on_ranks
from unit_tests.helpers.sentences import tell

Ask = Callable[[Tensor, Tokens], dict[str, Any]]


class Asks(PolicyGradient):
    """Ask in one stage for the reductions of a function of the values."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        object.__setattr__(self, "ask", ask)

    def totals(self, policy: Policy, tokens: Tokens) -> Any:
        return self.ask(policy.logp, tokens)  # pyright: ignore[reportAttributeAccessIssue]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens_of(values: Tensor, *ids: int) -> tuple[Policy, Tokens]:
    numbers = torch.tensor(ids) if ids else torch.arange(len(values))
    return Policy(logp=values), Tokens(weight=torch.ones_like(values), seq_ids=numbers)


def reduce(ask: Ask, *parts: Tensor) -> dict[str, Any]:
    """Reduce micro-batches of one rank."""
    return {name: x.tolist() for name, x in reduce_on_ranks(Asks(ask), [[*map(tokens_of, parts)]])[0].reduced.items()}


UNIT = 2.0**-64
"""Unit of an exact sum."""


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([], 0.0),
        ([3.0], 3.0),
        ([2.0**63, 2.0**63, -(2.0**62)], 2.0**64 - 2.0**62),
        ([-(2.0**63), 2.0**32, 2.0**31 + 1, 2.0**-32, -(2.0**-33)], -(2.0**63) + 2.0**32 + 2.0**31 + 1),
        ([0.75 * UNIT, 0.25 * UNIT, 0.75 * UNIT], 2 * UNIT),
        ([-0.75 * UNIT, 0.25 * UNIT], -UNIT),
        ([2.0**40, 3 * UNIT, -(2.0**40)], 3 * UNIT),
        ([2.0**-31, 2.0**-64, -(2.0**-31)], UNIT),
        ([1.0, 2.0**64], math.nan),
        ([1.0, -(2.0**64)], math.nan),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_a_sum_has_units_of_two_to_minus_64(values: list[float], want: float):
    got = reduce(lambda x, _: {"sum": exact_sum(x)}, tensor(*values))["sum"]
    assert got == want or (math.isnan(got) and math.isnan(want))


def test_order_statistics_of_few_values():
    def ask(x: Tensor, _: Tokens) -> dict[str, Any]:
        return {
            "first": kth(x, k=1),
            "third": kth(x, k=3),
            "least part": kth(x, fraction=0.0),
            "two fifths": kth(x, fraction=0.4),
            "all": kth(x, fraction=1.0),
            "low": quantile(x, 0.0),
            "quarter": quantile(x, 0.25),
            "most": quantile(x, 0.875),
            "largest": largest(x),
        }

    five = reduce(ask, tensor(5, -1), tensor(), tensor(3, 2, 7))
    assert five == {
        **{"first": 7, "third": 3, "least part": 7, "two fifths": 5, "all": -1},
        **{"low": -1, "quarter": 2, "most": 6, "largest": 7},
    }
    assert set(reduce(ask, tensor(4)).values()) == {4}
    two = reduce(ask, tensor(4), tensor(8))
    assert (two["third"], two["two fifths"], two["all"], two["quarter"], two["most"]) == (4, 8, 4, 5, 7.5)
    assert all(math.isnan(x) for x in reduce(ask, tensor()).values())
    assert all(math.isnan(x) for x in reduce(ask, tensor(1, math.nan, 3)).values())


def test_counts_are_of_tokens_or_of_what_is_true():
    def ask(x: Tensor, _: Tokens) -> dict[str, Any]:
        return {"all": count(x), "above": count(x > 2), "plain": (x * x).sum()}

    assert reduce(ask, tensor(1, 2), tensor(3), tensor(0, 5)) == {"all": 5, "above": 2, "plain": 39}
    assert reduce(ask, tensor()) == {"all": 0, "above": 0, "plain": 0}


def test_a_value_of_each_sequence_is_that_of_its_first_token():
    """The last token begins a sequence of its own, and one sequence does not count."""

    def ask(x: Tensor, tokens: Tokens) -> dict[str, Any]:
        return {"all": gather(x, tokens.seq_ids), "some": gather(x, tokens.seq_ids, where=x != 4)}

    policy, tokens = tokens_of(tensor(3, 3, 4, 4, 2), 0, 0, 1, 1, 2)
    seen = total_alone(Asks(ask), policy, tokens)
    assert {name: x.tolist() for name, x in seen.totals.items()} == {"all": [2, 3, 4], "some": [2, 3]}
    assert seen.first["all"].tolist() == [3, 3, 4, 4, 2]
    assert seen.first["some"].isnan().tolist() == [False, False, True, True, False]
    assert measure_near(seen) == {}, "no threshold"
    by_two = [[tokens_of(tensor(9, 8), 0, 1)], [tokens_of(tensor(7), 0), tokens_of(tensor(6, 6), 0, 0)]]
    assert [t.reduced["all"].tolist() for t in reduce_on_ranks(Asks(ask), by_two)][:1] == [[6, 7, 8, 9]]


def test_values_at_the_distance_of_rounding_are_near_a_threshold():
    def ask(x: Tensor, _: Tokens) -> dict[str, Any]:
        return {"top": largest(x), "low": kth(x, k=5), "n": count(x)}

    x = tensor(0.0, -1e-5, -1.001e-5, -3.0, -2.0)
    assert measure_near(total_alone(Asks(ask), *tokens_of(x)))["near_threshold"].tolist() == [1, 1, 0, 1, 0]


PARITY: list[tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = [
    (count, exact_sum),
    (lambda x: kth(x, k=1), lambda x: kth(x, fraction=1.0)),
    (lambda x: kth(x, k=1), lambda x: kth(x, k=2)),
    (lambda x: quantile(x, 0.5), lambda x: kth(x, fraction=0.5)),
    (lambda x: x.sum(), exact_sum),
    (exact_sum, lambda x: x.sum()),
]


@pytest.mark.parametrize(("even", "odd"), PARITY)
def test_a_total_is_the_same_reduction_in_every_micro_batch(even, odd):
    said = tell(lambda: reduce(lambda x, _: {"it": (odd if len(x) % 2 else even)(x)}, tensor(1, 2), tensor(3)))
    assert said == (
        "Asks.totals: it is another reduction in one micro-batch than in another: it may depend on what was reduced "
        "before, and not on the tokens"
    )


class Wrong(PolicyGradient):
    """Asks for totals that cannot be."""

    def totals(self, policy: Policy, tokens: Tokens) -> Any:
        if len(policy.logp) == 1:
            yield from ()
        elif len(policy.logp) == 2:
            yield {"a": count(policy.logp)}
            yield {"a": count(policy.logp)}
        else:
            yield {"b": kth(policy.logp[1:], k=1)}


def test_stages_that_cannot_be_are_refused_and_none_is_no_stage():
    assert reduce_on_ranks(Wrong(), [[tokens_of(tensor(1))]])[0].reduced == {}
    for n, words in (
        (2, "Wrong.totals asks for 'a' in two stages: rename one of them"),
        (
            3,
            "Wrong.totals: b has shape [2], expected one value per token, [3]: use `where` to leave tokens out",
        ),
    ):
        assert tell(lambda n=n: reduce_on_ranks(Wrong(), [[tokens_of(torch.zeros(n))]])) == words
    both = [[tokens_of(tensor(1)), tokens_of(tensor(1, 2))]]
    said = tell(lambda: reduce_on_ranks(Wrong(), both))
    assert said.startswith("Wrong.totals asks for other reductions in one micro-batch than in another, ")
    assert said.endswith(": the stages must not depend on the tokens")


def test_a_rank_alone_adds_nothing():
    alone, x = Alone(), tensor(1, 2)
    assert (alone.rank, alone.ranks) == (0, 1) and alone.sum_over_rows(x) is x
    tokens = tokens_of(x)[1]
    assert Totals().add_to(tokens) is tokens
    added = Totals(reduced={"n": x}, first={"m": x}).add_to(tokens)
    assert (added.totals, added.first) == ({"n": x}, {"m": x})
    assert [next(iter(sum_totals(GRPO(), [], alone))).reduced for _ in range(2)] == [{}, {}]


def reply(n: int = 2, **more: Any) -> Sample:
    return sample_of([*range(1, n + 2)], [False] + [True] * n, **more)


class Prepares(PolicyGradient):
    """Prepares an update by a rule of its name."""

    rule: str = ""

    def prepare_update(self, groups: list[Group]) -> list[Group]:
        match self.rule:
            case "drop":
                return [group[1:] for group in groups]
            case "exclude":
                return [[replace(s, excluded=np.ones_like(s.action_mask)) for s in g] for g in groups]
            case "nan":
                return [[s.with_advantage(math.nan) for s in g] for g in groups]
            case _:
                return groups

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return groups[::-1] if self.rule == "turn" else groups


def test_an_update_keeps_its_samples_and_a_token():
    groups = [[reply(reward=3.0), reply(reward=0.5)]]
    for rule, words in (
        (
            "drop",
            "Prepares.prepare_update was given 1 groups of 2 samples and returned 1 groups of 1, or others: return "
            "every sample in its group and order, and leave one out by its `excluded`",
        ),
        ("exclude", "Prepares.prepare_update left no token to train on: keep one, or set advantages to 0"),
        (
            "nan",
            "Prepares.prepare_update gave the advantage nan to a sample of p with the reward 3.0: advantages must be "
            "finite",
        ),
    ):
        assert tell(lambda rule=rule: prepare_update(Prepares(rule=rule), groups), RunStopped) == words
    assert prepare_update(Prepares(), groups) == groups and prepare_update(GRPO(), groups) is groups
    failed = [[replace(reply(), failure="timeout")]]
    assert [s.n_trained for s in prepare_update(Prepares(rule="exclude"), failed)[0]] == [0]


def test_advantages_are_of_the_samples_that_were_given():
    groups = [[reply(reward=3.0)], [reply(3, reward=0.5)]]
    assert tell(lambda: assign_advantages(Prepares(rule="turn"), groups), RunStopped) == (
        "Prepares.compute_advantages was given 2 groups of 2 samples and returned 2 groups of 2, or others: return "
        "every sample in its group and order, and leave one out by its `excluded`"
    )
    assert assign_advantages(Prepares(), groups) == groups


@pytest.mark.parametrize(
    ("moved", "threshold", "limit"),
    [
        ([0.0, 0.5], 0.25, 0.0),
        ([0.0, 0.5], 0.2501, 0.5),
        ([0.3, 0.3], 0.3, 0.3),
        ([0.4, 0.1, 0.1], 0.1, 0.1),
        ([0.2, 0.0, 0.2, 0.2], 0.12, 0.0),
        ([4.0], 0.04, 4.0),
    ],
)
def test_the_limit_of_m2po_is_the_largest_with_a_mean_below(moved, threshold, limit):
    assert find_limit(np.array(moved), threshold) == limit


def test_m2po_drops_the_tokens_that_moved_most():
    """Squares 0, 0.25 and 1 of one sample, and 0.01 of two others: means 0, 0.005, 0.007, 0.07 and 0.25."""
    columns = {"prox_logp": [9.0, 0.1, 0.7, -0.7]}
    one = reply(3, columns=columns, advantage=[0.0, 2.0, 3.0, 5.0])
    other = reply(1, columns={"prox_logp": [9.0, 0.0]}, advantage=[0.0, 7.0])
    failed = replace(one, failure="timeout")
    bare = replace(other, advantage=None)
    assert measure_moved(one).tolist() == pytest.approx([0, 0.25, 1], abs=1e-6)
    for threshold, kept in ((0.01, [2, 0, 0]), (0.1, [2, 3, 0]), (0.4, [2, 3, 5])):
        [[first, second, lost, without]] = M2PO(threshold=threshold).prepare_update([[one, other, failed, bare]])
        assert first.advantage is not None and first.advantage[1:].tolist() == kept
        assert second.advantage is not None and second.advantage.tolist() == [0, 7]
        assert lost is failed and without is bare
    assert M2PO().prepare_update([[failed]]) == [[failed]]
