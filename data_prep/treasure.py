"""Generated treasure games: a coin's value, and a box's letter; see rollouts/envs/treasure.py.

    python -m data_prep.treasure --out data/treasure

writes train.jsonl and eval.jsonl, and prints the return of the best policy. `--sft N` adds sft.jsonl, with whole games.
Their player knows the best move, but moves at random in a share of turns (`--by-chance`).
"""

from __future__ import annotations

import random
from dataclasses import replace

from data_prep.rows import Row
from data_prep.script import read_options, run_script, share, task_parser, write_task
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
    # floats may be compared here, since max() returns one of its arguments unchanged
    messages = [*row.messages, move(TAKE if best_return(coin) == coin else OPEN)]
    if messages[-1]["content"] == OPEN:
        messages += [{"role": "user", "content": row.answer}, move(row.answer)]
    return replace(row, messages=messages)


def average_best(rows: list[Row]) -> float:
    """Return the average return of the best policy per game."""
    return sum(best_return(int(row.messages[0]["content"]) / 10) for row in rows) / len(rows)


def main(argv: list[str] | None = None) -> None:
    parser = task_parser("data_prep.treasure", __doc__, train=60, held_out=60, rows="games", least=1)
    parser.add_argument(
        "--by-chance", type=share, default=0.6, help="share of the player's moves by chance (default %(default)s)"
    )
    options = read_options(parser, argv)
    for split, rows in write_task(parser, make, jsonl=True, **options).items():
        if rows:
            print(f"{options['out'] / split}: the best policy earns {average_best(rows):.3f} per game")


if __name__ == "__main__":
    run_script(main)
