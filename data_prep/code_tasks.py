"""Generated programming tasks: tiny Python functions with tests. No two files share a task.

    python -m data_prep.code_tasks --out data/code --train 300 --eval 100

writes train.parquet and eval.parquet. `--sft N` adds sft.parquet, with rows that end in an assistant turn. A task is a
sentence such as "plus 3 times 4", with the answer "f=lambda x:(x+3)*4". The tests, in the column `extra`, are calls of
f (`reward.function: code`). `--wrong-share 0.6` makes the teacher careless: in that share of rows, one number or
operation is wrong. A model trained on it is right about as often as the teacher. Reinforcement learning can improve
such a policy at once.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product

from data_prep.rows import Row
from data_prep.script import read_options, run_script, share, task_parser, whole, write_task

OPERATIONS = {"plus": "+", "minus": "-", "times": "*"}
# With 0 or 1, a step such as times 1 would do nothing.
DIGITS = range(2, 10)
INPUTS = (0, 1, 5, 11)
"""Test inputs. Tasks that differ in one step differ on at least one of these inputs."""
Step = tuple[str, int]
"""Operation and number, such as ("plus", 3)."""


def make(
    *, steps: int, train: int, held_out: int, sft: int = 0, copies: int = 1, wrong_share: float = 0.0, seed: int = 0
) -> dict[str, list[Row]]:
    """Draw the splits "eval", "train" and "sft", in this order, so that eval depends only on the seed.

    `sft` counts tasks, with `copies` rows each, which differ in the teacher's errors. Raises ValueError if there are
    too few tasks.
    """
    rng = random.Random(seed)
    tasks = list(product(product(OPERATIONS, DIGITS), repeat=steps))
    if train + held_out + sft > len(tasks):
        raise ValueError(f"{train + held_out + sft} tasks were asked for, there are {len(tasks)}; raise --steps")
    # shuffled once and then cut, so that no two splits share a task
    rng.shuffle(tasks)
    to_learn = [task for task in tasks[held_out + train : held_out + train + sft] for _ in range(copies)]
    # the copies of a task would otherwise lie side by side in the file
    rng.shuffle(to_learn)
    splits = {"eval": tasks[:held_out], "train": tasks[held_out : held_out + train], "sft": to_learn}
    rows = {split: [_make_row(split, i, task) for i, task in enumerate(chosen)] for split, chosen in splits.items()}
    taught = [_add_reply(row, task, wrong_share, rng) for row, task in zip(rows["sft"], to_learn, strict=True)]
    return rows | {"sft": taught}


def write_code(task: tuple[Step, ...]) -> str:
    """Return the right answer of a task.

    >>> write_code((("plus", 3), ("times", 4)))
    'f=lambda x:(x+3)*4'
    """
    code = "x"
    for i, (operation, number) in enumerate(task):
        code = f"({code})" if i else code
        code += f"{OPERATIONS[operation]}{number}"
    return f"f=lambda x:{code}"


def write_tests(task: tuple[Step, ...]) -> list[str]:
    """Return the tests of a task.

    >>> write_tests((("plus", 3), ("times", 4)))[1]
    'assert f(1) == 16'
    """
    return [f"assert f({x}) == {compute_value(task, x)}" for x in INPUTS]


def compute_value(task: tuple[Step, ...], x: int) -> int:
    """Return the value of the task's function."""
    for operation, number in task:
        x = {"plus": x + number, "minus": x - number, "times": x * number}[operation]
    return x


def _make_row(split: str, i: int, task: tuple[Step, ...]) -> Row:
    words = " ".join(f"{operation} {number}" for operation, number in task)
    messages = [{"role": "user", "content": words}]
    extra = json.dumps({"tests": write_tests(task)})
    return Row(id=f"code/{split}/{i}", messages=messages, answer=write_code(task), extra=extra)


def _add_reply(row: Row, task: tuple[Step, ...], wrong_share: float, rng: random.Random) -> Row:
    said = task
    if rng.random() < wrong_share:
        at = rng.randrange(len(task))
        operation, number = task[at]
        if rng.random() < 0.5:
            operation = rng.choice([other for other in OPERATIONS if other != operation])
        else:
            number = rng.choice([other for other in DIGITS if other != number])
        said = (*task[:at], (operation, number), *task[at + 1 :])
    reply = {"role": "assistant", "content": write_code(said)}
    return replace(row, messages=[*row.messages, reply])


def main(argv: list[str] | None = None) -> None:
    parser = task_parser("data_prep.code_tasks", __doc__, train=300, held_out=100, rows="tasks")
    parser.add_argument("--jsonl", action="store_true", help="write JSONL instead of Parquet")
    parser.add_argument("--steps", type=whole(1), default=2, help="operations of a task (default %(default)s)")
    parser.add_argument("--copies", type=whole(1), default=1, help="SFT rows per task (default %(default)s)")
    parser.add_argument("--wrong-share", type=share, default=0.0, help="share of SFT rows with one wrong part")
    write_task(parser, make, **read_options(parser, argv))


if __name__ == "__main__":
    run_script(main)
