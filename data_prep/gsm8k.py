"""GSM8K (https://arxiv.org/abs/2110.14168), from the hub or from a local copy in the original format.

    python -m data_prep.gsm8k --split train --out data/gsm8k/train.parquet
    python -m data_prep.gsm8k --split test --out data/gsm8k/test.parquet --from downloads/test.jsonl

`--sft` adds the worked solution as the assistant turn.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from core.errors import UserError, first_line
from core.hub import describe_hub, prepare_hub
from core.text.text_files import parse_json, read_text
from data_feeds.rows.values import holds_lone_surrogate
from data_prep.rows import Row, rows_file, write_rows
from data_prep.script import check_form, run_script, whole

HUB_ID = "openai/gsm8k"
PROMPT_FORM = '{question}\nThink step by step, then give the final number after "####".'


def make(records: list[dict[str, str]], *, split: str, prompt_form: str = PROMPT_FORM, sft: bool = False) -> list[Row]:
    """Convert records with "question" and "answer" (a solution that ends in "#### number")."""
    return [_row(record, f"gsm8k/{split}/{i}", prompt_form, sft) for i, record in enumerate(records)]


def read_original(path: Path) -> list[dict[str, str]]:
    """Read JSONL in the original format. Raises UserError with the number of an invalid line."""
    records: list[dict[str, str]] = []
    for n, line in enumerate(read_text(path, f"--from {path}").split("\n"), start=1):
        if not line.strip():
            continue
        record = parse_json(line, f"--from {path}, line {n}")
        if not isinstance(record, dict) or not all(isinstance(record.get(k), str) for k in ("question", "answer")):
            raise UserError(f'--from {path}, line {n}: expected an object with the texts "question" and "answer"')
        if holds_lone_surrogate(record):
            raise UserError(f'--from {path}, line {n} holds half of a character (such as "\\ud800"): write it again')
        records.append(record)
    if not records:
        raise UserError(f"--from {path} has no rows")
    return records


def read_hub(split: str) -> list[dict[str, str]]:
    import pyarrow.parquet as pq
    from huggingface_hub import hf_hub_download

    prepare_hub(HUB_ID)
    try:
        file = hf_hub_download(HUB_ID, f"main/{split}-00000-of-00001.parquet", repo_type="dataset")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{HUB_ID} cannot be loaded: {first_line(error)}; {describe_hub()}; or use --from") from error
    return pq.read_table(file).to_pylist()


def _row(record: dict[str, str], row_id: str, prompt_form: str, sft: bool) -> Row:
    solution, mark, number = record["answer"].rpartition("####")
    if not mark:
        raise UserError(f'{row_id}: the answer {record["answer"]!r:.60} has no "####" before its number')
    messages = [{"role": "user", "content": prompt_form.format(question=record["question"])}]
    if sft:
        worked = re.sub(r"<<[^>]*>>", "", solution).strip()  # calculator annotations, such as <<3*4=12>>
        messages.append({"role": "assistant", "content": f"{worked}\n#### {number.strip()}"})
    return Row(id=row_id, messages=messages, answer=number.strip().replace(",", ""))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.gsm8k", description=__doc__.split("\n")[0])
    parser.add_argument("--split", choices=["train", "test"], required=True)
    parser.add_argument("--out", type=rows_file, required=True, help="a name that ends in .parquet or .jsonl")
    parser.add_argument("--from", type=Path, dest="source", help="local JSONL instead of the hub")
    parser.add_argument("--prompt-form", default=PROMPT_FORM, help="with {question} in it")
    parser.add_argument("--sft", action="store_true", help="end each row in the worked solution")
    parser.add_argument("--limit", type=whole(1), help="only so many rows")
    args = parser.parse_args(argv)
    if args.source and not args.source.is_file():
        parser.error(f"--from {args.source}: there is no such file")
    check_form(parser, args.prompt_form, "question")
    records = read_original(args.source) if args.source else read_hub(args.split)
    rows = make(records[: args.limit], split=args.split, prompt_form=args.prompt_form, sft=args.sft)
    write_rows(args.out, rows)


if __name__ == "__main__":
    run_script(main)
