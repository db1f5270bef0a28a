"""Results of reward functions: parts, rewards of turns and tokens, notes and counts.

A reward function returns one of these for a sample:

    0.5                                           the part `correct`
    {"correct": 1.0, "short": 0.2}                named parts
    Scored({"correct": 1.0}, notes=[...], ...)    named parts, and more
    Failed("why")                                 the sample fails; it may also be raised
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from core.types.notes import Note

LONGEST_FAILURE = 300
LONGEST_NOTE = 4000
"""Maximum characters of a note; the middle of a longer one is left out."""
LARGEST_REWARD = 1e9
"""Maximum absolute value of a part. Larger, infinite and NaN values would ruin the group's mean."""
MAIN_PART = "correct"
"""Part of a function that returns one number. It has the weight if a function has a single weight."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Values of the steps of the last reply, which a separator ends."""

    separator: str
    """Text between two steps, such as a blank line."""
    values: Sequence[float]
    """One value per step, in order. It is earned by the token that completes the step's text."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Result of one sample. Numbers are named, finite, and at most LARGEST_REWARD."""

    parts: Mapping[str, float]
    turn_parts: Sequence[Mapping[str, float]] = ()
    """Shares of the parts that each reply of the policy earned, one mapping per reply. A name that `parts` lacks is a
    part of its own, the sum over the replies."""
    token_parts: Mapping[str, Sequence[float] | Steps] = field(default_factory=dict[str, Any])
    """Shares of the parts that tokens earned: a number per sampled token, or per step of the last reply. A name that
    `parts` lacks is a part of its own, the sum."""
    notes: Sequence[Note] = ()
    """Texts for the sample files and the run page."""
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers for the log, such as calls of a judge."""


class Failed(Exception):
    """Sample without a reward. A function raises it, or `score_group` returns it for one conversation."""

    def __init__(self, why: str, *, notes: Sequence[Note] = (), counts: Mapping[str, float] | None = None) -> None:
        super().__init__(why)
        self.notes, self.counts = notes, counts or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Checked result of one sample: parts or a failure, never both."""

    reward_parts: dict[str, float] = field(default_factory=dict[str, float])
    failure: str = ""
    """Last line of the traceback, or how the worker ended. "" if the reward succeeded."""
    turn_parts: tuple[dict[str, float], ...] = ()
    token_parts: dict[str, tuple[float, ...] | Steps] = field(default_factory=dict[str, Any])
    notes: tuple[Note, ...] = ()
    counts: dict[str, float] = field(default_factory=dict[str, float])
    stop: str = ""
    """Mistake of the user, such as a wrong key, for which the run stops. "" if there is none."""


class _Invalid(Exception):
    """Value that a reward function must not return."""


def read_result(returned: Any, who: str) -> RewardResult:
    """Return the checked result of a reward function for a sample. who: the function, for errors."""
    if isinstance(returned, Failed):
        return read_failure(returned)
    if isinstance(returned, Real) and not isinstance(returned, bool):
        returned = {MAIN_PART: returned}
    if isinstance(returned, dict):
        returned = Scored(returned)
    try:
        if not isinstance(returned, Scored):
            raise _Invalid(f"{who} must return a dict of named numbers, it returned {returned!r}")
        return _read_scored(returned, who)
    except _Invalid as error:
        return RewardResult(failure=str(error)[:LONGEST_FAILURE])


def read_failure(failed: Failed) -> RewardResult:
    """Return the result of a function that failed its sample."""
    why = " ".join(str(failed).split())[:LONGEST_FAILURE] or "the reward failed the sample, and did not say why"
    try:
        notes, counts = _read_notes(failed.notes, "Failed"), _read_numbers(failed.counts, "counts of Failed")
    except _Invalid as error:
        return RewardResult(failure=f"{why} ({error})"[:LONGEST_FAILURE])
    return RewardResult(failure=why, notes=notes, counts=counts)


def read_numbers(given: Any, who: str) -> dict[str, float]:
    """Return named finite numbers. Raises TypeError, which says what was returned instead."""
    try:
        return _read_numbers(given, who)
    except _Invalid as error:
        raise TypeError(str(error)[:LONGEST_FAILURE]) from error


def cut_notes(notes: Sequence[Note]) -> tuple[Note, ...]:
    """Return notes without the middle of long texts.

    >>> [len(note["text"]) for note in cut_notes([{"by": "judge", "text": "x" * 9000}])]
    [4005]
    """
    half = LONGEST_NOTE // 2
    return tuple(
        note
        if len(note["text"]) <= LONGEST_NOTE
        else {**note, "text": f"{note['text'][:half]} ... {note['text'][-half:]}"}
        for note in notes
    )


def merge_results(results: Sequence[tuple[str, RewardResult]]) -> RewardResult:
    """Join the results of several functions for a sample. Each has a prefix for the names of its parts.

    The first failure is that of the sample. Equal counts are added up.
    """
    if len(results) == 1 and not results[0][0]:
        return results[0][1]
    counts: dict[str, float] = {}
    for _, result in results:
        for name, value in result.counts.items():
            counts[name] = counts.get(name, 0.0) + value
    notes = tuple(note for _, result in results for note in result.notes)
    stop = next((result.stop for _, result in results if result.stop), "")
    failure = next((result.failure for _, result in results if result.failure), "")
    lengths = {len(result.turn_parts) for _, result in results if result.turn_parts}
    if len(lengths) > 1:
        failure = failure or f"turn_parts of two functions are of {min(lengths)} and {max(lengths)} replies"
    if stop or failure:
        return RewardResult(failure=failure, notes=notes, counts=counts, stop=stop)
    turns: list[dict[str, float]] = [{} for _ in range(max(lengths, default=0))]
    for before, result in results:
        for turn, parts in zip(turns, result.turn_parts, strict=False):  # a function may have none
            turn |= {before + part: value for part, value in parts.items()}
    return RewardResult(
        reward_parts={before + part: v for before, r in results for part, v in r.reward_parts.items()},
        turn_parts=tuple(turns),
        token_parts={before + part: v for before, r in results for part, v in r.token_parts.items()},
        notes=notes,
        counts=counts,
    )


def _read_scored(given: Scored, who: str) -> RewardResult:
    parts = _read_numbers(given.parts, who)
    turns = tuple(_read_numbers(turn, f"turn_parts of {who}") for turn in given.turn_parts)
    tokens = {name: _read_tokens(name, values, who) for name, values in given.token_parts.items()}
    # a share is of a part: the part that nobody named is the sum of its shares
    for name in {name for turn in turns for name in turn} - parts.keys():
        parts[name] = sum(turn.get(name, 0.0) for turn in turns)
    for name in tokens.keys() - given.parts.keys():
        values = tokens[name]
        parts[name] = parts.get(name, 0.0) + sum(values.values if isinstance(values, Steps) else values)
    if not parts:
        raise _Invalid(f"{who} must return a dict of named numbers, it returned {{}}")
    counts = _read_numbers(given.counts, f"counts of {who}")
    notes = _read_notes(given.notes, who)
    return RewardResult(reward_parts=parts, turn_parts=turns, token_parts=tokens, notes=notes, counts=counts)


def _read_notes(given: Any, who: str) -> tuple[Note, ...]:
    if not isinstance(given, list | tuple):
        raise _Invalid(f"notes of {who} must be a list, they are {given!r}")
    notes: Sequence[Any] = given
    for note in notes:
        if not isinstance(note, dict) or not all(isinstance(note.get(key), str) for key in ("by", "text")):  # pyright: ignore[reportUnknownMemberType]
            raise _Invalid(f"a note of {who} must be an object with the texts by and text, it is {note!r}")
        seconds = note.get("seconds", 0.0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise _Invalid(f"seconds of a note of {who} must be a number, they are {seconds!r}")
    try:
        json.dumps(notes)
    except (TypeError, ValueError) as error:
        raise _Invalid(f"notes of {who} must be JSON: {error}") from error
    return cut_notes(notes)


def _read_tokens(name: str, given: Sequence[float] | Steps, who: str) -> tuple[float, ...] | Steps:
    if isinstance(given, Steps):
        return replace(given, values=_read_tokens(name, given.values, who))
    for value in given:
        _check_number(name, value, f"token_parts of {who}")
    return tuple(map(float, given))


def _read_numbers(given: Any, who: str) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise _Invalid(f"{who} must return a dict of named numbers, it returned {given!r}")
    numbers: Mapping[Any, Any] = given
    for name, value in numbers.items():
        _check_number(name, value, who)
    return {name: float(value) for name, value in numbers.items()}


def _check_number(name: Any, value: Any, who: str) -> None:
    # Real includes numpy's numbers. `not <=` instead of `>`, since every comparison with NaN is false.
    if not isinstance(name, str) or not isinstance(value, Real) or not abs(value) <= LARGEST_REWARD:  # pyright: ignore[reportOperatorIssue]
        said = f"{who} must return numbers up to {LARGEST_REWARD:g} by name, it returned {name!r}: {value!r}"
        raise _Invalid(said)
