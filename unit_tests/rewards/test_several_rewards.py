"""Several reward functions: their parts keep their owner's name, and each source has the functions that it names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.rollout_schema import RewardConfig
from core.errors import UserError
from core.types.samples import Prompt
from rewards.calls import RewardCalls
from rewards.pool import Worker
from rewards.weights import find_weights, plan_rewards, weigh_parts

SHORT = "def score(prompt, messages, *, most=4):\n    return {'short': float(len(messages[-1]['content']) <= most)}\n"
TWO = "def score(prompt, messages):\n    return {'polite': 0.5, 'long': float(len(messages[-1]['content']))}\n"


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Paths of reward files, by the name of their function."""
    for name, text in (("short", SHORT), ("two", TWO)):
        (tmp_path / f"{name}.py").write_text(text)
    return {name: str(tmp_path / f"{name}.py") for name in ("short", "two")}


def reward_of(config: RewardConfig, reply: str, *, source: str = "a") -> tuple[dict[str, float], float]:
    prompt = Prompt(id="0", messages=[], answer="12", source=source)
    [result] = RewardCalls(plan_rewards(config)).score(prompt, [[{"role": "assistant", "content": reply}]])
    parts = result.reward_parts
    return parts, weigh_parts(find_weights(config, parts, source), parts)


def test_the_reward_is_the_sum_over_functions_and_parts(files):
    config = RewardConfig(
        functions={"gsm8k": 2.0, files["short"]: 0.25, files["two"]: {"polite": 1.0, "long": -0.1}},
        settings={files["short"]: {"most": 3}},
    )
    parts, reward = reward_of(config, "12")
    assert parts == {
        "gsm8k.correct": 1.0,
        "gsm8k.format": 0.0,
        "short.short": 1.0,
        "two.polite": 0.5,
        "two.long": 2.0,
    }
    assert reward == pytest.approx(2.0 * 1 + 0.25 * 1 + 0.5 - 0.2)
    assert reward_of(config, "1212")[1] == pytest.approx(0.0 + 0.0 + 0.5 - 0.4), "settings reach their function"


def test_a_source_has_the_functions_that_it_names(files):
    config = RewardConfig(function="arithmetic", by_source={"b": {files["short"]: 3.0}})
    assert reward_of(config, "12") == ({"correct": 1.0}, 1.0)
    assert reward_of(config, "12", source="b") == ({"short.short": 1.0}, 3.0)
    several = RewardConfig(functions={"arithmetic": 1.0}, by_source={"b": {files["short"]: 3.0, "arithmetic": 0.5}})
    assert reward_of(several, "12")[1] == 1.0
    assert reward_of(several, "12", source="b") == ({"short.short": 1.0, "arithmetic.correct": 1.0}, 3.5)


def test_plain_functions_of_a_row_have_the_deadline_times_their_number(files):
    """Else two that are slow, and each within it, would fail the sample together."""
    config = RewardConfig(functions={"arithmetic": 1.0, files["short"]: 1.0}, by_source={"b": {"arithmetic": 1.0}})
    worker, deadlines = cast(Any, Worker(plan_rewards(config))), []
    worker._process, worker._ready = SimpleNamespace(), True
    worker.socket = SimpleNamespace(send=list, recv=list, poll=lambda seconds: deadlines.append(seconds) or True)
    prompts = [Prompt(id="0", messages=[], source=source) for source in ("a", "b")]
    worker.compute_rewards([(prompt, [[]]) for prompt in prompts], 20.0)
    assert deadlines == [40.0, 20.0]


def test_a_single_weight_of_several_parts_is_refused(files):
    with pytest.raises(UserError, match=r"the reward two has one weight and returns long, polite"):
        reward_of(RewardConfig(functions={files["two"]: 1.0}), "12")
    with pytest.raises(UserError, match=r"the weights of the reward two name 'polit'"):
        reward_of(RewardConfig(functions={files["two"]: {"polit": 1.0}}), "12")


def test_a_config_is_the_same_after_it_was_written(files):
    config = RewardConfig(functions={files["two"]: {"polite": 1}}, by_source={"b": {"gsm8k": 1}})
    assert RewardConfig.model_validate(config.model_dump()) == config
    assert RewardConfig(function="gsm8k").weights == {"correct": 1.0}


REFUSED = {
    "both": ({"reward": {"function": "gsm8k", "functions": {"gsm8k": 1}}}, ["set function or functions"]),
    "neither": ({"reward": {"workers": 1}}, ["reward: function is missing"]),
    "no number": ({"reward": {"functions": {"gsm8k": "much"}}}, ["reward.functions.gsm8k", "'much'"]),
    "a switch": ({"reward": {"functions": {"gsm8k": True}}}, ["reward.functions.gsm8k", "True"]),
    "no part": ({"reward": {"functions": {"gsm8k": {}}}}, ["reward.functions.gsm8k"]),
    "no such function": ({"reward": {"functions": {"gsm9k": 1}}}, ["reward.functions", "did you mean 'gsm8k'"]),
    "one name twice": ({"reward": {"functions": {"a/x.py": 1, "b/x.py": 1}}}, ["called x"]),
    "settings of nobody": ({"reward": {"functions": {"gsm8k": 1}, "settings": {"math": {}}}}, ["settings names math"]),
    "settings of one": ({"reward": {"functions": {"gsm8k": 1}, "settings": {"gsm8k": 1}}}, ["under its name"]),
    "no such source": ({"reward.by_source": {"hard": {"gsm8k": 1}}}, ["names hard", "there are train"]),
    "a source left out": (
        {"reward": {"by_source": {"train": {"gsm8k": 1}}}, "data.eval": "x.parquet"},
        ["no functions for the source x"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_reward_is_refused(name, refused):
    changes, words = REFUSED[name]
    refused(changes, *words)


def test_a_run_logs_every_part_of_every_function(trained, files, sums):
    one, other = ({"path": str(sums / "train.parquet"), "name": name} for name in ("easy", "hard"))
    reward = {"functions": {"gsm8k": 1.0, files["short"]: 0.5}, "by_source": {"hard": {files["two"]: {"long": 0.1}}}}
    changes = {"reward": reward, "data.train": [one, other], "steps": 1}
    folder = trained(changes)
    [metrics] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parts = {name for name in metrics if name.startswith("reward/") and "." in name}
    assert parts == {"reward/gsm8k.correct", "reward/gsm8k.format", "reward/short.short", "reward/two.polite"} | {
        "reward/two.long"
    }
    rows = [json.loads(line) for line in (Path(folder) / "samples" / "step_00000.jsonl").read_text().splitlines()]
    for row in rows:
        parts = row["reward_parts"]
        long = parts.get("two.long")
        wanted = 0.1 * long if long is not None else parts["gsm8k.correct"] + 0.5 * parts["short.short"]
        assert row["reward"] == pytest.approx(wanted)
