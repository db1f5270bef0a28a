"""The treasure game, generated: what a coin is worth, and what a box holds; see rollouts/envs/treasure.py.

    python -m data_prep.treasure --out data/treasure

writes train.jsonl and eval.jsonl, and tells what the best policy earns on them; `--sft N` adds sft.jsonl, whose rows
are whole games of a player who moves by chance.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from data_prep.rows import Row, write_rows
from data_prep.script import run_script, whole
from rollouts.envs.treasure import OPEN, TAKE, best_return

COINS = (0, 9)
"""Worth of a coin, in tenths: less and more than the box."""
LETTERS = "ab"


def make(*, train: int, held_out: int, sft: int = 0, seed: int = 0) -> dict[str, list[Row]]:
    """Return the splits "eval" and "train", in which every game is equally frequent, and "sft"."""
    rng = random.Random(seed)
    games = [(coin, letter) for coin in COINS for letter in LETTERS]
    rows = {
        split: [make_row(f"treasure/{split}/{i}", *games[i % len(games)]) for i in range(n)]
        for split, n in (("eval", held_out), ("train", train))
    }
    return rows | {"sft": [play(make_row(f"treasure/sft/{i}", *rng.choice(games)), rng) for i in range(sft)]}


def make_row(name: str, coin: int, letter: str) -> Row:
    return Row(id=name, messages=[{"role": "user", "content": str(coin)}], answer=letter)


def play(row: Row, rng: random.Random) -> Row:
    """Return the game as it goes for a player who moves by chance."""
    messages = [*row.messages, {"role": "assistant", "content": rng.choice([TAKE, OPEN])}]
    if messages[-1]["content"] == OPEN:
        messages += [{"role": "user", "content": row.answer}, {"role": "assistant", "content": rng.choice(LETTERS)}]
    return Row(id=row.id, messages=messages, answer=row.answer)


def average_best(rows: list[Row]) -> float:
    """Return what the best policy earns per game."""
    return sum(best_return(int(row.messages[0]["content"]) / 10) for row in rows) / len(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.treasure", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for eval, train and sft files")
    parser.add_argument("--train", type=whole(1), default=60, help="games for RL (default %(default)s)")
    parser.add_argument("--eval", type=whole(1), default=60, help="held-out games (default %(default)s)")
    parser.add_argument("--sft", type=whole(0), default=0, help="games of a player by chance (default none)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for split, rows in make(train=args.train, held_out=args.eval, sft=args.sft, seed=args.seed).items():
        if rows:
            write_rows(args.out / f"{split}.jsonl", rows)
            print(f"{args.out / split}: the best policy earns {average_best(rows):.3f} per game")


if __name__ == "__main__":
    run_script(main)
