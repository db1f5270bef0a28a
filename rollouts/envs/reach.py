"""Planar arm with two joints that reaches for a dot: images in, action tokens out.

The row's column `arm` has `angles`, in radians, and `dot`, in pixels. The prompt shows both as an image. A reply of two
action tokens names target angles. Each joint turns at most STEP towards the target, and the next image shows the
result. The episode ends when the tip is on the dot, after `rollout.max_turns` replies, or with an invalid action.
data_prep/reach.py makes rows, and has an expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from core.numbers import is_finite
from core.types.action_tokens import NotActions, find_bins, find_centres, read_action_tokens
from core.types.images import encode_image
from core.types.messages import Message
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.base import Env

if TYPE_CHECKING:
    from PIL.Image import Image

Pair = tuple[float, float]

SIDE = 56
"""Width and height of an image, in pixels. The shoulder is in the middle."""
LINKS = (14.0, 11.0)
"""Lengths of upper arm and forearm, in pixels."""
LOW, HIGH = (-math.pi, 0.4), (math.pi, 2.4)
"""Lower and upper angles of shoulder (full circle) and elbow (bends to one side), in radians."""
BINS = 16
"""Number of action tokens: bins of each joint's angle."""
STEP = 1.2
"""Maximum rotation of a joint per move, in radians."""
NEAR = 4.0
"""Maximum distance between tip and a reached dot, in pixels."""
COLOURS = {"background": "white", "upper": (31, 80, 220), "fore": (44, 160, 44), "dot": (214, 39, 40)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Posture of the arm, and the position of the dot."""

    angles: Pair
    """Angle of the shoulder from the image's right, and of the elbow from the upper arm, in radians."""
    dot: Pair
    """Column and row of the dot, in pixels."""

    @property
    def joints(self) -> tuple[Pair, Pair, Pair]:
        """Positions of shoulder, elbow and tip, in pixels."""
        middle, (shoulder, elbow) = SIDE / 2, self.angles
        x = middle + LINKS[0] * math.cos(shoulder)
        y = middle + LINKS[0] * math.sin(shoulder)
        direction = shoulder + elbow
        return (middle, middle), (x, y), (x + LINKS[1] * math.cos(direction), y + LINKS[1] * math.sin(direction))

    @property
    def is_there(self) -> bool:
        """True if the tip is on the dot."""
        return math.dist(self.joints[-1], self.dot) <= NEAR

    def turn_to(self, wanted: Pair) -> Arm:
        """Return the arm after one move towards target angles. The shoulder turns the shorter way."""
        shoulder = wrap(self.angles[0] + _limit(wrap(wanted[0] - self.angles[0])))
        elbow = self.angles[1] + _limit(wanted[1] - self.angles[1])
        return Arm(angles=(shoulder, elbow), dot=self.dot)

    def draw(self) -> Image:
        """Draw the arm over the dot."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (SIDE, SIDE), COLOURS["background"])
        on = ImageDraw.Draw(image)
        shoulder, elbow, tip = self.joints
        x, y = self.dot
        on.ellipse((x - NEAR, y - NEAR, x + NEAR, y + NEAR), fill=COLOURS["dot"])
        on.line((*shoulder, *elbow), fill=COLOURS["upper"], width=2)
        on.line((*elbow, *tip), fill=COLOURS["fore"], width=2)
        return image

    def show(self) -> Message:
        """Return the image as a message."""
        return {"role": "user", "content": "", "parts": [{"type": "image", "image": encode_image(self.draw())}]}


def wrap(angle: float) -> float:
    """Return the same direction between -pi and pi.

    >>> round(wrap(math.pi + 0.5), 4), wrap(-0.5)
    (-2.6416, -0.5)
    """
    return (angle + math.pi) % (2 * math.pi) - math.pi


def _limit(change: float) -> float:
    return max(-STEP, min(STEP, change))


def name_angles(angles: Pair) -> list[int]:
    """Return the bins of target angles."""
    return find_bins(angles, LOW, HIGH, BINS)


def read_angles(bins: list[int]) -> Pair:
    """Return the target angles of bins, in radians."""
    shoulder, elbow = find_centres(bins, LOW, HIGH, BINS).tolist()
    return shoulder, elbow


class Reach(Env):
    """Environment of one arm. The scores are `reached`, 1 or 0, and `no_action`."""

    def __init__(self, prompt: Prompt):
        super().__init__(prompt)
        self.arm = read_arm(prompt)
        self.failed = False
        self.moves = 0

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        """Perform the move of a reply. Return the next image."""
        try:
            bins = read_action_tokens(reply.message["content"])
        except NotActions:
            bins = []
        # the vocabulary may have more action tokens than this game
        if len(bins) != len(LOW) or max(bins) >= BINS:
            self.failed = True
            return None
        self.arm = self.arm.turn_to(read_angles(bins))
        self.moves += 1
        return None if self.arm.is_there else [self.arm.show()]

    def scores(self) -> dict[str, float]:
        return {"reached": float(self.arm.is_there and not self.failed), "no_action": float(self.failed)}

    def counts(self) -> dict[str, float]:
        return {"moves": float(self.moves)}


def read_arm(prompt: Prompt) -> Arm:
    """Return the arm of a row. Raises UserError if the column is missing or malformed."""
    given: Any = prompt.extra.get("arm")
    try:
        (shoulder, elbow), (x, y) = given["angles"], given["dot"]
        if not all(map(is_finite, (shoulder, elbow, x, y))):
            raise TypeError("a number is expected")
        return Arm(angles=(float(shoulder), float(elbow)), dot=(float(x), float(y)))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"rollout.env=reach: the row {prompt.id} must have a column arm with angles and dot, two numbers each, "
            f"found {given!r:.100}: make rows with data_prep/reach.py"
        ) from error
