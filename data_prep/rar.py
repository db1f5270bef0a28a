"""Rubrics as Rewards (https://arxiv.org/abs/2507.17746): questions of science or medicine with weighted criteria.

    python -m data_prep.rar --subject Science --out data/rar/science.parquet --from downloads/train.jsonl

For `reward.function: rubric`. Pitfalls have negative weights. The reference answer is the row's answer. Without
`--from` the rows come from the hub. Not run with the hub: no network was at hand.
"""

from __future__ import annotations

from pathlib import Path

from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_prep.healthbench import make_extra
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script

HUB_ID = "anisha2102/RaR-{}"
SUBJECTS = ("Science", "Medicine")
PROMPT_FORM = "{question}"


def make(
    records: list[Record], *, subject: str = SUBJECTS[0], prompt_form: str = PROMPT_FORM
) -> tuple[list[Row], InvalidRows]:
    """Convert records with "question", "reference_answer" and "rubric" (title, description, weight)."""
    numbered = number_records(f"rar/{subject.lower()}", records)
    return filter_records(numbered, lambda row_id, record: make_row(row_id, record, prompt_form))


def make_row(row_id: str, record: Record, prompt_form: str) -> Row:
    """Convert a record. Raises InvalidRow."""
    question, answer = record.get("question"), record.get("reference_answer")
    if not isinstance(question, str) or not question.strip():
        raise InvalidRow("missing_column", "it has no question")
    messages = [{"role": "user", "content": prompt_form.format(question=question)}]
    extra = make_extra(row_id, record.get("rubric"))
    return Row(id=row_id, messages=messages, answer=str(answer or ""), extra=extra)


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.rar", __doc__, prompt_form=PROMPT_FORM, place="question")
    parser.add_argument("--subject", choices=SUBJECTS, default=SUBJECTS[0], help="default %(default)s")
    parser.add_argument("--from", type=Path, nargs="+", dest="files", default=[], help="local rows instead of the hub")
    args = parser.parse_args(argv)

    def made() -> tuple[list[Row], InvalidRows]:
        records = read_records(*args.files) if args.files else read_hub(HUB_ID.format(args.subject), "train")
        return make(records, subject=args.subject, prompt_form=args.prompt_form)

    convert(parser, args, made)


if __name__ == "__main__":
    run_script(main)
