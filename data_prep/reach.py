"""Generated images of an arm and a dot: start positions for reinforcement learning, and an expert's games.

    python -m data_prep.reach --out data/reach --sft 2000

writes train.parquet and eval.parquet with start positions, and sft.parquet with whole games. The expert computes the
angles, and in a share of moves (`--by-chance`) picks random ones. rollouts/envs/reach.py has the rules.
"""

from __future__ import annotations

import json
import math
import random

from core.types.action_tokens import write_action_tokens
from core.types.messages import Message
from data_prep.rows import Row
from data_prep.script import read_options, run_script, share, task_parser, write_task
from rollouts.envs.reach import BINS, HIGH, LINKS, LOW, SIDE, Arm, Pair, name_angles, read_angles, wrap

MOVES = 3
"""Maximum number of moves per game: rollout.max_turns of the recipe."""
DIGITS = 4
"""Decimals of a number in a row."""


def make(*, train: int, held_out: int, sft: int = 0, by_chance: float = 0.0, seed: int = 0) -> dict[str, list[Row]]:
    """Return the splits "eval", "train" and "sft", in this order, so that eval depends only on the seed."""
    rng = random.Random(seed)
    rows: dict[str, list[Row]] = {}
    for split, count in (("eval", held_out), ("train", train), ("sft", sft)):
        arms = [draw_arm(rng) for _ in range(count)]
        games = [play(arm, by_chance, rng) if split == "sft" else [arm.show()] for arm in arms]
        rows[split] = [
            Row(id=f"reach/{split}/{i}", messages=game, answer="", extra=json.dumps({"arm": describe(arm)}))
            for i, (arm, game) in enumerate(zip(arms, games, strict=True))
        ]
    return rows


def draw_arm(rng: random.Random) -> Arm:
    """Draw a posture, and an unreached dot that the expert reaches in time."""
    while True:
        angles, wanted = ((rng.uniform(LOW[0], HIGH[0]), rng.uniform(LOW[1], HIGH[1])) for _ in range(2))
        # the tip of another posture, so that the dot is within reach
        dot = Arm(angles=wanted, dot=(0.0, 0.0)).joints[-1]
        # rounded before the check, since the row stores these numbers
        arm = Arm(
            angles=(round(angles[0], DIGITS), round(angles[1], DIGITS)),
            dot=(round(dot[0], DIGITS), round(dot[1], DIGITS)),
        )
        if not arm.is_there and count_moves(arm) is not None:
            return arm


def describe(arm: Arm) -> dict[str, list[float]]:
    return {"angles": [*arm.angles], "dot": [*arm.dot]}


def find_angles(dot: Pair) -> Pair:
    """Return the angles that bring the tip to the dot, or as close as the links allow.

    Inverse kinematics of two links, by the law of cosines; angles in radians.
    """
    x, y = dot[0] - SIDE / 2, dot[1] - SIDE / 2
    upper, fore = LINKS
    # law of cosines: |dot|^2 = upper^2 + fore^2 + 2 upper fore cos(elbow)
    cosine = (x * x + y * y - upper * upper - fore * fore) / (2 * upper * fore)
    # Clipped: beyond the reach of the links there is no angle. acos is never negative, as the elbow bends to one side.
    elbow = math.acos(max(-1.0, min(1.0, cosine)))
    shoulder = math.atan2(y, x) - math.atan2(fore * math.sin(elbow), upper + fore * math.cos(elbow))
    return wrap(shoulder), elbow


def choose(arm: Arm) -> list[int]:
    """Return the expert's action."""
    return name_angles(find_angles(arm.dot))


def count_moves(arm: Arm) -> int | None:
    """Return the number of moves the expert needs, or None if MOVES are too few."""
    for n in range(1, MOVES + 1):
        arm = arm.turn_to(read_angles(choose(arm)))
        if arm.is_there:
            return n
    return None


def play(arm: Arm, by_chance: float, rng: random.Random) -> list[Message]:
    """Play a game of the expert, with random angles in a share of moves."""
    messages = [arm.show()]
    for _ in range(MOVES):
        action = [rng.randrange(BINS) for _ in LOW] if rng.random() < by_chance else choose(arm)
        messages.append({"role": "assistant", "content": write_action_tokens(action)})
        arm = arm.turn_to(read_angles(action))
        if arm.is_there:
            break
        messages.append(arm.show())
    # a game that ends without success has one image too many: nobody replies to it
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def main(argv: list[str] | None = None) -> None:
    parser = task_parser("data_prep.reach", __doc__, train=2000, held_out=200, rows="starts", least=1)
    parser.add_argument("--by-chance", type=share, default=0.0, help="share of the expert's moves by chance in SFT")
    write_task(parser, make, **read_options(parser, argv))


if __name__ == "__main__":
    run_script(main)
