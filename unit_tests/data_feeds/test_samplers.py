"""Samplers: which rows they prefer, in which proportion, and what a sampler of the user's may get wrong."""

from dataclasses import replace

import numpy as np
import pytest

from core.errors import RunStopped, UserError
from data_feeds.rows.mixture import pick_row, pick_rows
from data_feeds.samplers.base import History, choose_rows, take_best, take_weighted
from data_feeds.samplers.find import find_sampler

POOL = np.arange(6)


def history_of(rates: list[float | None], *, samples: float = 100.0, **others: list[float]) -> History:
    """Rows with these pass rates; None for a row without results."""
    rate = np.array([0.0 if r is None else r for r in rates])
    seen = np.array([r is not None for r in rates])
    history = History.empty(len(rates))
    changed = {name: np.array(values) for name, values in others.items()}
    n = seen * samples
    return replace(history, groups=seen.astype(int), samples=n, passed=n * rate, last_rate=rate, **changed)


def choose(given: object, history: History, *, count: int = 1, seed: int = 0, pool: np.ndarray = POOL) -> list[int]:
    _, sampler = find_sampler(given)
    return choose_rows(sampler, pool, history, count=count, rng=np.random.default_rng(seed)).tolist()


def chosen(given: object, history: History, *, seeds: int) -> set[int]:
    """Every row that is the first choice under one of the seeds."""
    return {choose(given, history, seed=seed)[0] for seed in range(seeds)}


def test_pick_rows_are_the_rows_of_single_draws():
    for first, count in ((0, 5), (3, 12), (7, 1), (6, 8)):
        assert pick_rows("0", first, count, 7).tolist() == [pick_row("0", first + i, 7) for i in range(count)]


def test_thompson_draws_rows_of_middling_difficulty_and_tries_new_ones():
    known = history_of([0.0, 0.1, 0.5, 0.9, 1.0, 0.02], samples=1000.0)
    assert chosen("thompson", known, seeds=20) == {2}
    new = history_of([0.0, 0.0, None, 1.0, 1.0, 1.0], samples=1000.0)
    assert chosen("thompson", new, seeds=20) == {2}


def test_weights_are_the_probabilities_of_the_first_draw():
    weights, rng = np.array([1.0, 2.0, 0.0, 5.0]), np.random.default_rng(0)
    drawn = np.bincount([take_weighted(np.arange(4), weights, 1, rng)[0] for _ in range(4000)], minlength=4)
    expected = 4000 * weights / 8
    # chi-square with two degrees of freedom: above 13.8 once in a thousand
    assert drawn[2] == 0
    assert sum((drawn[i] - expected[i]) ** 2 / expected[i] for i in (0, 1, 3)) < 13.8


def test_pools_draw_a_row_by_the_pool_of_its_last_group():
    history = history_of([0.25, 0.76, 0.5, None, 1.0, 0.0])
    only = {"name": "pools", "hard": 0, "normal": 0, "easy": 1, "unseen": 1e-9}
    assert {*choose(only, history, count=2)} == {1, 4}
    assert {*choose(only | {"easy": 0, "hard": 1}, history, count=2)} == {0, 5}
    assert {*choose(only | {"easy": 0, "normal": 1}, history, count=1)} == {2}
    # at the bounds themselves: up to hard_below is hard, and above easy_above is easy
    at_bounds = history_of([0.25, 0.75, 0.26, 0.76])
    for pool, rows in (("hard", {0}), ("normal", {1, 2}), ("easy", {3})):
        chosen_now = choose(only | {"easy": 0, pool: 1}, at_bounds, count=len(rows), pool=np.arange(4))
        assert {*chosen_now} == rows, pool


def test_no_positive_retires_what_passes_and_keeps_the_order_of_a_pass():
    history = history_of([0.9, 0.89, 1.0, None, 0.5, 0.0], samples=8.0, drawn=[1, 1, 1, 0, 0, 1])
    pool = np.array([4, 2, 0, 5, 3, 1, 4])
    assert choose("no_positive", history, count=4, pool=pool) == [4, 3, 5, 1]
    assert choose("no_positive", replace(history, samples=history.samples / 2, passed=history.passed / 2), count=6) == [
        *(3, 4, 0, 1, 2, 5)
    ], "too few samples to tell"
    with pytest.raises(RunStopped, match=r"all rows are retired, with a pass rate of 0.9 or more: raise"):
        choose("no_positive", history_of([1.0] * 6))


def test_priority_follows_the_spread_of_the_last_group():
    history = history_of([0.5] * 5 + [None], spread=[0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    settings = {"name": "priority", "alpha": 1, "epsilon": 1e-9}
    assert chosen(settings, history, seeds=40) == {0, 5}
    assert chosen(settings | {"alpha": 0}, history, seeds=60) == {*range(6)}


def test_rows_come_again_only_where_the_pool_is_too_small():
    assert take_best(np.array([3, 1, 3, 2]), np.array([1.0, 9.0, 1.0, 1.0]), 5).tolist() == [1, 3, 2, 1, 3]
    once = take_weighted(np.array([3, 1, 3, 2]), np.array([1.0, 0.0, 1.0, 1.0]), 4, np.random.default_rng(0)).tolist()
    assert sorted(once[:2]) == [2, 3] and once[2:] == once[:2]


OWN = "from data_feeds.samplers.base import Sampler, take_best\n\nclass Own(Sampler):\n    depth: int = 1\n\n"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return pool[: count - 1]", r"choose\(\) must return 1 whole numbers, and returned an array of int64"),
        ("return pool[:count] / 2", "returned an array of float64"),
        ("return pool[:count] + 100", r"returned the row 100, which is not in the pool"),
        ("return history.nothing", r"choose\(\) raised AttributeError: .*nothing"),
        ("history.drawn[0] = 1", "ValueError: assignment destination is read-only"),
    ],
)
def test_a_sampler_that_chooses_wrongly_is_told_so(tmp_path, body, says):
    path = tmp_path / "own.py"
    path.write_text(f"{OWN}    def choose(self, pool, history, *, count, rng):\n        {body}\n")
    with pytest.raises(UserError, match=f"data.sampler={path}: .*{says}"):
        choose(str(path), History.empty(6))


def test_a_wrong_name_or_setting_is_refused():
    for given, says in (
        ("tompson", r"there is no 'tompson' in data_feeds/samplers/ \(did you mean 'thompson'\?\)"),
        ({"name": "pools", "hart": 1}, r"data.sampler.hart"),
        ({"name": "pools", "hard_below": 0.9}, "hard_below=0.9 must be below easy_above=0.75"),
        ({"forget": 0.5}, "data.sampler needs either a name"),
        ({"name": "thompson", "forget": 0}, "data.sampler.forget=0 is not valid"),
    ):
        with pytest.raises(UserError, match=says):
            find_sampler(given)
