"""Every algorithm masters the quickstart's task through the real loop; the table is benchmarks/learning_matrix.py's."""

from pathlib import Path

import pytest

from benchmarks.learning_matrix import GOAL, MATRIX, learn, warm_up


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the quickstart's data and its warmed-up model."""
    made = tmp_path_factory.mktemp("matrix")
    warm_up(made)
    return made


def masters(name: str, seed: int, folder: Path) -> None:
    row = learn(name, seed, folder)
    assert row.start < 0.5
    assert row.steps is not None, f"the best step's reward was {row.best:.3f}, not {GOAL}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MATRIX)
def test_every_algorithm_learns(name, folder):
    masters(name, 0, folder)


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", MATRIX)
def test_every_algorithm_learns_from_other_seeds(name, seed, folder):
    masters(name, seed, folder)
