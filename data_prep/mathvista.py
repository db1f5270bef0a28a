r"""MathVista (https://arxiv.org/abs/2310.02255, CC BY-SA 4.0): mathematics about images, for evaluation.

    python -m data_prep.mathvista --out data/mathvista/testmini.parquet
    python -m data_prep.mathvista --out data/mathvista/testmini.parquet --from downloads/testmini-00000-of-00001.parquet

The rows are those of testmini in AI4Math/MathVista on the hub; the answers of its test are not public, as its card
says. The card names the columns pid, question, image, decoded_image, choices, unit, precision, answer, question_type,
answer_type, query (the question with its hint and choices) and metadata (task, category, grade, language, source and
others). The rows are for reward.function=mathvista; an evaluation can be split by task, category, question_type and
answer_type.
"""

from __future__ import annotations

import json
from pathlib import Path

from data_feeds.images.read_images import ImageReader
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_feeds.rows.values import to_text
from data_prep.images import ask_about, make_reader
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script

HUB_ID = "AI4Math/MathVista"
PROMPT_FORM = "{query}\nPut the answer in \\boxed{{}}."
ANSWER_TYPES = ("text", "integer", "float", "list")
SPLIT = "testmini"
METADATA = ("task", "category")


def make(
    records: list[Record], reader: ImageReader, *, prompt_form: str = PROMPT_FORM
) -> tuple[list[Row], InvalidRows]:
    """Convert records of the original."""
    numbered = number_records(f"mathvista/{SPLIT}", records)
    return filter_records(numbered, lambda row_id, record: _row(row_id, record, reader, prompt_form))


def _row(row_id: str, record: Record, reader: ImageReader, prompt_form: str) -> Row:
    query, image = record.get("query"), record.get("decoded_image")
    if not isinstance(query, str) or not query.strip():
        raise InvalidRow("missing_column", "it has no query")
    if image is None:
        raise InvalidRow("missing_column", "it has no decoded_image")
    answer = "" if record.get("answer") is None else to_text(record["answer"], "answer", "bad_answer").strip()
    kind, choices = record.get("answer_type"), record.get("choices")
    kept = {"question_type": record.get("question_type"), "answer_type": kind}
    if not answer or kind not in ANSWER_TYPES:
        raise InvalidRow(
            "bad_answer", f"it has no answer, or an unknown answer_type {kind!r}: use the rows of testmini"
        )
    if kept["question_type"] == "multi_choice":
        if not choices or answer not in choices:
            raise InvalidRow("bad_answer", f"its answer {answer!r:.60} is none of its choices")
        kept["choices"] = choices
    elif kind == "float":
        if not isinstance(record.get("precision"), float | int):
            raise InvalidRow("missing_column", "its answer_type is float, and it has no precision")
        kept["precision"] = int(record["precision"])
    metadata = record.get("metadata") or {}
    kept |= {name: metadata[name] for name in METADATA if metadata.get(name) is not None}
    asked = ask_about(reader.read(image, "decoded_image"), prompt_form.format(query=query.strip()))
    return Row(id=row_id, messages=[asked], answer=answer, extra=json.dumps(kept, ensure_ascii=False))


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.mathvista", __doc__, prompt_form=PROMPT_FORM, place="query")
    parser.add_argument("--from", type=Path, nargs="+", dest="files", default=[], help="local files instead of the hub")
    args = parser.parse_args(argv)

    def made() -> tuple[list[Row], InvalidRows]:
        records = read_records(*args.files) if args.files else read_hub(HUB_ID, SPLIT)
        reader = make_reader(args.files[0].parent if args.files else None)
        return make(records, reader, prompt_form=args.prompt_form)

    convert(parser, args, made)


if __name__ == "__main__":
    run_script(main)
