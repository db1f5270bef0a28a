"""Generated treasure games: a coin's value, and a box's letter; see rollouts/envs/treasure.py.

    python -m data_prep.treasure --out data/treasure

writes train.jsonl and eval.jsonl, and prints the return of the best policy. `--sft N` adds sft.jsonl, with whole games
of a player who knows the best move, but moves at random in a share of turns (`--by-chance`).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from data_prep.rows import Row, write_splits
from data_prep.script import run_script, share, whole
from rollouts.envs.treasure import OPEN, TAKE, best_return

COINS = (0, 9)
"""Values of a coin, in tenths: below and above that of the box."""
LETTERS = "ab"
"""Moves, and letters in a box."""


def make(*, train: int, held_out: int, sft: int = 0, by_chance: float = 0.6, seed: int = 0) -> dict[str, list[Row]]:
    """Return the splits "eval" and "train", with all games equally frequent, and "sft"."""
    rng = random.Random(seed)
    games = [(coin, letter) for coin in COINS for letter in LETTERS]
    rows = {
        split: [make_row(f"treasure/{split}/{i}", *games[i % len(games)]) for i in range(n)]
        for split, n in (("eval", held_out), ("train", train))
    }
    taught = [make_row(f"treasure/sft/{i}", *rng.choice(games)) for i in range(sft)]
    return rows | {"sft": [play(row, by_chance, rng) for row in taught]}


def make_row(name: str, coin: int, letter: str) -> Row:
    return Row(id=name, messages=[{"role": "user", "content": str(coin)}], answer=letter)


def play(row: Row, by_chance: float, rng: random.Random) -> Row:
    """Play a game with the best moves, and random moves in a share of turns."""

    def move(best: str) -> dict[str, str]:
        return {"role": "assistant", "content": rng.choice(LETTERS) if rng.random() < by_chance else best}

    coin = int(row.messages[0]["content"]) / 10
    messages = [*row.messages, move(TAKE if best_return(coin) == coin else OPEN)]
    if messages[-1]["content"] == OPEN:
        messages += [{"role": "user", "content": row.answer}, move(row.answer)]
    return Row(id=row.id, messages=messages, answer=row.answer)


def average_best(rows: list[Row]) -> float:
    """Return the average return of the best policy per game."""
    return sum(best_return(int(row.messages[0]["content"]) / 10) for row in rows) / len(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.treasure", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for eval, train and sft files")
    parser.add_argument("--train", type=whole(1), default=60, help="games for RL (default %(default)s)")
    parser.add_argument("--eval", type=whole(1), default=60, help="held-out games (default %(default)s)")
    parser.add_argument("--sft", type=whole(0), default=0, help="whole games of a player (default none)")
    parser.add_argument(
        "--by-chance", type=share, default=0.6, help="share of his moves by chance (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    splits = make(train=args.train, held_out=args.eval, sft=args.sft, by_chance=args.by_chance, seed=args.seed)
    write_splits(args.out, splits, jsonl=True)
    for split, rows in splits.items():
        if rows:
            print(f"{args.out / split}: the best policy earns {average_best(rows):.3f} per game")


if __name__ == "__main__":
    run_script(main)
