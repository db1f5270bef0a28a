"""Pairs, single replies with a label, and teachers by hand: what is compared, what is left out, and who grades."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from algs.base import Algorithm
from algs.dpo import DPO
from algs.gkd import GKD
from algs.kto import KTO, make_mismatched, sum_log_ratio
from algs.measures import list_read, plan_measures
from algs.minillm import MiniLLM
from algs.offline_dro import OfflineDRO
from algs.opd import OPD
from algs.opsd import OPSD
from algs.orpo import ORPO
from algs.otb import OTB
from algs.ppo import PPO
from algs.preference import discount_length, is_pair, preference_sign
from algs.rae import RAE, name_role
from algs.reward_model import append_scored_token
from algs.sdpo import SDPO
from algs.state import StepSeen
from algs.teachers import LIVE, START, Teacher, check_teachers, find_column, grade_tokens, list_paths
from algs.terms import KL
from algs.top_entropy import TopEntropy
from core.types.arrays import DOUBLE
from core.types.images import EncodedImage, PlacedImage
from core.types.samples import Group, Prompt, Sample
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell


def reply(reward: float | None, n: int = 2, **more: Any) -> Sample:
    """A prompt of one token, and a reply of n; without a reward it has failed."""
    sample = sample_of([*range(1, n + 2)], [False] + [True] * n, reward=reward, dtype=DOUBLE, **more)
    return replace(sample, failure="timeout") if reward is None else sample


def left_out(sample: Sample) -> Sample:
    return replace(sample, excluded=np.ones_like(sample.action_mask))


def credit(alg: Algorithm, *groups: Group) -> list[list[float]]:
    """Advantages of all tokens, by sample."""
    return [s.advantage.tolist() for g in alg.compute_advantages([*groups]) for s in g if s.advantage is not None]


def test_a_pair_has_two_replies_of_unequal_rewards():
    good, bad = reply(1.0), reply(0.0)
    for group, want in (
        ([good, bad], True),
        ([bad, good], True),
        ([reply(0.5), reply(0.25)], True),
        ([good, good], False),
        ([good], False),
        ([good, bad, bad], False),
        ([good, bad, reply(None)], False),
        ([good, left_out(bad)], False),
        ([good, reply(None)], False),
        ([], False),
    ):
        assert is_pair(group) == want, group
    assert [preference_sign(s) for s in (good, bad, reply(0.5), reply(None))] == [1, -1, 1, -1]


def test_tokens_beyond_the_shorter_reply_count_less():
    groups = [[reply(1.0, 3).with_advantage(2.0), reply(0.0, 1).with_advantage(-3.0)]]
    [[long, short]] = discount_length(groups, 0.25)
    assert long.advantage is not None and long.advantage.tolist() == [2, 2, 0.5, 0.5]
    assert short.advantage is not None and short.advantage.tolist() == [-3, -3]


def test_pairs_that_are_not_whole_are_excluded_and_whole_ones_are_not():
    whole, half = [reply(1.0, 3), reply(0.0, 2)], [reply(1.0, 3), reply(None)]
    done = DPO(length_norm=True).compute_advantages([whole, half])
    assert [[s.n_trained for s in g] for g in done] == [[3, 2], [0, 0]]
    assert credit(DPO(length_norm=True), whole) == [[0, *[pytest.approx(1 / 3)] * 3], [0, -0.5, -0.5]]
    # five tokens of the only pair, of which three are chosen
    assert credit(ORPO(), whole, half)[:2] == [[0, *[pytest.approx(5 / 3)] * 3], [0, *[pytest.approx(-5 / 3)] * 2]]
    # two pairs of five and of seven tokens, with four chosen
    both = credit(ORPO(), [reply(1.0, 3), reply(0.0, 2)], [reply(0.0, 6), reply(1.0, 1)])
    assert [row[1] for row in both] == pytest.approx([5 * 2 / 4, -5 * 2 / 4, -7 * 2 / 4, 7 * 2 / 4])


def test_replies_are_credited_with_their_rewards():
    assert credit(OfflineDRO(), [reply(2.5), reply(-3.0), reply(None)]) == [[0, 2.5, 2.5], [0, -3, -3], [0, 0, 0]]
    assert credit(GKD(teacher="x"), [reply(2.5), reply(-3.0)]) == [[0, 0, 0]] * 2


def columns(now: float, ref: float, n: int = 2) -> dict[str, list[float]]:
    """Columns of a prompt's token and n others, with these log-probabilities."""
    return {"prox_logp": [9.0] + [now] * n, "ref_logp": [7.0] + [ref] * n}


def test_the_reference_point_is_the_mean_of_mismatched_replies():
    """Log-ratios of 2 x 0.75 and 3 x -0.25 in the mismatched replies; a failed row keeps its place."""
    good, bad, failed = reply(1.0), reply(0.0), reply(None)
    up = replace(reply(1.0, columns=columns(-1, -1.75)), reward=None)
    down = replace(reply(1.0, 3, columns=columns(-2, -1.75, 3)), reward=None)
    assert [sum_log_ratio(s) for s in (up, down)] == [1.5, -0.75]
    alg = KTO(desirable_weight=2.0, undesirable_weight=3.0)
    done = alg.compute_advantages([[good, up], [bad, down], [failed]])
    assert [[s.reward for s in g] for g in done] == [[1], [0], [None]]
    assert [s.columns["reference_point"].tolist() for g in done for s in g] == [[0.375] * 3] * 3
    assert [s.advantage.tolist() for g in done for s in g if s.advantage is not None] == [
        *[[0, 2, 2], [0, -3, -3], [0, 0, 0]]
    ]
    for mismatched, point in (([up], 1.5), ([down], 0.0), ([], 0.0)):
        [[one]] = alg.compute_advantages([[good, *mismatched]])
        assert one.columns["reference_point"].tolist() == [point] * 3


def image(begin: int, end: int, name: str) -> PlacedImage:
    return PlacedImage(EncodedImage(name.encode(), 2, 3, name), begin, end)


def test_a_mismatched_reply_brings_its_own_images_along():
    first = sample_of([1, 2, 3, 4, 5], [False, False, True, False, True], images=(image(1, 2, "a"), image(3, 4, "b")))
    mask = [False, False, False, True, True, False, False]
    images = (image(1, 3, "c"), image(5, 6, "d"))
    second = sample_of([11, 12, 13, 14, 15, 16, 17], mask, images=images, prompt=Prompt(id="q", messages=[]))
    mixed = make_mismatched(first, second)
    assert mixed.token_ids.tolist() == [1, 2, 14, 15, 16, 17] and mixed.prompt is first.prompt
    assert mixed.action_mask.tolist() == [False, False, True, True, False, False]
    assert mixed.images == (image(1, 2, "a"), image(4, 5, "d"))
    assert (mixed.rollout_logp.tolist(), mixed.versions.tolist()) == ([0] * 6, [-1] * 6)
    assert (mixed.reward, mixed.float_dtype) == (None, first.float_dtype)
    other = make_mismatched(second, first)
    assert other.token_ids.tolist() == [11, 12, 13, 3, 4, 5]
    assert other.images == (image(1, 3, "c"), image(4, 5, "b"))
    [[_, one], [_, two]] = KTO().prepare_groups([[first], [second]])
    assert (one.token_ids.tolist(), two.token_ids.tolist()) == (mixed.token_ids.tolist(), other.token_ids.tolist())


def test_a_scored_token_stands_behind_the_last():
    sample = sample_of([5, 6, 7], [False, True, False], reward=1.0)
    scored = append_scored_token(sample)
    assert scored.token_ids.tolist() == [5, 6, 7, 7] and scored.action_mask.tolist() == [False, False, False, True]
    assert (scored.rollout_logp.tolist(), scored.versions.tolist()) == ([0] * 4, [-1] * 4)
    assert (scored.reward, scored.rollout_logp.dtype) == (1.0, sample.rollout_logp.dtype)


def read(sample: Sample, group: Group) -> None:
    """Prompt of a teacher; None for every sample."""


RATES: list[tuple[Teacher, list[float]]] = [
    (Teacher(START), [0, 0, 0, 0, 0, 0]),
    (Teacher(START, ema=0.25), [0.25] * 6),
    (Teacher(START, ema=0.25, ema_every=2), [0, 0.25, 0, 0.25, 0, 0.25]),
    (Teacher(START, reset_every=3), [0, 0, 1, 0, 0, 1]),
    (Teacher(START, reset_every=1), [1] * 6),
    (Teacher(START, ema=0.25, ema_every=2, reset_every=3), [0, 0.25, 1, 0.25, 0, 1]),
    (Teacher(START, ema=0.25, when=lambda state: state["n"] > 4), [0.25, 0.25, 0.25, 0.25, 1, 1]),
]


@pytest.mark.parametrize(("teacher", "rates"), RATES)
def test_a_teacher_follows_the_policy_at_its_steps(teacher: Teacher, rates: list[float]):
    assert [teacher.rate_after(n, {"n": n}) for n in range(1, 7)] == rates
    assert teacher.moves == any(rates)


def test_teachers_tell_where_they_are_and_what_they_grade():
    for teacher, path, partial, column in (
        (Teacher(START), None, False, "name"),
        (Teacher(LIVE, prompt=read), None, True, "name"),
        (Teacher("a/model", column="mine"), "a/model", False, "mine"),
        (Teacher("b/model", sources=("x",)), "b/model", True, "name"),
    ):
        assert (teacher.path, teacher.is_partial, find_column("name", teacher)) == (path, partial, column)
    several = {"a": Teacher("x"), "b": Teacher(START), "c": Teacher("y"), "d": Teacher("x")}
    assert list_paths(several) == ["x", "y"]
    kl = KL(coef=0.5, ema=0.25, ema_every=3, reset_every=4, reset_optimizer=True)
    assert kl.reference == Teacher(START, ema=0.25, ema_every=3, reset_every=4, with_optimizer=True)


def test_each_column_has_one_teacher_for_a_sample():
    a, b = Teacher("x", column="t", sources=("a",)), Teacher("y", column="t", sources=("b",))
    check_teachers({"one": a, "other": b, "third": Teacher("z", column="u")}, ["t", "u"])
    check_teachers({"t": Teacher("x", sources=("a", "a"))}, ["t"])
    assert tell(lambda: check_teachers({"one": a, "other": b}, ["u"])) == (
        "alg: the teacher one fills t, which required_columns does not name: add it"
    )
    for other in (Teacher("y", column="t"), Teacher("y", column="t", sources=("b", "a"))):
        assert tell(lambda other=other: check_teachers({"one": a, "other": other}, ["t"])) == (
            "alg: 2 teachers fill the column t, and some sample may have two of them: give each its own sources"
        )


def test_tokens_without_a_teacher_have_no_grade():
    graded = {"teacher_logp": [5.0, -1.0, -2.0]}
    for alg in (OPSD(), SDPO(), OPD(teacher="x", coef=2.0), MiniLLM(teacher="x")):
        assert credit(alg, [reply(None), left_out(reply(1.0))]) == [[0, 0, 0]] * 2, alg
    sample = reply(1.0, columns=graded)  # the engine says 0, 0.1 and 0.2
    assert credit(OPSD(), [sample]) == [pytest.approx([5, -1.1, -2.2])]
    assert credit(OPD(teacher="x", coef=2.0), [sample])[0][1:] == pytest.approx([-2.2, -4.4])
    assert grade_tokens(reply(None), "teacher_logp").advantage.tolist() == [0, 0, 0]  # pyright: ignore


def test_the_teacher_of_opsd_reads_the_answer():
    messages = [{"role": "user", "content": "Q"}]
    alg = OPSD(hint=" [{answer}|{answer}]")
    for answer, want in (("42", [{"role": "user", "content": "Q [42|42]"}]), ("", None)):
        sample = reply(1.0, prompt=Prompt(id="p", messages=messages, answer=answer))
        assert alg.show_answer(sample, [sample]) == want
    assert messages == [{"role": "user", "content": "Q"}]


def test_a_role_has_the_mean_of_its_own_rewards():
    chess, go = (Prompt(id="p", messages=[], source=source) for source in ("chess", ""))
    rows = [(2.0, chess, 0), (4.0, chess, 0), (8.0, chess, 1), (16.0, go, 1)]
    group = [replace(reply(r, prompt=prompt), player=player) for r, prompt, player in rows]
    assert [name_role(s) for s in group] == ["chess.player0", "chess.player0", "chess.player1", "player1"]
    alg = RAE(decay=0.75).with_state({"chess.player0": 1.0, "player3": 5.0})
    assert [row[1] for row in credit(alg, group)] == [1, 3, 8, 16]
    after = alg.after(StepSeen(number=0, groups=[group, [reply(None)]], means={})).state
    assert after == {"chess.player0": 1.5, "player3": 5.0, "chess.player1": 2.0, "player1": 4.0}


def test_a_plan_has_each_measure_where_it_is_computed():
    plan = plan_measures(OTB(kl=KL(coef=0.1, estimator="full"), entropy_coef=0.1))
    assert (sorted(plan.live), plan.any) == (["entropy", "kl"], True)
    assert {model: [*own] for model, own in plan.columns.items()} == {"prox": ["prox.collision"]}
    plain = plan_measures(PPO())
    assert (plain.live, plain.columns, plain.any) == ({}, {}, False)
    assert ([*plan_measures(TopEntropy()).live], plan_measures(TopEntropy()).any) == (["entropy"], False)
    assert list_read(OTB()) == {"prox_logp", "prox.collision", "prox", ""}
    assert list_read(GKD(teacher="x")) == {"teacher"}


class OfPPO(PPO):
    """Requires one more column."""

    more: str = ""

    @property
    def required_columns(self):
        return super().required_columns | {self.more}


class OfDPO(DPO):
    """Requires one more column."""

    more: str = ""

    @property
    def required_columns(self):
        return super().required_columns | {self.more}


def test_a_column_that_no_model_computes_is_named():
    for alg, there in (
        (OfPPO(more="nothing"), "prox_logp, values"),
        (OfDPO(more="nothing"), "prox_logp, ref_logp"),
    ):
        assert tell(lambda alg=alg: plan_measures(alg)) == (
            f"{type(alg).__name__}: required_columns names 'nothing', which no model computes: there are {there}, and "
            "every column of its teachers"
        )
    for more, alg in (("prox_logp", OfPPO), ("values", OfPPO), ("prox_logp", OfDPO)):
        assert plan_measures(alg(more=more)).columns == {}
    assert tell(lambda: plan_measures(OfPPO(more="prox.kl"))) == (
        "OfPPO: required_columns names 'prox.kl', which is no measure of a model: those are none"
    )
