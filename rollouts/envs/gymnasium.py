"""Gymnasium environments with text or numeric actions, and text, numeric or image observations.

Columns of the row: `gym` is the environment's id ("FrozenLake-v1"), `gym_args` its arguments, and `gym_seed` the seed
of the reset. All episodes of a row start in the same state. The policy reads the observation as text. The action is the
last number, the last numbers, or the whole text of the reply. An unreadable action is answered with one sentence, and
costs a turn but no step.

With `gym_observe: image`, the policy sees the rendered image (rgb_array) instead of the observation. With `gym_bins:
N`, it acts by action tokens. Each number of a Box is one of N equal bins, `<act_0>` to `<act_N-1>`. A Discrete action
of n choices is one of the first n tokens; see core/types/action_tokens.py.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from core.errors import UserError, name_error, shorten
from core.types.action_tokens import NotActions, find_centres, list_action_tokens, read_action_tokens
from core.types.images import encode_image
from core.types.messages import Message, Part
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.base import Env

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
DIGITS = 4
"""Decimals of a number in an observation."""
MOST_BINS = 1000
"""Maximum number of bins per number of an action."""


class BadAction(Exception):
    """Error of a reply without a valid action. The message is sent to the policy."""


class Gymnasium(Env):
    """Gymnasium environment as a conversation. The scores are `return`, `steps` and `invalid_actions`."""

    def __init__(self, prompt: Prompt):
        super().__init__(prompt)
        self.gym: Any = None
        self.sees, self.bins = read_form(prompt)
        self.earned: list[float] = []
        """Reward of each reply."""
        self.steps = self.invalid = 0

    async def open(self) -> list[Message]:
        """Create and reset the environment. Return the first observation and the possible actions."""
        self.gym = make_gym(self.prompt, sees=self.sees)
        first, _ = self.gym.reset(seed=self.prompt.extra.get("gym_seed") or 0)
        actions = describe_actions(self.gym.action_space, self.bins)
        if not self.sees:
            return [_say(f"observation: {write_value(first, self.gym.observation_space)}\nactions: {actions}")]
        # a policy with action tokens can write no other action, so the prompt need not list them
        return [self._show("" if self.bins else f"actions: {actions}")]

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        """Perform the action of a reply."""
        try:
            action = read_action(reply.message["content"], self.gym.action_space, self.bins)
        except BadAction as error:
            self.invalid += 1
            # an entry per reply, valid or not, since turn_scores must match the replies
            self.earned.append(0.0)
            return [_say(f"error: {error}")]
        seen, reward, terminated, truncated, _ = self.gym.step(action)
        self.steps += 1
        self.earned.append(float(reward))
        if terminated or truncated:
            return None
        if self.sees:
            return [self._show("")]
        return [_say(f"observation: {write_value(seen, self.gym.observation_space)}\nreward: {reward:g}")]

    def scores(self) -> dict[str, float]:
        return {"return": sum(self.earned), "steps": float(self.steps), "invalid_actions": float(self.invalid)}

    def turn_scores(self, player: int) -> list[dict[str, float]]:
        """Return the reward of every reply."""
        return [{"return": reward} for reward in self.earned]

    def _show(self, text: str) -> Message:
        """Return the rendered environment as a message, with text."""
        from PIL import Image

        frame = self.gym.render()
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != 3:
            raise UserError(
                f"rollout.env=gymnasium: the row {self.prompt.id}: {self.prompt.extra['gym']} renders no image "
                "(rgb_array): leave gym_observe out"
            )
        parts: list[Part] = [{"type": "image", "image": encode_image(Image.fromarray(frame))}]
        if text:
            parts.append({"type": "text", "text": text})
        return {"role": "user", "content": text, "parts": parts}

    async def close(self) -> None:
        """Close the environment."""
        if self.gym is not None:
            self.gym.close()


def read_form(prompt: Prompt) -> tuple[bool, int]:
    """Return whether the policy sees images, and the number of bins (0: actions are text)."""
    observe, bins = prompt.extra.get("gym_observe") or "text", prompt.extra.get("gym_bins") or 0
    if observe not in ("text", "image") or type(bins) is not int or not 0 <= bins <= MOST_BINS:
        raise UserError(
            f"rollout.env=gymnasium: the row {prompt.id} may have gym_observe: text or image, and gym_bins: 1 to "
            f"{MOST_BINS}, found {observe!r:.60} and {bins!r:.60}"
        )
    return observe == "image", bins


def make_gym(prompt: Prompt, *, sees: bool = False) -> Any:
    """Create the environment of a row. It renders images if `sees`.

    Raises UserError if the row names no environment, or an unknown one.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise UserError(
            "rollout.env=gymnasium: the package gymnasium is not installed: pip install -c constraints.txt gymnasium"
        ) from error
    name, args = prompt.extra.get("gym"), prompt.extra.get("gym_args") or {}
    if not isinstance(name, str) or not isinstance(args, dict):
        raise UserError(
            f"rollout.env=gymnasium: the row {prompt.id} must name an environment in its column gym (and its arguments "
            f"as an object in gym_args), found {name!r:.60} and {args!r:.60}"
        )
    try:
        return gymnasium.make(name, **args, **({"render_mode": "rgb_array"} if sees else {}))
    # TypeError: an argument of gym_args that the environment does not take
    except (gymnasium.error.Error, TypeError) as error:
        raise UserError(f"rollout.env=gymnasium: the row {prompt.id}: {name}: {name_error(error)}") from error


def describe_actions(space: Any, bins: int = 0) -> str:
    """Describe a valid action in words. Raises UserError for an action space without text or numbers."""
    if bins:
        most = _count_bins(space, bins)
        *_, last = list_action_tokens(int(max(most)))
        return f"{len(most)} tokens from <act_0> to {last}"
    match type(space).__name__:
        case "Discrete":
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        case "MultiDiscrete" if np.any(space.start):
            last = space.start + space.nvec - 1
            return f"{_count_numbers(space)} whole numbers from {write_value(space.start)} to {write_value(last)}"
        case "MultiDiscrete" | "MultiBinary":
            return f"{_count_numbers(space)} whole numbers, each below {_bounds_of(space)}"
        case "Box":
            kind = "numbers" if space.dtype.kind == "f" else "whole numbers"
            return f"{_count_numbers(space)} {kind} from {write_value(space.low)} to {write_value(space.high)}"
        case "Text":
            return f"a text of at most {space.max_length} characters"
        case other:
            raise UserError(f"rollout.env=gymnasium: actions of the kind {other} are neither text nor numbers")


def read_action(reply: str, space: Any, bins: int = 0) -> Any:
    """Parse the action of a reply. `bins`: number of bins, 0 without action tokens. Raises BadAction."""
    kind = type(space).__name__
    if bins:
        return _read_tokens(reply, space, bins)
    if kind == "Text":
        action: Any = reply.strip()
    else:
        wanted = 1 if kind == "Discrete" else _count_numbers(space)
        # the last numbers: the policy may reason with numbers before it acts
        numbers = NUMBER.findall(reply)[-wanted:]
        if len(numbers) < wanted:
            raise BadAction(f"the action is {describe_actions(space)}, found {len(numbers)} numbers")
        try:
            # no float is rounded to a whole number, nor a number bent to the bounds of its dtype
            read = float if space.dtype.kind == "f" else int
            action = np.array([read(n) for n in numbers], dtype=space.dtype).reshape(space.shape)
        except (ValueError, OverflowError) as error:
            said = shorten(", ".join(numbers))
            raise BadAction(f"the action is {describe_actions(space)}, found {said}") from error
        action = np.int64(action) if kind == "Discrete" else action
    if not space.contains(action):
        raise BadAction(f"the action is {describe_actions(space)}, found {write_value(action)}")
    return action


def _read_tokens(reply: str, space: Any, bins: int) -> Any:
    most = _count_bins(space, bins)
    try:
        said = read_action_tokens(reply)
    except NotActions as error:
        raise BadAction(f"the action is {describe_actions(space, bins)}: {error}") from error
    if len(said) != len(most) or any(one >= n for one, n in zip(said, most, strict=True)):
        raise BadAction(f"the action is {describe_actions(space, bins)}, found {reply.strip()[:60]}")
    match type(space).__name__:
        case "Discrete":
            return np.int64(space.start + said[0])
        case "Box":
            return find_centres(said, space.low, space.high, bins).astype(space.dtype).reshape(space.shape)
        case _:
            # MultiBinary has no start
            return (np.array(said).reshape(space.shape) + getattr(space, "start", 0)).astype(space.dtype)


def _count_bins(space: Any, bins: int) -> list[int]:
    """Return the number of possible tokens for each number of an action."""
    match type(space).__name__:
        case "Discrete":
            return [int(space.n)]
        case "MultiDiscrete" | "MultiBinary":
            return np.broadcast_to(getattr(space, "nvec", 2), space.shape).reshape(-1).tolist()
        case "Box" if np.isfinite(space.low).all() and np.isfinite(space.high).all():
            return [bins] * _count_numbers(space)
        case "Box":
            raise UserError("rollout.env=gymnasium: a Box without bounds has no bins: leave gym_bins out")
        case other:
            raise UserError(f"rollout.env=gymnasium: actions of the kind {other} are no numbers: leave gym_bins out")


def write_value(value: Any, space: Any = None) -> str:
    """Return an observation as text: numbers in order, parts of a Dict or Tuple by name.

    >>> write_value(np.array([0.5, -1.23456])), write_value({"at": 3, "wind": np.array([1.0])})
    ('0.5 -1.2346', 'at: 3, wind: 1')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{name}: {write_value(part)}" for name, part in value.items())
    if isinstance(value, tuple):
        return "; ".join(write_value(part) for part in value)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise UserError(f"rollout.env=gymnasium: observations of {space} are neither text nor numbers")
    return " ".join(f"{round(float(x), DIGITS):g}" for x in array.reshape(-1))


def _count_numbers(space: Any) -> int:
    return int(np.prod(space.shape))


def _bounds_of(space: Any) -> str:
    return write_value(getattr(space, "nvec", 2))


def _say(text: str) -> Message:
    return {"role": "user", "content": text}
