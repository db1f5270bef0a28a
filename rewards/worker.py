"""Reward process: `python -m rewards.worker FD`, started by rewards/pool.py.

It reads a RewardPlan, then lists of samples, from the socket FD, and returns (parts, failure) for each sample. It may
die at any time, because of the reward or because the pool kills it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from core.errors import UserError

if TYPE_CHECKING:
    from rewards import RewardFn
    from rewards.several import RewardPlan

# From <linux/prctl.h>: Python has no constant for it.
PR_SET_PDEATHSIG = 1
LONGEST_FAILURE = 300
LARGEST_REWARD = 1e9
"""Maximum absolute value of a part. Larger, infinite and NaN values would ruin the group's mean."""


def main(fd: int) -> None:
    # a reward that loops for ever must not outlive the run, however that ends
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # a child of the reward with this socket would hide the worker's death from the pool
    os.set_inheritable(fd, False)
    pool = Connection(fd)
    try:
        reward: RewardPlan = pool.recv()
        score = reward.load()
        reward.prepare()
    except EOFError:  # the run ended before it needed this worker
        return
    except UserError as error:
        pool.send(str(error))
        return
    pool.send("")
    while True:
        try:
            samples = pool.recv()
        except EOFError:  # the pool has closed
            return
        for prompt, messages in samples:
            pool.send(compute_parts(score, pickle.loads(prompt), messages))


def compute_parts(
    score: RewardFn, fields: dict[str, Any], messages: list[dict[str, str]]
) -> tuple[dict[str, float], str]:
    """Return the reward's parts, or the reason of a failure."""
    prompt: Any = SimpleNamespace(**fields)  # a Prompt without torch
    parts, failure = call_user_code(lambda: score(prompt, messages), "score()")
    if not parts and not failure:
        failure = "score() must return a dict of named numbers, it returned {}"
    return parts, failure


def call_user_code(call: Callable[[], Any], who: str) -> tuple[dict[str, float], str]:
    """Return named finite numbers from the user's code, or the reason why they are invalid."""
    try:
        parts = call()
    except Exception as error:  # the border to the user's code
        return {}, last_line(error)
    if not isinstance(parts, dict):
        return {}, f"{who} must return a dict of named numbers, it returned {parts!r}"[:LONGEST_FAILURE]
    for name, value in parts.items():
        # Real includes numpy's numbers. `not <=` instead of `>`, since every comparison with NaN is false.
        if not isinstance(name, str) or not isinstance(value, Real) or not abs(value) <= LARGEST_REWARD:
            said = f"{who} must return numbers up to {LARGEST_REWARD:g} by name, it returned {name!r}: {value!r}"
            return {}, said[:LONGEST_FAILURE]
    return {name: float(value) for name, value in parts.items()}, ""


def last_line(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_FAILURE]
    return f"{said} ({Path(frame.filename).name}, line {frame.lineno})"


if __name__ == "__main__":
    main(int(sys.argv[1]))
