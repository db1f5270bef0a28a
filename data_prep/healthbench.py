"""HealthBench (https://arxiv.org/abs/2505.08775): conversations about health, with rubrics written by physicians.

    python -m data_prep.healthbench --out data/healthbench/rows.parquet --from downloads/oss_eval.jsonl

For `reward.function: rubric`. Criteria have points, negative ones for mistakes. `--from` reads the JSONL that the
authors publish; without it the rows come from the hub. Not run with the hub: no network was at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.types.messages import Message
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_prep.rows import Record, Row, filter_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script
from rewards.rubric_rows import read_rubric

HUB_ID = "openai/healthbench"


def make(records: list[Record]) -> tuple[list[Row], InvalidRows]:
    """Convert records with "prompt" (messages) and "rubrics" (criterion, points, tags)."""
    numbered = [(f"healthbench/{one.get('prompt_id', i)}", one) for i, one in enumerate(records)]
    return filter_records(numbered, make_row)


def make_row(row_id: str, record: Record) -> Row:
    """Convert a record. Raises InvalidRow."""
    messages, rubric = record.get("prompt"), record.get("rubrics")
    if not isinstance(messages, list) or not messages:
        raise InvalidRow("missing_column", 'it must have "prompt", a list of messages')
    return Row(id=row_id, messages=[*map(_read_turn, messages)], answer="", extra=make_extra(row_id, rubric))


def _read_turn(turn: Any) -> Message:
    if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
        raise InvalidRow("bad_messages", f"a message must have the texts role and content, found {turn!r:.60}")
    return {"role": turn["role"], "content": turn["content"]}


def make_extra(row_id: str, rubric: object) -> str:
    """Return the column extra with the rubric. Raises InvalidRow for a rubric that no judge can use."""
    try:
        read_rubric(row_id, {"rubric": rubric})
    except ValueError as error:
        raise InvalidRow("bad_extra", str(error)) from error
    return json.dumps({"rubric": rubric})


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.healthbench", __doc__)
    parser.add_argument("--from", type=Path, nargs="+", dest="files", default=[], help="local JSONL instead of the hub")
    args = parser.parse_args(argv)
    convert(parser, args, lambda: make(read_records(*args.files) if args.files else read_hub(HUB_ID, "test")))


if __name__ == "__main__":
    run_script(main)
