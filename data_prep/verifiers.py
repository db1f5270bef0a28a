"""Prompts of an environment of verifiers, for rollouts/agents/verifiers_agent.py.

    python -m data_prep.verifiers --env my-taskset --python .venv-verifiers/bin/python --out data/mine.jsonl

The environment's package is installed beside verifiers, in another environment, and runs there.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from core.errors import UserError
from data_feeds.rows.invalid_rows import InvalidRows
from data_prep.rows import Row
from data_prep.script import conversion_parser, convert, run_script

AGENT = Path(__file__).resolve().parent.parent / "rollouts/agents/verifiers_agent.py"


def make(env: str, python: str) -> list[Row]:
    """Return the tasks of an environment as rows. Raises UserError if that Python cannot list them."""
    try:
        done = subprocess.run([python, str(AGENT), "rows", env], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"--python {python}: {error.strerror or error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it says nothing"]
        raise UserError(f"--env {env}: {python} cannot list its tasks: {said[-1]:.300}")
    tasks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [
        Row(
            id=f"{env}/{task['idx']}",
            messages=task["messages"],
            answer="",  # the environment knows it
            extra=json.dumps({"idx": task["idx"]}),
        )
        for task in tasks
    ]


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.verifiers", __doc__)
    parser.add_argument("--env", required=True, help="name of the taskset, or of a package that has one")
    parser.add_argument("--python", required=True, help="the Python that has verifiers")
    args = parser.parse_args(argv)
    convert(parser, args, lambda: (make(args.env, args.python), InvalidRows()))


if __name__ == "__main__":
    run_script(main)
