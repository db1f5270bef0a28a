"""Tasks of reasoning-gym, about a hundred generators of puzzles, for `reward.function: reasoning_gym`.

    python -m data_prep.reasoning_gym --set leg_counting --size 10000 --seed 1 --out data/legs.parquet

`--settings '{"max_animals": 5}'` sets the generator's arguments, such as those of difficulty.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from core.errors import UserError, name_error
from data_feeds.rows.invalid_rows import InvalidRows
from data_prep.rows import Row
from data_prep.script import conversion_parser, convert, run_script, whole
from rewards.reasoning_gym import check_name, pack

PROMPT_FORM = "{question}\n\nThink step by step, then write the final answer between <answer> and </answer>."


def make(
    name: str, *, size: int, seed: int = 0, settings: dict[str, Any] | None = None, prompt_form: str = PROMPT_FORM
) -> list[Row]:
    """Generate rows of a data set. Raises UserError for an unknown name, or arguments that it refuses."""
    check_name(name)
    import reasoning_gym

    try:
        settings = settings or {}
        entries = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
        return [make_row(f"{name}/{seed}/{i}", name, settings, entries[i], prompt_form) for i in range(size)]
    except Exception as error:  # a border: generators raise what they like for arguments
        raise UserError(f"--set {name}: {name_error(error)}") from error


def make_row(row_id: str, name: str, settings: dict[str, Any], entry: dict[str, Any], prompt_form: str) -> Row:
    """Return an entry as a row. The answer holds all that the score needs, and the policy never sees it."""
    return Row(
        id=row_id,
        messages=[{"role": "user", "content": prompt_form.format(question=entry["question"])}],
        answer=json.dumps({"dataset": name, "settings": settings, "entry": pack(entry)}),
        extra=json.dumps({"dataset": name}),
    )


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.reasoning_gym", __doc__, prompt_form=PROMPT_FORM, place="question")
    parser.add_argument("--set", required=True, help="name of a data set, such as leg_counting")
    parser.add_argument("--size", type=whole(1), default=1000, help="number of rows (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--settings", type=read_settings, default={}, help="arguments of the data set, as JSON")
    args = parser.parse_args(argv)

    def made() -> tuple[list[Row], InvalidRows]:
        options: dict[str, Any] = {"size": args.size, "seed": args.seed, "settings": args.settings}
        return make(args.set, **options, prompt_form=args.prompt_form), InvalidRows()

    convert(parser, args, made)


def read_settings(text: str) -> dict[str, Any]:
    """Parse --settings."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"give a JSON object, found {text!r:.80}")
    return found


if __name__ == "__main__":
    run_script(main)
