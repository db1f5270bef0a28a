"""Mathematics benchmarks, from the hub or from local files with the original columns.

    python -m data_prep.math_sets math500 --out data/math500.parquet
    python -m data_prep.math_sets aime26 --out data/aime26.parquet --from downloads/aime_2026.jsonl

Each benchmark is an entry of SETS, with location and column names. Answers are LaTeX or numbers, for
reward.function=math_verify. GSM8K has a separate script (data_prep/gsm8k.py). Of AMO-Bench, the rows of answer_type
`description` are invalid: their answers are prose, which its authors give to a judge (11 of 50, by its repository).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_feeds.rows.values import to_text
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script
from rewards.math_verify import read_gold

PROMPT_FORM = "{problem}\nLet's think step by step and output the final answer within \\boxed{{}}."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """Location and columns of a benchmark."""

    hub: str
    split: str
    config: str = ""
    """Configuration on the hub, if there are several."""
    problem: str = "problem"
    answer: str = "answer"
    """Column with the answer, or with a list of all expected answers."""
    extra: tuple[str, ...] = ()
    """Columns that are kept under `extra`."""
    prose: str = ""
    """Value of `answer_type` whose answers only a judge can compare."""


SETS = {
    "math500": ProblemSet(hub="HuggingFaceH4/MATH-500", split="test", extra=("subject", "level")),
    "aime24": ProblemSet(hub="HuggingFaceH4/aime_2024", split="train"),
    "aime25": ProblemSet(hub="MathArena/aime_2025", split="train"),
    "aime26": ProblemSet(hub="MathArena/aime_2026", split="train"),
    "amc23": ProblemSet(hub="math-ai/amc23", split="test", problem="question"),
    "olympiadbench": ProblemSet(
        hub="Hothan/OlympiadBench",
        config="OE_TO_maths_en_COMP",
        split="train",
        problem="question",
        answer="final_answer",
        extra=("subfield", "answer_type"),
    ),
    "minerva": ProblemSet(hub="math-ai/minervamath", split="test", problem="question"),
    "hmmt_feb25": ProblemSet(hub="MathArena/hmmt_feb_2025", split="train", extra=("problem_type",)),
    "hmmt_nov25": ProblemSet(hub="MathArena/hmmt_nov_2025", split="train", extra=("problem_type",)),
    "hmmt_feb26": ProblemSet(hub="MathArena/hmmt_feb_2026", split="train", extra=("problem_type",)),
    "brumo25": ProblemSet(hub="MathArena/brumo_2025", split="train", extra=("problem_type",)),
    "amo_bench": ProblemSet(
        hub="meituan-longcat/AMO-Bench",
        split="test",
        problem="prompt",
        extra=("answer_type",),
        prose="description",
    ),
}


def make(records: list[Record], name: str, *, prompt_form: str = PROMPT_FORM) -> tuple[list[Row], InvalidRows]:
    """Convert records of a benchmark, with the original columns."""
    numbered = number_records(name, records)
    return filter_records(numbered, lambda row_id, record: _row(row_id, record, SETS[name], prompt_form))


def _row(row_id: str, record: Record, of: ProblemSet, prompt_form: str) -> Row:
    problem = record.get(of.problem)
    if not isinstance(problem, str) or not problem.strip():
        raise InvalidRow("missing_column", f"it has no {of.problem}")
    if of.prose and record.get("answer_type") == of.prose:
        raise InvalidRow("bad_answer", f"its answer is prose (answer_type {of.prose}), which only a judge can compare")
    messages = [{"role": "user", "content": prompt_form.format(problem=problem.strip())}]
    kept = {column: _plain(record[column]) for column in of.extra if record.get(column) is not None}
    extra = json.dumps(kept, ensure_ascii=False) if kept else None
    return Row(id=row_id, messages=messages, answer=_find_answer(record.get(of.answer), of.answer), extra=extra)


def _find_answer(given: Any, column: str) -> str:
    """Return the answer as text. Several answers are separated by commas, as in a reply."""
    listed = given if isinstance(given, list) else [] if given is None else [given]
    texts = [to_text(one, "answer", "bad_answer").strip() for one in listed]
    if not any(texts):
        raise InvalidRow("missing_column", f"it has no {column}")
    return check_gold(", ".join(texts))


def check_gold(answer: str) -> str:
    """Return an answer that math-verify can read. Raises InvalidRow for another, which would pay no reply rightly."""
    try:
        # most answers are whole numbers, and the library takes milliseconds
        if not answer.isdecimal():
            read_gold(answer)
    except ValueError as error:
        raise InvalidRow("bad_answer", str(error)) from error
    return answer


def _plain(value: Any) -> Any:
    """Join a list of texts, such as problem_type, into one text."""
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def read(name: str, files: list[Path]) -> list[Record]:
    """Read records of local files (JSON, JSONL or Parquet), or else of the hub."""
    if files:
        return read_records(*files)
    of = SETS[name]
    return read_hub(of.hub, of.split, **({"name": of.config} if of.config else {}))


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.math_sets", __doc__, prompt_form=PROMPT_FORM)
    parser.add_argument("name", choices=SETS, metavar="NAME", help=", ".join(SETS))
    parser.add_argument("--from", type=Path, nargs="+", dest="files", default=[], help="local files instead of the hub")
    args = parser.parse_args(argv)
    convert(parser, args, lambda: make(read(args.name, args.files), args.name, prompt_form=args.prompt_form))


if __name__ == "__main__":
    run_script(main)
