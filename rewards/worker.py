"""Reward process: `python -m rewards.worker FD`, started by rewards/pool.py.

It reads a RewardPlan, then lists of samples, from the socket FD, and returns the results of each sample. It may die at
any time, because of the reward or because the pool kills it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from core.errors import UserError
from rewards.calls import RewardCalls

# From <linux/prctl.h>: Python has no constant for it.
PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    pool = connect(fd)
    if (calls := load_calls(pool)) is None:
        return
    while True:
        try:
            samples = pool.recv()
        except EOFError:  # the pool has closed
            return
        for prompt, conversations in samples:
            pool.send(calls.score(read_prompt(prompt), conversations))


def connect(fd: int) -> Connection:
    """Return the connection to the pool, without which this process dies."""
    # a reward that loops for ever must not outlive the run, however that ends
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # a child of the reward with this socket would hide the worker's death from the pool
    os.set_inheritable(fd, False)
    return Connection(fd)


def load_calls(pool: Connection) -> RewardCalls | None:
    """Load the functions of the plan that the pool sends, and report it; None if this process is not needed."""
    try:
        plan = pool.recv()
        calls = RewardCalls(plan)
        plan.prepare()
    except EOFError:  # the run ended before it needed this worker
        return None
    except UserError as error:
        pool.send(str(error))
        return None
    pool.send("")
    return calls


def read_prompt(fields: bytes) -> Any:
    """Return a Prompt without torch."""
    return SimpleNamespace(**pickle.loads(fields))


if __name__ == "__main__":
    main(int(sys.argv[1]))
