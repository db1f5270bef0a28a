"""Records: the rows of a source under our column names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.data_schema import SourceConfig
from core.errors import UserError
from core.types.messages import Message, ToolSpec
from data_feeds.chat.tool_specs import read_tools
from data_feeds.rows.convert_form import IMAGES, build_turns, convert_row, list_images
from data_feeds.rows.find_form import FormFit, Probe, find_form
from data_feeds.rows.forms import ANSWERS, OURS, RowKind, Turns
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.read_files import HUB, read_rows
from data_feeds.rows.read_messages import read_messages
from data_feeds.rows.run_samples import list_sample_files, read_run
from data_feeds.rows.values import check_characters, find_value, load_json, parse_turns, to_text

COMPLETION = "completion"
"""Column of ours, read only if `columns` of the recipe names it: the reply to `messages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Data set row, with columns renamed to our names."""

    id: str
    where: str
    """Setting, file and row number, for error messages."""
    columns: dict[str, Any]
    """Non-null columns with one of our names."""
    extra: dict[str, Any]
    """All other columns, under their original names."""
    flaw: InvalidRow | None = None
    """Reason why the row cannot be used for any purpose."""
    repeats_id: bool = False
    """True if an earlier row has the id that the data set gives; then `id` ends in the row's number."""
    fills_gaps: bool = False
    """True for columnar files, which write null for keys that another row's object has."""

    def get_answer(self) -> str:
        """Return the answer as text, or "" if there is none. Raises InvalidRow for other types."""
        return to_text(self.columns.get("answer", ""), "answer", "bad_answer")

    def get_column(self, column: str) -> Any:
        """Return the value of a column. Raises InvalidRow if it is missing."""
        if column not in self.columns:
            raise InvalidRow("missing_column", f"it has no {column}")
        return self.columns[column]

    def get_messages(self, column: str, *, text_is: str) -> list[Message]:
        """Parse the messages in a column: turns, JSON text of turns, or other text.

        Other text is one turn of the role `text_is`; a user's follows the images.

        Images are references, not loaded yet (read_messages.py). Raises InvalidRow for an invalid list of messages.
        """
        given = self.get_column(column)
        fills_gaps = self.fills_gaps
        if isinstance(given, str) and (turns := parse_turns(given, column)) is not None:
            given, fills_gaps = turns, False  # in JSON text a null was written
        elif isinstance(given, str):
            holes = [{"type": "image"} for _ in self.list_images()[1]] if text_is == "user" else []
            given = [{"role": text_is, "content": [*holes, {"type": "text", "text": given}] if holes else given}]
        return read_messages(given, column, fills_gaps=fills_gaps)

    def list_images(self) -> tuple[str, list[Any]]:
        """Return the column with the images of the row, and the images in it, not loaded. Raises InvalidRow."""
        there = [name for name in IMAGES if name in self.columns]
        if len(there) > 1:
            raise InvalidRow("bad_image", f"it has {' and '.join(there)}: keep one of them")
        column = there[0] if there else IMAGES[-1]
        return column, list_images(self.columns.get(column))

    def get_tools(self) -> list[ToolSpec]:
        """Return the tools of the row. Raises InvalidRow for an invalid list."""
        return read_tools(self.columns.get("tools"), fills_gaps=self.fills_gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Records of a source, and the form that its rows have."""

    items: list[Record]
    fit: FormFit
    notes: list[str]
    """Sentences about the form and its columns, for the start of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlan:
    """Conversion of a source's rows to records."""

    key: str
    names: dict[str, str]
    """Columns of the source by our names."""
    fills_gaps: bool
    fit: FormFit

    def make(self, row: dict[str, Any], i: int) -> Record:
        """Return the record of row number `i`. Raises UserError for a column that would change the form."""
        for name in self.fit.unseen & row.keys():
            if row[name] is not None:
                raise UserError(
                    f"{self.key}, row {i} has {name}, which no row had when form {self.fit.name} was recognised, so it "
                    f"would not be read: move a row with {name} to the beginning of the file"
                )
        return _make_record(row, i, self.names, f"{self.key}, row {i}", self.fills_gaps, self.fit)


def read_records(
    source: SourceConfig, *, key: str, kind: RowKind, needed: Iterable[str], known: Iterable[str]
) -> Records:
    """Read all rows of a source. Raises UserError, beginning with `key`, for a problem of the whole source.

    needed: columns that at least one row must have. known: all columns read under our names.
    """
    # supervised learning reads a run's samples as prompts and completions
    of_run = list_sample_files(source.path) if kind == "prompts" else []
    rows = read_run(of_run, key) if of_run else read_rows(source, key)
    read, _ = plan_records(source, rows, key=key, kind=kind, needed=needed, known=known)
    return replace(read, items=_number_repeated_ids(read.items))


def plan_records(
    source: SourceConfig,
    rows: list[dict[str, Any]],
    *,
    key: str,
    kind: RowKind,
    needed: Iterable[str],
    known: Iterable[str],
) -> tuple[Records, RecordPlan]:
    """Return the records of rows, and the conversion of further rows of the source. As `read_records`."""
    known = list(known)
    # a renamed column that nothing reads is a misspelling
    if ignored := [ours for ours in source.columns if ours not in known]:
        raise UserError(f"{key}: columns names {ignored[0]}, and only {', '.join(known)} are read here: leave it out")
    if not rows:
        raise UserError(f"{key} has no rows")
    names = {ours: source.columns.get(ours, ours) for ours in known if ours != COMPLETION or ours in source.columns}
    if source.columns and source.form == "auto":
        # `columns` says all of it, so nothing is left to recognise
        fit = find_form(kind, rows, key=key, path=source.path, given=OURS)
        checked = [*needed, *source.columns]
    else:
        fit = find_form(kind, rows, key=key, path=source.path, given=source.form)
        checked = [*(needed if fit.name == OURS else ()), *source.columns]
    there = set().union(*(row.keys() for row in rows))
    for ours in dict.fromkeys(checked):
        if names[ours] not in there and all(find_value(row, names[ours]) is None for row in rows):
            raise UserError(
                f"{key} has no column {names[ours]}; it has {', '.join(sorted(there))}: name the one meant in columns "
                f"({{{ours}: ...}})"
            )
    plan = RecordPlan(key=key, names=names, fills_gaps=_fills_gaps(source.path, kind), fit=fit)
    records = [plan.make(row, i) for i, row in enumerate(rows)]
    notes = [] if fit.name == OURS else [_describe_form(key, source, fit, there)]
    if kind == "prompts":
        notes += _check_answers(key, records, rows)
    return Records(items=records, fit=fit, notes=notes), plan


def _fills_gaps(path: str, kind: RowKind) -> bool:
    """Tell whether the rows have null for keys that they lack. JSON and CSV tell them apart."""
    # a recorded run is a folder, of JSON lines
    is_run = kind == "prompts" and bool(list_sample_files(path))
    return not is_run and not path.removesuffix(".gz").endswith((".jsonl", ".json", ".csv"))


def _describe_form(key: str, source: SourceConfig, fit: FormFit, there: set[str]) -> str:
    """Return the sentence on a recognised form, for the start of a run."""
    others = sorted(there - fit.used - set(source.columns.values()) - {"id", "tools", *IMAGES})
    unread = f"; in extra: {', '.join(others)}" if others else ""
    how = "recognised" if source.form == "auto" else "as form says"
    return f"{key} is of form {fit.name} ({how}): {fit}{unread}"


def _check_answers(key: str, records: list[Record], rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence if no prompt has an answer and a column looks like one. Raises UserError for verl's."""
    if any("answer" in record.columns for record in records):
        return []
    probe = Probe(rows[:1])
    if nested := probe.list_columns("reward_model.ground_truth|reward_spec.ground_truth"):
        raise UserError(
            f"{key}: no row has an answer, and {nested[0]} holds one: write answer: {nested[0]} into columns, or leave "
            "columns out, and the form of the rows is recognised"
        )
    found = [name for name in probe.list_columns(ANSWERS) if name != "answer"]
    if not found:
        return []
    return [
        f"{key}: no row has an answer for the reward, and the column {found[0]} may hold one: write answer: {found[0]} "
        "into columns"
    ]


def _number_repeated_ids(records: list[Record]) -> list[Record]:
    """Append the row's number to an id that an earlier row has: every row needs an id of its own."""
    given = {record.id for record in records}
    if len(given) == len(records):
        return records
    numbered: list[Record] = []
    seen: set[str] = set()
    for i, record in enumerate(records):
        if record.id in seen:
            new = f"{record.id}#{i}"
            while new in given:
                new += "#"
            record = replace(record, id=new, repeats_id=True)
        seen.add(record.id)
        numbered.append(record)
    return numbered


def find_folder(path: str) -> Path | None:
    """Return the base folder of relative image paths, or None for a hub data set."""
    if path.startswith(HUB):
        return None
    return Path(path) if os.path.isdir(path) else Path(path).parent


def _make_record(
    row: dict[str, Any], i: int, names: dict[str, str], where: str, fills_gaps: bool, fit: FormFit
) -> Record:
    # The flaw is raised when the row is converted. So it counts as an invalid row, as any other problem of a row does.
    row_id, flaw, columns, extra = str(i), None, dict[str, Any](), dict[str, Any]()
    try:
        check_characters(row)
        made = convert_row(fit, row)
        columns = {
            ours: value
            for ours, theirs in names.items()
            if (value := find_value(row if ours != theirs else made, theirs)) is not None
        }
        # A column extra is unpacked: the scripts in data_prep/ write it, since Parquet columns need one type.
        extra = {k: v for k, v in made.items() if k not in names.values() and k != "extra"}
        extra |= read_extra(row.get("extra") or {})
        if COMPLETION in columns:
            both = Turns(user=("messages",), assistant=COMPLETION)
            columns = columns | {"messages": build_turns(both, columns)}
        row_id = to_text(columns.pop("id", i), "id", "bad_id")
    except InvalidRow as found:
        row_id, flaw = str(i), found
    return Record(id=row_id, where=where, columns=columns, extra=extra, flaw=flaw, fills_gaps=fills_gaps)


def read_extra(given: Any) -> dict[str, Any]:
    """Return the object in a column extra, or in JSON text of it. Raises InvalidRow for anything else."""
    try:
        extra = load_json(given) if isinstance(given, str) else given
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise InvalidRow("bad_extra", f"extra must be an object, or JSON of one, found {given!r:.60}")
    return extra
