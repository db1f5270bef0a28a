"""Seconds of a device: each moment counts once, for the first activity in the list, or as idle."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from core.timing.clock import ActivityTimer
from core.timing.phases import IDLE, Activity


def spend() -> None:
    until = time.perf_counter() + 1e-4
    while time.perf_counter() < until:
        pass


LISTED = [Activity.GENERATE, Activity.SYNC]
EVENTS = st.sampled_from([Activity.GENERATE, Activity.SYNC, Activity.TRAIN])


@settings(max_examples=30)
@given(st.lists(st.tuples(EVENTS, st.booleans()), max_size=8))
def test_a_moment_counts_for_the_first_activity_that_runs(events):
    timer = ActivityTimer(*LISTED)
    running = dict.fromkeys(LISTED, 0)
    for activity, begins in events:
        if begins:
            timer.begin_activity(activity)
        elif running.get(activity):
            timer.end_activity(activity)
        else:
            continue
        running[activity] = running.get(activity, 0) + (1 if begins else -1)
        before = timer.read_seconds()
        spend()
        after = timer.read_seconds()
        grown = [name for name in after if after[name] > before.get(name, 0.0)]
        assert grown == [next((str(name) for name, n in running.items() if n), IDLE)]


def test_no_moment_is_lost_or_counted_twice():
    created = time.perf_counter()
    timer, started = ActivityTimer(*LISTED), time.perf_counter()
    for activity in LISTED * 3:
        with timer.measure(activity):
            spend()
        spend()
    passed = time.perf_counter() - started
    assert passed <= sum(timer.read_seconds().values()) <= time.perf_counter() - created


def test_an_activity_in_place_of_another_is_charged_alone():
    timer = ActivityTimer(Activity.GENERATE, Activity.ENVIRONMENT)
    with timer.measure(Activity.GENERATE):
        before = timer.read_seconds()
        with timer.measure(Activity.ENVIRONMENT, instead_of=Activity.GENERATE):
            spend()
        after = timer.read_seconds()
        assert after[Activity.ENVIRONMENT] - before[Activity.ENVIRONMENT] >= 1e-4
        spend()
        assert timer.read_seconds()[Activity.GENERATE] - after[Activity.GENERATE] >= 1e-4
        assert timer.read_seconds()[Activity.ENVIRONMENT] == after[Activity.ENVIRONMENT]
    assert not any(timer.running.values())
