"""HH-RLHF (https://arxiv.org/abs/2204.05862, MIT): pairs of conversations with human preferences.

    python -m data_prep.hh_rlhf --split train --out data/hh_rlhf/train.parquet
    python -m data_prep.hh_rlhf --split test --out data/hh_rlhf/test.parquet --from downloads/test.jsonl.gz

`messages` are the shared turns, `chosen` and `rejected` the last replies. `--subset` names a part of the hub's data set
(harmless-base, helpful-base, ...). The texts were written to provoke harm; many are offensive.
"""

from __future__ import annotations

import re
from pathlib import Path

from core.types.samples import Message
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script

HUB_ID = "Anthropic/hh-rlhf"
ROLES = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"\n\n(Human|Assistant):")


def make(records: list[Record], *, split: str) -> tuple[list[Row], InvalidRows]:
    """Convert records with two whole conversations, "chosen" and "rejected"."""
    return filter_records(number_records(f"hh_rlhf/{split}", records), _row)


def _row(row_id: str, record: Record) -> Row:
    chosen, rejected = _turns(record, "chosen"), _turns(record, "rejected")
    if chosen[:-1] != rejected[:-1]:
        raise InvalidRow("not_one_prompt", "the two conversations part before their last turn")
    if not chosen[:-1]:
        raise InvalidRow("empty", "nothing comes before the reply")
    if chosen[-1]["content"] == rejected[-1]["content"]:
        raise InvalidRow("same_reply", "chosen and rejected are the same")
    return Row(
        id=row_id, messages=chosen[:-1], answer="", chosen=chosen[-1]["content"], rejected=rejected[-1]["content"]
    )


def _turns(record: Record, column: str) -> list[Message]:
    """Parse the turns of a conversation that ends in a reply."""
    text = record.get(column)
    if not isinstance(text, str):
        raise InvalidRow("missing_column", f"it has no {column}")
    # the pattern has a group, so the roles are between the texts
    before, *parts = TURN.split(text)
    turns: list[Message] = [
        {"role": ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if before.strip() or not turns:
        raise InvalidRow("bad_messages", f"{column} does not begin with a turn of Human or Assistant: {text[:60]!r}")
    if turns[-1]["role"] != "assistant":
        raise InvalidRow("no_reply", f"{column} does not end in a turn of Assistant")
    if not turns[-1]["content"]:
        raise InvalidRow("empty", f"the last reply of {column} is empty")
    return turns


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.hh_rlhf", __doc__)
    parser.add_argument("--split", choices=["train", "test"], required=True, help="of the original")
    parser.add_argument("--subset", default="harmless-base", help="folder of the hub's data set (default %(default)s)")
    parser.add_argument("--from", type=Path, dest="source", help="local JSONL or JSONL.gz instead of the hub")
    args = parser.parse_args(argv)

    def made() -> tuple[list[Row], InvalidRows]:
        records = read_records(args.source) if args.source else read_hub(HUB_ID, args.split, data_dir=args.subset)
        return make(records, split=args.split)

    convert(parser, args, made)


if __name__ == "__main__":
    run_script(main)
