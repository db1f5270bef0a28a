"""Rules of sections that no other test of the recipes breaks: columns of an evaluation, and weights of a reward."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.data_schema import COLUMNS
from configs.eval_schema import OF_PROMPTS, EvalSetConfig
from configs.rollout_schema import RewardConfig
from unit_tests.helpers.sentences import tell


@pytest.mark.parametrize("name", [*COLUMNS, "reply"])
def test_an_evaluation_reads_the_columns_of_prompts_alone(name):
    def make() -> Any:
        return EvalSetConfig.model_validate({"path": "a", "columns": {"id": "key", name: "x"}})

    if name in OF_PROMPTS:
        assert make().columns[name] == "x"
        return
    what = "is not read by an evaluation" if name in COLUMNS else "is not one of our columns"
    assert f"{name} {what}: id, messages, tools, answer, image, images" in tell(make, ValidationError)


def test_a_reward_of_one_function_has_a_weight_of_a_part():
    def make(**given: Any) -> RewardConfig:
        return RewardConfig.model_validate({"function": "gsm8k"} | given)

    assert make().weights == {"correct": 1.0} and make(weights={"format": 0.5}).weights == {"format": 0.5}
    said = tell(lambda: make(weights={}), ValidationError)
    assert "weights names no part of function: give one, such as {correct: 1.0}" in said
