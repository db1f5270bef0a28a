"""DeepScaleR mathematics (https://github.com/agentica-project/rllm, MIT): problems of AIME, AMC and MATH.

    python -m data_prep.deepscaler --out data/deepscaler/train.parquet
    python -m data_prep.deepscaler --out data/deepscaler/aime.parquet --from downloads/test/aime.json

Answers are LaTeX or numbers, for reward.function=math_verify. The hub has DeepScaleR-Preview, 40,000 problems. `--from`
reads one or several files of the original format.
"""

from __future__ import annotations

from pathlib import Path

from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_feeds.rows.values import to_text
from data_prep.math_sets import PROMPT_FORM, check_gold
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script

HUB_ID = "agentica-org/DeepScaleR-Preview-Dataset"


def make(records: dict[str, list[Record]], *, prompt_form: str = PROMPT_FORM) -> tuple[list[Row], InvalidRows]:
    """Convert records with "problem" and "answer", by file name."""
    numbered = [pair for name, of in records.items() for pair in number_records(f"deepscaler/{name}", of)]
    return filter_records(numbered, lambda row_id, record: _row(row_id, record, prompt_form))


def _row(row_id: str, record: Record, prompt_form: str) -> Row:
    problem, answer = record.get("problem"), record.get("answer")
    if not isinstance(problem, str) or not problem.strip():
        raise InvalidRow("missing_column", "it has no problem")
    text = "" if answer is None else to_text(answer, "answer", "bad_answer")  # AMC answers are floats, such as 142.0
    if not text.strip():
        raise InvalidRow("missing_column", "it has no answer")
    messages = [{"role": "user", "content": prompt_form.format(problem=problem)}]
    return Row(id=row_id, messages=messages, answer=check_gold(text.strip()))


def read(files: list[Path]) -> dict[str, list[Record]]:
    """Read records by folder and file ("test/aime"). Without files, read the data set of the hub."""
    if not files:
        return {"preview": read_hub(HUB_ID, "train")}
    return {f"{path.parent.name}/{path.stem}": read_records(path) for path in files}


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.deepscaler", __doc__, prompt_form=PROMPT_FORM)
    parser.add_argument("--from", type=Path, nargs="+", dest="files", default=[], help="local JSON instead of the hub")
    args = parser.parse_args(argv)
    convert(parser, args, lambda: make(read(args.files), prompt_form=args.prompt_form))


if __name__ == "__main__":
    run_script(main)
