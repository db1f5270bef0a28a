"""Rules of sections that no other test of the recipes breaks, each refused in a sentence that names the fix."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.data_schema import COLUMNS, DataConfig, PromptDataConfig
from configs.eval_schema import OF_PROMPTS, EvalSetConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from configs.trainer_schema import TrainerConfig
from core.strict_model import StrictModel
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


def sources(**by_path: bool) -> dict[str, Any]:
    return {"train": [{"path": path, "name": path, "replacement": anew} for path, anew in by_path.items()]}


REFUSED: list[tuple[type[StrictModel], dict[str, Any], str]] = [
    *((DataConfig, {"train": none}, "train names no source: give a path, or a list of sources") for none in ("", [])),
    (
        PromptDataConfig,
        sources(one=False, two=True, three=True) | {"sampler": "uniform"},
        "sampler chooses the rows, and two has replacement: leave one of them out",
    ),
    (
        RolloutConfig,
        {"env": "calculator", "agent": {"command": ["play"]}},
        "env=calculator and agent exclude each other: leave one of them out",
    ),
    (
        TrainerConfig,
        {"deepspeed": {"zero_optimization": "x" * 70}},
        f"zero_optimization must hold keys of DeepSpeed's ZeRO, found '{'x' * 59}",
    ),
]


@pytest.mark.parametrize(("section", "given", "sentence"), REFUSED)
def test_settings_of_a_section_that_exclude_each_other_are_refused(section, given, sentence):
    with pytest.raises(ValidationError) as refused:
        section.model_validate(given)
    assert [error["msg"] for error in refused.value.errors()] == [f"Value error, {sentence}"]


def test_each_of_them_alone_is_allowed():
    for given in (sources(one=False, two=False) | {"sampler": "uniform"}, sources(one=False, two=True)):
        assert PromptDataConfig.model_validate(given)
    assert RolloutConfig.model_validate({"env": "calculator"}).agent is None
    assert RolloutConfig.model_validate({"agent": {"command": ["play"]}}).env == "single_turn"
    assert TrainerConfig.model_validate({"deepspeed": {"zero_optimization": {"overlap_comm": True}}}).deepspeed
