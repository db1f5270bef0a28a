"""Conversations in common formats, from JSONL or the hub.

    python -m data_prep.chats --out data/chats.parquet --from downloads/chats.jsonl
    python -m data_prep.chats --out data/chats.parquet --hub OWNER/NAME --split train

A row is {"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]} (ShareGPT), or {"prompt"} with
{"completion"} or {"response"}, each text or messages. "system" becomes the first turn. "id" and "answer" are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.types.samples import Message
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_feeds.rows.values import to_text
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script

ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant", "tool")}
"""Role names of other formats -> our roles."""
REPLIES = ("completion", "response")
CACHE = {"id", "answer", "system", "messages", "conversations", "prompt", *REPLIES}


def make(records: list[Record], *, name: str) -> tuple[list[Row], InvalidRows]:
    """Convert rows to our format. Rows without an id are numbered after `name`."""
    return filter_records(number_records(name, records), _row)


def not_kept(records: list[Record]) -> list[str]:
    """Return the columns that our format lacks."""
    return sorted({name for record in records for name in record} - CACHE)


def _row(numbered: str, record: Record) -> Row:
    own = record.get("id")
    row_id = numbered if own is None or own == "" else to_text(own, "id", "bad_id")
    messages = _turns(record)
    if system := record.get("system"):
        messages = [*_messages(system, "system", text_is="system"), *messages]
    # a policy trained on it would learn to say nothing
    if any(m["role"] == "assistant" and not m["content"].strip() for m in messages):
        raise InvalidRow("empty", "an assistant turn is empty")
    answer = record.get("answer")
    return Row(id=row_id, messages=messages, answer="" if answer is None else to_text(answer, "answer", "bad_answer"))


def _turns(record: Record) -> list[Message]:
    """Return the messages of a row, in any known format."""
    whole = [column for column in ("messages", "conversations") if record.get(column)]
    if len(whole) > 1 or (whole and record.get("prompt")):
        raise InvalidRow("bad_messages", f"it is written in two forms at once: {', '.join([*whole, 'prompt'][:2])}")
    if whole:
        return _messages(record[whole[0]], whole[0], text_is="user")
    replies = [column for column in REPLIES if record.get(column)]
    if not record.get("prompt") or len(replies) != 1:
        raise InvalidRow(
            "missing_column", "it has neither messages nor conversations, nor prompt and one of completion and response"
        )
    asked = _messages(record["prompt"], "prompt", text_is="user")
    return [*asked, *_messages(record[replies[0]], replies[0], text_is="assistant")]


def _messages(given: Any, column: str, *, text_is: str) -> list[Message]:
    if isinstance(given, str):
        return [{"role": text_is, "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRow("bad_messages", f"{column} must be text or a list of turns, found {given!r:.60}")
    return [_message(turn, column) for turn in given]


def _message(turn: Any, column: str) -> Message:
    who, said = ("from", "value") if isinstance(turn, dict) and "from" in turn else ("role", "content")
    if not isinstance(turn, dict) or not isinstance(turn.get(said), str) or turn.get(who) not in ROLES:
        raise InvalidRow(
            "bad_messages", f"a turn of {column} must have a {who} of {', '.join(ROLES)} and text, found {turn!r:.60}"
        )
    # Parquet gives every turn all keys, so an empty one is no loss
    if lost := {name for name, value in turn.items() if name not in (who, said) and value is not None}:
        raise InvalidRow("bad_messages", f"a turn of {column} holds {min(lost)!r}, which no template would be shown")
    return {"role": ROLES[turn[who]], "content": turn[said]}


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.chats", __doc__)
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("--from", type=Path, dest="source", help="local JSONL, JSON, also .gz, or Parquet")
    origin.add_argument("--hub", help="name of a data set on the hub")
    parser.add_argument("--split", default="train", help="of the hub's data set (default %(default)s)")
    args = parser.parse_args(argv)

    def made() -> tuple[list[Row], InvalidRows]:
        records = read_records(args.source) if args.source else read_hub(args.hub, args.split)
        if lost := not_kept(records):
            print(f"not kept: {', '.join(lost)}")
        return make(records, name=args.source.stem if args.source else args.hub)

    convert(parser, args, made)


if __name__ == "__main__":
    run_script(main)
