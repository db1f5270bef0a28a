"""Frame around a training loop: run folder, clock, display, and an orderly end in all cases."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from algs.base import Algorithm
from configs.eval_schema import EvalConfig
from configs.schema import RunConfig, SLConfig
from core import metrics as names
from core.allocator import keep_freed_memory
from core.cluster.ray_workers import Cluster
from core.cluster.scratch import Scratch
from core.cluster.signals import end_on_signals, raise_interrupt
from core.cluster.workers import Workers
from core.errors import ProcessDied, RunStopped
from core.gc_control import collecting_seldom
from core.timing.clock import Clock
from core.timing.deadlines import CLOSE_TIMEOUT_S
from core.timing.phases import Phase
from core.types.batch import RowLayout
from core.types.samples import Group
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed
from driver.checkpoint import BestBy, Checkpoint, RunState, is_due, remove_old_checkpoints, write_checkpoint
from driver.checks.hub_upload import push_model
from driver.checks.output_folder import write_each
from driver.early_stop import EarlyStop
from driver.records.advice import Adviser, make_settings
from driver.records.console import Console
from driver.records.outcome import show_outcome
from driver.records.run_folder import RunFolder
from driver.records.run_result import RunResult, make_result, name_end
from driver.records.sample_text import make_record, write_sample
from driver.records.speed import measure_speed
from driver.records.trackers.base import Outcome
from driver.records.trackers.hub import Trackers
from driver.records.tracking import make_sample_rows, make_trackers
from driver.resume import describe_changes, restore_before
from driver.saving import list_writes, write_model
from rollouts.scheduling.availability import EngineAvailability, list_running
from rollouts.worker import RolloutWorker
from trainers.trainer import Trainer


@dataclass
class RunContext:
    """Objects shared by all programs during a run. `facts` are written to summary.json."""

    cfg: RunConfig | EvalConfig
    folder: RunFolder
    clock: Clock
    console: Console
    trackers: Trackers
    adviser: Adviser
    early_stop: EarlyStop
    cluster: Cluster | None = None
    engines: Workers[RolloutWorker] | None = None
    availability: EngineAvailability | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    updates_skipped: int = 0
    updates_made: int = 0
    logged: dict[str, float] = field(default_factory=dict[str, float])
    names_logged: set[str] = field(default_factory=set[str])
    evaluated: set[int] = field(default_factory=set[int])
    """Metrics of the last step, names of all logged metrics, and steps of the logged evaluations."""

    @property
    def training(self) -> RunConfig:
        """Configuration of a training run."""
        assert isinstance(self.cfg, RunConfig)
        return self.cfg

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Send a step's metrics to the trackers and the console, with advice; an evaluation gets its own line."""
        metrics = {names.STEP_NUMBER: float(step), **metrics, **self.clock.start_lap()}
        tokens = metrics.get(names.ROLLOUT_TOKENS, metrics[names.TRAIN_TOKENS])
        metrics |= measure_speed(self.training, metrics, tokens, peak_tflops=self.facts["peak_tflops"])
        self.logged = metrics
        self.names_logged |= metrics.keys()
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        with self.clock.phase(Phase.LOG):  # of the next step: the seconds of this one are in the line
            self.trackers.metrics(step, {name: value for name, value in metrics.items() if name not in evaluation})
            self.console.show_step(metrics)
            for rule, text in self.adviser.read_line(metrics):
                self.console.advise(rule, text)
        self.facts["steps_done"] = step + 1
        if evaluation:
            self.log_evaluation(int(evaluation.get("eval/version", step + 1)), evaluation)
        self.updates_skipped += (skipped := int(metrics[names.TRAIN_SKIPPED]))
        self.updates_made += self.training.total_updates // self.cfg.n_steps - skipped
        if said := self.early_stop.note_step(metrics):
            self.console.say(said)

    def log_evaluation(self, steps_done: int, metrics: dict[str, float]) -> None:
        """Send an evaluation to the trackers, once, at the number of steps behind its weights; 0 before training.

        A step's own metrics are of the weights that it starts with, so both are of the same weights at one number.
        """
        if steps_done not in self.evaluated:
            self.evaluated.add(steps_done)
            self.adviser.evaluated.append(metrics)
            with self.clock.phase(Phase.LOG):
                self.trackers.metrics(steps_done, {names.STEP_NUMBER: float(steps_done), **metrics})

    def count_steps(self, first: int) -> Iterator[int]:
        """Yield the steps from `first` to the recipe's last, or until `stop_when` ends the run."""
        for step in range(first, self.cfg.n_steps):
            yield step
            if self.is_over:
                return

    @property
    def is_over(self) -> bool:
        """True if `stop_when` ends the run after this step."""
        return bool(self.early_stop.reason)

    def show_samples(self, step: int, groups: list[Group], *, every: int) -> None:
        """Send samples of the step to the trackers and print a sample, at their intervals."""
        tracking = self.training.tracking
        if self.trackers.feeders and tracking.samples_every and step % tracking.samples_every == 0:
            self.trackers.samples(step, make_sample_rows(step, groups, tracking.samples))
        if every and step % every == 0:
            record = make_record(step, groups)
            self.console.show_sample(step, write_sample(step, record), record)

    def check_trained(self) -> None:
        """Report skipped updates. Raises RunStopped if all were skipped, since the model is unchanged."""
        if not self.updates_skipped:
            return
        why = "because its gradient was not finite or it had no token to train on"
        if not self.updates_made:
            raise RunStopped(
                f"all {self.updates_skipped} updates of the run were skipped, each {why}: the model is unchanged; "
                "look at the loss and the advantages, or lower trainer.lr"
            )
        self.facts["updates_skipped"] = self.updates_skipped
        self.console.say(
            f"{self.updates_skipped} of {self.updates_skipped + self.updates_made} updates were skipped, each {why}"
        )

    def report_data(self, feeds: dict[str, Feed[Any] | None]) -> None:
        """Report invalid rows, by the key of their file."""
        for key, feed in feeds.items():
            if feed is not None:
                sentences, self.facts[key] = feed.summary(key)
                for sentence in sentences:
                    self.console.say(sentence)

    def report_layout(self, layout: RowLayout) -> None:
        """Report the measured row layout."""
        self.facts["layout"] = layout.measured
        self.console.say(f"rows: {layout.measured}")

    async def save_model(self, trainers: Workers[Trainer], tokenizer: ChatTokenizer, alg: Algorithm) -> None:
        """Save the final model to the run folder and to `save_to`, and the other models that the run has."""
        self.check_trained()
        with self.clock.phase(Phase.SAVE):
            steps = self.facts.get("steps_done", self.cfg.n_steps)
            write, run = self._writer(trainers, tokenizer, steps), self.folder.path
            writes = list_writes(write, trainers, self.training, alg, run=run, steps=steps, push=self._push)
            await write_each(writes)

    async def _push(self, to: str, model: Path) -> None:
        self.facts["pushed"] = pushed = await asyncio.to_thread(push_model, to, model)
        self.console.say(f"pushed to {pushed}")

    def _writer(
        self, trainers: Workers[Trainer], tokenizer: ChatTokenizer, steps: int
    ) -> Callable[..., Awaitable[None]]:
        """Return a function that writes a model into a folder."""
        how = {"cfg": self.training, "run": self.folder.path, "steps": steps, "say": self.console.say}
        return partial(write_model, trainers=trainers, tokenizer=tokenizer, **how)

    def checkpoint_is_due(self, steps_done: int) -> bool:
        steps = steps_done if self.is_over else self.cfg.n_steps
        return is_due(steps_done, every=self.training.checkpoint.every, steps=steps)

    async def write_checkpoint(self, trainers: Workers[Trainer], tokenizer: ChatTokenizer, state: RunState) -> None:
        """Write a checkpoint with all metrics of the step; also save the model if it is the best by checkpoint.best."""
        keys = self.training.checkpoint
        if keys.best is not None and keys.best not in self.names_logged:
            said = f"checkpoint.best={keys.best}: no step has logged it; the steps log {', '.join(sorted(self.logged))}"
            # At the end it is only reported, because the trained model still has to be saved.
            if state.steps_done < self.cfg.n_steps:
                raise RunStopped(said)
            self.console.say(said)
        with self.clock.phase(Phase.CHECKPOINT):
            home = self.folder.path / "checkpoints"
            whole = replace(state, metrics=state.metrics | self.logged, before=self.facts.get("before", {}))
            await write_checkpoint(home, trainers, whole)
            if not math.isfinite(value := self.logged.get(keys.best_metric, 0.0)):
                self.console.say(f"step {state.steps_done}: {keys.best_metric} is {value}, so this is not the best")
            best = remove_old_checkpoints(home, keys.keep, BestBy(metric=keys.best_metric, lower=keys.lower_is_better))
            if keys.best is not None and best is not None and best.state.steps_done == state.steps_done:
                await self._writer(trainers, tokenizer, state.steps_done)(self.folder.path / "best_model")
                self.facts["best"] = {"steps_done": state.steps_done, keys.best: best.state.metrics[keys.best]}

    async def resume(self, trainers: Workers[Trainer], checkpoint: Checkpoint | None, settings: dict[str, Any]) -> int:
        """Restore the trainers from `checkpoint`; return the number of completed steps, 0 without a checkpoint."""
        if checkpoint is None:
            return 0
        with self.clock.phase(Phase.RESUME):
            await trainers.call_all(Trainer.load_state, checkpoint.folder)
        done = checkpoint.state.steps_done
        self.facts["resumed"] = {"checkpoint": str(checkpoint.folder), "steps_done": done}
        self.console.steps_done = done
        self.console.say(f"resumed after {done} steps: {checkpoint.folder}")
        self.facts |= restore_before(checkpoint.state, settings)
        for sentence in describe_changes(checkpoint.state.recipe, settings):
            self.console.say(sentence)
        return done

    async def start_cluster(self) -> None:
        """Start Ray in a thread: in the main thread it would take over SIGTERM and block the event loop."""
        starting = asyncio.create_task(asyncio.to_thread(Cluster, self.cfg.ray_address, ship_code=self.cfg.ship_code))
        try:
            # Shielded: a Ray that starts while the run is cancelled would otherwise be left behind.
            self.cluster = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.cluster = await starting  # what has started must be ended
            raise

    def write_summary(self, exit_reason: str) -> None:
        """Write summary.json; report a failure, which must not hide the reason of the run's end."""
        try:
            facts = {"seconds": self.clock.get_totals(), "warnings": [*self.adviser.given.values()], **self.facts}
            self.folder.write_summary(exit_reason=exit_reason, **facts)
        except RunStopped as error:
            self.console.say(f"{error}")

    @contextmanager
    def tracking(self, at_once: Callable[[], None]) -> Generator[None]:
        """Run the trackers during the body; finally send them the outcome and the model's path.

        at_once: called if a signal exits this process immediately.
        """
        self.trackers.start()
        end: BaseException | None = None
        try:
            yield
        except BaseException as error:
            end = error
            raise
        finally:
            end_on_signals(at_once=at_once)  # the loop has ended; a signal now ends the wait for slow trackers
            model, why = self.folder.path / "model", name_end(end, early=self.early_stop.reason)
            path = str(model) if model.is_dir() else None
            with self.clock.phase(Phase.CLOSE):
                self.facts["trackers"] = self.trackers.finish(Outcome(exit_reason=why, model=path))

    async def close(self) -> None:
        try:
            if self.availability is not None:
                await self.availability.stop()
            if self.engines is not None:
                ranks = list_running(len(self.engines), self.availability)
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await asyncio.gather(*(self.engines.call_one(rank, RolloutWorker.close) for rank in ranks))
        except (TimeoutError, RunStopped) as error:  # it is killed next
            self.console.say(f"an engine did not close by itself ({str(error) or 'no response'})")
        finally:
            if self.cluster is not None:
                self.cluster.close()


async def run_body(
    context: RunContext, body: Callable[[RunContext], Awaitable[None]], at_once: Callable[[], None]
) -> None:
    """Start Ray if needed, run `body`, and close, in the run's event loop.

    at_once: called if a signal exits this process immediately.
    """
    cfg, clock = context.cfg, context.clock
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    # A supervised run in this process never returns to the event loop, so only an exception can stop it.
    loop_turns = cfg.backend == "ray" or not isinstance(cfg, SLConfig)
    first = (lambda: loop.call_soon_threadsafe(task.cancel)) if loop_turns else raise_interrupt
    end_on_signals(first=first, at_once=at_once)
    try:
        if cfg.backend == "ray":
            with clock.phase(Phase.START):
                await context.start_cluster()
            end_on_signals(first=first, at_once=at_once)  # Ray's own code in C++ has taken SIGTERM, from any thread
        await body(context)
    except ProcessDied:
        context.engines = None  # they may wait for it; all are killed next
        raise
    finally:
        with clock.phase(Phase.CLOSE):
            await context.close()


def run_in_context(
    cfg: RunConfig | EvalConfig, body: Callable[[RunContext], Awaitable[None]], checkpoint: Checkpoint | None = None
) -> RunResult:
    """Run `body` until the end, Ctrl-C, SIGTERM or an error; always write a summary and end all processes.

    checkpoint: checkpoint to resume, whose trackers are continued.
    """
    clock = Clock()
    keep_freed_memory()  # every step makes arrays of about the same sizes
    folder = RunFolder(cfg.run_dir, cfg.name, cfg.model_dump())
    is_training = isinstance(cfg, RunConfig)
    display = cfg.display if is_training else "auto"
    console = Console(cfg.n_steps, clock, live=cfg.backend == "ray", display=display)
    context = RunContext(
        cfg=cfg,
        folder=folder,
        clock=clock,
        console=console,
        trackers=make_trackers(cfg, folder.path, console.say, checkpoint),
        adviser=Adviser(make_settings(cfg), cfg.n_steps),
        early_stop=EarlyStop(cfg.stop_when if is_training else None),
    )
    at_once = partial(context.write_summary, "interrupted")
    reason = "error"
    try:
        end_on_signals(at_once=at_once)
        console.say(f"run folder: {folder.path}")
        seldom = collecting_seldom(cfg.backend == "ray")
        # Left in reverse order: the scratch folder last, because it kills every process of the run.
        with Scratch(logs=folder.path / "logs"), context.tracking(at_once), console, seldom:
            asyncio.run(run_body(context, body, at_once))
        reason = name_end(None, early=context.early_stop.reason)
        show_outcome(console, context.facts, early_stop=context.early_stop, of=cfg.n_steps)
        console.say(f"run folder: {folder.path}")
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        # A signal cancels the run's task; callers, such as a notebook, expect the exception of Ctrl-C.
        reason = name_end(error)
        raise KeyboardInterrupt from None
    except Exception as error:
        reason = name_end(error)
        if isinstance(error, ProcessDied):
            error.run_folder, error.steps = folder.path, cfg.n_steps
        raise
    finally:
        for unwritten in folder.samples.close():
            console.say(unwritten)
        context.write_summary(reason)
        end_on_signals()  # as before the run
    return make_result(reason, folder.path, context.facts, context.logged)
