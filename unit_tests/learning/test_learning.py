"""Every algorithm learns through the real loop: the two matrices of tools/benchmarks."""

from itertools import chain
from pathlib import Path

import pytest

from algs import list_algorithms
from tools.benchmarks import supervised_matrix
from tools.benchmarks.learning_matrix import GOAL, MATRIX, Row, learn_all, warm_up

pytestmark = [pytest.mark.one_core, pytest.mark.timeout(3600)]  # all of them learn in the first test's set-up

FIRST = {alg.get("name", "by_source"): row for row, alg in reversed(MATRIX.items())}
"""Row of every file of algs/."""
AT_ONCE = {"grpo"}
"""Files whose learning every CI shows. `make verify` shows that of the others, and algs/README.md has the table."""
ONE_EACH = [row for row in FIRST.values() if MATRIX[row].get("name") in AT_ONCE]
VARIANTS = [row for row in MATRIX if row not in ONE_EACH]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the quickstart's data and its warmed-up model."""
    made = tmp_path_factory.mktemp("matrix")
    warm_up(made)
    return made


@pytest.fixture(scope="module")
def rows(folder) -> dict[str, Row]:
    return {row.name: row for row in learn_all(ONE_EACH, [0], folder)}


def mastered(row: Row) -> bool:
    assert row.start < 0.5
    return row.best >= GOAL


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_EACH)
def test_every_algorithm_learns(name, rows):
    assert mastered(rows[name]), f"its best step's reward was {rows[name].best:.3f}, not {GOAL}"


@pytest.mark.verify
def test_variants_learn_and_every_algorithm_does_from_other_seeds(folder):
    rows = chain(learn_all(VARIANTS, [0], folder), learn_all(list(MATRIX), [1, 2], folder))
    assert not [row for row in rows if not mastered(row)]


def test_every_file_of_algs_has_a_row():
    supervised = {task.alg["name"] for task in supervised_matrix.MATRIX.values()}
    # echo needs an environment that answers: tools/benchmarks/echo_on_tools.py
    assert FIRST.keys() | supervised | {"echo"} == {*list_algorithms()}


@pytest.fixture(scope="module")
def given(folder) -> Path:
    """With the rows of the supervised matrix, too."""
    supervised_matrix.make_rows(folder)
    return folder


@pytest.mark.verify
@pytest.mark.parametrize("name", supervised_matrix.MATRIX)
def test_every_algorithm_of_given_rows_learns(name, given):
    one = supervised_matrix.learn(name, 0, given)
    assert one.before < 0.5 and one.after >= supervised_matrix.GOAL, one
