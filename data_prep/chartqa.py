"""ChartQA (https://arxiv.org/abs/2203.10244, GPL-3.0): questions about images of charts.

    python -m data_prep.chartqa --split train --out data/chartqa/train.parquet
    python -m data_prep.chartqa --out data/chartqa/test.parquet --from downloads/test-00000-of-00001.parquet

An original row is {"image", "query", "label", "human_or_machine"}. The label is a list of one answer, a number or a few
words. With --sft, the answer is also the last turn. The author of the question (human or machine) is kept, so that an
evaluation can be split by it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_feeds.images.read_images import ImageReader
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_feeds.rows.values import to_text
from data_prep.images import ask_about, make_reader
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script

HUB_ID = "HuggingFaceM4/ChartQA"
PROMPT_FORM = "{question}\nAnswer with a number or a few words."
# 0 and 1 are the class labels on the hub.
ASKED_BY = {"0": "human", "1": "machine", "human": "human", "machine": "machine"}


def make(
    records: list[Record], reader: ImageReader, *, split: str, sft: bool = False, prompt_form: str = PROMPT_FORM
) -> tuple[list[Row], InvalidRows]:
    """Convert records of the original."""
    numbered = number_records(f"chartqa/{split}", records)
    return filter_records(numbered, lambda row_id, record: _row(row_id, record, reader, sft, prompt_form))


def _row(row_id: str, record: Record, reader: ImageReader, sft: bool, prompt_form: str) -> Row:
    question = record.get("query")
    if not isinstance(question, str) or not question.strip():
        raise InvalidRow("missing_column", "it has no query")
    if record.get("image") is None:
        raise InvalidRow("missing_column", "it has no image")
    answer = _find_answer(record.get("label"))
    asked = ask_about(reader.read(record["image"], "image"), prompt_form.format(question=question.strip()))
    by = ASKED_BY.get(str(record.get("human_or_machine")))
    return Row(
        id=row_id,
        messages=[asked, {"role": "assistant", "content": answer}] if sft else [asked],
        answer=answer,
        extra=None if by is None else json.dumps({"asked_by": by}),
    )


def _find_answer(given: Any) -> str:
    """Return the only answer of a label."""
    listed = given if isinstance(given, list) else [] if given is None else [given]
    texts = [to_text(one, "label", "bad_answer").strip() for one in listed]
    if len(texts) != 1 or not texts[0]:
        raise InvalidRow("bad_answer", f"label must hold one answer, found {given!r:.60}")
    return texts[0]


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.chartqa", __doc__, prompt_form=PROMPT_FORM, place="question")
    parser.add_argument("--split", default="train", choices=("train", "val", "test"), help="default %(default)s")
    parser.add_argument("--from", type=Path, nargs="+", dest="files", default=[], help="local files instead of the hub")
    parser.add_argument("--sft", action="store_true", help="with the answer as the last turn")
    args = parser.parse_args(argv)

    def made() -> tuple[list[Row], InvalidRows]:
        records = read_records(*args.files) if args.files else read_hub(HUB_ID, args.split)
        reader = make_reader(args.files[0].parent if args.files else None)
        return make(records, reader, split=args.split, sft=args.sft, prompt_form=args.prompt_form)

    convert(parser, args, made)


if __name__ == "__main__":
    run_script(main)
