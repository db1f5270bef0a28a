"""GSM8K (https://arxiv.org/abs/2110.14168), from the hub or from a local copy in the original format.

    python -m data_prep.gsm8k --split train --out data/gsm8k/train.parquet
    python -m data_prep.gsm8k --split test --out data/gsm8k/test.parquet --from downloads/test.jsonl

`--sft` adds the worked solution as the assistant turn.
"""

from __future__ import annotations

import re
from pathlib import Path

from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script
from rewards.gsm8k import find_answer

HUB_ID = "openai/gsm8k"
PROMPT_FORM = '{question}\nThink step by step, then give the final number after "####".'


def make(
    records: list[Record], *, split: str, prompt_form: str = PROMPT_FORM, sft: bool = False
) -> tuple[list[Row], InvalidRows]:
    """Convert records with "question" and "answer" (a solution that ends in "#### number")."""
    numbered = number_records(f"gsm8k/{split}", records)
    return filter_records(numbered, lambda row_id, record: _row(row_id, record, prompt_form, sft))


def _row(row_id: str, record: Record, prompt_form: str, sft: bool) -> Row:
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise InvalidRow("missing_column", 'it must have the texts "question" and "answer"')
    solution, mark, number = answer.rpartition("####")
    if not mark:
        raise InvalidRow("bad_answer", f'the answer {answer!r:.60} has no "####" before its number')
    if find_answer(number)[0] is None:
        raise InvalidRow("bad_answer", f'the answer {answer!r:.60} has no number after "####"')
    messages = [{"role": "user", "content": prompt_form.format(question=question)}]
    if sft:
        worked = re.sub(r"<<[^>]*>>", "", solution).strip()  # calculator annotations, such as <<3*4=12>>
        messages.append({"role": "assistant", "content": f"{worked}\n#### {number.strip()}"})
    return Row(id=row_id, messages=messages, answer=number.strip().replace(",", ""))


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.gsm8k", __doc__, prompt_form=PROMPT_FORM, place="question")
    parser.add_argument("--split", choices=["train", "test"], required=True, help="of the original")
    parser.add_argument("--from", type=Path, dest="source", help="local JSONL instead of the hub")
    parser.add_argument("--sft", action="store_true", help="end each row in the worked solution")
    args = parser.parse_args(argv)

    def made() -> tuple[list[Row], InvalidRows]:
        # "main": the hub has a second configuration, "socratic"
        records = read_records(args.source) if args.source else read_hub(HUB_ID, args.split, name="main")
        return make(records, split=args.split, prompt_form=args.prompt_form, sft=args.sft)

    convert(parser, args, made)


if __name__ == "__main__":
    run_script(main)
