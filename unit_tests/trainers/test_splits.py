"""A step of every algorithm is the same however it is cut; see splits.py."""

import pytest

from algs import list_algorithms
from unit_tests.pretend_cuda.steps import Models
from unit_tests.trainers.splits import CLOSE, measure

pytestmark = [pytest.mark.verify, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", list_algorithms())
def test_the_gradient_is_that_in_one_piece(models, name):
    apart = measure(name, models)
    assert max(apart.values()) <= CLOSE, apart
