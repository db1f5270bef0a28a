"""Every algorithm masters the quickstart's task through the real loop; the table is benchmarks/learning_matrix.py's."""

from pathlib import Path

import pytest

from benchmarks.learning_matrix import GOAL, MATRIX, Row, learn_all, warm_up

pytestmark = pytest.mark.timeout(3600)  # all of them learn in the first test's set-up


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the quickstart's data and its warmed-up model."""
    made = tmp_path_factory.mktemp("matrix")
    warm_up(made)
    return made


@pytest.fixture(scope="module")
def rows(folder) -> dict[str, Row]:
    return {row.name: row for row in learn_all(list(MATRIX), [0], folder)}


def mastered(row: Row) -> bool:
    assert row.start < 0.5
    return row.best >= GOAL


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_every_algorithm_learns(name, rows):
    assert mastered(rows[name]), f"its best step's reward was {rows[name].best:.3f}, not {GOAL}"


@pytest.mark.verify
def test_every_algorithm_learns_from_other_seeds(folder):
    failed = [row for row in learn_all(list(MATRIX), [1, 2], folder) if not mastered(row)]
    assert not failed
