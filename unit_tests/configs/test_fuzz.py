"""Whatever a recipe holds, loading and explaining it succeeds or is refused by one sentence: never a traceback."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from algs.base import PolicyGradient
from configs.load import read_recipe, sections_in
from configs.schema import RLConfig, RunConfig, SLConfig
from core.errors import UserError
from driver.checks.explain import explain
from driver.evaluation.suites.setup import explain_eval, load_eval_recipe
from driver.load_recipe import load_recipe

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent
RECIPES = {path.stem: read_recipe(str(path)) for path in sorted((ROOT / "configs").glob("*.yaml"))}
LONGEST_SENTENCE = 3000


def write_out(cls: type[RunConfig], name: str) -> dict[str, Any]:
    """Return a recipe with every key that it could have."""
    path = ROOT / "configs" / f"{name}.yaml"
    return load_recipe(cls, str(path), ["model.lora={}"]).cfg.model_dump(mode="json")


RECIPES |= {"whole RL": write_out(RLConfig, "tiny"), "whole SL": write_out(SLConfig, "tiny_sft")}


def field_names(section: type[BaseModel]) -> set[str]:
    """Return the names of the keys of a section and of those below it."""
    below = [inner for field in section.model_fields.values() for inner in sections_in(field.annotation)]
    return set(section.model_fields).union(*map(field_names, below))


KNOWN = sorted(field_names(RLConfig) | field_names(SLConfig) | field_names(PolicyGradient) | {"base", "file"})

texts = st.one_of(
    st.sampled_from(
        ["", " ", ".", "..", "/", "~", "hub:", "hub:///", "x/y", "x.py", "grpo", "None", "nan", "1e3", "auto"]
    ),
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.builds(lambda char, n: char * n, st.sampled_from("a/.é\n{"), st.sampled_from([300, 5000, 20_000])),
)
numbers = st.one_of(
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400]),
    st.sampled_from([0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf]),
    st.integers(),
    st.floats(),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts, st.dates(), st.binary(max_size=8))
keys = st.one_of(st.sampled_from(KNOWN), st.sampled_from(KNOWN), texts, st.integers(), st.booleans(), st.none())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)
deep = st.integers(10, 40).map(lambda levels: nest(levels))


def nest(levels: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner]
    return inner


def sections_of(raw: Any) -> list[Any]:
    """Return every mapping and every list of a recipe: the places where something can be changed."""
    if not isinstance(raw, dict | list):
        return []
    inside = raw.values() if isinstance(raw, dict) else raw
    return [raw, *(place for value in inside for place in sections_of(value))]


@st.composite
def mutated(draw: Callable[..., Any]) -> dict[str, Any]:
    """Draw a recipe of configs/ with one to three changes."""
    whole = st.sampled_from([name for name in RECIPES if name.startswith("whole")])
    raw = copy.deepcopy(RECIPES[draw(st.one_of(whole, st.sampled_from(sorted(RECIPES))))])
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(sections_of(raw)))
        there = list(place) if isinstance(place, dict) else list(range(len(place)))
        match draw(st.sampled_from(["change", "change", "change", "delete", "add"])):
            case "add" if isinstance(place, dict):
                place[draw(keys)] = draw(st.one_of(numbers, texts, values))
            case "add":
                place.append(draw(values))
            case "delete" if there:
                del place[draw(st.sampled_from(there))]
            case _ if there:
                at = draw(st.sampled_from(there))
                alike = numbers if isinstance(place[at], int | float) else texts  # gets past the check of the type
                place[at] = draw(st.one_of(alike, alike, values, deep))
    return raw


def check(raw: dict[str, Any], folder: Path, model: str) -> None:
    """Load and explain; a UserError must be one printable sentence."""
    if isinstance(raw.get("model"), dict) and isinstance(raw["model"].get("path"), str) and "/" in raw["model"]["path"]:
        raw["model"]["path"] = model  # the recipes name models that are not there
    path = folder / "mutated.yaml"
    path.write_text(yaml.safe_dump(raw, allow_unicode=True), encoding="utf-8")
    try:
        if isinstance(raw.get("data"), dict) and "sets" in raw["data"]:
            explain_eval(load_eval_recipe(str(path), []))
        else:
            explain(load_recipe(SLConfig if "rows_per_step" in raw else RLConfig, str(path), []))
    except UserError as error:
        note(str(error))
        assert str(error) and "\n" not in str(error) and len(str(error)) < LONGEST_SENTENCE


@pytest.mark.slow
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(raw=mutated())
def test_a_mutated_recipe_runs_or_gets_a_sentence(raw, tmp_path_factory, tiny_path):
    check(raw, tmp_path_factory.getbasetemp(), tiny_path)


@pytest.mark.verify
@pytest.mark.timeout(1800)
@settings(max_examples=2000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(raw=mutated())
def test_two_thousand_mutated_recipes_run_or_get_a_sentence(raw, tmp_path_factory, tiny_path):
    check(raw, tmp_path_factory.getbasetemp(), tiny_path)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(key=texts, value=texts)
def test_an_override_of_junk_gets_a_sentence(key, value):
    try:
        load_recipe(RLConfig, str(ROOT / "configs" / "tiny.yaml"), [f"{key}={value}"])
    except UserError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < LONGEST_SENTENCE


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(text=st.one_of(texts, st.text(st.sampled_from("{}[]:-&*!|>#'\"\n a0,?%@`\\"), max_size=40)))
def test_a_file_of_junk_gets_a_sentence(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "junk.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        load_recipe(RLConfig, str(path), [])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < LONGEST_SENTENCE


@pytest.mark.parametrize("key", ["steps", "tracking.samples", "show_samples"])
def test_an_integer_that_no_float_can_hold_gets_a_sentence(key, recipe):
    with pytest.raises(UserError, match=f"{key}: the number is too large, at most 2147483647 is allowed"):
        load_recipe(RLConfig, recipe(), [f"{key}={10**400}"])
