"""Samplers by their formulas: the rows are those of weights and scores that are written out here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from core.errors import RunStopped, UserError
from data_feeds.samplers.base import History, Sampler, choose_rows, take_best, take_weighted
from data_feeds.samplers.find import find_sampler
from unit_tests.helpers.sentences import tell

POOL = np.array([5, 3, 0, 1, 4, 2])


def history_of(**columns: list[float]) -> History:
    """A history of six rows, whose other columns are 0."""
    empty = History.empty(6)
    return replace(
        empty, **{name: np.array(values).astype(getattr(empty, name).dtype) for name, values in columns.items()}
    )


def choose(given: Any, history: History, *, seed: int, count: int = 6, pool: Any = POOL) -> list[int]:
    rng = np.random.default_rng(seed)
    return choose_rows(find_sampler(given)[1], pool, history, count=count, rng=rng).tolist()


def check_weights(given: Any, history: History, weights: list[float], pool: Any = POOL) -> None:
    """Check that rows are drawn with these weights, by row."""
    own = np.array(weights)[pool]
    for seed in range(12):
        expected = take_weighted(pool, own, len(pool), np.random.default_rng(seed)).tolist()
        assert choose(given, history, seed=seed, count=len(pool), pool=pool) == expected, seed


def test_pools_give_a_row_the_weight_of_its_pool():
    history = history_of(groups=[1, 1, 1, 2, 0, 1], last_rate=[0.25, 0.26, 0.75, 0.76, 0.5, 0.0])
    check_weights("pools", history, [0.2, 1.0, 1.0, 0.2, 1.0, 0.2])
    settings = {"unseen": 3, "hard": 0.5, "normal": 2, "easy": 0.25, "hard_below": 0.1, "easy_above": 0.5}
    check_weights({"name": "pools", **settings}, history, [2, 2, 0.25, 0.25, 3, 0.5])


def test_priority_weighs_a_row_by_its_spread():
    history = history_of(groups=[1, 1, 1, 0, 1, 1], spread=[0.5, 0.0, 0.2, 0.0, 0.4, 0.1])
    check_weights("priority", history, [(s + 0.01) ** 0.6 for s in (0.5, 0.0, 0.2, 0.5, 0.4, 0.1)])
    given = {"name": "priority", "alpha": 2, "epsilon": 0.3}
    check_weights(given, history, [(s + 0.3) ** 2 for s in (0.5, 0.0, 0.2, 0.5, 0.4, 0.1)])
    # a row without results has the largest spread of the pool
    pool = np.array([2, 3, 5])
    check_weights(given, history, [(s + 0.3) ** 2 for s in (0, 0, 0.2, 0.2, 0, 0.1)], pool)
    check_weights("priority", History.empty(6), [1.0] * 6)


def test_thompson_takes_rates_nearest_to_one_half():
    history = history_of(samples=[8, 8, 8, 0, 4, 2.5], passed=[8, 1, 4, 0, 3, 0.5])
    for seed in range(12):
        passed, failed = np.array([8, 1, 4, 0, 3, 0.5])[POOL], np.array([0, 7, 4, 0, 1, 2.0])[POOL]
        rate = np.random.default_rng(seed).beta(1 + passed, 1 + failed)
        nearest = sorted(range(6), key=lambda i: abs(rate[i] - 0.5))
        assert choose("thompson", history, seed=seed, count=3) == [int(POOL[i]) for i in nearest[:3]]


def test_rows_are_retired_at_the_threshold_and_not_before():
    history = history_of(samples=[4, 3.9, 4, 8, 8, 0], passed=[2, 3.9, 1.9, 4.1, 3.9, 0], drawn=[0, 2, 1, 0, 1, 0])
    given = {"name": "no_positive", "threshold": 0.5, "least_samples": 4}
    assert choose(given, history, seed=0, count=4) == [5, 4, 2, 1]
    assert choose("no_positive", history, seed=0, count=6) == [5, 3, 0, 4, 2, 1]
    retired = history_of(samples=[8] * 6, passed=[8] * 6)
    assert tell(lambda: choose({"name": "no_positive", "threshold": 0.75}, retired, seed=0), RunStopped) == (
        "data.sampler: all rows are retired, with a pass rate of 0.75 or more: raise data.sampler.threshold, or bring "
        "harder rows"
    )
    assert choose({"name": "no_positive", "least_samples": 9}, retired, seed=0, count=2) == [5, 3]


def test_the_uniform_sampler_keeps_the_order_of_the_pool():
    assert choose("uniform", History.empty(6), seed=0, count=4) == [5, 3, 0, 1]


def test_the_best_rows_come_in_the_order_of_their_scores():
    assert take_best(np.array([7, 3, 9, 3]), np.array([1.0, 5.0, 5.0, 8.0]), 3).tolist() == [3, 9, 7]
    assert take_best(np.array([7, 3, 9]), np.array([2, 2, 2]), 2).tolist() == [7, 3]
    assert take_best(np.array([7, 3]), np.array([1.0, 2.0]), 5).tolist() == [3, 7, 3, 7, 3]
    none = tell(lambda: take_weighted(POOL, np.zeros(6), 2, np.random.default_rng(0)), RunStopped)
    assert none == "data.sampler: no row is left that the sampler would draw: loosen its settings"


class Own(Sampler):
    """Sampler that does what its test says."""

    what: Any = None

    def choose(self, pool: Any, history: History, *, count: int, rng: np.random.Generator) -> Any:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what


def test_errors_of_a_sampler_are_told_by_its_name():
    def ask(what: Any, **named: Any) -> Any:
        return choose_rows(Own(what=what, **named), POOL, History.empty(6), count=2, rng=np.random.default_rng(0))

    assert tell(lambda: ask(KeyError("x"), name="mine")) == "data.sampler=mine: choose() raised KeyError: 'x'"
    assert tell(lambda: ask(UserError("so"), name="mine"), UserError) == "so"
    assert tell(lambda: ask(RunStopped("all of it"), file="a.py"), RunStopped) == "all of it"
    assert tell(lambda: ask([5, 9], file="a.py")) == (
        "data.sampler=a.py: choose() returned the row 9, which is not in the pool: return rows of it"
    )
    assert tell(lambda: ask([[5, 3]], name="mine")) == (
        "data.sampler=mine: choose() must return 2 whole numbers, and returned an array of int64 with the shape [1, 2]"
    )
    found = ask(np.array([5, 5], dtype=np.uint8))
    assert found.tolist() == [5, 5] and found.dtype == np.int64


def test_a_history_begins_with_nothing():
    history = History.empty(3)
    whole = [history.drawn, history.groups, history.samples, history.passed, history.last_rate, history.spread]
    assert [column.tolist() for column in whole] == [[0, 0, 0]] * 6
    assert [column.dtype.kind for column in whole] == list("iiffff")
    assert history_of(groups=[0, 1, 2, 0, 0, 0]).seen.tolist() == [False, True, True, False, False, False]
    view = history.view()
    assert not any(column.flags.writeable for column in (view.groups, view.samples, view.passed, view.last_rate))
    assert history.drawn.flags.writeable


def test_a_sampler_is_found_by_its_name_or_its_file(tmp_path, monkeypatch):
    spec, sampler = find_sampler({"name": "thompson", "forget": 1})
    assert (type(sampler).__name__, sampler.name, sampler.forget, sampler.pass_reward) == ("Thompson", "thompson", 1, 1)
    assert spec.module.endswith("thompson")
    (path := tmp_path / "own.py").write_text(
        "from data_feeds.samplers.base import Sampler\n\n\nclass Own(Sampler):\n    depth: int = 2\n\n"
        "    def choose(self, pool, history, *, count, rng):\n        return pool[:count]\n"
    )
    for given in (str(path), {"file": str(path), "depth": 5}):
        spec, sampler = find_sampler(given)
        assert spec.path == str(path) and sampler.file == str(path)
        assert sampler.model_dump()["depth"] == (2 if isinstance(given, str) else 5)
    monkeypatch.chdir(tmp_path)
    spec, sampler = find_sampler("own.py")
    assert (spec.path, sampler.name, sampler.file) == (str(path), "", "own.py")
