"""The schemas that editors read accept every recipe of the project, and mark what a run would refuse."""

import json
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft7Validator

from configs.load import read_yaml
from tools.editor_schema import FOLDER
from tools.recipe import program_of

CONFIGS = FOLDER.parent
RECIPES = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("papers/*.yaml")])
GRPO = {"name": "a", "steps": 1, "alg": {"name": "grpo"}}
DPO = {"name": "a", "steps": 1, "alg": {"name": "dpo"}}


@cache
def load_validator(name: str) -> Draft7Validator:
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def list_errors(name: str, recipe: dict[str, Any]) -> list[str]:
    return [error.message for error in load_validator(name).iter_errors(recipe)]


def test_every_recipe_names_its_schema_and_fits_it():
    for path in RECIPES:
        head = [line for line in path.read_text().splitlines() if line.startswith("# yaml-language-server")]
        [schema] = [line.partition("$schema=")[2] for line in head]
        program = program_of(path).removeprefix("main_").removesuffix(".py")
        assert (path.parent / schema).resolve() == FOLDER / f"{program}.json"
        assert list_errors(program, read_yaml(str(path))) == [], path.name


@pytest.mark.parametrize(
    ("name", "recipe", "said"),
    [
        ("rl", GRPO | {"trainer": {"learning_rate": 1e-5}}, "'learning_rate' was unexpected"),
        ("rl", GRPO | {"groups_per_step": "many"}, "'many' is not of type 'integer'"),
        ("rl", GRPO | {"placement": "together"}, "'together' is not one of"),
        ("rl", GRPO | {"alg": {"name": "grpo", "beta": 0.1}}, "'beta' was unexpected"),
        ("rl", GRPO | {"alg": {"name": "grpo", "kl": {"place": "sky"}}}, "'sky' is not one of"),
        ("rl", GRPO | {"alg": {"name": "gpro"}}, "'gpro' is not one of"),
        ("sl", DPO | {"alg": {"name": "dpo", "clip_low": 0.2}}, "'clip_low' was unexpected"),
        ("sl", DPO | {"rollout": {}}, "'rollout' was unexpected"),
        ("eval", {"name": "a", "samples": 0}, "0 is less than the minimum of 1"),
    ],
)
def test_what_a_run_would_refuse_is_marked(name, recipe, said):
    assert any(said in message for message in list_errors(name, recipe))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("rl", {"base": "quickstart.yaml", "trainer": {"lr": 1e-6}}),
        ("rl", GRPO | {"alg": {"file": "my_loss.py", "anything": 1}}),
        ("rl", GRPO | {"alg": {"name": "ppo", "gamma": 1}}),
        ("sl", DPO | {"data": {"train": [{"path": "a.jsonl", "ratio": 2}]}}),
    ],
)
def test_what_a_run_would_take_is_not_marked(name, recipe):
    assert list_errors(name, recipe) == []
