"""stop_when: the run ends when its metric is where it should be, says so, and saves its model."""

from __future__ import annotations

import json

import pytest

import main_sl
from configs.schema import RLConfig, SLConfig
from configs.trainer_schema import StopWhenConfig
from core.errors import UserError
from driver.early_stop import EarlyStop
from driver.load_recipe import load_recipe
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import ROOT, file_of


def steps_until_the_end(values: list[float | None], **when) -> int | None:
    """Number of steps after which the run ends."""
    stop = EarlyStop(StopWhenConfig(metric="eval/loss", **when))
    for n, value in enumerate(values, start=1):
        stop.note_step({"step": 0.0} if value is None else {"eval/loss": value})
        if stop.reason:
            return n
    return None


def test_the_values_must_be_so_in_a_row():
    assert steps_until_the_end([1, 3, 3, 1, 3, 3, 3], above=2, for_steps=3) == 7
    assert steps_until_the_end([3, None, 3, None, 3], above=2, for_steps=3) == 5, (
        "a step without the metric is no value"
    )
    assert steps_until_the_end([2, 2, 2], above=2) is None, "above is not equal"
    assert steps_until_the_end([2, 1.5], below=2) == 2


def test_a_metric_of_the_users_that_step_0_lacks_is_refused():
    stop = EarlyStop(StopWhenConfig(metric="train/mien", above=1))
    with pytest.raises(UserError, match=r"stop_when.metric=train/mien is not logged; a step logs step, train/mine"):
        stop.note_step({"step": 0.0, "train/mine": 1.0})
    stop = EarlyStop(StopWhenConfig(metric="train/mine", above=1))
    stop.note_step({"step": 0.0, "train/updates_skipped": 1.0})


@pytest.mark.parametrize("name", ["reward/length_corr", "rollout/tool_errors", "train/mine"])
def test_a_metric_that_some_steps_lack_does_not_end_the_run(name):
    stop = EarlyStop(StopWhenConfig(metric=name, above=1, for_steps=2))
    lines = [{"step": 1.0}, {"step": 2.0, name: 2.0}, {"step": 3.0}]
    if name != "train/mine":  # a declared metric may be absent in step 0, too
        lines.insert(0, {"step": 0.0})
    for line in lines:
        stop.note_step(line)
    assert not stop.reason and stop.describe_unlogged() is None
    stop.note_step({"step": 4.0, name: 2.0})
    assert stop.reason


def test_a_run_says_that_its_metric_never_came():
    stop = EarlyStop(StopWhenConfig(metric="reward/polite", above=1))
    stop.note_step({"step": 0.0})
    assert stop.describe_unlogged() == (
        "stop_when.metric=reward/polite: no step of this run has logged it, and so it had no effect"
    )


REFUSED = {
    "no bound": ({"metric": "train/loss"}, "set above or below"),
    "two bounds": ({"metric": "train/loss", "above": 1, "below": 2}, "set above or below, and not both"),
    "no evaluation": ({"metric": "eval/reward/mean", "above": 1}, "set eval_every"),
    "a misspelt metric": ({"metric": "reward/maen", "above": 1}, "no such metric (did you mean 'reward/mean'?)"),
    "a misspelt part": ({"metric": "reward/corect", "above": 1}, "no such metric (did you mean 'reward/correct'?)"),
    "a metric of the other program": ({"metric": "eval/loss", "above": 1}, "set eval_every"),
    "a metric of another algorithm": (
        {"metric": "train/clip_frac", "above": 1},
        "(did you mean 'train/clip_frac_low'?)",
    ),
    "a metric of nobody": ({"metric": "accuracy", "above": 1}, "no such metric; docs/reference/metrics.md lists"),
}


def test_what_a_run_may_log_is_not_refused_at_the_start(recipe):
    """Parts of rewards that have no weight, what an environment counts, and what a loss of the user's may log."""
    names = ["reward/polite", "reward/arithmetic.correct", "rollout/counts/anything", "time/step_s", "sync/bytes"]
    path = recipe()
    for name in names:
        load_recipe(RLConfig, path, [f"stop_when={{metric: {name}, above: 1}}"])
    file = recipe({"alg": {"file": str(ROOT / "algs" / "sft.py")}}, kind="sl")
    assert load_recipe(SLConfig, file, ["stop_when={metric: train/mine, above: 1}"])


@pytest.mark.parametrize("name", REFUSED)
def test_a_condition_that_cannot_be_is_refused(name, refused):
    when, words = REFUSED[name]
    refused({"stop_when": when}, "stop_when", words)


def test_a_run_ends_early_with_its_model_and_a_checkpoint(trained, sums):
    """Weights are synced every third step; those of the model at the end are measured all the same."""
    changes = {
        "steps": 9,
        "stop_when": {"metric": "train/lr", "above": 0, "for_steps": 4},
        "checkpoint.every": 5,
        "data.eval": str(sums / "eval.parquet"),
        "weight_sync.every": 3,
        "max_staleness": 2,
    }
    folder = trained(changes)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == "done early, stop_when: train/lr is 0.001, above 0, 4 times in a row"
    assert summary["steps_done"] == 4 and "after" in summary
    assert json.loads((folder / "model" / "feynrl.json").read_text())["steps"] == 4
    assert (folder / "checkpoints" / "last").resolve().name.endswith("4")


TRACKER = """
from pathlib import Path
from driver.records.trackers.base import Tracker
class Mine(Tracker):
    def finish(self, outcome):
        Path(__file__).with_suffix(".txt").write_text(f"{outcome.status}, {outcome.exit_reason}")
"""


def test_a_supervised_run_ends_early_too(recipe, tmp_path):
    mine = file_of(tmp_path / "mine.py", TRACKER)
    early = {"steps": 5, "stop_when": {"metric": "train/loss", "below": 100}, "trackers": ["jsonl", mine]}
    path = recipe(early, kind="sl")
    code, err = run_here(main_sl, "--config", path)
    assert code == 0, err
    [folder] = (tmp_path / "runs").iterdir()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1 and (folder / "model").is_dir()
    reason = json.loads((folder / "summary.json").read_text())["exit_reason"]
    assert reason.startswith("done early, stop_when: train/loss")
    assert (tmp_path / "mine.txt").read_text() == f"finished, {reason}"
