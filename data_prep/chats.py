"""Conversations, pairs and labelled replies in any form that FeynRL recognises, from a file or the hub.

    python -m data_prep.chats --out data/chats.parquet --from downloads/chats.jsonl
    python -m data_prep.chats --out data/chats.parquet --hub OWNER/NAME --split train

docs/how_to/data_set.md lists the forms; the rows of a file may be of several. Training reads them without this script,
which writes them in our form. Nothing is lost: labels, images, tools, `train` of a turn; other columns become `extra`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from core.errors import UserError
from core.types.messages import Message
from data_feeds.images.read_images import ImageReader
from data_feeds.rows import sources
from data_feeds.rows.convert_form import convert_row
from data_feeds.rows.find_form import FormFit, Probe, find_form, list_fitting
from data_feeds.rows.forms import RowKind
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_feeds.rows.sources import read_extra
from data_feeds.rows.values import to_text
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script
from data_prep.written_turns import write_turn

KINDS: tuple[RowKind, ...] = ("pairs", "unpaired", "conversations")
COLUMNS = ("id", "messages", "answer", "tools", "image", "images")
"""Columns of ours that are written as such, or read into the messages, in rows of every kind."""
OF_KIND: dict[RowKind, tuple[str, ...]] = {"pairs": ("chosen", "rejected"), "unpaired": ("label",)}
MOST_PIXELS = 2**24


def make(
    records: list[Record], *, name: str, folder: Path | None = None, fills_gaps: bool = False
) -> tuple[list[Row], InvalidRows]:
    """Convert rows to our format. Rows without an id are numbered after `name`.

    folder: base of relative image paths. fills_gaps: the file writes null for keys that another row's object has.
    """
    images = ImageReader(folder=folder, max_pixels=MOST_PIXELS, max_pixels_key="the limit of data_prep.chats")
    make_row: Callable[[str, Record], Row] = partial(_row, images=images, fills_gaps=fills_gaps)
    return filter_records(number_records(name, records), make_row)


def _row(numbered: str, given: Record, *, images: ImageReader, fills_gaps: bool) -> Row:
    kind, fit = _find_kind(given)
    made = convert_row(fit, given)
    read = (*COLUMNS, *OF_KIND.get(kind, ()))
    columns = {name: made[name] for name in read if made.get(name) is not None}
    record = sources.Record(id=numbered, where=numbered, columns=columns, extra={}, fills_gaps=fills_gaps)
    messages = _read(record, "messages", images) if "messages" in columns else []
    replies: dict[str, str] = {}
    if kind == "pairs":
        ends = {name: _read(record, name, images, asked=messages) for name in ("chosen", "rejected")}
        # without a prompt of its own, a pair is two conversations
        messages = messages or ends["chosen"][:-1]
        replies = {name: _write_reply(turns, messages, name) for name, turns in ends.items()}
    # a policy trained on it would learn to say nothing
    if any(m["role"] == "assistant" and not m["content"].strip() and "tool_calls" not in m for m in messages):
        raise InvalidRow("empty", "an assistant turn is empty")
    own, tools = columns.get("id"), record.get_tools()
    return Row(
        id=numbered if own in (None, "") else to_text(own, "id", "bad_id"),
        messages=messages,
        answer=record.get_answer(),
        label=bool(columns["label"]) if kind == "unpaired" else None,
        tools=json.dumps(tools, ensure_ascii=False) if tools else None,
        extra=_write_extra({name: value for name, value in made.items() if name not in read and value is not None}),
        **replies,
    )


def _find_kind(record: Record) -> tuple[RowKind, FormFit]:
    """Return the kind and the form of a row. Raises InvalidRow unless exactly one form fits."""
    probe = Probe([record])
    for kind in KINDS:
        if not (found := list_fitting(kind, probe)):
            continue
        # a label of another meaning does not make a reply good or bad
        if kind == "unpaired" and record.get("label", record.get("kto_tag")) not in (0, 1):
            continue
        try:
            return kind, find_form(kind, [record], key="it", path="FILE")
        except UserError as error:
            raise InvalidRow("bad_messages" if len(found) > 1 else "missing_column", str(error)) from error
    raise InvalidRow("missing_column", f"no form fits the columns {', '.join(map(str, record))}")


def _read(
    record: sources.Record, column: str, images: ImageReader, *, asked: list[Message] | None = None
) -> list[Message]:
    """Return the messages of a column with their images; those of a reply follow the prompt `asked`."""
    messages = record.get_messages(column, text_is="user" if asked is None else "assistant")
    name, listed = record.list_images()
    if not listed and not any("parts" in message for message in messages):
        return messages
    return images.load(messages, name, listed, is_reply=bool(asked))


def _write_reply(turns: list[Message], asked: list[Message], column: str) -> str:
    """Return the reply of a pair, which follows `asked`: text, or JSON text of several turns."""
    if len(turns) > len(asked) and turns[: len(asked)] == asked:
        turns = turns[len(asked) :]
    elif turns[0]["role"] != "assistant":
        raise InvalidRow(
            "not_one_prompt", f"{column} is neither a reply nor a conversation that begins with the prompt"
        )
    if len(turns) == 1 and turns[0].keys() == {"role", "content"}:
        return turns[0]["content"]
    if any("parts" in turn for turn in turns):
        raise InvalidRow("bad_image", f"{column} holds an image of its own, which belongs to the prompt")
    return json.dumps([write_turn(turn, lambda image: None) for turn in turns], ensure_ascii=False)


def _write_extra(others: dict[str, Any]) -> str | None:
    """Return the other columns as JSON, or None if there are none."""
    whole = others | read_extra(others.pop("extra", None) or {})
    try:
        return json.dumps(whole, ensure_ascii=False) if whole else None
    except TypeError as error:
        raise InvalidRow("bad_extra", f"another column cannot be written as JSON: {error}") from error


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.chats", __doc__)
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("--from", type=Path, dest="source", help="local JSONL, JSON, also .gz, or Parquet")
    origin.add_argument("--hub", help="name of a data set on the hub")
    parser.add_argument("--split", default="train", help="of the hub's data set (default %(default)s)")
    args = parser.parse_args(argv)

    def made() -> tuple[list[Row], InvalidRows]:
        if args.source is None:
            return make(read_hub(args.hub, args.split), name=args.hub, fills_gaps=True)
        folder, fills_gaps = args.source.parent, args.source.suffix == ".parquet"
        return make(read_records(args.source), name=args.source.stem, folder=folder, fills_gaps=fills_gaps)

    convert(parser, args, made)


if __name__ == "__main__":
    run_script(main)
