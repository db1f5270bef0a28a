"""Settings of algorithms: numbers that make no sense are refused."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from algs import is_algorithm, list_algorithms, load_algorithm_class
from algs.base import PolicyGradient
from algs.by_source import BySource
from algs.terms import KL, AdaptiveEntropy, Correction, Overlong
from core.loading import resolve
from core.strict_model import StrictModel
from unit_tests.helpers.variants import NEEDED

SECTIONS: dict[type[StrictModel], dict[str, Any]] = {
    # the other settings with which a number of the section is one
    Correction: {},
    KL: {"coef": 0.1, "ema": 0.5},
    AdaptiveEntropy: {"target": 1.0},
    Overlong: {"mode": "penalty", "max_tokens": 8, "buffer": 1},
}
MAY_BE_0 = {"low", "coef of KL"}
ANY_SIGN = {"cov_above", "cov_below", "seed", "threshold"}
"""Numbers that may be below 0: bounds of a covariance or of a reward."""


def list_numbers(cls: type[StrictModel]) -> Iterator[tuple[str, type]]:
    """Yield the fields of a model that are numbers."""
    for key, field in cls.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if kind in (int, float):
                yield key, kind


@pytest.mark.parametrize("cls", SECTIONS)
def test_a_number_of_a_section_has_its_least_value(cls):
    """Above 0, but for two; a whole number is at least 1."""
    for key, kind in list_numbers(cls):
        others = {name: value for name, value in SECTIONS[cls].items() if name != key}
        least = 0.0 if key in MAY_BE_0 or f"{key} of {cls.__name__}" in MAY_BE_0 else 1 if kind is int else 1e-9
        if not (cls is KL and least == 0):  # without coef no reference may move
            assert getattr(cls(**others, **{key: least}), key) == least
        for number in (-1, -0.5, float("nan"), *([0] if least else [])):
            with pytest.raises(ValidationError, match=rf"(?m)^{key}$"):
                cls(**others, **{key: number})
    with pytest.raises(ValidationError, match=r"(?m)^ema$"):
        KL(coef=0.1, ema=1.0)


def test_a_mixture_of_one_algorithm_asks_for_what_the_algorithm_asks_for():
    same = ("required_columns", "needs_entropy", "whole_groups", "whole_episodes", "teachers")
    mixed: list[str] = []
    for name in list_algorithms():
        settings: dict[str, Any] = {"name": name, **NEEDED.get(name, {})}
        try:
            mixture = BySource(by_source={"a": settings})
        except ValueError:
            continue
        mixed.append(name)
        [alg] = mixture.algorithms.values()
        for prop in same:
            assert getattr(mixture, prop) == getattr(alg, prop), (name, prop)
        samples = isinstance(alg, PolicyGradient)
        assert mixture.needs_siblings == (samples and alg.needs_siblings), name
        assert mixture.not_on_policy == (alg.not_on_policy if samples else ""), name
        assert mixture.measures.keys() == alg.measures.keys(), name
        beside = BySource(by_source={"a": settings, "b": {"name": "grpo"}})
        assert beside.needs_siblings and beside.whole_groups == alg.whole_groups, name
        assert beside.whole_episodes == alg.whole_episodes and beside.needs_entropy == alg.needs_entropy, name
    assert {"grpo", "sft", "gspo", "qae", "opd", "gkd", "rloo"} <= {*mixed}
    assert not {"ppo", "p3o", "dpo", "reward_model"} & {*mixed}


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
