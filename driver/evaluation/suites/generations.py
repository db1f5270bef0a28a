"""Samples of an evaluation as Parquet: parts during the evaluation, a sorted file at the end.

    generations/part_00000.parquet    complete groups of samples: complete, because it has this name
    generations.parquet               all samples, by data set, prompt and sample
    judge_spend.json                  calls and tokens of judges, if there are any

A part is written under a temporary name and renamed, so an evaluation may be killed at any time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from core.errors import UserError, first_line, writing
from core.text.atomic_write import replacing, write_whole
from core.text.json_text import dump_json
from core.text.text_files import parse_json, read_text
from core.types.episodes import list_episodes
from core.types.messages import describe_messages
from core.types.samples import Group, Prompt
from driver.evaluation.suites.answers import find_final_answer
from driver.run_inputs import hash_row
from rollouts.scheduling.judge_spend import JudgeSpend

PARTS, WHOLE = "generations", "generations.parquet"
SPEND = "judge_spend.json"
"""File of a run folder with the calls and tokens of judges so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Sample of an evaluation, as a row of the file."""

    set: str
    """Name of the data set."""
    index: int
    """Number of the prompt in the data set."""
    player: int
    """Side played by the policy, in a game where it plays several; otherwise 0."""
    sample: int
    """Number of the sample among the prompt's."""
    id: str
    prompt: str
    """Messages before the first reply, as JSON: the row's, and the environment's initial messages."""
    row: str
    """Hash of the data set's row."""
    answer: str
    extra: str
    """Other columns of the row, as JSON."""
    completion: str
    final_answer: str
    """Final answer, for the majority vote."""
    reward: float | None
    reward_parts: str
    """Named parts of the reward, as JSON."""
    failure: str
    """Reason for a missing reward; otherwise ""."""
    stop: str
    tokens: int
    """Number of sampled tokens."""


# The types of Generation's fields, as they are written there.
ARROW_TYPES = {"str": pa.string(), "int": pa.int32(), "float | None": pa.float64()}
SCHEMA = pa.schema([(field.name, ARROW_TYPES[str(field.type)]) for field in fields(Generation)])


def describe_group(group: Group, prompt: Prompt, *, of_set: str, index: int) -> list[Generation]:
    """Return the rows of a group, per episode. prompt: the data set's, before the environment's messages."""
    # Of the row itself: messages that an environment added are no reason to refuse a resume.
    digest = hash_row(prompt)
    return [
        Generation(
            set=of_set,
            index=index,
            player=sample.player,
            sample=n,
            id=sample.prompt.id,
            prompt=json.dumps(describe_messages(sample.prompt.messages)),
            row=digest,
            answer=sample.prompt.answer,
            extra=dump_json(sample.prompt.extra, default=str),
            completion=sample.completion or "",
            final_answer=find_final_answer(sample.completion or ""),
            reward=sample.reward,
            reward_parts=json.dumps(sample.reward_parts),
            failure=sample.failure,
            stop=sample.stop,
            tokens=sample.n_sampled,
        )
        for n, sample in enumerate(list_episodes(group))
    ]


class PartWriter:
    """Writer of an evaluation's parts."""

    def __init__(self, run_folder: Path, *, prompts_per_part: int):
        """Continue after existing parts."""
        self.folder, self.prompts_per_part = run_folder / PARTS, prompts_per_part
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        # Parts are numbered without gaps, so the count is the next number.
        self.n_parts = len(list_parts(run_folder))
        self.waiting: list[list[Generation]] = []

    def add(self, rows: list[Generation]) -> None:
        """Add the samples of a prompt. They are written when a part is full."""
        self.waiting.append(rows)
        if len(self.waiting) >= self.prompts_per_part:
            self.flush()

    def flush(self) -> None:
        """Write waiting samples. Raises RunStopped on failure."""
        if self.waiting:
            path = self.folder / f"part_{self.n_parts:05d}.parquet"
            write_generations(path, [row for rows in self.waiting for row in rows])
            self.waiting = []
            self.n_parts += 1


def list_parts(run_folder: Path) -> list[Path]:
    """List the complete parts of an evaluation."""
    found = sorted((run_folder / PARTS).glob("part_*.parquet"))
    return [path for path in found if re.fullmatch(r"part_\d{5,}\.parquet", path.name)]


def list_files(run_folder: Path) -> list[Path]:
    """List the files with an evaluation's samples: the parts, or the joined file."""
    whole = run_folder / WHOLE
    return [whole] if whole.is_file() else list_parts(run_folder)


def copy_parts(source: Path, run_folder: Path) -> None:
    """Copy the samples of a resumed evaluation, as parts, and the spending of judges."""
    home = run_folder / PARTS
    with writing(home):
        home.mkdir(exist_ok=True)
        for i, part in enumerate(list_files(source)):
            with replacing(home / f"part_{i:05d}.parquet") as partial:
                shutil.copyfile(part, partial)
    if (source / SPEND).is_file():
        with replacing(run_folder / SPEND) as partial:
            shutil.copyfile(source / SPEND, partial)


def write_spend(run_folder: Path, spend: JudgeSpend) -> None:
    """Write the calls and tokens of judges so far, if there are any."""
    if measured := spend.measure():
        write_whole(run_folder / SPEND, json.dumps(measured) + "\n")


def restore_spend(run_folder: Path, spend: JudgeSpend) -> None:
    """Continue from the calls and tokens of an interrupted evaluation, if judges made any."""
    if (path := run_folder / SPEND).is_file():
        spend.restore(parse_json(read_text(path, str(path)), str(path)))


def write_generations(path: Path, rows: Iterable[Generation]) -> None:
    """Write rows to a file atomically."""
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA)
    with replacing(path, meaning="the samples before are kept: resume names this run folder") as partial:
        pq.write_table(table, partial)


def read_generations(paths: Sequence[Path]) -> list[Generation]:
    """Read the rows of these files. Raises UserError for an unreadable file."""
    rows: list[Generation] = []
    for path in paths:
        try:
            rows += [Generation(**row) for row in pq.read_table(path, columns=SCHEMA.names).to_pylist()]
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{path} cannot be read as samples of an evaluation ({first_line(error)}): remove it, and its prompts "
                "are sampled again"
            ) from error
    return rows


def join_parts(run_folder: Path, order: dict[str, int]) -> list[Generation]:
    """Write all samples to a single file, in the order of the data sets, and remove the parts; return the samples."""
    rows = read_generations(list_parts(run_folder))
    rows.sort(key=lambda row: (order[row.set], row.index, row.sample))
    write_generations(run_folder / WHOLE, rows)
    shutil.rmtree(run_folder / PARTS)
    return rows
