"""Reward process for async functions: `python -m rewards.async_worker FD`, started by rewards/async_pool.py.

It reads a RewardPlan, then numbered samples, from the socket FD. All of them are in flight at once; each is answered
with the number when it is done, or after the deadline.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from multiprocessing.connection import Connection

from rewards.calls import Conversation, RewardCalls, last_line
from rewards.scored import RewardResult
from rewards.worker import connect, load_calls, read_prompt

Job = tuple[int, float, bytes, list[Conversation]]
"""Number of a sample, deadline in seconds, fields of the prompt, and conversations."""


def main(fd: int) -> None:
    pool = connect(fd)
    if (calls := load_calls(pool)) is not None:
        asyncio.run(serve(pool, calls))


async def serve(pool: Connection, calls: RewardCalls) -> None:
    """Answer samples until the pool closes."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    running: set[asyncio.Task[None]] = set()

    def begin(job: Job) -> None:
        task = loop.create_task(answer(pool, calls, job))
        # the event loop keeps only weak references to tasks
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        while True:
            try:
                job = pool.recv()
            except (EOFError, OSError):
                loop.call_soon_threadsafe(closed.set)
                return
            loop.call_soon_threadsafe(begin, job)

    threading.Thread(target=read, daemon=True).start()
    await closed.wait()


async def answer(pool: Connection, calls: RewardCalls, job: Job) -> None:
    """Score a sample, or report that the deadline has passed."""
    number, timeout_s, prompt, conversations = job
    try:
        # a TimeoutError of the user's own is caught inside, so this one is of the deadline
        async with asyncio.timeout(timeout_s):
            results = await calls.score_async(read_prompt(prompt), conversations)
        pool.send((number, results))
    except TimeoutError:
        pool.send((number, fail_all(f"timeout after {timeout_s:g}s", conversations)))
    except OSError:  # the pool has closed
        raise
    except Exception as error:  # without an answer, the pool would kill the process with all its samples
        pool.send((number, fail_all(last_line(error), conversations)))


def fail_all(why: str, conversations: list[Conversation]) -> list[RewardResult]:
    """Return a failure for each conversation."""
    return [RewardResult(failure=why)] * len(conversations)


if __name__ == "__main__":
    main(int(sys.argv[1]))
