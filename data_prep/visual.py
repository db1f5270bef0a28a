"""Generated visual tasks: drawings with a question and an answer. No two rows have the same image.

    python -m data_prep.visual --out data/visual --tasks count,position --train 1000 --eval 200

writes train.parquet and eval.parquet. `--sft N` adds sft.parquet, with rows that end in an assistant turn. `--pairs N`
adds pairs.parquet, with a right reply (chosen) and a wrong one (rejected). Tasks: `count` (number and colour of shapes:
"3 red"), `colour` (of the circle among three shapes), `position` ("top left"), `number` (two digits), `bars` (colour of
the highest bar in a chart).

`--wrong-share 0.6` makes the teacher careless: in that share of rows of sft.parquet the answer is wrong. A model
trained on it is right about as often, with the right answer as the mode. Reinforcement learning can improve such a
policy at once.

Two controls show whether a model uses the images. `--images shuffled` swaps images between rows of a split, and
`--images none` writes only text. With either, no model can beat chance.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace

from core.types.messages import Message
from data_prep.drawings import TASKS, Drawing, draw, pick_other
from data_prep.images import ask_about
from data_prep.rows import Row
from data_prep.script import read_options, run_script, share, task_parser, whole, write_task

IMAGES = ("own", "shuffled", "none")
TRIES = 100
"""Draws of an image before the task counts as exhausted."""


def make(
    *,
    tasks: tuple[str, ...],
    train: int,
    held_out: int,
    sft: int = 0,
    pairs: int = 0,
    wrong_share: float = 0.0,
    images: str = "own",
    side: int = 56,
    seed: int = 0,
) -> dict[str, list[Row]]:
    """Draw the splits "eval", "train", "sft" and "pairs", in this order, so that eval depends only on the seed.

    Tasks alternate in each split. images: one of IMAGES. Raises ValueError if there are too few different images.
    """
    rng = random.Random(seed)
    # drawn together, so that no two splits share an image
    drawings = _draw_all(tasks, held_out + train + sft + pairs, side, rng)
    splits: dict[str, list[Drawing]] = {}
    for split, count in (("eval", held_out), ("train", train), ("sft", sft), ("pairs", pairs)):
        splits[split], drawings = drawings[:count], drawings[count:]
    rows: dict[str, list[Row]] = {}
    for split, drawn in splits.items():
        seen = _exchange_images(drawn, rng) if images == "shuffled" else drawn
        rows[split] = [_make_row(split, i, d, with_image=images != "none") for i, d in enumerate(seen)]
    rows["sft"] = [_teach(row, d, wrong_share, rng) for row, d in zip(rows["sft"], splits["sft"], strict=True)]
    rows["pairs"] = [
        replace(row, chosen=d.answer, rejected=pick_other(d, rng))
        for row, d in zip(rows["pairs"], splits["pairs"], strict=True)
    ]
    return rows


def _draw_all(tasks: tuple[str, ...], count: int, side: int, rng: random.Random) -> list[Drawing]:
    drawn: dict[str, Drawing] = {}
    for i in range(count):
        # a small task has few images: no two rows may share one, and a search without an end would hang
        for _ in range(TRIES):
            drawing = draw(tasks[i % len(tasks)], side, rng)
            if drawing.image.hash not in drawn:
                drawn[drawing.image.hash] = drawing
                break
        else:
            raise ValueError(f"after {i} images, {TRIES} of {tasks[i % len(tasks)]} are not new: ask for fewer")
    return list(drawn.values())


def _exchange_images(drawings: list[Drawing], rng: random.Random) -> list[Drawing]:
    """Give every drawing the image of another drawing of the same task, if there is one."""
    exchanged = list(drawings)
    # in the order of the drawings: that of a set would differ from process to process
    for task in dict.fromkeys(d.task for d in drawings):
        places = [i for i, d in enumerate(drawings) if d.task == task]
        rng.shuffle(places)
        # a rotation of the shuffled places: nobody keeps the own image, which a plain shuffle would allow
        for i, other in zip(places, [*places[1:], *places[:1]], strict=True):
            exchanged[i] = replace(drawings[i], image=drawings[other].image)
    return exchanged


def _make_row(split: str, i: int, drawing: Drawing, *, with_image: bool) -> Row:
    text: Message = {"role": "user", "content": drawing.question}
    asked = ask_about(drawing.image, drawing.question) if with_image else text
    extra = json.dumps({"task": drawing.task})
    return Row(id=f"visual/{split}/{i}", messages=[asked], answer=drawing.answer, extra=extra)


def _teach(row: Row, drawing: Drawing, wrong_share: float, rng: random.Random) -> Row:
    said = pick_other(drawing, rng) if rng.random() < wrong_share else drawing.answer
    return replace(row, messages=[*row.messages, {"role": "assistant", "content": said}])


def _list_tasks(text: str) -> tuple[str, ...]:
    tasks = tuple(text.split(","))
    if unknown := [task for task in tasks if task not in TASKS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r:.60} is none of {', '.join(TASKS)}")
    return tasks


def main(argv: list[str] | None = None) -> None:
    parser = task_parser("data_prep.visual", __doc__, train=1000, held_out=200, rows="rows")
    parser.add_argument("--jsonl", action="store_true", help="write JSONL, and images beside it, instead of Parquet")
    parser.add_argument(
        "--tasks", type=_list_tasks, default=("count",), help=f"some of {','.join(TASKS)} (default count)"
    )
    parser.add_argument("--pairs", type=whole(0), default=0, help="rows for DPO (default none)")
    parser.add_argument("--wrong-share", type=share, default=0.0, help="share of SFT rows with a wrong answer")
    parser.add_argument("--images", choices=IMAGES, default="own", help="default %(default)s; others are controls")
    parser.add_argument("--side", type=whole(28), default=56, help="of an image, in pixels (default %(default)s)")
    write_task(parser, make, **read_options(parser, argv))


if __name__ == "__main__":
    run_script(main)
