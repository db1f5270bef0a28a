"""Metrics of groups, judges and a trainer's step, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.schema import RLConfig, SLConfig
from core.errors import RunStopped, UserError
from core.metrics import VALUE_MOMENTS
from core.types.samples import Prompt, Sample, make_sample
from driver.load_recipe import load_recipe
from driver.records.advice import Settings, make_settings
from driver.records.episode_metrics import measure_counts
from driver.records.judge_metrics import check_second_failures, measure_judges, measure_second
from driver.records.rollout_metrics import (
    check_failures,
    measure_drawn,
    measure_groups,
    measure_passes,
    measure_staleness,
    name_train_metrics,
)
from driver.records.speed import measure_speed
from rollouts.scheduling.buffer import FinishedGroup
from rollouts.second_reward import AUTHOR, PREFIX
from unit_tests.helpers.examples import sample_of, some_groups
from unit_tests.helpers.sentences import tell

Recipe = Callable[..., str]


def rewarded(reward: float | None, *, tokens: int = 2, source: str = "", **more: Any) -> Sample:
    n = 1 + tokens
    return make_sample(
        prompt=Prompt(id="p", messages=[], source=source),
        token_ids=[1] * n,
        action_mask=[False] + [True] * tokens,
        rollout_logp=[0.0] * n,
        versions=[0] * n,
        reward=reward,
        failure="" if reward is not None else "timeout",
        **more,
    )


MIXED = [
    [
        rewarded(1.0, reward_parts={"right": 1.0, "short": 0.5}, source="a"),
        rewarded(3.0, tokens=6, stop="length", source="a"),
    ],
    [rewarded(2.0, reward_parts={"right": 0.0}, source="b"), rewarded(None, tokens=4)],
]


def test_what_is_told_of_groups_by_hand():
    """Rewards 1, 3, 2 and none; the second group has one reward only, so it cannot compare."""
    assert measure_groups(MIXED, ["a", "b", "c"]) == {
        "rollout/samples": 4.0,
        "rollout/branches_per_episode": 1.0,
        "rollout/trained_fraction": 10 / 14,
        "rollout/failed": 1.0,
        "rollout/tokens": 14.0,
        "rollout/tokens_mean": 3.5,
        "rollout/tokens_max": 6.0,
        "rollout/truncated_fraction": 0.25,
        "rollout/zero_std_groups": 0.5,
        "reward/mean": 2.0,
        "reward/std": pytest.approx((2 / 3) ** 0.5),
        "reward/length_corr": pytest.approx(1.0),
        "reward/right": 0.5,
        "reward/short": 0.5,
        "reward/a": 2.0,
        "reward/b": 2.0,
    }
    with pytest.raises(RunStopped, match="reward/right is a part of the reward and a source"):
        measure_groups(MIXED, ["right"])


@pytest.mark.parametrize("name", ["mean", "others"])
def test_a_part_does_not_replace_a_metric_of_its_name(name):
    group = [[rewarded(1.0, reward_parts={name: 0.5})]]
    with pytest.raises(UserError, match=f"a part '{name}', as another metric is called: rename the part"):
        measure_groups(group)


def test_what_was_drawn_for_nothing_is_told():
    """Count 14 + 2 tokens, of which a failed sample of 4 and a rejected group of 2 are wasted."""
    rejected = FinishedGroup(ticket=2, group=[rewarded(5.0)], accepted=False, seconds=6.0)
    drawn = [FinishedGroup(ticket=i, group=g, accepted=True, seconds=3.0) for i, g in enumerate(MIXED)]
    assert measure_drawn([*drawn, rejected]) == {
        "rollout/groups_drawn": 3.0,
        "rollout/wasted_fraction": 6 / 16,
        "time/groups/mean_s": 4.0,
        "time/groups/std_s": pytest.approx(2**0.5),
        "reward/mean_drawn": 11 / 4,
    }


def test_as_many_failures_as_allowed_are_allowed():
    check_failures(MIXED, max_failed_fraction=0.25)
    with pytest.raises(RunStopped, match=r"1 of 4 samples failed, more than .*=0.2; the first: timeout"):
        check_failures(MIXED, max_failed_fraction=0.2)


def test_explained_variance_is_that_of_the_definition():
    """1 - Var(return - prediction) / Var(return), from averages."""
    returns, predictions = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([0.5, 1.0, 1.0, 4.0])
    gap = returns - predictions
    means = {"value/return": returns, "value/return_sq": returns**2, "value/error": gap, "value/error_sq": gap**2}
    named = name_train_metrics({name: float(values.mean()) for name, values in means.items()})
    want = 1 - gap.var(unbiased=False) / returns.var(unbiased=False)
    assert named["train/value/explained_variance"] == pytest.approx(float(want))
    assert not named.keys() & set(VALUE_MOMENTS)
    constant = {"value/return": 1.0, "value/return_sq": 1.0, "value/error": 0.0, "value/error_sq": 0.0}
    assert "train/value/explained_variance" not in name_train_metrics(constant), "it is not defined there"


def test_judges_are_measured_over_all_samples_with_the_cost_of_failed_ones():
    """Seconds 1, 2 and 9 of calls, one of them of a failed sample; the cached verdict took none."""
    notes = [[{"by": "j", "text": "", "seconds": s, "cached": not s} for s in of] for of in ([1.0, 2.0], [9.0], [0.0])]
    counts = [
        {"calls": 2, "unreadable": 1, "votes": 2, "agreed": 1, "tokens_in": 30, "tokens_out": 4},
        {"calls": 1, "unanswered": 1, "retries": 3, "tokens_in": 20, "tokens_out": 2},
        {"cached": 1, "anchors": 4, "anchor_errors": 1},
    ]
    sample = some_groups()[0][0]
    samples = [
        replace(sample, notes=n, counts={f"judge/{k}": float(v) for k, v in c.items()}, failure=f)
        for n, c, f in zip(notes, counts, ("", "unreadable", ""), strict=True)
    ]
    measured = {
        **{"judge/calls": 3, "judge/retries": 3, "judge/unanswered": 1, "judge/cached_fraction": 0.25},
        **{"judge/tokens_in": 50, "judge/tokens_out": 6, "judge/unreadable_fraction": 1 / 3},
        **{"judge/anchor_error": 0.25, "judge/agreement": 0.5},
        # 0.9 of the way from the second to the third
        **{"judge/seconds_p50": 2, "judge/seconds_p95": 2 + 0.9 * 7},
    }
    assert measure_judges(samples) == pytest.approx(measured)
    unknown = replace(sample, counts={"judge/calls": 1.0, "judge/without_usage": 1.0})
    of_tokens = {"judge/tokens_in", "judge/tokens_out"}
    assert measure_judges([*samples, unknown]).keys() == measured.keys() - of_tokens
    assert measure_judges([sample]) == {}


def sampled(*versions: int, **more: Any) -> Sample:
    """After a prompt of one token."""
    n = len(versions)
    return sample_of([1] * (n + 1), [False] + [True] * n, versions=[-1, *versions], **more)


def test_tokens_are_counted_by_the_steps_since_their_version():
    given = sample_of([1, 2], [False, True], rollout_logp=[0.0] * 2, versions=[-1] * 2, origin="demonstration")
    groups = [[sampled(3, 4), given], [sampled(4, 4), sampled(4)]]
    mean, most = {"rollout/staleness_mean": 0.2}, {"rollout/staleness_max": 1.0}
    assert measure_staleness(groups, step=4, max_staleness=1) == mean | most | {
        **{"rollout/mixed_versions_fraction": 1 / 3, "rollout/staleness/0": 0.8, "rollout/staleness/1": 0.2}
    }
    fresh = [[sampled(4, 4)]]
    assert measure_staleness(fresh, step=4, max_staleness=0) == dict.fromkeys([*mean, *most], 0.0)
    assert measure_staleness([[sampled()]], step=4, max_staleness=1) == {}
    for step, max_staleness, steps in ((4, 0, 1), (3, 1, -1)):
        assert tell(lambda n=step, m=max_staleness: measure_staleness(groups, step=n, max_staleness=m), RunStopped) == (
            f"step {step} was to train on a token that is {steps} steps old, with max_staleness={max_staleness}: its "
            "engine did not sample from the version that it named, or a group was started too early"
        )


def test_a_single_token_that_is_trained_on_is_all_of_them():
    measured = measure_groups([[sampled(0, reward=1.0)]])
    numbers = {"trained_fraction": 1.0, "tokens": 1.0, "tokens_mean": 1.0, "tokens_max": 1.0, "samples": 1.0}
    numbers |= {"failed": 0.0, "zero_std_groups": 1.0, "branches_per_episode": 1.0, "truncated_fraction": 0.0}
    assert measured == {f"rollout/{name}": value for name, value in numbers.items()} | {
        **{"reward/mean": 1.0, "reward/std": 0.0}
    }
    failed = measure_groups([[sampled(failure="it broke")]])
    assert (failed["rollout/trained_fraction"], failed["rollout/failed"]) == (0.0, 1.0)


def test_rules_of_advice_read_the_sizes_of_the_recipe(recipe: Recipe):
    changes = {"group_size": 6, "updates_per_step": 2, "rollout.max_new_tokens": 9}
    rl = load_recipe(RLConfig, recipe(changes), []).cfg
    assert make_settings(rl) == Settings(group_size=6, updates_per_step=2, max_new_tokens=9)
    rows = load_recipe(SLConfig, recipe(kind="sl"), []).cfg
    assert make_settings(rows) == Settings(group_size=1, updates_per_step=1, max_new_tokens=0)


def test_speed_counts_the_devices_of_trainers_and_engines(recipe: Recipe):
    line = {"time/step_s": 4.0, "time/train_s": 2.0, "tflops": 30.0, "rollout/engines": 3.0}
    for kind, changes, ranks, devices in (
        ("rl", {}, 1, 1),
        ("rl", {"backend": "ray", "trainer.ranks": 2}, 2, 5),
        ("rl", {"backend": "ray", "trainer.ranks": 2, "rollout.num_engines": 2, "placement": "colocate"}, 2, 3),
        ("sl", {"backend": "ray", "trainer.ranks": 4}, 4, 4),
    ):
        cfg = load_recipe(RLConfig if kind == "rl" else SLConfig, recipe(changes, kind=kind), []).cfg
        assert measure_speed(cfg, line, 1200.0, peak_tflops=10.0) == {
            **{"tokens_per_s": 300.0, "tokens_per_s_per_device": 300.0 / devices, "mfu": 30.0 / (2.0 * 10.0 * ranks)}
        }


def test_pass_at_k_is_the_mean_over_groups_and_sides():
    """Of four samples two are right, and of four none is; a side with two samples lowers k to 2."""
    right, wrong = rewarded(1.0), rewarded(0.5)
    both = [[right, right, wrong, rewarded(None)], [wrong] * 4]
    assert measure_passes(both, pass_reward=1.0) == pytest.approx(
        # the probability that one of 1, 2 and 4 of the first four is right: 1/2, 1 - 1/6, 1
        {"pass@1": 0.25, "pass@2": 5 / 12, "pass@4": 0.5}
    )
    assert measure_passes(both, pass_reward=0.5) == pytest.approx({"pass@1": 7 / 8, "pass@2": 1.0, "pass@4": 1.0})
    sides = [[right, wrong, replace(right, player=1), replace(right, player=1)]]
    assert measure_passes(sides, pass_reward=1.0) == pytest.approx({"pass@1": 0.75, "pass@2": 1.0})
    assert measure_passes([[right]], pass_reward=1.0) == {}


def test_metrics_of_a_trainer_get_names_and_what_follows_from_squares():
    named = name_train_metrics({"loss": 0.5, "mismatch/ratio": 0.5, "mismatch/ratio_sq": 1.0, "compare_losses/x": 1.0})
    assert named == {"train/loss": 0.5, "train/mismatch/ratio": 0.5, "train/mismatch/ess": 0.25}


def test_what_episodes_count_is_averaged_added_up_or_divided():
    sample = rewarded(1.0)
    counts = [
        {"turns": 2.0, "tool_calls": 3.0, "tool_errors": 1.0, "tool_errors/raised": 1.0, "mine": 5.0},
        {"turns": 4.0, "tool_calls": 1.0, "tool_seconds": 0.5, "agent/timeouts": 1.0, "drafts/drafted": 8.0},
        {"turns": 3.0, "drafts/accepted": 2.0, "tokens/sampled": 10.0, "tokens/kept": 4.0, "game/won": 1.0},
        {"assistant/repeated": 3.0, "assistant/rewritten": 1.0, "agent/slow": 2.0, "judge/calls": 9.0},
        {},
    ]
    found = measure_counts([replace(sample, counts=one) for one in counts])
    errors = {name: found.pop(name) for name in [*found] if name.startswith("rollout/tool_errors/")}
    assert errors.pop("rollout/tool_errors/raised") == 0.25 and not any(errors.values())
    assert found == {
        **{"rollout/turns_mean": 3.0, "rollout/tool_calls_mean": 2.0, "rollout/tool_seconds_mean": 0.5},
        **{"rollout/counts/mine": 5.0, "rollout/tool_errors": 0.25, "rollout/won": 1.0},
        **{"rollout/timeouts": 1.0, "rollout/failed/slow": 2.0, "rollout/drafted": 8.0},
        **{"rollout/rewritten_fraction": 0.25, "rollout/kept_fraction": 0.4, "rollout/accepted": 0.25},
    }
    assert measure_counts([sample]) == {}


def test_a_second_reward_is_averaged_over_the_samples_that_it_scored():
    def scored(reward: float | None, mean: float | None) -> Sample:
        counts = {PREFIX + "failed": float(mean is None)}
        counts |= {} if mean is None else {PREFIX + "mean": mean, PREFIX + "kind": 2 * mean}
        return rewarded(reward, counts=counts, notes=[{"by": "judge", "text": "?"}, {"by": AUTHOR, "text": "no luck"}])

    groups = [[scored(1.0, 4.0), scored(2.0, 2.0)], [scored(3.0, 0.0), scored(None, 2.0), scored(1.0, None)]]
    assert measure_second(groups) == {
        **{"second_reward/failed": 1.0, "second_reward/mean": 2.0, "second_reward/kind": 4.0},
        "second_reward/corr": pytest.approx(-1.0),
    }
    assert "second_reward/corr" not in measure_second([[scored(1.0, 4.0), scored(None, 2.0)]])
    check_second_failures(groups, max_failed_fraction=0.2)
    assert tell(lambda: check_second_failures(groups, max_failed_fraction=0.1), RunStopped) == (
        "eval_reward failed 1 of 5 samples, more than eval_reward.max_failed_fraction=0.1; the first: no luck"
    )
