"""Settings of algorithms: numbers that make no sense are refused."""

from typing import Any

import pytest

from algs import is_algorithm, list_algorithms, load_algorithm_class
from core.loading import resolve
from unit_tests.helpers.variants import NEEDED

ANY_SIGN = {"cov_above", "cov_below", "seed", "threshold"}
"""Numbers that may be below 0: bounds of a covariance or of a reward."""


@pytest.mark.parametrize("name", list_algorithms())
def test_no_number_of_an_algorithm_may_be_negative_or_nan(name: str):
    cls = load_algorithm_class(resolve(name, "algs", offers=is_algorithm, key="alg.name"))
    needed: dict[str, Any] = NEEDED.get(name, {})
    cls(**needed)
    for key, field in cls.model_fields.items():
        if not any(kind in str(field.annotation) for kind in ("int", "float")):
            continue
        for number in (float("nan"), *(() if key in ANY_SIGN else (-1, -0.5))):
            given: dict[str, Any] = {**needed, key: number}
            with pytest.raises(ValueError, match=key):
                cls(**given)
