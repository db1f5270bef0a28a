"""Rewards: functions of text, found by name in this folder or by path.

    def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
        return {"correct": float(messages[-1]["content"].strip() == prompt.answer)}

`messages` are all messages after the prompt. The returned parts are named, finite numbers. Each is logged under its
name, and the sample's reward is their weighted sum. If a reward raises, the sample fails: it has no reward and is not
trained on. rewards/scored.py has the other results: a number, `Scored` with notes and rewards of tokens, `Failed`.

    async def score(prompt, messages): ...              many calls in flight, for a reward that waits for a server
    def score_group(prompt, conversations): ...         all live siblings of a prompt at once, plain or async

A file defines one of these, by `def` or `async def` at the top level. They may have settings as keyword arguments
(`reward.settings` of the recipe). A keyword argument `run` is no setting: it gets a RewardRun. Optional functions with
the same settings: `prepare` runs in every worker before the first sample. `check(deadline_s, ...)`, with
reward.timeout_s first, runs once before the start, and raises UserError for a problem that the user must fix. A
UserError that `score` raises stops the run.

Import core.types.samples only under TYPE_CHECKING, as the rewards here do. It imports torch, which costs time and
memory in every worker. The `prompt` of `score` has the fields of a Prompt (id, messages, answer, extra).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from core.errors import UserError
from core.loading import FileSpec, load_module, resolve
from rewards.kinds import NAMES, Kind, find_kind
from rewards.scored import Failed as Failed  # where users look for them
from rewards.scored import Scored as Scored
from rewards.scored import Steps as Steps

RewardFn = Callable[..., Any]
"""`score` or `score_group` with the settings. An async one returns an awaitable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJudge:
    """Judge that the run serves: `judge` of the recipe."""

    model: str
    is_frozen: bool = True
    """False for the policy, whose verdicts change with the weights."""
    is_greedy: bool = False
    """True if equal requests have equal verdicts, whatever the seed."""
    words: tuple[str, ...] = ()
    """The two words between which it chooses, with log-probabilities; empty if it may write any text."""
    urls: tuple[str, ...] = ()
    """Address of each engine, with the /v1. Empty before the engines have started."""
    key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRun:
    """Facts of the run, for rewards with a keyword argument `run`."""

    engines: int = 1
    """Maximum number of engines. Each has reward processes of its own, which share the limits of the run."""
    folder: str | None = None
    """Run folder, or None outside of a run."""
    earlier_folder: str | None = None
    """Run folder of the checkpoint that the run resumes."""
    judge: RunJudge | None = None


def resolve_reward(name_or_path: str, *, key: str = "reward") -> FileSpec:
    return resolve(name_or_path, "rewards", offers=has_score, key=key)


def has_score(module: ModuleType) -> bool:
    return any(callable(getattr(module, name, None)) for name in NAMES)


def load_reward(spec: FileSpec, settings: dict[str, Any], run: RewardRun | None = None) -> RewardFn:
    """Import a reward and return the function with the settings applied. Raises UserError if it cannot be called."""
    kind, module = find_kind(spec), load_module(spec)
    score = getattr(module, kind.name, None)
    if not callable(score):
        if has_score(module):
            raise UserError(f"{spec.path} has score_group, and does not define it: define it by `def` at the top level")
        raise UserError(
            f"{spec.path} has no function score(prompt, messages) -> dict[str, float], and no score_group(prompt, "
            "conversations)"
        )
    given = "conversations" if kind.is_group else "messages"
    # checked by signature, without a call: an unknown setting fails before the first sample
    signature = inspect.signature(score)
    try:
        signature.bind_partial(None, None)
    except TypeError as error:
        raise UserError(
            f"{kind.name}() of {spec.path} must take the prompt and the {given}: {kind.name}(prompt, {given})"
        ) from error
    try:
        signature.bind(None, None, **add_run(signature, settings, run))
    except TypeError as error:
        raise UserError(f"reward.settings does not fit {kind.name}() of {spec.path}: {error}") from error
    check_deferred(score, kind, spec)
    return partial(score, **add_run(signature, settings, run))


def add_run(signature: inspect.Signature, settings: dict[str, Any], run: RewardRun | None) -> dict[str, Any]:
    """Return the settings, with the facts of the run for a function that has an argument `run`."""
    return settings | {"run": run or RewardRun()} if "run" in signature.parameters else settings


def check_deferred(score: Callable[..., Any], kind: Kind, spec: FileSpec) -> None:
    """Raise UserError for a function whose call runs nothing yet, unless it is known to be async."""
    # of an object, the method that a call runs
    call = score if inspect.isroutine(score) or isinstance(score, type | partial) else score.__call__
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise UserError(
            f"{kind.name}() of {spec.path} is a generator (`yield`), which would not run: define it by `def` or "
            "`async def`, and return the parts"
        )
    if inspect.iscoroutinefunction(call) and not kind.is_async:
        raise UserError(
            f"{kind.name}() of {spec.path} is `async def` by way of another object: define `async def {kind.name}` at "
            "the top level of the file, and call the object there"
        )


def prepare_reward(spec: FileSpec, settings: dict[str, Any], run: RewardRun | None = None) -> None:
    """Call the reward's `prepare`, if it exists."""
    prepare = getattr(load_module(spec), "prepare", None)
    if prepare is not None:
        prepare(**add_run(inspect.signature(prepare), settings, run))


def check_reward(spec: FileSpec, settings: dict[str, Any], deadline_s: float, run: RewardRun | None = None) -> None:
    """Call the reward's `check`, if it exists. deadline_s: reward.timeout_s."""
    check = getattr(load_module(spec), "check", None)
    if check is not None:
        check(deadline_s, **add_run(inspect.signature(check), settings, run))


def takes_run(spec: FileSpec) -> bool:
    """Tell whether a reward gets the facts of the run."""
    module = load_module(spec)
    functions = [function for name in NAMES if (function := getattr(module, name, None)) is not None]
    return any("run" in inspect.signature(function).parameters for function in functions)
