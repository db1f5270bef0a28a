"""Recognition of the form of a data set's rows, from its columns and its first rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from core.errors import UserError, quote, suggest_name
from data_feeds.rows.forms import FORMS, OURS, Form, RowKind, Shape, Turns, list_names
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.values import find_value, parse_list

PROBED = 200
"""Rows at the beginning of a data set that the form must fit, with the columns that begin later."""
FOREIGN = ("human", "gpt", "bot", "model", "function_call", "observation", "function_response")
"""Roles that only other forms have."""
PAIR_KEYS = (("user", "assistant"), ("human", "assistant"), ("input", "output"), ("question", "answer"))
"""Keys of an object with a question and its reply."""
PROGRAMS: Mapping[RowKind, str] = {
    "conversations": "conversations, for alg.name: sft of main_sl.py",
    "pairs": "pairs, for alg.name: dpo of main_sl.py",
    "unpaired": "replies with a label, for alg.name: kto of main_sl.py",
    "scored": "completions with rewards, for alg.name: offline_dro of main_sl.py",
    "prompts": "prompts, for main_rl.py",
}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Probe:
    """First rows of a data set."""

    rows: Sequence[Row]

    @cached_property
    def columns(self) -> set[str]:
        """Columns that are not null in every row."""
        return {name for row in self.rows for name, value in row.items() if value is not None}

    def list_columns(self, path: str) -> list[str]:
        """Return the alternatives of a path that at least one row has.

        >>> Probe([{"a": {"b": 1}, "c": None}]).list_columns("a.b|c|d")
        ['a.b']
        """
        # by the first part of a path, so that most of the table costs nothing
        likely = [one for one in path.split("|") if one in self.columns or one.split(".")[0] in self.columns]
        return [one for one in likely if one in self.columns or self.list_values(one)]

    def list_values(self, path: str) -> list[Any]:
        """Return the values of a column in the rows that have it."""
        return [value for row in self.rows if (value := find_value(row, path)) is not None]

    def is_equal(self, column: str, other: str) -> bool:
        return all(row.get(column) == row.get(other) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormFit:
    """Form of a data set, with the columns that the data set has of the form's alternatives."""

    form: Form
    begins_with_prompt: bool = False
    """Whether chosen and rejected are texts that begin with the text of the prompt."""
    unseen: frozenset[str] = frozenset()
    """Columns that would change the reading of a row, and that no row had when the form was found."""

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def used(self) -> set[str]:
        """Columns that the form consumes. A column with a dotted path in it stays in `extra`, too."""
        parts = [p for s in self.form.fields.values() for p in (s.columns if isinstance(s, Turns) else (s,))]
        return {part for part in parts if "." not in part} | self.form.copies.keys()

    def __str__(self) -> str:
        """Text such as `messages = prompt + completion, answer = reward_model.ground_truth`."""
        return ", ".join(f"{ours} = {_describe(source)}" for ours, source in self.form.fields.items())


def _describe(source: str | Turns) -> str:
    return " + ".join(source.columns) if isinstance(source, Turns) else source


def find_form(kind: RowKind, rows: Sequence[Row], *, key: str, path: str, given: str = "auto") -> FormFit:
    """Return the form of a data set: the recipe's `form`, or the only one that fits the columns and the first rows.

    key, path: the source in the recipe, for errors. Raises UserError, with the fix, for a form that does not fit, and
    if no form fits or several do.
    """
    probe = Probe([*rows[:PROBED], *_list_new_columns(rows)])
    found = list_fitting(kind, probe) if given == "auto" else [_check_given(kind, probe, key=key, given=given)]
    if len(found) > 1:
        a, b = (_resolve(form, probe) for form in found[:2])
        raise UserError(
            f"{key} fits two forms, {a.name} ({str(a) or 'our columns'}) and {b.name} ({str(b) or 'our columns'}): "
            f"write {write_source(key, path, form=a.name)}, or form: {b.name}"
        )
    if found and found[0].refusal:
        raise UserError(f"{key}: {found[0].refusal}")
    if found:
        # a recipe that names the form means it, whatever other columns there are
        return _resolve(found[0] if given == "auto" else replace(found[0], excludes=()), probe, key)
    # its rows are invalid one by one, which tells more
    own = next(form for form in FORMS if form.name == OURS and form.kind == kind)
    if all(any(need in row for row in rows) for need in own.needs):
        return FormFit(form=own)
    raise UserError(f"{key} {_explain_misfit(kind, probe, key=key, path=path)}")


def _list_new_columns(rows: Sequence[Row]) -> list[Row]:
    """Return the cells, by row after the first PROBED, of columns that all rows before lack."""
    seen = Probe(rows[:PROBED]).columns.copy()
    found: list[Row] = []
    for row in rows[PROBED:]:
        if row.keys() - seen and (new := {name for name, value in row.items() if value is not None} - seen):
            seen |= new
            # alone, because the row may be one of those that are invalid
            found.append({name: row[name] for name in new})
    return found


def list_fitting(kind: RowKind, probe: Probe) -> list[Form]:
    """Return the forms of a kind of row that fit all rows."""
    found = [form for form in FORMS if form.kind == kind and fits(form, probe)]
    return [form for form in found if not form.is_last] or found


def fits(form: Form, probe: Probe, *, strictly: bool = True) -> bool:
    """Tell whether a form fits the columns and all rows; without `strictly`, the columns and at least one row."""
    if any(probe.list_columns(path) for path in form.excludes):
        return False
    for path, shape in form.needs.items():
        there = probe.list_columns(path)
        if not there or not _has_shape(there[0], shape, probe, strictly=strictly):
            return False
    copies_fit = all(c not in probe.columns or probe.is_equal(c, other) for c, other in form.copies.items())
    return copies_fit and not any(probe.is_equal(c, other) for c, other in form.differs.items())


def _has_shape(column: str, shape: Shape, probe: Probe, *, strictly: bool) -> bool:
    values = probe.list_values(column)
    # a few bad rows of our own columns are invalid rows, and do not make it another form
    if shape == "own_turns":
        return not all(map(_is_foreign, values))
    if shape == "own_reply":
        return not all(map(SHAPES["hh"], values))
    if shape == "turns" and column == "messages":
        return all(map(_is_foreign, values))
    return (all if strictly else any)(map(SHAPES[shape], values))


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and ({"from", "value"} <= turn.keys() or {"role", "content"} <= turn.keys())


def _is_foreign(value: Any) -> bool:
    turns = _list(value)
    if not turns or not all(map(_is_turn, turns)):
        return False
    return all("from" in turn for turn in turns) or any(turn.get("role") in FOREIGN for turn in turns)


def _list(value: Any) -> list[Any]:
    """Return a list, or the list in JSON text; [] for anything else."""
    if isinstance(value, str):
        try:
            return parse_list(value) or []
        except InvalidRow:  # it is counted when the row is read
            return []
    return value if isinstance(value, list) else []


def _holds(value: Any, *keys: str) -> bool:
    return bool(_list(value)) and all(isinstance(item, dict) and {*keys} <= item.keys() for item in _list(value))


SHAPES: dict[Shape, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "text": lambda value: isinstance(value, str),
    "talk": lambda value: (
        isinstance(value, str) or _is_turn(value) or (bool(_list(value)) and all(map(_is_turn, _list(value))))
    ),
    "turns": lambda value: bool(_list(value)) and all(map(_is_turn, _list(value))),
    "pairs_of_turns": lambda value: any(_holds(value, *keys) for keys in PAIR_KEYS),
    "segments": lambda value: _holds(value, "label", "text"),
    "ids": lambda value: bool(_list(value)) and all(isinstance(item, int) for item in _list(value)),
    "list": lambda value: isinstance(value, list),
    "hh": lambda value: isinstance(value, str) and value.lstrip().startswith("Human: "),
}
"""Tests of the content of a column, in a row that has it; those of our own columns are in `_has_shape`."""


def _resolve(form: Form, probe: Probe, key: str | None = None) -> FormFit:
    """Replace alternatives by the columns of the data set. With `key`, raises UserError if it has several of them."""

    def choose(path: str) -> str:
        there = probe.list_columns(path)
        if len(there) > 1 and key is not None:
            raise UserError(
                f"{key} fits form {form.name}, and it has {' and '.join(there)}, of which one is meant: write "
                f"{' or '.join(_write_choice(form, probe, path, one) for one in there)} in that source"
            )
        return there[0] if there else ""

    fields: dict[str, str | Turns] = {}
    for ours, source in form.fields.items():
        if isinstance(source, str):
            if column := choose(source):
                fields[ours] = column
            continue
        parts = {name: choose(getattr(source, name)) for name in ("system", "history", "whole", "assistant")}
        fields[ours] = Turns(user=tuple(filter(None, map(choose, source.user))), **parts)
    resolved = replace(form, fields=fields)
    begins = form.kind == "pairs" and _begin_with_prompt(resolved, probe.rows)
    return FormFit(form=resolved, begins_with_prompt=begins, unseen=_list_unseen(form, probe))


def _list_unseen(form: Form, probe: Probe) -> frozenset[str]:
    """Return the columns of a form's fields, and those that would make it another form, that no row of `probe` has."""
    parts = [p for s in form.fields.values() for p in (s.columns if isinstance(s, Turns) else (s,))]
    names = [name for path in (*parts, *form.excludes) for name in path.split("|")]
    return frozenset(name.split(".")[0] for name in names) - probe.columns


def _write_choice(form: Form, probe: Probe, path: str, column: str) -> str:
    """Return the key `columns` that reads `column` in place of the alternatives of a path."""
    named: dict[str, str] = {}
    for ours, source in form.fields.items():
        paths = {ours: source} if isinstance(source, str) else {}
        if isinstance(source, Turns):
            asked = next(iter((*source.user, source.whole)))
            paths = {ours: asked}
            if source.assistant:
                paths["completion" if ours == "messages" else ours] = source.assistant
        for name, alternatives in paths.items():
            there = [column] if alternatives == path else probe.list_columns(alternatives)
            named |= {name: there[0]} if there else {}
    return f"columns: {{{', '.join(f'{ours}: {theirs}' for ours, theirs in named.items())}}}"


def _begin_with_prompt(form: Form, rows: Sequence[Row]) -> bool:
    """Tell whether every text of a pair's replies begins with the text of its prompt."""
    asked = form.fields.get("messages")
    if not isinstance(asked, Turns) or len(asked.columns) != 1 or not asked.user:
        return False
    texts = [(row.get(asked.user[0]), row.get("chosen"), row.get("rejected")) for row in rows]
    return bool(texts) and all(
        isinstance(prompt, str) and prompt and isinstance(reply, str) and reply.startswith(prompt)
        for prompt, *replies in texts
        for reply in replies
    )


def _check_given(kind: RowKind, probe: Probe, *, key: str, given: str) -> Form:
    """Return the form that the recipe names. Raises UserError if the rows do not have its columns."""
    named = [form for form in FORMS if form.name == given and form.kind == kind]
    if not named:
        others: list[RowKind] = [form.kind for form in FORMS if form.name == given]
        names = list_names(kind)
        why = f"is for {PROGRAMS[others[0]]}" if others else f"is none of {', '.join(names)}"
        raise UserError(f"{key}: form {quote(given)} {why}{'' if others else suggest_name(given, names)}")
    for form in named:
        if given == OURS or form.refusal or fits(replace(form, excludes=()), probe, strictly=False):
            return form
    needs = " and ".join(path.replace("|", " or ") for path in named[0].needs)
    there = [form.name for form in list_fitting(kind, probe)]
    fix = f"write form: {there[0]}" if there else "leave form out"
    raise UserError(f"{key}: form {given} needs rows with {needs}, and no row is of that form: {fix}")


def _explain_misfit(kind: RowKind, probe: Probe, *, key: str, path: str) -> str:
    """Return the end of a sentence that says why no form fits, with the fix."""
    there = sorted(set().union(*(row.keys() for row in probe.rows)))
    has = f"it has {', '.join(map(quote, there))}"
    # the mistake with the smallest repair first: a row is odd, the rows are of another program, a column is missing
    for form in FORMS:
        if form.kind == kind and not form.refusal and fits(form, probe, strictly=False):
            column, n = _find_odd(form, probe)
            return (
                f"has the columns of form {form.name}, and row {n} is of another form (its {column} is "
                f"{find_value(probe.rows[n], column)!r:.60}): repair it, or write "
                f"{write_source(key, path, form=form.name)}, which counts such rows as invalid"
            )
    kinds: tuple[RowKind, ...] = ("conversations", "pairs", "unpaired", "scored", "prompts")
    for other in kinds:
        if other != kind and (found := list_fitting(other, probe)) and found[0].name != OURS:
            return (
                f"has rows of form {found[0].name}, which are {PROGRAMS[other]}, and {PROGRAMS[kind]} are needed; {has}"
                ": use that program, or name the column meant in columns"
            )
    own = next(form for form in FORMS if form.name == OURS and form.kind == kind)
    missing = next((need for need in own.needs if need not in there), "messages")
    guess = next((c for c in there if _is_guess(c, probe)), there[0] if there else "COLUMN")
    return (
        f"has no column {missing}; {has}: name the one meant in columns "
        f"({write_source(key, path, columns=f'{{{missing}: {quote(guess)}}}')})"
    )


def _is_guess(column: str, probe: Probe) -> bool:
    return column != "id" and bool(probe.list_values(column)) and _has_shape(column, "talk", probe, strictly=True)


def _find_odd(form: Form, probe: Probe) -> tuple[str, int]:
    """Return the column and number of the first row that does not have the form's content."""
    for path, shape in form.needs.items():
        column = probe.list_columns(path)[0]
        for n, row in enumerate(probe.rows):
            value = find_value(row, column)
            if value is not None and not SHAPES[shape](value):
                return column, n
    return next(iter(form.needs)), 0


def write_source(key: str, path: str, **settings: str) -> str:
    """Return the lines of a recipe that give a source these settings.

    >>> write_source("data.train=x.jsonl", "x.jsonl", form="verl")
    'data.train: [{path: x.jsonl, form: verl}]'
    """
    words = ", ".join(f"{name}: {value}" for name, value in settings.items())
    where = key.partition("=")[0]
    source = f"{{path: {path}, {words}}}"
    if where == "data.train":
        return f"{where}: [{source}]"
    return f"{where}: {source}" if where == "data.eval" else words
