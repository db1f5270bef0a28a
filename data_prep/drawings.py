"""Random drawings, each with a question and an answer."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from core.types.images import EncodedImage, read_image

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 80, 220), "black": (0, 0, 0)}
SHAPES = ("square", "circle", "triangle")
MOST = 4
"""Maximum number of shapes in a counting task."""
CELLS = 4
"""Rows and columns of the grid of shapes."""
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
NUMBERS = range(10, 100)
BARS_END = 10
"""Height of the highest possible bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Image with a question about it."""

    task: str
    image: EncodedImage
    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Kind of drawing."""

    question: str
    answers: tuple[str, ...]
    """Possible answers, equally frequent, so that a guess is right with probability 1 / len(answers)."""
    draw: Callable[[ImageDraw, int, str, random.Random], None]
    """Draws an image with the given answer. The integer is the side of the image, in pixels."""


def draw(name: str, side: int, rng: random.Random) -> Drawing:
    """Draw an image of a task in TASKS, `side` pixels wide and high."""
    from PIL import Image, ImageDraw

    task = TASKS[name]
    # the answer comes first, or answers that many drawings share would be more frequent
    answer = rng.choice(task.answers)
    image = Image.new("RGB", (side, side), "white")
    task.draw(ImageDraw.Draw(image), side, answer, rng)
    return Drawing(task=name, image=_encode(image), question=task.question, answer=answer)


def pick_other(drawing: Drawing, rng: random.Random) -> str:
    """Return a wrong answer that differs in one word."""
    words = drawing.answer.split()
    answers = [answer.split() for answer in TASKS[drawing.task].answers]
    near = [other for other in answers if sum(a != b for a, b in zip(words, other, strict=True)) == 1]
    return " ".join(rng.choice(near))


def _encode(image: Image) -> EncodedImage:
    file = io.BytesIO()
    # lossless, since colours are part of the answers
    image.save(file, "PNG")
    return read_image(file.getvalue())


def _draw_count(on: ImageDraw, side: int, answer: str, rng: random.Random) -> None:
    """Draw shapes of one kind and colour, each in a separate cell."""
    count, colour = answer.split()
    shape, cell = rng.choice(SHAPES), side / CELLS
    # at most one shape in a cell, or shapes could cover each other
    for place in rng.sample(range(CELLS * CELLS), int(count)):
        _draw_shape(on, shape, colour, cell * (place % CELLS), cell * (place // CELLS), cell, rng)


def _draw_colour(on: ImageDraw, side: int, answer: str, rng: random.Random) -> None:
    """Draw a circle in the answer's colour, and other shapes in other colours."""
    others = rng.sample([colour for colour in COLOURS if colour != answer], 2)
    drawn = [("circle", answer), ("square", others[0]), ("triangle", others[1])]
    for place, (shape, colour) in zip(rng.sample(range(4), 3), drawn, strict=True):
        _draw_shape(on, shape, colour, side / 2 * (place % 2), side / 2 * (place // 2), side / 2, rng)


def _draw_position(on: ImageDraw, side: int, answer: str, rng: random.Random) -> None:
    """Draw a single shape in the part of the image that the answer names."""
    row, column = answer.split()
    cell = side / 3
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    _draw_shape(on, shape, colour, cell * COLUMNS.index(column), cell * ROWS.index(row), cell, rng)


def _draw_number(on: ImageDraw, side: int, answer: str, rng: random.Random) -> None:
    """Draw the digits of the number, at a random position and size."""
    from PIL import ImageFont

    font = ImageFont.load_default(size=side * rng.uniform(0.45, 0.6))
    left, top, right, bottom = on.textbbox((0, 0), answer, font=font)
    x, y = rng.uniform(0, side - (right - left)), rng.uniform(0, side - (bottom - top))
    # the text box may begin above or left of the origin, so the offset is subtracted
    on.text((x - left, y - top), answer, font=font, fill=COLOURS[rng.choice(list(COLOURS))])


def _draw_bars(on: ImageDraw, side: int, answer: str, rng: random.Random) -> None:
    """Draw a bar of each colour, in random order. The answer's bar is the highest."""
    # Without repetition, so that one bar is the highest. Sorted, so that the answer gets it.
    heights = sorted(rng.sample(range(1, BARS_END + 1), len(COLOURS)))
    others = rng.sample([colour for colour in COLOURS if colour != answer], len(COLOURS) - 1)
    bars = list(zip([*others, answer], heights, strict=True))
    rng.shuffle(bars)
    width, unit = side / len(bars), (side - 2) / BARS_END
    on.line((0, side - 1, side, side - 1), fill="black")
    for i, (colour, height) in enumerate(bars):
        box = (width * i + 2, side - 1 - unit * height, width * (i + 1) - 2, side - 2)
        on.rectangle(box, fill=COLOURS[colour])


def _draw_shape(on: ImageDraw, shape: str, colour: str, x: float, y: float, cell: float, rng: random.Random) -> None:
    """Draw a shape of random size and position in the cell with the upper left corner (x, y)."""
    size = cell * rng.uniform(0.55, 0.8)
    farthest = max(1.0, cell - size - 1)  # a free pixel on each side, so that neighbours do not touch
    x, y = x + rng.uniform(1, farthest), y + rng.uniform(1, farthest)
    box, fill = (x, y, x + size, y + size), COLOURS[colour]
    if shape == "circle":
        on.ellipse(box, fill=fill)
    elif shape == "square":
        on.rectangle(box, fill=fill)
    else:
        on.polygon([(x, y + size), (x + size, y + size), (x + size / 2, y)], fill=fill)


TASKS = {
    "count": Task(
        question="how many?",
        answers=tuple(f"{n} {colour}" for n, colour in product(range(1, MOST + 1), COLOURS)),
        draw=_draw_count,
    ),
    "colour": Task(question="colour of the circle?", answers=tuple(COLOURS), draw=_draw_colour),
    "position": Task(
        question="where?",
        answers=tuple(f"{row} {column}" for row, column in product(ROWS, COLUMNS)),
        draw=_draw_position,
    ),
    "number": Task(question="which number?", answers=tuple(map(str, NUMBERS)), draw=_draw_number),
    "bars": Task(question="which bar is highest?", answers=tuple(COLOURS), draw=_draw_bars),
}
