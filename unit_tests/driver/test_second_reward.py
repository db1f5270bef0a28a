"""A second reward of held-out samples, and the correlation of rewards with lengths."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.rollout_schema import RewardConfig
from core.errors import RunStopped, UserError
from core.types.messages import Message
from core.types.samples import Prompt, Sample
from driver.records.judge_metrics import check_second_failures, measure_second
from driver.records.rollout_metrics import measure_groups
from rewards.scored import RewardResult
from rollouts.second_reward import PREFIX, SecondReward
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.runs import evaluations_of, file_of, metrics_of

LONG = "def score(prompt, messages): return {'correct': float(len(messages[-1]['content']))}\n"
SHORT = """
from rewards import Failed

def score(prompt, messages):
    n = len(messages[-1]["content"])
    if n == 0:
        raise Failed("empty")
    return {"brief": -float(n), "kind": 1.0}
"""


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.verify)])
def test_an_evaluation_has_a_second_reward_that_trains_nothing(trained, sums, tmp_path, backend):
    """It is the opposite of the reward, weighted, and of held-out samples alone."""
    second = {"function": file_of(tmp_path / "short.py", SHORT), "weights": {"brief": 2.0}, "max_failed_fraction": 1}
    own = {"data.eval": str(sums / "eval.parquet"), "eval_samples": 2, "steps": 1, "backend": backend}
    own |= {"reward.function": file_of(tmp_path / "long.py", LONG), "eval_reward": second}
    folder = trained(own)
    before = evaluations_of(folder)[0]
    assert before["eval/second_reward/mean"] == 2 * before["eval/second_reward/brief"] < 0
    assert before["eval/second_reward/kind"] == 1.0 and before["eval/second_reward/corr"] == pytest.approx(-1.0)
    n = before["eval/second_reward/failed"]
    total = before["eval/reward/mean"] * 20
    assert before["eval/second_reward/brief"] * (20 - n) == pytest.approx(-total), "failed ones are empty"
    [line] = metrics_of(folder)
    assert not [name for name in line if "second" in name] and line["reward/length_corr"] > 0.9
    rows = (folder / "samples" / "step_00000.jsonl").read_text()
    assert "second" not in rows and json.loads(rows.splitlines()[0])["reward_parts"].keys() == {"correct"}


def test_what_a_second_reward_lacks_is_refused(refused, sums, tmp_path):
    second = {"function": "arithmetic"}
    refused({"eval_reward": second}, "eval_reward is of the samples of data.eval")
    refused({"eval_reward": {"function": "nowhere"}}, "there is no 'nowhere'")
    grouped = {"function": file_of(tmp_path / "all.py", "def score_group(prompt, conversations): ...")}
    refused({"eval_reward": grouped, "data.eval": str(sums / "eval.parquet")}, "has score_group, which compares")
    own = second | {"judge_budget": {"calls": 1}}
    refused({"eval_reward": own, "data.eval": str(sums / "eval.parquet")}, "reward.judge_budget counts the judges of")


def test_a_correlation_of_lengths_is_within_groups():
    """Rewards that differ between prompts alone, as lengths do, say nothing about what a longer reply earns."""
    groups = some_groups()
    by_group = [[replace(s, reward=float(100 * s.n_sampled)) for s in group] for group in groups]
    assert measure_groups(by_group)["reward/length_corr"] == pytest.approx(1.0)
    shifted = [[replace(s, reward=float(1000 * i - s.n_sampled)) for s in group] for i, group in enumerate(groups)]
    assert measure_groups(shifted)["reward/length_corr"] == pytest.approx(-1.0)
    equal = [[replace(s, reward=float(i)) for s in group] for i, group in enumerate(groups)]
    assert "reward/length_corr" not in measure_groups(equal)
    assert "reward/length_corr" not in measure_groups([[replace(s, reward=None, failure="no") for s in groups[0]]])


def test_a_second_reward_counts_what_it_failed():
    group = [replace(s, counts={PREFIX + "failed": 1.0}) for s in some_groups()[0]]
    assert measure_second([group]) == {"second_reward/failed": float(len(group))}
    assert measure_second(some_groups()) == {}


def test_a_second_reward_counts_its_calls_and_stops_a_run_it_fails():
    """A judge that both rewards ask has made two calls, one of them for the second."""
    sample = replace(some_groups()[0][0], counts={"judge/calls": 1.0})
    result, weights = RewardResult(reward_parts={"score": 3.0}, counts={"judge/calls": 1.0}), {"score": 1.0}

    def add(result: RewardResult) -> Sample:
        async def compute_reward(prompt: Prompt, messages: list[Message]) -> RewardResult:
            return result

        config = RewardConfig(function="judge", weights=weights)
        rewards = cast(Any, SimpleNamespace(compute_reward=compute_reward))
        return asyncio.run(SecondReward(config=config, rewards=rewards).add([], sample))

    own = {"second/score": 3.0, "second/mean": 3.0, "second/failed": 0.0}
    assert add(result).counts == own | {"judge/calls": 2.0}
    failed = add(RewardResult(failure="no server", counts={"judge/calls": 1.0}))
    assert failed.counts["judge/calls"] == 2.0
    check_second_failures([[failed, add(result)]], max_failed_fraction=0.5)
    with pytest.raises(RunStopped, match=r"failed 1 of 2 samples, .*eval_reward.max_failed_fraction=0.4; .* no server"):
        check_second_failures([[failed, add(result)]], max_failed_fraction=0.4)
    for name in ("mean", "failed", "corr"):
        with pytest.raises(UserError, match=f"eval_reward returns a part '{name}'"):
            add(RewardResult(reward_parts={"score": 3.0, name: 1.0}))
