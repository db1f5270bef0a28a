"""Main steps of an evaluation, called by main_eval.py."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.eval_schema import EvalConfig
from core.errors import RunStopped
from core.tasks import gather_fail_fast, start_task
from core.text.atomic_write import write_whole
from core.text.summary import Summarized, Summary
from core.timing.phases import Phase
from core.types.samples import Prompt
from data_feeds.rows.eval_sets import OF_SET, PromptSet
from driver.context import RunContext
from driver.evaluation.estimators import choose_ks
from driver.evaluation.suites.display import EvalDisplay, format_estimate, format_table
from driver.evaluation.suites.generations import (
    Generation,
    PartWriter,
    describe_group,
    join_parts,
    restore_spend,
    write_spend,
)
from driver.evaluation.suites.table import RESULTS, GradedPrompt, TableRow, make_table, measure_prompt
from rollouts.scheduling.generation import GroupRequests


@dataclass(frozen=True, kw_only=True, repr=False)
class EvalReport(Summarized):
    """Outcome of an evaluation that came to its end."""

    folder: Path
    """Run folder, with results.json, config.yaml and every sample in Parquet."""
    table: list[TableRow]
    """Estimates with their intervals; the first row is of all prompts."""

    def summarize(self) -> Summary:
        """Return the table, each estimate with its interval."""
        metrics = list(dict.fromkeys(name for row in self.table for name in row.metrics))
        rows = [
            [
                f"{row.column}={row.value}" if row.column else row.value,
                str(row.prompts),
                *(format_estimate(row.metrics.get(name)) for name in metrics),
            ]
            for row in self.table
        ]
        lines = [f"evaluation: {self.folder}"]
        return Summary(lines=lines, headings=("prompts of", "prompts", *metrics), rows=rows)


@dataclass
class EvalRun:
    """Objects of an evaluation."""

    cfg: EvalConfig
    sets: list[PromptSet]
    requests: GroupRequests
    context: RunContext
    writer: PartWriter
    done: dict[tuple[str, int], list[Generation]]
    """Samples of an earlier, interrupted run."""
    merged: Path | None = None
    """Temporary model of an adapter or checkpoint, which engines may load until sampling ends."""

    @property
    def ks(self) -> list[int]:
        return sorted({*self.cfg.k}) or choose_ks(max(one.samples for one in self.sets))

    async def sample_all(self) -> None:
        """Sample every prompt that has no samples yet, and write the samples in parts."""
        display = EvalDisplay({one.name: len(one.prompts) for one in self.sets}, self.ks, self.context.console)
        for (name, _), rows in self.done.items():
            # Quiet, because these prompts were reported by the run that sampled them.
            display.count(name, measure_prompt(self._grade(rows), self.ks), quiet=True)
        if self.done:
            self.context.console.say(f"resumed: the samples of {len(self.done)} prompts are there")
        places = asyncio.Semaphore(self.cfg.prompts_per_engine * self.cfg.rollout.most_engines)

        judges, folder = self.requests.judges, self.context.folder.path
        restore_spend(folder, judges)

        async def sample(one: PromptSet, index: int, prompt: Prompt) -> bool:
            async with places:
                # A used up budget starts no prompt; those in progress end, because their judges are paid for.
                if judges.describe_excess():
                    return False
                # the tickets of a training run's evaluation; so a data set's samples do not depend on the other sets
                group = await self.requests.generate_group(-1 - index, prompt, one.samples)
            rows = describe_group(group, prompt, of_set=one.name, index=index)
            self.writer.add(rows)
            if not self.writer.waiting:  # a part was written
                write_spend(folder, judges)
            display.count(one.name, measure_prompt(self._grade(rows), self.ks))
            return True

        missing = [
            sample(one, index, prompt)
            for one in self.sets
            for index, prompt in enumerate(one.prompts)
            if (one.name, index) not in self.done
        ]
        back = start_task(self._serve_restarted())
        try:
            with self.context.clock.phase(Phase.EVALUATE), display.shown():
                sampled = await gather_fail_fast(missing)
            if not all(sampled):
                raise RunStopped(judges.describe_excess())
        finally:
            back.cancel()
            try:
                # First, because it may be what fills the disk.
                remove_merged(self.merged)
            finally:
                # After an error too: a resumed evaluation continues from these samples.
                self.writer.flush()
                write_spend(folder, judges)

    async def _serve_restarted(self) -> None:
        """Let restarted engines serve at once: they have loaded the weights themselves."""
        engines = self.requests.engines
        while True:
            engines.weights_arrived(await engines.wait_for(engines.needing_weights), None)

    def report(self) -> list[TableRow]:
        """Write all samples and the results; print the table. Raises RunStopped if too many samples failed."""
        order = {one.name: i for i, one in enumerate(self.sets)}
        with self.context.clock.phase(Phase.SAVE):
            rows = join_parts(self.context.folder.path, order)
            # After the samples are written, so that they can be read even if there are too many failures for a result.
            self._check_failures(rows)
            by = [*([OF_SET] if len(self.sets) > 1 else []), *self.cfg.data.by]
            groups: dict[tuple[str, int], list[Generation]] = {}
            for row in rows:
                groups.setdefault((row.set, row.index), []).append(row)
            graded = [self._grade(group) for group in groups.values()]
            table = make_table(graded, self.ks, by=by, resamples=self.cfg.resamples, seed=self.cfg.seed)
            self._write_results(table, rows)
        for line in format_table(table, self.ks):
            self.context.console.say(line)
        self.context.facts["results"] = asdict(table[0])
        return table

    def _grade(self, rows: Sequence[Generation]) -> GradedPrompt:
        return grade_prompt(rows, by=self.cfg.data.by, pass_reward=self.cfg.pass_reward)

    def _check_failures(self, rows: Sequence[Generation]) -> None:
        """Report the failed samples of each data set. Raises RunStopped for a data set with too many."""
        # Each by itself: in a table of large data sets, a small one may fail completely within their fraction.
        for one in self.sets:
            own = [row for row in rows if row.set == one.name]
            failures = [row.failure for row in own if row.failure]
            said = f"{one.name}: {len(failures)} of {len(own)} samples failed"
            if len(failures) > self.cfg.reward.max_failed_fraction * len(own):
                raise RunStopped(
                    f"{said}, more than reward.max_failed_fraction={self.cfg.reward.max_failed_fraction:g}; the "
                    f"first: {failures[0]}"
                )
            if failures:
                self.context.console.say(f"{said} and count as 0; the first: {failures[0]}")

    def _write_results(self, table: Sequence[TableRow], rows: Sequence[Generation]) -> None:
        """Write the results without times or machine facts, so that equal evaluations give equal files."""
        facts: dict[str, Any] = {
            "table": [asdict(row) for row in table],
            "samples": len(rows),
            "failed": sum(bool(row.failure) for row in rows),
            "truncated_fraction": sum(row.stop == "length" for row in rows) / len(rows),
            "tokens_mean": sum(row.tokens for row in rows) / len(rows),
        }
        write_whole(self.context.folder.path / RESULTS, json.dumps(facts, indent=1) + "\n")


def remove_merged(folder: Path | None) -> None:
    """Remove the temporary model, if any."""
    if folder is not None and folder.exists():
        shutil.rmtree(folder)


def grade_prompt(rows: Sequence[Generation], *, by: Sequence[str], pass_reward: float) -> GradedPrompt:
    """Return rewards and answers of a prompt's samples; a failed sample gets reward 0 and does not pass."""
    extra = json.loads(rows[0].extra)
    labels = {column: label_text(extra[column]) for column in by if column in extra}
    return GradedPrompt(
        labels=labels | {OF_SET: rows[0].set},
        # A failure counts as wrong: leaving it out would favour a model whose replies break the reward.
        rewards=[row.reward or 0.0 for row in rows],
        passes=[row.reward is not None and row.reward >= pass_reward for row in rows],
        answers=[row.final_answer for row in rows],
        players=[row.player for row in rows],
        failed=sum(bool(row.failure) for row in rows),
    )


def label_text(value: Any) -> str:
    """Format a column's value as the name of a row in the table."""
    return value if isinstance(value, str) else json.dumps(value)
