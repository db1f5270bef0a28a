"""Rewards: functions of text, found by name in this folder or by path.

    def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
        return {"correct": float(messages[-1]["content"].strip() == prompt.answer)}

`messages` are all messages after the prompt. The returned parts are named, finite numbers. Each is logged under its
name, and the sample's reward is their weighted sum. If a reward raises, the sample fails: it has no reward and is not
trained on.

`score` may have settings as keyword arguments (`reward.settings` of the recipe). Optional functions with the same
settings: `prepare` runs in every worker before the first sample. `check(deadline_s, ...)`, with reward.timeout_s first,
runs once before the start, and raises UserError for a problem that the user must fix.

Import core.types.samples only under TYPE_CHECKING, as the rewards here do. It imports torch, which costs time and
memory in every worker. The `prompt` of `score` has the fields of a Prompt (id, messages, answer, extra).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from core.loading import FileSpec, load_module, resolve

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt

    RewardFn = Callable[[Prompt, list[Message]], dict[str, float]]


def resolve_reward(name_or_path: str, *, key: str = "reward") -> FileSpec:
    return resolve(name_or_path, "rewards", offers=has_score, key=key)


def has_score(module: ModuleType) -> bool:
    return callable(getattr(module, "score", None))


def load_reward(spec: FileSpec, settings: dict[str, Any]) -> RewardFn:
    """Import a reward and return `score` with the settings applied. Raises UserError if it cannot be called."""
    score = getattr(load_module(spec), "score", None)
    if not callable(score):
        raise UserError(f"{spec.path} has no function score(prompt, messages) -> dict[str, float]")
    # checked by signature, without a call: an unknown setting fails before the first sample
    signature = inspect.signature(score)
    try:
        signature.bind_partial(None, None)
    except TypeError as error:
        raise UserError(
            f"score() of {spec.path} must take the prompt and the messages: score(prompt, messages)"
        ) from error
    try:
        signature.bind(None, None, **settings)
    except TypeError as error:
        raise UserError(f"reward.settings does not fit score() of {spec.path}: {error}") from error
    if kind := _describe_deferred(score):
        raise UserError(
            f"score() of {spec.path} is {kind}, which would not run: define it by `def`, and return the parts"
        )
    return partial(score, **settings)


def _describe_deferred(score: Callable[..., Any]) -> str:
    """Return the kind of a function whose call runs nothing yet, or ""."""
    # of an object, the method that a call runs
    call = score if inspect.isroutine(score) or isinstance(score, type | partial) else score.__call__
    if inspect.iscoroutinefunction(call):
        return "`async def`"
    return "a generator (`yield`)" if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call) else ""


def prepare_reward(spec: FileSpec, settings: dict[str, Any]) -> None:
    """Call the reward's `prepare`, if it exists."""
    prepare = getattr(load_module(spec), "prepare", None)
    if prepare is not None:
        prepare(**settings)


def check_reward(spec: FileSpec, settings: dict[str, Any], deadline_s: float) -> None:
    """Call the reward's `check`, if it exists. deadline_s: reward.timeout_s."""
    check = getattr(load_module(spec), "check", None)
    if check is not None:
        check(deadline_s, **settings)
