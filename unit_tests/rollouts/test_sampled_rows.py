"""Rows that a sampler chooses: the same in whatever order groups finish, and after a resume at every step."""

from collections import Counter

import pytest

from unit_tests.helpers.sampled_play import OVERLAP, REUSE, STEPS, SYNC, make_feed, make_rows, play


@pytest.mark.parametrize("schedule", [SYNC, OVERLAP, REUSE], ids=["synchronous", "overlap", "reuse"])
@pytest.mark.parametrize("sampler", ["thompson", "priority"])
def test_three_orders_of_completion_draw_identical_rows(schedule, sampler):
    (rows, told), *others = [play(schedule, sampler, seed=seed, sizes=(40, 9)) for seed in range(3)]
    for again, told_again in others:
        both = rows.keys() & again.keys()  # with overlap, another number of tickets may be begun at the end
        assert len(both) >= STEPS * schedule.fresh and all(rows[t] == again[t] for t in both)
        assert told == told_again


@pytest.mark.parametrize("schedule", [SYNC, OVERLAP, REUSE], ids=["synchronous", "overlap", "reuse"])
def test_a_run_resumed_at_every_step_draws_the_same_rows(schedule):
    rows, told = play(schedule, "thompson", seed=0, sizes=(40, 9))
    again, told_again = play(schedule, "thompson", seed=1, sizes=(40, 9), resumes=True)
    both = rows.keys() & again.keys()
    assert len(both) >= STEPS * schedule.fresh and all(rows[t] == again[t] for t in both)
    assert told == told_again


def test_the_uniform_sampler_draws_the_rows_of_no_sampler():
    for sizes in ((7,), (30, 9), (2,)):
        rows, _ = play(OVERLAP, "uniform", seed=0, sizes=sizes)
        feed = make_feed(*sizes)
        assert rows == {ticket: feed.draw(ticket).id for ticket in rows}


def test_the_shares_of_a_mixture_stay_exact():
    rows, _ = play(SYNC, "thompson", seed=0, sizes=(40, 9))
    assert Counter(rows[t].partition("/")[0] for t in range(12)) == {"0": 8, "1": 4}


def test_results_move_the_choice_and_the_log_says_by_how_much():
    _, uniform = play(SYNC, "uniform", seed=0)
    _, chosen = play(SYNC, {"name": "pools", "hard": 0, "easy": 0}, seed=0)
    assert uniform[-1]["data/new_rows"] == 0 and uniform[-1]["data/effective_rows"] > 0.9
    assert chosen[-1]["data/effective_rows"] < 0.7, "about half of the rows are left"
    hard = [m["data/drawn_pass_rate"] for m in chosen[6:] if "data/drawn_pass_rate" in m]
    assert all(0.1 < rate < 0.9 for rate in hard)


def test_a_large_source_is_drawn_from_the_next_rows_alone(monkeypatch):
    monkeypatch.setattr("rollouts.scheduling.sampled_rows.WHOLE_POOL", 10)
    sampled = make_rows(SYNC, (1000,), "thompson")
    feed = make_feed(1000)
    ahead = {feed.draw(ticket).id for ticket in range(32)}
    assert {sampled.draw(ticket).id for ticket in range(4)} <= ahead
