r"""MM-Math (https://arxiv.org/abs/2404.05091, MIT): middle-school problems with images and solutions.

    python -m data_prep.mm_math --from downloads/MM_Math.jsonl --images downloads/Image --out data/mm_math.parquet

The original is THU-KEG/MM_Math on the hub: MM_Math.jsonl, and Image.zip with the images. Download both, and unpack the
second. An original row is {"question", "file_name", "solution", "year", "difficult", "knowledge"}. Our answer is the
content of \boxed{} in the solution, for reward.function=math_verify. Several answers are joined by commas. Difficulty,
year and knowledge are kept, so that an evaluation can be split by them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from core.types.messages import Message
from data_feeds.images.read_images import ImageReader
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_prep.images import ask_about, make_reader
from data_prep.rows import Record, Row, convert, filter_records, read_records, rows_file
from data_prep.script import check_form, run_script, whole
from driver.evaluation.suites.answers import list_boxes

PROMPT_FORM = "{problem}\nLet's think step by step and output the final answer within \\boxed{{}}."
CACHE = ("difficult", "year", "knowledge")


def make(
    records: list[Record], reader: ImageReader, *, prompt_form: str = PROMPT_FORM
) -> tuple[list[Row], InvalidRows]:
    """Convert records of the original."""
    numbered = [(f"mm_math/{i}", record) for i, record in enumerate(records)]
    return filter_records(numbered, lambda row_id, record: _row(row_id, record, reader, prompt_form))


def _row(row_id: str, record: Record, reader: ImageReader, prompt_form: str) -> Row:
    problem, solution, name = (record.get(column) for column in ("question", "solution", "file_name"))
    if not isinstance(problem, str) or not problem.strip():
        raise InvalidRow("missing_column", "it has no question")
    if not isinstance(solution, str):
        raise InvalidRow("missing_column", "it has no solution")
    if not isinstance(name, str) or not name:
        raise InvalidRow("missing_column", "it has no file_name")
    answers = list(dict.fromkeys(box.strip() for box in list_boxes(solution) if box.strip()))
    if not answers:
        raise InvalidRow("bad_answer", "its solution has no \\boxed{} with an answer")
    asked: Message = ask_about(reader.read(name, "file_name"), prompt_form.format(problem=problem.strip()))
    kept = {column: record[column] for column in CACHE if record.get(column) is not None}
    extra = json.dumps(kept, ensure_ascii=False) if kept else None
    return Row(id=row_id, messages=[asked], answer=", ".join(answers), extra=extra)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.mm_math", description="MM-Math, from its two files.")
    parser.add_argument("--out", type=rows_file, required=True, help="a name that ends in .parquet or .jsonl")
    parser.add_argument("--from", type=Path, dest="source", required=True, help="MM_Math.jsonl, also .gz")
    parser.add_argument("--images", type=Path, required=True, help="folder of the unpacked Image.zip")
    parser.add_argument("--prompt-form", default=PROMPT_FORM, help="with {problem} in it")
    parser.add_argument("--limit", type=whole(1), help="only so many rows")
    args = parser.parse_args(argv)
    check_form(parser, args.prompt_form, "problem")
    reader = make_reader(args.images)
    convert(
        parser,
        args.out,
        lambda: make(read_records(args.source), reader, prompt_form=args.prompt_form),
        limit=args.limit,
    )


if __name__ == "__main__":
    run_script(main)
