"""Columns of teachers, and the moves of those that follow the policy.

A teacher that reads what the policy read is scored with all other columns. One with a prompt of its own, or for some
data sets only, is scored on rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from algs.base import Algorithm
from algs.teachers import Teacher, find_column
from configs.schema import RunConfig
from core.cluster.workers import Workers
from core.errors import RunStopped, UserError
from core.types.arrays import Floats
from core.types.messages import find_images
from core.types.samples import Column, Group, Sample
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.packing.batches import Plan
from data_feeds.packing.splice import align, find_first_sampled, splice
from driver.rl.scoring import compute_columns
from modeling.hf_config import max_positions
from trainers.trainer import Trainer

WITHOUT_TEACHER = "without_teacher"
"""Count of a sample: 1 if it has no teacher, and so is not trained on."""


def check_teacher_sources(teachers: Mapping[str, Teacher], sources: Collection[str]) -> None:
    """Raise UserError for a teacher of a data set that is not there: its samples would have none."""
    for name, teacher in teachers.items():
        if unknown := sorted({*teacher.sources} - {*sources}):
            raise UserError(
                f"alg: the teacher {name} is for the data set {unknown[0]!r}, and data.train has "
                f"{', '.join(map(repr, sorted(sources)))}: name one of these"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reader of samples for the teachers of a run."""

    cfg: RunConfig
    tokenizer: ChatTokenizer
    plan: Callable[[list[Group]], Plan]
    """Splits samples into micro-batches."""
    plan_rows: Callable[[list[Group]], Plan]
    """The same for rows of a teacher, which need not be together."""

    def write_row(self, teacher: Teacher, sample: Sample, group: Group) -> Sample | None:
        """Return the row that a teacher reads for a sample; None without any."""
        if not sample.n_trained or (teacher.sources and sample.prompt.source not in teacher.sources):
            return None
        if teacher.prompt is None:
            return sample.replace(columns={}, advantage=None)
        messages = teacher.prompt(sample, group)
        if messages is None:
            return None
        self.check_context(sample)
        if find_images(messages):
            raise RunStopped(f"the teacher's prompt for {sample.prompt.id} holds an image: give it text only")
        row = splice(sample, self.tokenizer.render([*messages], sample.prompt.tools))
        # the reply is never cut: what a teacher cannot read whole, it does not grade
        return row if len(row.token_ids) <= self.find_limit(teacher) else None

    def check_context(self, sample: Sample) -> None:
        """Raise RunStopped if tokens before the first reply are not those of the prompt's messages."""
        if sample.images:
            raise RunStopped(
                f"the sample of {sample.prompt.id} has images, and a teacher with a prompt of its own reads text: let "
                "its prompt return None for such samples"
            )
        known = self.tokenizer.render(sample.prompt.messages, sample.prompt.tools)
        if sample.token_ids[: find_first_sampled(sample)].tolist() != known:
            raise RunStopped(
                f"the sample of {sample.prompt.id} begins with other messages than its prompt, as those of an agent, "
                "and a teacher's prompt would replace them: let its prompt return None for such samples"
            )

    def find_limit(self, teacher: Teacher) -> int:
        """Return the largest number of tokens in a teacher's row."""
        path, trusts = teacher.path or self.cfg.model.path, self.cfg.model.trust_remote_code
        positions = max_positions(path, trust_remote_code=trusts)
        room = self.cfg.trainer.micro_batch_tokens
        return room if positions is None else min(room, positions)


async def score_groups(
    trainers: Workers[Trainer],
    groups: list[Group],
    columns: Collection[Column],
    *,
    teachers: Mapping[str, Teacher],
    reader: Reader,
) -> list[Group]:
    """Return the groups with these columns. Samples that some teacher does not grade are excluded."""
    apart = {n: t for n, t in teachers.items() if t.is_partial or find_column(n, t) != n}
    together = frozenset(columns) - {find_column(n, t) for n, t in apart.items()}
    if apart:
        groups = await _score_apart(trainers, groups, apart, reader)
    return await compute_columns(trainers, groups, reader.plan(groups), together) if together else groups


async def _score_apart(
    trainers: Workers[Trainer], groups: list[Group], teachers: Mapping[str, Teacher], reader: Reader
) -> list[Group]:
    found: dict[int, dict[Column, Floats]] = {}
    # sorted, so that all runs score in one order
    for name, teacher in sorted(teachers.items()):
        pairs = [[(s, r) for s in g if (r := reader.write_row(teacher, s, g)) is not None] for g in groups]
        pairs = [own for own in pairs if own]
        if not pairs:
            continue
        rows = [[row for _, row in own] for own in pairs]
        scored = await compute_columns(trainers, rows, reader.plan_rows(rows), frozenset({name}))
        for own, done in zip(pairs, scored, strict=True):
            for (sample, _), row in zip(own, done, strict=True):
                found.setdefault(id(sample), {})[find_column(name, teacher)] = align(sample, row, name)
    wanted = {find_column(name, teacher) for name, teacher in teachers.items()}
    graded = [[_add_grades(s, found.get(id(s), {}), wanted) for s in g] for g in groups]
    if not any(s.n_trained for g in graded for s in g):
        raise RunStopped(
            f"no sample of the step has a teacher for the column {', '.join(sorted(wanted))}, so there is nothing to "
            "train on: let accept_group refuse groups without a teacher"
        )
    return graded


def _add_grades(sample: Sample, found: dict[Column, Floats], wanted: Collection[Column]) -> Sample:
    if not sample.n_trained:
        return sample
    counts = {**sample.counts, WITHOUT_TEACHER: float(found.keys() != {*wanted})}
    if found.keys() == {*wanted}:
        return sample.replace(columns=sample.columns | found, counts=counts)
    return sample.replace(excluded=np.ones_like(sample.action_mask), counts=counts)


async def move_teachers(trainers: Workers[Trainer], alg: Algorithm, steps_done: int) -> None:
    """Let the teachers that follow the policy move, after `steps_done` steps of the run."""
    rates = {name: t.rate_after(steps_done, alg.state) for name, t in alg.teachers.items()}
    if moving := {name: rate for name, rate in rates.items() if rate}:
        await trainers.call_all(Trainer.move_teachers, moving)
