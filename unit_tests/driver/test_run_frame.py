"""The frame around a training loop: what it logs and shows, what it says of skipped updates, and how it ends."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import RLConfig, SLConfig
from configs.trainer_schema import StopWhenConfig
from core.cluster.workers import Local
from core.errors import RunStopped
from core.speed_metrics import TFLOPS
from core.timing.clock import Clock
from core.timing.phases import Phase
from driver.checkpoint import Checkpoint, RunState, read_checkpoint
from driver.context import RunContext, run_in_context
from driver.early_stop import EarlyStop
from driver.load_recipe import load_recipe
from driver.records.advice import Adviser, Settings
from driver.records.console import Console
from unit_tests.helpers.checkpoints import Writer, stand
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.runs import file_of
from unit_tests.helpers.sentences import tell

Recipe = Callable[..., str]


class Noted:
    """Console and trackers that note what they get."""

    def __init__(self, *, has_trackers: bool = True) -> None:
        self.said, self.lines, self.shown, self.tables = list[str](), list[Any](), list[Any](), list[Any]()
        self.advised: list[str] = []
        self.say, self.feeders = self.said.append, [None] * has_trackers

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.lines.append((step, values))

    def samples(self, step: int, rows: list[Any]) -> None:
        self.tables.append((step, len(rows)))

    def show_step(self, metrics: dict[str, float]) -> None:
        self.shown.append(metrics)

    def show_sample(self, step: int, text: str, record: dict[str, Any]) -> None:
        self.shown.append((step, text.startswith(f"sample of step {step}"), record["group"]))

    def advise(self, rule: str, text: str) -> None:
        self.advised.append(rule)


def make_context(cfg: Any, noted: Noted, **more: Any) -> RunContext:
    given: Any = noted
    parts: dict[str, Any] = {
        "folder": SimpleNamespace(path=Path("run")),
        "clock": Clock(),
        "early_stop": EarlyStop(None),
    }
    parts |= {"adviser": Adviser(Settings(), cfg.n_steps), "facts": {"peak_tflops": 2.0}}
    return RunContext(cfg=cfg, console=given, trackers=given, **parts | more)


def measured(**more: float) -> dict[str, float]:
    """Metrics of a step of ten trained tokens."""
    return {"train/tokens": 10.0, TFLOPS: 1.0, "train/updates_skipped": 0.0} | {
        name.replace("__", "/"): value for name, value in more.items()
    }


@pytest.fixture
def rows(recipe: Recipe) -> SLConfig:
    return load_recipe(SLConfig, recipe({"steps": 4}, kind="sl"), []).cfg


# Lines -------------------------------------------------------------------------------------------------------


def test_a_step_and_its_evaluation_have_a_line_each_and_once(rows: SLConfig):
    stop = EarlyStop(StopWhenConfig(metric="train/loss", below=1))
    context = make_context(rows, noted := Noted(), early_stop=stop)
    with context.clock.phase(Phase.TRAIN):
        pass
    context.log(0, measured(train__loss=2.0, eval__loss=3.0))
    [(step, line), evaluation] = noted.lines
    assert step == 0 and evaluation == (1, {"step": 1.0, "eval/loss": 3.0})
    assert (line["step"], line["train/loss"]) == (0.0, 2.0) and "eval/loss" not in line
    assert {"time/step_s", "time/train_s", "time/rest_s", "tokens_per_s", "mfu"} <= line.keys()
    assert line["tokens_per_s"] == 10.0 / line["time/step_s"]
    assert context.logged == line | {"eval/loss": 3.0} == noted.shown[0]
    assert context.names_logged == context.logged.keys() and context.facts["steps_done"] == 1
    context.log_evaluation(1, {"eval/loss": 3.0})
    context.log_evaluation(0, {"eval/loss": 4.0})
    assert noted.lines[2:] == [(0, {"step": 0.0, "eval/loss": 4.0})]
    assert context.evaluated == {0, 1} and context.adviser.evaluated == [{"eval/loss": 3.0}, {"eval/loss": 4.0}]
    assert not context.is_over
    with context.clock.phase(Phase.TRAIN):
        pass
    context.log(1, measured(train__loss=0.5, rollout__tokens=30.0, train__updates_skipped=1.0, eval__version=3.0))
    assert context.is_over and context.logged["tokens_per_s"] == 30.0 / context.logged["time/step_s"]
    assert noted.lines[-1] == (3, {"step": 3.0, "eval/version": 3.0})
    assert (context.updates_made, context.updates_skipped) == (1, 1)


def test_advice_and_missing_metrics_are_said_after_the_step(rows: SLConfig):
    never = EarlyStop(StopWhenConfig(metric="rollout/tool_errors", above=1))
    adviser = Adviser(Settings(), 1)
    adviser.read_line({"step": -1.0, "train/lr": 1.0})
    context = make_context(rows, noted := Noted(), early_stop=never, adviser=adviser)
    with context.clock.phase(Phase.TRAIN):
        pass
    context.log(0, measured(train__lr=2.0))
    assert noted.advised == ["warmup_at_end"]
    assert noted.said == ["stop_when.metric=rollout/tool_errors: the first step has not logged it"]


def test_steps_are_counted_until_the_condition_is_met(rows: SLConfig):
    context = make_context(rows, Noted())
    assert [*context.count_steps(1)] == [1, 2, 3]
    for step in context.count_steps(0):
        if step == 1:
            context.early_stop.end("a budget is used up")
    assert step == 1 and context.is_over


def test_checkpoints_are_due_at_the_end_wherever_it_is(rows: SLConfig):
    keys = rows.checkpoint.model_copy(update={"every": 3})
    context = make_context(rows.model_copy(update={"checkpoint": keys}), Noted())
    assert [n for n in range(1, 5) if context.checkpoint_is_due(n)] == [3, 4]
    context.early_stop.end("a budget is used up")
    assert context.checkpoint_is_due(2), "where stop_when ended the run"


def test_samples_are_shown_and_sent_at_their_own_intervals(recipe: Recipe):
    tracking = {"tracking.samples_every": 2, "tracking.samples": 3, "trackers": ["jsonl", "mlflow"]}
    groups = [[replace(sample, completion="7") for sample in group] for group in some_groups(2, 2)]
    for every, has_trackers, shown, tables in (
        (3, True, [(0, True, 0), (3, True, 1)], [(0, 3), (2, 3)]),
        (0, True, [], [(0, 3), (2, 3)]),
        (1, False, [(n, True, n % 2) for n in range(4)], []),
    ):
        cfg = load_recipe(RLConfig, recipe(tracking), []).cfg
        context = make_context(cfg, noted := Noted(has_trackers=has_trackers))
        for step in range(4):
            context.show_samples(step, groups, every=every)
        assert (noted.shown, noted.tables) == (shown, tables)
    none = cfg.model_copy(update={"tracking": cfg.tracking.model_copy(update={"samples_every": 0})})
    context = make_context(none, noted := Noted())
    context.show_samples(0, groups, every=0)
    assert noted.shown == noted.tables == []


# The end -----------------------------------------------------------------------------------------------------


def test_skipped_updates_are_told_and_a_run_of_nothing_else_has_no_model(rows: SLConfig):
    why = "each because its gradient was not finite or it had no token to train on"

    def check(skipped: int, made: int) -> tuple[list[str], dict[str, Any]]:
        context = make_context(rows, noted := Noted(), updates_skipped=skipped, updates_made=made, facts={})
        context.check_trained()
        return noted.said, context.facts

    assert check(0, 4) == check(0, 0) == ([], {})
    assert check(1, 3) == ([f"1 of 4 updates were skipped, {why}"], {"updates_skipped": 1})
    assert tell(lambda: check(4, 0), RunStopped) == (
        f"all 4 updates of the run were skipped, {why}: the model is unchanged; look at the loss and the advantages, "
        "or lower trainer.lr"
    )


def test_rows_and_layout_are_reported_by_their_key(rows: SLConfig):
    context = make_context(rows, noted := Noted(), facts={})
    feed: Any = SimpleNamespace(summary=lambda key: ([f"{key}: 3 rows", f"{key}: 1 invalid"], {"rows": 3}))
    layout: Any = SimpleNamespace(measured="packed")
    context.report_data({"data.train": feed, "data.eval": None})
    context.report_layout(layout)
    assert noted.said == ["data.train: 3 rows", "data.train: 1 invalid", "rows: packed"]
    assert context.facts == {"data.train": {"rows": 3}, "layout": "packed"}


def test_a_resumed_run_says_where_it_goes_on_and_what_differs(rows: SLConfig):
    called: list[Any] = []

    async def call_all(method: Any, folder: Path) -> None:
        called.append((method.__name__, folder))

    trainers: Any = SimpleNamespace(call_all=call_all)
    context = make_context(rows, noted := Noted(), facts={})
    assert asyncio.run(context.resume(trainers, None, {})) == 0 and not called and noted.said == []
    then = {"settings": {"trainer.logits_mib": 1}, "sha256": {}, "in_package": []}
    state = RunState(steps_done=3, metrics={}, position={}, recipe=then, before={"eval/loss": 2.0})
    now = then | {"settings": {"trainer.logits_mib": 2}}
    done = asyncio.run(context.resume(trainers, Checkpoint(folder=Path("/c"), state=state), now))
    assert (done, noted.steps_done, called) == (3, 3, [("load_state", Path("/c"))])
    assert context.facts == {"resumed": {"checkpoint": "/c", "steps_done": 3}, "before": {"eval/loss": 2.0}}
    assert noted.said == [
        "resumed after 3 steps: /c",
        "not to the last bit: trainer.logits_mib differs from the run that is resumed",
    ]
    assert "resume" in context.clock.get_totals()


def test_the_best_model_is_kept_beside_the_checkpoints(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    best = {"checkpoint": {"every": 1, "best": "train/loss"}, "steps": 4}
    cfg = load_recipe(SLConfig, recipe(best, kind="sl"), []).cfg
    written: list[Any] = []

    async def write(folder: Path, **how: Any) -> None:
        written.append((folder.name, how["steps"]))

    monkeypatch.setattr("driver.context.write_model", write)
    (run := tmp_path / "run").mkdir()
    context = make_context(
        cfg, noted := Noted(), folder=SimpleNamespace(path=run), facts={"before": {"eval/loss": 3.0}}
    )
    trainers: Any = Local(Writer())
    none: Any = None

    def checkpoint(steps_done: int, **logged: float) -> None:
        context.logged = {name.replace("_", "/"): value for name, value in logged.items()}
        context.names_logged |= context.logged.keys()
        asyncio.run(context.write_checkpoint(trainers, none, stand(steps_done, mine=1.0)))

    said = "checkpoint.best=train/loss: no step has logged it; the steps log eval/x, train/y"
    assert tell(lambda: checkpoint(1, train_y=1.0, eval_x=2.0), RunStopped) == said
    assert not (run / "checkpoints").exists()
    context.names_logged.clear()
    checkpoint(4, train_y=1.0, eval_x=2.0)
    assert noted.said == [said] and written == [], "the trained model still has to be saved"
    for steps_done, loss in ((1, 0.5), (2, 0.9), (3, 0.25)):
        checkpoint(steps_done, train_loss=loss)
    assert written == [("best_model", 1), ("best_model", 3)]
    assert context.facts["best"] == {"steps_done": 3, "train/loss": 0.25}
    checkpoint(5, train_loss=float("nan"))
    assert noted.said[1:] == ["step 5: train/loss is nan, so this is not the best"] and len(written) == 2
    kept = read_checkpoint(run / "checkpoints" / "step_00003")
    assert kept is not None and kept.state.metrics == {"mine": 1.0, "train/loss": 0.25}
    assert kept.state.before == {"eval/loss": 3.0}


def test_every_model_of_a_run_is_saved_then_copied_then_pushed(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copies = {"alg": {"name": "ppo"}, "trainer.ema": 0.5, "save_to": str(tmp_path / "copy"), "push_to": "me/x"}
    loaded, run, written = load_recipe(RLConfig, recipe(copies), []), tmp_path / "run", list[Any]()

    async def write(folder: Path, *given: Any, **how: Any) -> None:
        written.append((folder, how.get("which", given[0] if given else "policy"), how["run"], how["steps"]))

    def push(to: str, folder: Path) -> str:
        written.append((to, folder))
        return "https://hub/me/x"

    monkeypatch.setattr("driver.context.write_model", write)
    monkeypatch.setattr("driver.saving.write_value_model", write)
    monkeypatch.setattr("driver.context.push_model", push)
    context = make_context(loaded.cfg, noted := Noted(), folder=SimpleNamespace(path=run), facts={"steps_done": 1})
    trainers: Any = "trainers"
    none: Any = None
    asyncio.run(context.save_model(trainers, none, loaded.alg))
    assert written == [
        (run / "model", "policy", run, 1),
        (run / "model_ema", "ema", run, 1),
        (run / "value_model", "trainers", run, 1),
        (tmp_path / "copy", "policy", run, 1),
        ("me/x", run / "model"),
    ]
    assert noted.said == ["pushed to https://hub/me/x"] and context.facts["pushed"] == "https://hub/me/x"
    written.clear()
    plain = make_context(loaded.cfg.model_copy(update={"save_to": None, "push_to": None}), noted, updates_skipped=3)
    said = tell(lambda: asyncio.run(plain.save_model(trainers, none, loaded.alg)), RunStopped)
    assert said.startswith("all 3 updates")
    assert written == [], "nothing was trained"


def test_engines_are_closed_before_the_cluster_and_a_late_one_is_told(rows: SLConfig):
    def close(error: Exception | None, running: Any) -> tuple[list[Any], list[str]]:
        calls: list[Any] = []

        async def stop() -> None:
            calls.append("stop")

        async def call_one(rank: int, method: Any) -> None:
            calls.append((rank, method.__name__))
            if error is not None:
                raise error

        engines: Any = type("Engines", (), {"call_one": staticmethod(call_one), "__len__": lambda self: 2})()
        availability: Any = None if running is None else SimpleNamespace(stop=stop, running=lambda: running)
        cluster: Any = SimpleNamespace(close=lambda: calls.append("cluster"))
        context = make_context(rows, noted := Noted(), engines=engines, availability=availability, cluster=cluster)
        asyncio.run(context.close())
        return calls, noted.said

    assert close(None, None) == ([(0, "close"), (1, "close"), "cluster"], [])
    assert close(None, [1]) == (["stop", (1, "close"), "cluster"], [])
    for error, said in ((RunStopped("engine 1 is gone"), "engine 1 is gone"), (TimeoutError(), "no response")):
        assert close(error, [1]) == (
            ["stop", (1, "close"), "cluster"],
            [f"an engine did not close by itself ({said})"],
        )


TRACKER = """
import signal
from driver.records.trackers.base import Tracker

class Mine(Tracker):
    def finish(self, outcome):
        self.outcome = outcome
        self.handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
"""


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_run_in_one_process_moves_no_cursor_and_leaves_no_handler(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A debugger works in its terminal, and the next Ctrl-C is no longer the run's."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", Terminal())
    mine = file_of(tmp_path / "mine.py", TRACKER)
    cfg = load_recipe(SLConfig, recipe({"trackers": ["jsonl", mine]}, kind="sl"), []).cfg
    seen: list[RunContext] = []

    async def body(context: RunContext) -> None:
        seen.append(context)
        (context.folder.path / "model").mkdir()
        context.facts["steps_done"] = 2
        context.early_stop.end("a budget is used up")

    assert Console(2, Clock(), live=True).is_live
    result = run_in_context(cfg, body)
    [context] = seen
    assert not context.console.is_live
    tracker: Any = context.trackers.feeders[0].tracker
    reason, folder = "done early, a budget is used up", context.folder.path
    assert (tracker.outcome.exit_reason, tracker.outcome.model) == (reason, str(folder / "model"))
    now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert all(after is not before for after, before in zip(now, tracker.handlers, strict=True))
    assert (result.exit_reason, result.folder, result.steps_done) == (reason, folder, 2)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps_done"]) == (reason, 2) and summary["warnings"] == []
    assert summary["trackers"] == {mine: {"lines": 0, "delivered": 0}} and summary["seconds"]["all"] > 0


def test_a_run_that_fails_says_why_in_its_summary(recipe: Recipe, tmp_path: Path):
    cfg = load_recipe(SLConfig, recipe(kind="sl"), []).cfg
    for error, reason in (
        (RunStopped("no room"), "stopped: no room"),
        (KeyError("x"), "error: KeyError: 'x'"),
        (asyncio.CancelledError(), "interrupted"),
    ):

        async def body(context: RunContext, error: BaseException = error) -> None:
            raise error

        kind = KeyboardInterrupt if reason == "interrupted" else type(error)
        with pytest.raises(kind):
            run_in_context(cfg.model_copy(update={"name": reason.split(":")[0]}), body)
        [folder] = (tmp_path / "runs").glob(f"{reason.split(':')[0]}-*")
        assert json.loads((folder / "summary.json").read_text())["exit_reason"] == reason


def test_what_cannot_be_written_at_the_end_is_said_beside_the_reason(recipe: Recipe, tmp_path: Path, capsys):
    """Samples of the last step, and the summary: their places are taken by folders."""
    cfg, go = load_recipe(SLConfig, recipe(kind="sl"), []).cfg, threading.Event()

    def wait() -> Any:
        go.wait()
        yield from some_groups(1, 2)

    async def body(context: RunContext) -> None:
        for name in ("samples/step_00003.jsonl", "summary.json"):
            (context.folder.path / name).mkdir()
        groups: Any = wait()
        await context.folder.samples.write(3, groups)
        go.set()
        raise RunStopped("no room")

    assert tell(lambda: run_in_context(cfg, body), RunStopped) == "no room"
    [folder] = (tmp_path / "runs").iterdir()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"{folder}/samples/step_00003.jsonl cannot be written: Is a directory; the steps before are logged",
        f"{folder}/summary.json cannot be written: Is a directory",
    ]
