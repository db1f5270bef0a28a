"""Records of a source, if the recipe writes rows of their form as they are meant."""

from __future__ import annotations

from typing import Any

from core.errors import UserError
from data_feeds.chat.turns import TrainOn
from data_feeds.rows.find_form import PROBED
from data_feeds.rows.row_types import RowConverter
from data_feeds.rows.sources import COMPLETION, RecordPlan, Records, plan_records, read_records
from data_feeds.rows.values import parse_list


def read_checked(converter: RowConverter) -> Records:
    """Read the records of a source. Raises UserError if the recipe lacks the settings that their form needs."""
    key, row_type = converter.key, converter.row_type
    read = read_records(converter.source, key=key, kind=row_type.kind, needed=row_type.needed, known=row_type.known)
    _check_settings(read, converter)
    return read


def plan_checked(converter: RowConverter, rows: list[dict[str, Any]]) -> tuple[Records, RecordPlan]:
    """Return the records of the first rows of a source, and the conversion of the others. As `read_checked`."""
    row_type = converter.row_type
    needed, known = row_type.needed, row_type.known
    read, plan = plan_records(converter.source, rows, key=converter.key, kind=row_type.kind, needed=needed, known=known)
    _check_settings(read, converter)
    return read, plan


def _check_settings(read: Records, converter: RowConverter) -> None:
    if converter.row_type.kind == "conversations":
        template, train_on = converter.tokenizer.template, converter.train_on
        check_form_settings(read, key=converter.key, template=template, train_on=train_on)


def check_form_settings(read: Records, *, key: str, template: str, train_on: TrainOn) -> None:
    """Raise UserError, with the keys to set, if supervised rows of this form would be misread.

    template, train_on: those of `data`.
    """
    has = {"data.template": template, "data.train_on": train_on}
    form = read.fit.form
    if form.settings and any(has[name] != value for name, value in form.settings.items()):
        fix = " and ".join(f"{name}: {value}" for name, value in form.settings.items())
        raise UserError(f"{key} is of form {form.name}, which no chat template writes: set {fix}")
    texts = [record.columns.get("messages") for record in read.items[:PROBED]]
    is_plain = all(isinstance(text, str) and not parse_list(text) for text in texts if text is not None)
    # as a user's turn, after a system prompt of the template's own; only a recipe that trains on users means that
    means_users = not isinstance(train_on, str) and "user" in train_on
    if template == "chat" and is_plain and any(texts) and not means_users:
        raise UserError(
            f"{key}: messages is plain text, which the chat template would write as the turn of a user: set "
            "data.template: plain and data.train_on: everything to train on it as it is, or name the column of the "
            f"replies, too (columns: {{{COMPLETION}: ...}})"
        )
