"""Every algorithm in every partition of eight rows, over 1, 2 and 4 ranks, and in the splits of training: equal to the
bit. The fast tests of test_check.py do the same for a few partitions.
"""

from typing import Any

import pytest

from algs import find_algorithm, list_algorithms
from algs.base import Algorithm
from algs.check.partitions import changes_no_bit, list_partitions
from unit_tests.helpers.variants import CANDIDATES, NEEDED, VARIANTS, name_variant

pytestmark = pytest.mark.one_core

AS_THEY_COME: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in list_algorithms()]
STAGED: list[tuple[str, dict[str, Any]]] = [
    ("kl_cov", {"fraction": 0.2}),
    ("clip_cov", CANDIDATES),
    ("top_entropy", {"quantile": 0.5}),
    ("tilted", {"beta": 2.0}),
    ("aot", {}),
    ("p3o", {}),
]


def algorithm_of(name: str, settings: dict[str, Any]) -> Algorithm:
    return find_algorithm({"name": name})[1](**NEEDED.get(name, {}) | settings)


def test_eight_rows_have_4140_partitions():
    """Bell's number, each once."""
    every = [tuple(sorted(p)) for p in list_partitions(8)]
    assert len(every) == len(set(every)) == 4140
    assert all(sorted(i for part in p for i in part) == [*range(8)] for p in every)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), STAGED, ids=name_variant)
def test_totals_are_equal_in_many_partitions(name, settings):
    assert changes_no_bit(algorithm_of(name, settings), drawn=60).endswith(": equal")


@pytest.mark.verify
@pytest.mark.parametrize(("name", "settings"), [*AS_THEY_COME, *VARIANTS, *STAGED], ids=name_variant)
def test_every_partition_is_equal(name, settings):
    assert changes_no_bit(algorithm_of(name, settings), drawn=None).endswith(": equal")
