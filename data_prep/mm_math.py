r"""MM-Math (https://arxiv.org/abs/2404.05091, MIT): middle-school problems with images and solutions.

    python -m data_prep.mm_math --from downloads/MM_Math.jsonl --images downloads/Image --out data/mm_math.parquet

The original is THU-KEG/MM_Math on the hub: MM_Math.jsonl, and Image.zip with the images. Download both, and unpack the
second. An original row is {"question", "file_name", "solution", "year", "difficult", "knowledge"}. Our answer is the
content of \boxed{} in the solution, for reward.function=math_verify. Several answers are joined by commas. Difficulty,
year and knowledge are kept, so that an evaluation can be split by them.
"""

from __future__ import annotations

import json
from pathlib import Path

from core.types.messages import Message
from data_feeds.images.read_images import ImageReader
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_prep.images import ask_about, make_reader
from data_prep.math_sets import PROMPT_FORM, check_gold
from data_prep.rows import Record, Row, filter_records, number_records, read_records
from data_prep.script import conversion_parser, convert, run_script
from driver.evaluation.suites.answers import list_boxes

CACHE = ("difficult", "year", "knowledge")


def make(
    records: list[Record], reader: ImageReader, *, prompt_form: str = PROMPT_FORM
) -> tuple[list[Row], InvalidRows]:
    """Convert records of the original."""
    numbered = number_records("mm_math", records)
    return filter_records(numbered, lambda row_id, record: _row(row_id, record, reader, prompt_form))


def _row(row_id: str, record: Record, reader: ImageReader, prompt_form: str) -> Row:
    problem, solution, name = (record.get(column) for column in ("question", "solution", "file_name"))
    if not isinstance(problem, str) or not problem.strip():
        raise InvalidRow("missing_column", "it has no question")
    if not isinstance(solution, str):
        raise InvalidRow("missing_column", "it has no solution")
    if not isinstance(name, str) or not name:
        raise InvalidRow("missing_column", "it has no file_name")
    # without repetitions, but in order: a solution may box its answer twice
    answers = list(dict.fromkeys(box.strip() for box in list_boxes(solution) if box.strip()))
    if not answers:
        raise InvalidRow("bad_answer", "its solution has no \\boxed{} with an answer")
    asked: Message = ask_about(reader.read(name, "file_name"), prompt_form.format(problem=problem.strip()))
    kept = {column: record[column] for column in CACHE if record.get(column) is not None}
    extra = json.dumps(kept, ensure_ascii=False) if kept else None
    return Row(id=row_id, messages=[asked], answer=check_gold(", ".join(answers)), extra=extra)


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.mm_math", __doc__, prompt_form=PROMPT_FORM)
    parser.add_argument("--from", type=Path, dest="source", required=True, help="MM_Math.jsonl, also .gz")
    parser.add_argument("--images", type=Path, required=True, help="folder of the unpacked Image.zip")
    args = parser.parse_args(argv)
    reader = make_reader(args.images)
    convert(parser, args, lambda: make(read_records(args.source), reader, prompt_form=args.prompt_form))


if __name__ == "__main__":
    run_script(main)
