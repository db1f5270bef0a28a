"""What an algorithm returns is what it was given, and a few parts of algorithms that no oracle covers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from algs.measures import plan_measures
from algs.opd import OPD
from algs.reinforce_pp import ReinforcePP
from algs.validate import check_samples
from core.errors import RunStopped
from core.types.measures import Measure
from core.types.samples import Sample
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell


def a_sample(first: int) -> Sample:
    return sample_of([first, 1, 2], [False, True, True])


A, B, C, D = map(a_sample, (5, 6, 7, 8))


@pytest.mark.parametrize(
    ("returned", "sizes"),
    [
        ([[B, A], [C, D]], "2 groups of 4"),
        ([[C, D], [A, B]], "2 groups of 4"),
        ([[A, C], [B, D]], "2 groups of 4"),
        ([[A, B], [C, a_sample(9)]], "2 groups of 4"),
        ([[A, B], [C]], "2 groups of 3"),
        ([[A, B]], "1 groups of 2"),
    ],
    ids=["siblings swapped", "groups swapped", "mixed", "another", "one left out", "a group left out"],
)
def test_samples_that_were_not_given_are_refused(returned, sizes):
    said = tell(lambda: check_samples(OPD(teacher="x"), [[A, B], [C, D]], returned), RunStopped)
    assert said == (
        f"OPD.compute_advantages was given 2 groups of 4 samples and returned {sizes}, or others: return every sample "
        "in its group and order, and leave one out by its `excluded`"
    )


def test_copies_of_the_given_samples_are_accepted():
    copies = [[replace(s, token_ids=s.token_ids.copy()) for s in g] for g in [[A, B], [C, D]]]
    check_samples(OPD(teacher="x"), [[A, B], [C, D]], copies)


@pytest.mark.parametrize("name", ["logp", "entropy", "measures", "apply", "list_tensors"])
def test_a_measure_has_no_name_of_the_policys(name):
    class Named(OPD):
        @property
        def measures(self) -> dict[str, Measure]:
            return {name: Measure(len)}  # pyright: ignore[reportArgumentType]

    said = tell(lambda: plan_measures(Named(teacher="x")))
    assert said == f"Named: a measure is named {name}, which policy.{name} means already: rename it"


def test_the_ratio_of_opd_says_where_it_is_anchored():
    assert [OPD(teacher="x", ratio=ratio).anchored_on_rollout for ratio in ("rollout", "none")] == [True, False]


def test_turns_are_compared_within_their_group_with_a_baseline():
    """Two groups of two episodes of one turn; the second group's turns earn more, all by the same step."""

    def episode(reward: float) -> Sample:
        return sample_of([1, 2, 3], [False, True, True], reward=reward, turn_rewards=[reward])

    def credit(**settings: Any) -> list[float]:
        groups = [[episode(0.0), episode(1.0)], [episode(4.0), episode(5.0)]]
        found = ReinforcePP(credit="turn", **settings).compute_advantages(groups)
        return [round(float(s.advantage[1]), 3) for g in found for s in g if s.advantage is not None]

    with_it, without = credit(baseline=True), credit(baseline=False)
    assert with_it[:2] == with_it[2:] and with_it[0] == -with_it[1] < 0
    assert sorted(without) == without and len({*without}) == 4
