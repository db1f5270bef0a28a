"""Generated arithmetic problems: no two files share one, not even with swapped operands (12+34 and 34+12).

    python -m data_prep.arithmetic --out data/arithmetic --train 1000 --eval 200

writes train.parquet and eval.parquet. `--sft N` adds sft.parquet, with rows that end in an assistant turn.
`--wrong-share 0.6` makes the teacher careless: in that share of rows, one digit of the answer is wrong. A model trained
on it is right about as often as the teacher, everywhere alike, with the right answer as the mode. Reinforcement
learning can improve such a policy at once.

`--pairs N` adds two files of the same N problems for preference learning: pairs.parquet with a right and a wrong reply
to each, and labelled.parquet with both replies as rows of their own, labelled true and false. `--copies K` writes K
rows of each problem of these files and of sft.parquet, with wrong replies drawn anew.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

from data_prep.rows import Row
from data_prep.script import form_of, read_options, run_script, share, task_parser, whole, write_task

COMMUTATIVE = "+*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Kinds of problems, and their format."""

    ops: str = "+"
    """Some of + - *, drawn equally often."""
    largest: int = 99
    """Largest operand. The smallest is 0."""
    padded: bool = False
    """Pad operands and answers with leading zeros to the number of digits of the largest."""
    prompt_form: str = "{a}{op}{b}="

    def question(self, a: int, op: str, b: int) -> str:
        width = len(str(self.largest)) if self.padded else 1
        return self.prompt_form.format(a=f"{a:0{width}d}", op=op, b=f"{b:0{width}d}")

    def answer(self, a: int, op: str, b: int) -> str:
        # the largest absolute value of an answer, which for a difference is largest - 0
        largest = _value(self.largest, op, 0 if op == "-" else self.largest)
        value = _value(a, op, b)
        digits = str(abs(value)).zfill(len(str(largest)) if self.padded else 1)
        return f"-{digits}" if value < 0 else digits

    def problems(self, count: int, rng: random.Random) -> list[tuple[int, str, int]]:
        """Draw `count` different problems. Raises ValueError if there are too few."""
        n = self.largest + 1
        # n (n + 1) / 2 pairs without order, n^2 with order
        there_are = sum(n * (n + 1) // 2 if op in COMMUTATIVE else n * n for op in self.ops)
        if count > there_are:
            raise ValueError(f"{count} problems were asked for, there are {there_are}; raise --max or add --ops")
        drawn: dict[tuple[int, str, int], tuple[int, str, int]] = {}
        while len(drawn) < count:
            a, op, b = rng.randrange(n), rng.choice(self.ops), rng.randrange(n)
            # the key ignores the order of operands where it does not matter, so a held-out sum is never trained on
            # swapped
            drawn.setdefault((min(a, b), op, max(a, b)) if op in COMMUTATIVE else (a, op, b), (a, op, b))
        return list(drawn.values())


def make(
    task: Task,
    *,
    train: int,
    held_out: int,
    sft: int = 0,
    pairs: int = 0,
    copies: int = 1,
    wrong_share: float = 0.0,
    seed: int = 0,
) -> dict[str, list[Row]]:
    """Draw the splits "eval", "train", "sft", "pairs" and "labelled", in this order.

    So eval depends only on the seed. `sft` counts problems, with `copies` rows each, which differ in the order of
    operands and in the teacher's errors. `pairs` counts the problems of "pairs" and "labelled", with `copies` pairs
    each, side by side, which differ in the wrong reply.
    """
    rng = random.Random(seed)
    # drawn together, so that no two splits share a problem
    problems = task.problems(held_out + train + sft + pairs, rng)
    compared = problems[held_out + train + sft :]
    to_learn = [_turned(problem, rng) for problem in problems[held_out + train :][:sft] for _ in range(copies)]
    # the copies of a problem would otherwise lie side by side in the file
    rng.shuffle(to_learn)
    splits = {"eval": problems[:held_out], "train": problems[held_out : held_out + train], "sft": to_learn}
    rows = {split: [_row(task, split, i, p) for i, p in enumerate(ps)] for split, ps in splits.items()}
    rows["sft"] = [_taught(row, wrong_share, rng) for row in rows["sft"]]
    if not pairs:
        return rows
    repeated = [problem for problem in compared for _ in range(copies)]
    asked = [_row(task, "pairs", i, problem) for i, problem in enumerate(repeated)]
    wrong = [_with_wrong_digit(row.answer, rng) for row in asked]
    rows["pairs"] = [replace(row, chosen=row.answer, rejected=bad) for row, bad in zip(asked, wrong, strict=True)]
    rows["labelled"] = [one for row, bad in zip(asked, wrong, strict=True) for one in _labelled(row, bad)]
    return rows


def _value(a: int, op: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def _turned(problem: tuple[int, str, int], rng: random.Random) -> tuple[int, str, int]:
    a, op, b = problem
    # both orders are the same problem, so no other split has the swapped one
    return (b, op, a) if op in COMMUTATIVE and rng.random() < 0.5 else problem


def _row(task: Task, split: str, i: int, problem: tuple[int, str, int]) -> Row:
    messages = [{"role": "user", "content": task.question(*problem)}]
    return Row(id=f"arithmetic/{split}/{i}", messages=messages, answer=task.answer(*problem))


def _taught(row: Row, wrong_share: float, rng: random.Random) -> Row:
    said = _with_wrong_digit(row.answer, rng) if rng.random() < wrong_share else row.answer
    return _replied(row, said)


def _labelled(row: Row, wrong: str) -> tuple[Row, Row]:
    """Return the row with the right reply, labelled true, and with a wrong one, labelled false."""
    right = replace(_replied(row, row.answer), id=f"{row.id}/right", label=True)
    return right, replace(_replied(row, wrong), id=f"{row.id}/wrong", label=False)


def _replied(row: Row, reply: str) -> Row:
    return replace(row, messages=[*row.messages, {"role": "assistant", "content": reply}])


def _with_wrong_digit(answer: str, rng: random.Random) -> str:
    said = list(answer)
    at = rng.choice([i for i, char in enumerate(said) if char.isdigit()])
    said[at] = rng.choice([d for d in "0123456789" if d != said[at]])
    return "".join(said)


def main(argv: list[str] | None = None) -> None:
    parser = task_parser("data_prep.arithmetic", __doc__, train=1000, held_out=200, rows="problems")
    parser.add_argument("--jsonl", action="store_true", help="write JSONL instead of Parquet")
    parser.add_argument("--ops", default="+", help="some of +-* (default %(default)s)")
    parser.add_argument("--max", type=whole(0), default=99, help="largest operand (default %(default)s)")
    parser.add_argument("--padded", action="store_true", help="leading zeros, all numbers equally long")
    parser.add_argument(
        "--prompt-form", type=form_of("a", "op", "b"), default="{a}{op}{b}=", help="default %(default)s"
    )
    parser.add_argument(
        "--copies", type=whole(1), default=1, help="rows per problem of --sft and --pairs (default %(default)s)"
    )
    parser.add_argument("--pairs", type=whole(0), default=0, help="problems for preferences (default none)")
    parser.add_argument("--wrong-share", type=share, default=0.0, help="share of SFT rows with one wrong digit")
    options = read_options(parser, argv)
    ops = options.pop("ops")
    if not ops or set(ops) - set("+-*") or len(set(ops)) < len(ops):
        parser.error(f"--ops {ops!r}: give some of + - *, each once")
    form, padded = options.pop("prompt_form"), options.pop("padded")
    task = Task(ops=ops, largest=options.pop("max"), padded=padded, prompt_form=form)
    write_task(parser, partial(make, task), **options)


if __name__ == "__main__":
    run_script(main)
