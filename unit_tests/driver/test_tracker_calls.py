"""What trackers ask of their packages, call by call, and what a thread that feeds one says at the end."""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from configs.tracking_schema import TrackingConfig
from core.errors import RunStopped
from core.timing.deadlines import TRACKER_FINISH_TIMEOUT_S
from driver.records.trackers.base import Outcome, TrackedRun, Tracker
from driver.records.trackers.feeder import Feeder
from driver.records.trackers.jsonl import Jsonl
from driver.records.trackers.mlflow import MOST_TABLES, Mlflow, choose_experiment, make_name
from driver.records.trackers.wandb import Wandb, choose_mode, choose_project
from unit_tests.helpers.processes import wait_until
from unit_tests.helpers.sentences import tell

DONE, STOPPED = Outcome(exit_reason="done", model="/a/model"), Outcome(exit_reason="stopped: no disk", model=None)


class Noting:
    """Part of another package that notes each call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **keys: self.calls.append((name, *given, *keys.items()))


def a_feeder(folder: Path, tracker: Tracker) -> Feeder:
    run = TrackedRun(
        **{"name": "a", "folder": folder, "config": {}, "facts": {}, "settings": TrackingConfig()},
        **{"first_step": 0, "previous": None},
    )
    return Feeder("slow", tracker, run, on_start=lambda *_: None)


def test_a_tracker_that_takes_nothing_may_be_a_thousand_lines_behind(tmp_path):
    feeder = a_feeder(tmp_path, Tracker())
    for step in range(1000):
        feeder.metrics(step, {})
    assert feeder.read_news() is None
    feeder.metrics(1000, {})
    said = "slow is slower than the run: some lines are not sent to it"
    assert [feeder.read_news(), feeder.read_news(), feeder.offered] == [said, None, 1001]


class Hanging(Tracker):
    """Waits in its first line until it is released, and takes a moment to give up."""

    farewell = "it has everything"

    def __init__(self) -> None:
        self.release, self.is_abandoned = threading.Event(), False

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.release.wait()

    def abandon(self) -> None:
        self.release.wait(0.05)
        self.is_abandoned = True


def test_a_tracker_that_hangs_at_the_end_is_given_up_without_its_farewell(tmp_path):
    tracker = Hanging()
    feeder = a_feeder(tmp_path, tracker)
    feeder.start()
    try:
        feeder.metrics(0, {})
        feeder.begin_finish(DONE, time.monotonic())
        assert feeder.end_finish(time.monotonic()) == [
            f"slow did not take everything within {TRACKER_FINISH_TIMEOUT_S:g} s of the run's end",
            "slow: 1 of 1 lines were not delivered",
        ]
        assert tracker.is_abandoned and feeder.dropped
    finally:
        tracker.release.set()


def test_a_tracker_that_took_everything_says_its_farewell(tmp_path):
    tracker = Hanging()
    tracker.release.set()
    feeder = a_feeder(tmp_path, tracker)
    feeder.start()
    feeder.metrics(0, {})
    deadline = time.monotonic() + 60
    feeder.begin_finish(DONE, deadline)
    assert feeder.end_finish(deadline) == ["it has everything"] and not tracker.is_abandoned


class Ending(Tracker):
    """Its server is away for the first line, and when the run ends."""

    is_away = True

    def metrics(self, step: int, values: dict[str, float]) -> None:
        if self.is_away:
            self.is_away = False
            raise ConnectionError("no answer")

    def finish(self, outcome: Outcome) -> None:
        raise ConnectionError("no end")


def test_a_failure_at_the_end_is_told_after_one_that_cost_nothing(tmp_path):
    feeder = a_feeder(tmp_path, Ending())
    feeder.start()
    feeder.metrics(0, {})
    wait_until(lambda: feeder.failure)
    first = "slow failed, and gets its lines again with those of the next step: ConnectionError: no answer"
    assert feeder.read_news() == first
    feeder.metrics(1, {})
    deadline = time.monotonic() + 60
    feeder.begin_finish(DONE, deadline)
    last = "slow failed and gets nothing more, the run goes on without it: ConnectionError: no end"
    assert feeder.end_finish(deadline) == [last] and feeder.delivered == 2


def test_a_log_is_open_until_its_run_ends_and_no_longer(tmp_path):
    def is_open() -> bool:
        return str(tmp_path / "metrics.jsonl") in [file.path for file in psutil.Process().open_files()]

    log = Jsonl()
    log.start(a_feeder(tmp_path, log).run)
    log.metrics(0, {"x": 1.0})
    assert is_open()
    log.finish(DONE)
    assert not is_open(), "a notebook makes many runs in one process"


class Full:
    """File on a disk that is full."""

    def tell(self) -> int:
        return 0

    def write(self, lines: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, size: int) -> None:
        self.size = size


def test_a_log_that_fits_no_disk_says_how_much_it_needs(tmp_path):
    log, file = Jsonl(), Full()
    log.path, log.file = tmp_path / "metrics.jsonl", file  # type: ignore[assignment]
    said = tell(lambda: log.metrics(0, {f"x{i}": 1.0 for i in range(100_000)}), RunStopped)
    assert said.startswith(f"{log.path} cannot be written: the disk is full: about 1.42 MiB are needed, and there was")
    assert said.endswith(" MiB; the steps before are logged") and file.size == 0


# MLflow ------------------------------------------------------------------------------------------------------


def test_mlflow_is_given_samples_as_tables_of_which_it_lists_the_newest():
    tracker, client = Mlflow(), Noting()
    tracker.client, tracker.run_id, tracker.tables = client, "r", deque(maxlen=MOST_TABLES)  # type: ignore[assignment]
    tracker.samples(3, [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}])
    [text, tag] = client.calls
    assert text == (
        *("log_text", "r", '{"columns": ["a", "b"], "data": [[1, "x"], [2, "y"]]}', "samples/step_00003.json"),
    )
    assert tag == ("set_tag", "r", "mlflow.loggedArtifacts", '[{"path": "samples/step_00003.json", "type": "table"}]')
    for step in range(4, 104):
        tracker.samples(step, [{"a": 1}])
    listed = json.loads(client.calls[-1][3])
    assert [table["path"] for table in listed] == [f"samples/step_{step:05d}.json" for step in range(4, 104)]


class New(Noting):
    """Server with a run that nothing is known of."""

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params={}, tags={}))


def test_mlflow_is_given_no_longer_values_than_it_takes(tmp_path, monkeypatch):
    """6000 characters of a parameter and 8000 of a tag. It gets most of them, and the end."""
    pairs: Any = SimpleNamespace(Param=lambda *pair: pair, RunTag=lambda *pair: pair)
    monkeypatch.setitem(sys.modules, "mlflow.entities", pairs)
    tracker, client, long = Mlflow(), New(), "é" * 9000 + "!"
    tracker.client, tracker.run_id = client, "r"  # type: ignore[assignment]
    run = TrackedRun(
        name="a",
        folder=tmp_path,
        config={"data.system": long, "steps": 2},
        facts={"git": long},
        settings=TrackingConfig(),
        first_step=0,
        previous=None,
    )
    tracker._describe(run)
    (_, _, (_, params)), (_, _, (_, tags)), recipe = client.calls
    assert recipe == ("log_artifact", "r", str(tmp_path / "config.yaml"), "recipe/a")
    params, tags = dict(params), dict(tags)
    assert params["steps"] == "2" and tags["run_folder"] == str(tmp_path)
    for value, most in ((params["data.system"], 6000), (tags["git"], 8000)):
        assert most - 100 < len(value) <= most and value.startswith("é") and value.endswith("!")


class Refused(Exception):
    """In place of MlflowException."""


class Shared(Noting):
    """Server that has no experiment at first, and makes none: another run has made one meanwhile, or it refuses."""

    def __init__(self, *found: Any) -> None:
        super().__init__()
        self.found = [None, *found]

    def get_experiment_by_name(self, name: str) -> Any:
        return self.found.pop(0)

    def create_experiment(self, name: str, artifacts: str | None) -> str:
        raise Refused(name)

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{run_name} of {experiment_id}"))


def test_a_run_joins_an_experiment_that_another_makes_meanwhile(monkeypatch):
    errors: Any = SimpleNamespace(MlflowException=Refused)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", errors)
    tracker: Any = Mlflow()
    tracker.client = Shared(SimpleNamespace(experiment_id="7"))
    assert tracker._begin_run("sums", "a", None) == "a of 7"
    tracker.client = Shared(None)
    with pytest.raises(Refused, match="sums"):
        tracker._begin_run("sums", "a", None)


class Asked(Noting):
    """Server that has a run in some stage, or answers with an error's code."""

    def __init__(self, stage: str = "", code: str = "") -> None:
        super().__init__()
        self.stage, self.code = stage, code

    def get_run(self, run_id: str) -> Any:
        if self.code:
            refused: Any = Refused(run_id)
            refused.error_code = self.code
            raise refused
        return SimpleNamespace(info=SimpleNamespace(lifecycle_stage=self.stage))


def test_a_run_that_the_server_no_longer_has_is_not_continued(monkeypatch):
    errors: Any = SimpleNamespace(MlflowException=Refused)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", errors)
    tracker: Any = Mlflow()
    for client, continued in (
        (Asked("active"), "r"),
        (Asked("deleted"), None),
        (Asked(code="RESOURCE_DOES_NOT_EXIST"), None),
    ):
        tracker.client = client
        assert tracker._continue_run("r") == continued
    tracker.client = Asked(code="INTERNAL_ERROR")
    with pytest.raises(Refused, match=r"^r$"):
        tracker._continue_run("r")


@pytest.mark.parametrize(
    ("outcome", "calls"),
    [
        (DONE, [("set_tag", "r", "exit_reason", "done"), ("set_tag", "r", "model", "/a/model"), "FINISHED"]),
        (STOPPED, [("set_tag", "r", "exit_reason", "stopped: no disk"), "FAILED"]),
        (Outcome(exit_reason="interrupted", model=None), [("set_tag", "r", "exit_reason", "interrupted"), "KILLED"]),
    ],
)
def test_mlflow_is_told_how_the_run_ended(outcome, calls):
    tracker, client = Mlflow(), Noting()
    tracker.client, tracker.run_id = client, "r"  # type: ignore[assignment]
    tracker.finish(outcome)
    assert client.calls == [*calls[:-1], ("set_terminated", "r", calls[-1])]


def test_experiment_and_project_are_of_the_recipe_or_the_environment(monkeypatch):
    for variable in ("MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    unset = TrackingConfig()
    chosen = TrackingConfig(mlflow_experiment="mine", wandb_project="ours", wandb_mode="offline")
    assert [choose_experiment(unset), choose_project(unset), choose_mode(unset)] == ["feynrl", "feynrl", "online"]
    for variable in ("MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.setenv(variable, "theirs")
    assert [choose_experiment(unset), choose_project(unset)] == ["theirs", "theirs"]
    assert [choose_experiment(chosen), choose_project(chosen), choose_mode(chosen)] == ["mine", "ours", "offline"]
    for given, mode in (("run", "online"), ("dryrun", "offline"), ("offline", "offline"), ("shared", "shared")):
        monkeypatch.setenv("WANDB_MODE", given)
        assert choose_mode(unset) == mode


# Weights & Biases --------------------------------------------------------------------------------------------


def a_wandb(*, offline: bool) -> tuple[Wandb, Noting]:
    tracker, noted = Wandb(), Noting()
    tracker.offline = offline
    tracker.run = SimpleNamespace(
        **{"log": noted.log, "finish": noted.finish, "dir": "/r/wandb/offline-run-1/files"},
        summary=SimpleNamespace(update=noted.summary),
    )
    tracker.wandb = SimpleNamespace(Table=lambda columns, data: (columns, data), teardown=noted.teardown)
    return tracker, noted


def test_wandb_is_given_lines_and_tables_by_our_step():
    tracker, noted = a_wandb(offline=False)
    tracker.metrics(2, {"x": 1.0})
    tracker.samples(2, [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}])
    assert noted.calls == [
        ("log", {"step": 2, "x": 1.0}),
        ("log", {"step": 2, "samples": (["a", "b"], [[1, "x"], [2, "y"]])}),
    ]


def test_wandb_is_told_how_the_run_ended_and_an_offline_run_how_it_is_sent():
    bye = "wandb: offline; `wandb sync /r/wandb/offline-run-1` sends this run"
    for offline, outcome, code, farewell in ((True, DONE, 0, bye), (False, STOPPED, 1, "")):
        tracker, noted = a_wandb(offline=offline)
        tracker.finish(outcome)
        summary = {"exit_reason": outcome.exit_reason, "model": outcome.model}
        assert noted.calls == [("summary", summary), ("finish", ("exit_code", code)), ("teardown",)]
        assert tracker.farewell == farewell
    tracker, noted = a_wandb(offline=True)
    tracker.abandon()
    assert noted.calls == [("teardown",)] and tracker.farewell == ""


def test_names_that_mlflow_would_refuse_are_changed_as_little_as_possible():
    for name, made in (
        ("reward/a_b.c-d e:1", "reward/a_b.c-d e:1"),
        ("reward/is it right?", "reward/is it right_"),
        ("é=ü", "é_ü"),
        ("a" * 251, "a" * 250),
        *(("/a//b/", "_a/_b_"), ("../a/./b", "__/a/_/b"), ("", "_")),
    ):
        assert make_name(name) == made
