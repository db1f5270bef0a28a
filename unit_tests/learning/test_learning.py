"""Every algorithm masters the quickstart's task through the real loop (tools/benchmarks/learning_matrix.py)."""

from itertools import chain
from pathlib import Path

import pytest

from tools.benchmarks.learning_matrix import GOAL, MATRIX, Row, learn_all, warm_up

pytestmark = pytest.mark.timeout(3600)  # all of them learn in the first test's set-up

FIRST = {alg["name"]: row for row, alg in reversed(MATRIX.items())}
"""Row of every file of algs/."""
AT_ONCE = {"grpo", "ppo", "opd"}
SHOWN = FIRST.keys() - AT_ONCE
"""Files whose learning is shown by `make verify` and the table of algs/README.md: each takes ten seconds."""
ONE_EACH = [row for row in MATRIX if (row in FIRST.values() and MATRIX[row]["name"] not in SHOWN) or "LoRA" in row]
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
