"""Dolci, OLMo 3's post-training mixture (https://arxiv.org/abs/2512.13961): prompts for reinforcement learning.

    python -m data_prep.dolci --out data/dolci/math.parquet
    python -m data_prep.dolci --verifier general-quality_ref --out data/dolci/chat.parquet --from downloads/0.parquet

The hub has allenai/Dolci-Instruct-RL. Its card (README.md at e3ea402) lists prompt (text), source_prompt (turns with
content and role), ground_truth and dataset (lists of text), original_dataset (text), and others; no row was seen. The
names of verifiers are those of open-instruct's code. `dataset` names the verifier of a row, and --verifier takes the
rows of one: `math` for reward.function=math_verify, general-quality_ref for reward.function=judge, with the reference
reply as the answer. Rows of other verifiers (code, instructions) are left out, because no reward here reads their
ground truth. How `prompt` writes several turns could not be seen. One that begins with "user:" and has no source_prompt
is taken as one turn, and is invalid if another role's mark follows.

Dolci-Instruct-SFT and Dolci-Instruct-DPO need no script: their `messages`, `chosen` and `rejected` are recognised as
they are (path: hub:allenai/Dolci-Instruct-SFT).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from core.types.messages import Message
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_prep.math_sets import check_gold
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script

HUB_ID = "allenai/Dolci-Instruct-RL"
VERIFIERS = ("math", "general-quality_ref")
ROLES = ("system", "user", "assistant")
BEGINS = re.compile(r"\s*user\s*:\s*")
NEXT_TURN = re.compile(r"^(?:user|assistant|system)\s*:", re.MULTILINE)


def make(records: list[Record], *, verifier: str) -> tuple[list[Row], InvalidRows]:
    """Convert the records of one verifier; a record's number counts all."""
    numbered = [
        (row_id, record)
        for row_id, record in number_records("dolci", records)
        if list_texts(record.get("dataset")) == [verifier]
    ]
    return filter_records(numbered, lambda row_id, record: _row(row_id, record, verifier))


def _row(row_id: str, record: Record, verifier: str) -> Row:
    answers = list_texts(record.get("ground_truth"))
    if len(answers) != 1 or not answers[0].strip():
        raise InvalidRow("bad_answer", f"ground_truth must hold one text, found {record.get('ground_truth')!r:.60}")
    answer = check_gold(answers[0].strip()) if verifier == "math" else answers[0].strip()
    origin = record.get("original_dataset")
    extra = json.dumps({"original_dataset": origin}, ensure_ascii=False) if isinstance(origin, str) else None
    return Row(id=row_id, messages=read_turns(record), answer=answer, extra=extra)


def list_texts(given: Any) -> list[str]:
    """Return a column as a list; text is a list of one (such a version of the data was not seen)."""
    listed = given if isinstance(given, list) else [] if given is None else [given]
    return [text for text in listed if isinstance(text, str)]


def read_turns(record: Record) -> list[Message]:
    """Return the turns of the prompt. Raises InvalidRow unless they end with the user's."""
    turns = record.get("source_prompt")
    if turns:
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise InvalidRow("bad_messages", "its source_prompt is not a list of turns")
        messages: list[Message] = [{"role": turn.get("role"), "content": turn.get("content")} for turn in turns]
        if messages[-1]["role"] != "user" or any(m["role"] not in ROLES or not m["content"] for m in messages):
            raise InvalidRow("bad_messages", "its source_prompt ends with no turn of the user's, or one is empty")
        return messages
    text = record.get("prompt")
    if not isinstance(text, str) or not (asked := BEGINS.sub("", text, count=1).strip()):
        raise InvalidRow("missing_column", "it has neither prompt nor source_prompt")
    if NEXT_TURN.search(asked):
        raise InvalidRow("bad_messages", "its prompt has several turns, and no source_prompt")
    return [{"role": "user", "content": asked}]


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.dolci", __doc__)
    parser.add_argument("--verifier", default="math", choices=VERIFIERS, help="default %(default)s")
    parser.add_argument("--from", type=Path, nargs="+", dest="files", default=[], help="local files instead of the hub")
    args = parser.parse_args(argv)
    convert(
        parser,
        args,
        lambda: make(read_records(*args.files) if args.files else read_hub(HUB_ID, "train"), verifier=args.verifier),
    )


if __name__ == "__main__":
    run_script(main)
