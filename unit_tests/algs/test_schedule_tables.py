"""Schedules and state by hand: values at their ends, names of numbers, what is refused, and what is hidden."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from algs.base import PolicyGradient
from algs.grpo import GRPO
from algs.ppo import PPO
from algs.rae import RAE
from algs.schedules import (
    Schedule,
    flatten_schedules,
    kinds_of,
    list_numbers,
    read_value,
    value_at,
    with_values,
    write_value,
)
from algs.state import StepSeen
from algs.terms import KL, AdaptiveEntropy
from configs.load import validate
from core.errors import RunStopped, UserError
from core.strict_model import StrictModel
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell


def part(start: float, end: float, steps: int, **more: Any) -> Schedule:
    return Schedule(start=start, end=end, steps=steps, **more)


def test_a_schedule_has_its_end_exactly_and_from_its_last_step_on():
    falls = part(1e8, 0.1, 4)
    assert [falls.value_at(step) for step in (0, 2, 4, 5)] == [1e8, 1e8 + (0.1 - 1e8) / 2, 0.1, 0.1]
    curve = part(2.0, 6.0, 4, shape="cosine")
    half = math.sqrt(0.5)
    assert [curve.value_at(step) for step in range(6)] == pytest.approx([2, 4 - 2 * half, 4, 4 + 2 * half, 6, 6])


def test_the_next_schedule_begins_where_the_steps_of_the_last_are_over():
    parts = [part(0.1, 0.5, 2), part(0.9, 0.3, 3), part(7.0, 8.0, 1)]
    got = [value_at(parts, step) for step in range(8)]
    assert got == pytest.approx([0.1, 0.3, 0.9, 0.7, 0.5, 7.0, 8.0, 8.0])


NAMED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"a": {"start": 1}}, {"a": {"start": 1}}),
    ({"a": {"b": {"c": {"start": 1}}, "d": [2]}, "e": 3}, {"a.b.c": {"start": 1}, "a.d": [2], "e": 3}),
    ({"a": {}}, {"a": {}}),
    ({"a": {"b": {"start": 1}, "c": 2}}, {"a": {"b": {"start": 1}, "c": 2}}),
    ({"a.b": {"start": 1}}, {"a.b": {"start": 1}}),
]


@pytest.mark.parametrize(("given", "flat"), NAMED)
def test_sections_of_schedules_become_dotted_names(given, flat):
    assert flatten_schedules(given) == flat


class Inner(StrictModel):
    rate: float = 0.5
    label: str = ""


class Outer(StrictModel):
    inner: Inner = Inner()
    count: int = 2
    either: int | float = 1
    maybe: float | None = None
    switch: bool = False
    odd: bool | int = 1
    text: str = ""
    several: list[float] | None = None
    by_name: dict[str, float] | None = None


def test_numbers_are_found_by_their_dotted_names():
    for name, kinds in (
        ("count", {int}),
        ("either", {int, float}),
        ("maybe", {float}),
        ("inner.rate", {float}),
        ("inner", set[type]()),
        ("inner.label", set[type]()),
        ("inner.rate.more", set[type]()),
        ("inner.nothing", set[type]()),
        ("switch", set[type]()),
        ("odd", set[type]()),
        ("text", set[type]()),
        ("several", set[type]()),
        ("by_name", set[type]()),
        ("count.more", set[type]()),
        ("nothing", set[type]()),
    ):
        assert kinds_of(Outer, name) == kinds, name
    assert list_numbers(Outer) == ["inner.rate", "count", "either", "maybe"]
    assert list_numbers(Outer, "x.") == ["x.inner.rate", "x.count", "x.either", "x.maybe"]


def test_values_are_written_into_copies_of_the_sections():
    inside = {"coef": 0.1, "place": "loss"}
    raw: dict[str, Any] = {"kl": inside, "mu": 1.0, "wrong": [3]}
    write_value(raw, "kl.coef", 0.7)
    write_value(raw, "mu", 2.0)
    write_value(raw, "new.deep.value", 4.0)
    write_value(raw, "wrong.value", 5.0)
    assert raw == {
        "kl": {"coef": 0.7, "place": "loss"},
        "mu": 2.0,
        "wrong": [3],
        "new": {"deep": {"value": 4.0}},
    }
    assert inside == {"coef": 0.1, "place": "loss"}
    of_model: dict[str, Any] = {"inner": Inner(label="x")}
    write_value(of_model, "inner.rate", 0.25)
    assert of_model == {"inner": {"rate": 0.25, "label": "x"}}


def test_values_replace_those_of_a_copy():
    before = Outer()
    after = with_values(before, {"inner.rate": 0.75, "count": 5, "maybe": 1.5})
    assert (after.inner.rate, after.count, after.maybe, after.inner.label) == (0.75, 5, 1.5, "")
    assert (before.inner.rate, before.count, before.maybe) == (0.5, 2, None)
    assert [read_value(after, name) for name in ("inner.rate", "count")] == [0.75, 5]


class Moves(PolicyGradient):
    """Asks for what its hyper-parameter says."""

    mu: float = Field(0.1, ge=0, le=1)
    count: int = Field(2, ge=1)
    what: str = ""

    def is_asked(self, name: str) -> bool:
        return self.what == name and self.mu > 0.3

    needs_entropy = property(lambda self: self.is_asked("needs_entropy"))
    needs_siblings = property(lambda self: self.is_asked("needs_siblings"))
    whole_groups = property(lambda self: self.is_asked("whole_groups"))
    whole_episodes = property(lambda self: self.is_asked("whole_episodes"))

    @property
    def required_columns(self):
        return frozenset({"ref_logp"} if self.is_asked("required_columns") else ())


RISES = {"start": 0.1, "end": 0.5, "steps": 3}


@pytest.mark.parametrize(
    "prop", ["required_columns", "needs_entropy", "needs_siblings", "whole_groups", "whole_episodes"]
)
def test_no_schedule_changes_what_is_read_at_the_start(prop: str):
    with pytest.raises(UserError) as refused:
        validate(Moves, {"what": prop, "schedules": {"mu": RISES}}, prefix="alg.")
    assert str(refused.value).endswith(
        f"schedules.mu comes to 0.5, where the algorithm's {prop} is another than at 0.1, and it is read once, at the "
        "start: use a small number instead of 0"
    )
    assert Moves.model_validate({"what": prop, "schedules": {"mu": RISES | {"end": 0.3}}}).mu == 0.1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mu": [RISES, {"start": 2.0, "end": 0.2, "steps": 3}]}, "schedules.mu comes to 2: Input should be less than"),
    ({"mu": [RISES, 5]}, "and must have start, end and steps"),
    ({"mu": []}, "the schedule of mu is [], and must have start, end and steps"),
    ({"nu": RISES}, "there is no numeric hyper-parameter nu"),
    ({"kl": {"coff": RISES}}, "there is no numeric hyper-parameter kl.coff (did you mean 'kl.coef'?)"),
    (
        {"zzz": RISES},
        "there is no numeric hyper-parameter zzz: it has correction.low, correction.high, correction.token_high, "
        "correction.max_drift, kl.coef, kl.target, kl.horizon, kl.reset_every, kl.ema, kl.ema_every, "
        "overlong.max_tokens, overlong.buffer, overlong.coef, entropy_coef, adaptive_entropy.target, "
        "adaptive_entropy.delta, adaptive_entropy.high, mu, count",
    ),
]


@pytest.mark.parametrize(("schedules", "words"), REFUSED)
def test_a_schedule_of_no_number_is_refused(schedules, words):
    with pytest.raises(UserError) as refused:
        validate(Moves, {"schedules": schedules}, prefix="alg.")
    assert words in str(refused.value)


def test_schedules_may_be_given_as_objects_and_round_for_counts():
    for given in (part(0.3, 0.5, 2), [part(0.3, 0.4, 2), part(0.4, 0.5, 2)], [{"start": 0.3, "end": 0.5, "steps": 2}]):
        alg = Moves.model_validate({"mu": 0.9, "schedules": {"mu": given}})
        assert (alg.mu, alg.with_state({}, step=9).mu, alg.scheduled_values()) == (0.3, 0.5, {"mu": 0.3})
    counts = Moves.model_validate({"schedules": {"count": part(1.6, 4.4, 2)}})
    assert (counts.count, counts.with_state({}, step=1).count, counts.with_state({}, step=2).count) == (2, 3, 4)
    assert isinstance(counts.count, int)


def a_step(number: int = 0, **means: float) -> StepSeen:
    sample = sample_of([1, 2], [False, True], reward=1.0)
    return StepSeen(number=number, groups=[[sample, sample], [sample]], means=means)


def test_a_copy_is_of_the_step_after_the_one_that_has_ended():
    alg = PPO(critic_warmup=3)
    assert (alg.step_number, alg.trains_policy) == (0, False)
    second = alg.after(a_step(number=1))
    assert (second.step_number, second.trains_policy) == (2, False)
    assert second.after(a_step(number=2)).trains_policy and alg.step_number == 0
    assert alg.with_state({}).step_number == 0


def test_algorithms_with_a_state_of_their_own_or_of_a_section_have_one():
    for alg, has in (
        (GRPO(), False),
        (RAE(), True),
        (GRPO(kl=KL(coef=0.1)), False),
        (GRPO(kl=KL(coef=0.1, target=0.5)), True),
        (GRPO(adaptive_entropy=AdaptiveEntropy(target=0.5)), True),
    ):
        assert alg.has_state == has, alg
    both = GRPO(kl=KL(coef=0.25, target=0.5), adaptive_entropy=AdaptiveEntropy(target=0.5))
    assert both.state == {"kl_coef": 0.25, "entropy_coef": 0.0, "entropy_on": 1.0}


HIDDEN = (
    "Reads.accept_group reads {}, which moves from step to step, and with max_staleness above 0 groups finish while it "
    "moves: set max_staleness: 0"
)


class Reads(PolicyGradient):
    """Reads one of its own values."""

    mu: float = 0.5

    def accept_group(self, group: Any) -> bool:
        return self.mu > 0.3


def test_what_moves_is_hidden_and_the_rest_is_not():
    schedules = {"kl.coef": part(0.1, 0.2, 2), "kl.horizon": part(5, 6, 2), "mu": part(0.4, 0.5, 2)}
    alg = Reads.model_validate({"schedules": schedules})
    hidden = alg.hide_state()
    for read, what in (
        (lambda: hidden.state, "the state"),
        (lambda: hidden.step_number, "step_number"),
        (lambda: hidden.mu, "mu"),
        (lambda: hidden.kl, "kl"),
        (lambda: hidden.accept_group([]), "mu"),
    ):
        assert tell(read, RunStopped) == HIDDEN.format(what)
    assert hidden.correction.high == 2.0 and alg.mu == 0.4 and alg.kl.coef == 0.1 and alg.state == {}
    for one in (alg, hidden):
        with pytest.raises(AttributeError):
            one.nothing  # noqa: B018


class Starts(PolicyGradient):
    """Starts with the state that it was given."""

    def initial_state(self):
        return STATES[self.loss_norm]


class Ends(PolicyGradient):
    """Ends a step with a number that has no name."""

    def next_state(self, step):
        return 0.5


STATES: dict[str, Any] = {
    "token": [1.0],
    "sequence": {"n": np.array([1, 2])},
    "prompt": {"n": "x"},
    "constant": {"n": math.inf},
    "sequence_sum": {"n": np.float32(0.5), "k": np.int64(3), "row": np.ones(2, dtype=np.float32)},
}


def test_a_first_state_is_checked_like_every_other():
    entry = (
        "Starts: the state's n is a {}, expected a number or a numpy array of floats [n]: write float(x), and "
        "x.cpu().numpy() for a tensor"
    )
    for norm, kind, words in (
        ("token", UserError, "Starts: the state must be a dict of numbers and arrays, found list"),
        ("sequence", UserError, entry.format("ndarray")),
        ("prompt", UserError, entry.format("str")),
        ("constant", RunStopped, "Starts: the state's n is inf, and it must be finite: look at its next_state"),
    ):
        assert tell(lambda norm=norm: Starts(loss_norm=norm).state, kind) == words
    state = Starts(loss_norm="sequence_sum").state
    assert (state["n"], state["k"], state["row"].tolist()) == (0.5, 3.0, [1.0, 1.0])
    assert (type(state["n"]), type(state["k"]), state["row"].dtype) == (float, float, np.float32)
    assert tell(lambda: Ends().after(a_step())) == "Ends: the state must be a dict of numbers and arrays, found float"
    assert tell(lambda: GRPO().with_state([1.0])) == (  # pyright: ignore[reportArgumentType]
        "GRPO: the state must be a dict of numbers and arrays, found list"
    )


def test_numbers_are_grouped_by_name_in_the_order_of_samples():
    rewards = [[3.0, 5.0], [7.0]]
    groups = [[sample_of([1, 2], [False, True], reward=r) for r in row] for row in rewards]
    step = StepSeen(number=0, groups=groups, means={"loss": 2.5})
    named = step.group_by(lambda s: "high" if (s.reward or 0) > 4 else "low", lambda s: s.reward)
    assert named == {"low": [3.0], "high": [5.0, 7.0]} and step.n_samples == 3 and step.mean("loss") == 2.5
    assert tell(lambda: step.mean("kl")) == (
        "next_state asks for the mean of kl, which the step did not measure; it has loss"
    )
