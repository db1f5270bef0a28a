"""Rewards of tokens: from the `token_parts` and `turn_parts` of a reward function to a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from core.types.arrays import Floats
from core.types.samples import TOKEN_REWARDS, Sample
from rewards.scored import RewardResult, Steps

Decode = Callable[[list[int]], str]


def add_token_rewards(sample: Sample, result: RewardResult, weights: Mapping[str, float], decode: Decode) -> Sample:
    """Return the sample with the column of token rewards: the weighted sum of the shares that tokens earned.

    Raises ValueError if the shares do not fit the tokens.
    """
    if not result.token_parts:
        return sample
    column = np.zeros(len(sample.token_ids), dtype=sample.float_dtype)
    for name, values in result.token_parts.items():
        weight = weights.get(name, 0.0)  # parts without a weight are metrics only
        for position, value in find_positions(sample, name, values, decode):
            column[position] += weight * value
    column.setflags(write=False)
    columns: dict[str, Floats] = {**sample.columns, TOKEN_REWARDS: column}
    return sample.replace(columns=columns)


def join_turns(
    sample: Sample, of_env: Sequence[Mapping[str, float]], of_reward: Sequence[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    """Return the shares of each reply, of the environment and of the reward. Raises ValueError for a wrong number."""
    if of_reward and len(of_reward) != len(sample.spans):
        raise ValueError(f"turn_parts has {len(of_reward)} entries for {len(sample.spans)} replies")
    if not of_env or not of_reward:
        return [*(of_env or of_reward)]
    return [{**env, **reward} for env, reward in zip(of_env, of_reward, strict=True)]


def find_positions(
    sample: Sample, name: str, values: tuple[float, ...] | Steps, decode: Decode
) -> list[tuple[int, float]]:
    """Return the position of each value's token in the sample. Raises ValueError for a wrong number of values."""
    if not isinstance(values, Steps):
        sampled = np.flatnonzero(sample.action_mask)
        if len(values) != len(sampled):
            raise ValueError(f"token_parts[{name!r}] has {len(values)} values for {len(sampled)} sampled tokens")
        return list(zip(sampled.tolist(), values, strict=True))
    begin, end = sample.spans[-1]
    ids = sample.token_ids[begin:end].tolist()
    ends = find_step_ends(decode(ids), values.separator)
    if len(values.values) != len(ends):
        raise ValueError(
            f"token_parts[{name!r}] has {len(values.values)} values for {len(ends)} steps of the last reply"
        )
    return [(begin + find_token(ids, at, decode), v) for at, v in zip(ends, values.values, strict=True)]


def find_step_ends(text: str, separator: str) -> list[int]:
    r"""Return the number of characters up to the end of each step, without the separator.

    Blank steps count as none: after the last separator, and between separators in a row.

    >>> find_step_ends("one\n\ntwo\n\n", "\n\n"), find_step_ends("one\n\n\n\ntwo", "\n\n")
    ([3, 8], [3, 10])
    """
    ends: list[int] = []
    at = 0
    for step in text.split(separator):
        if step.strip():
            ends.append(at + len(step.rstrip()))
        at += len(step) + len(separator)
    return ends


def find_token(ids: Sequence[int], characters: int, decode: Decode) -> int:
    """Return the index of the first token with which the decoded text has at least this many characters."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        if len(decode(list(ids[: middle + 1]))) >= characters:
            high = middle
        else:
            low = middle + 1
    return low
