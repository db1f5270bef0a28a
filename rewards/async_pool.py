"""Reward process with many samples in flight, for async reward functions.

A sample fails alone if the function raises or the deadline passes. If a function blocks the event loop of the process
or ends it, the process is killed, and the samples in it fail; the next sample starts a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from core.timing.deadlines import REWARD_EXIT_GRACE_S
from core.types.samples import Message, Prompt
from rewards.pool import Worker, describe_prompt
from rewards.scored import RewardResult
from rewards.several import RewardPlan

CLOSED = "the run has ended"
"""Failure of a sample that was in flight when the pool was closed, or that came later."""


class AsyncRewardPool:
    """Process for async reward functions, all of one kind, with at most `at_once` calls in flight."""

    def __init__(self, reward: RewardPlan, at_once: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._reward = reward
        self._gate = asyncio.Semaphore(at_once)
        self._process: _Process | None = None
        self._is_closed = False

    @property
    def is_fast(self) -> bool:
        """False: such functions wait for others, as for a judge."""
        return False

    async def compute_each(self, prompt: Prompt, conversations: list[list[Message]]) -> list[RewardResult]:
        """Return the result of `score` for each conversation. Raises UserError if the reward cannot be loaded."""
        each = await asyncio.gather(*(self.compute_group(prompt, [one]) for one in conversations))
        return [result for [result] in each]

    async def compute_group(self, prompt: Prompt, conversations: list[list[Message]]) -> list[RewardResult]:
        """Return a result per conversation. Raises UserError if the reward cannot be loaded.

        The deadline starts when the call begins, so time before the gate does not count.
        """
        async with self._gate:
            if self._is_closed:
                return [RewardResult(failure=CLOSED)] * len(conversations)
            if self._process is None or self._process.is_over:
                self._process = _Process(self._reward)
            return await self._process.compute(prompt, conversations, self.timeout_s)

    def close(self) -> None:
        # the samples at the gate go on as soon as those in flight have failed, and must start no other process
        self._is_closed = True
        if self._process is not None:
            self._process.close()


class _Process:
    """Process with samples in flight. A thread of its own starts it and reads the results."""

    def __init__(self, reward: RewardPlan) -> None:
        self._worker = Worker(reward, "rewards.async_worker")
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[list[RewardResult] | str]] = {}
        """Result of each sample in flight; a text is how the process ended."""
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._killed_for = ""
        self.is_over = False
        # The kernel ties a worker to the thread that started it.
        self._thread = threading.Thread(target=self._serve, name="reward", daemon=True)
        # A process that holds the interpreter's lock reads nothing, and sending to it would block the event loop.
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="reward-send")
        self._thread.start()

    async def compute(self, prompt: Prompt, conversations: list[list[Message]], timeout_s: float) -> list[RewardResult]:
        """Send a sample, and wait for the result."""
        await asyncio.shield(self._loaded)
        number, result = next(self._numbers), self._loop.create_future()
        job = (number, timeout_s, describe_prompt(prompt), conversations)
        if self.is_over:
            return [RewardResult(failure=self._killed_for)] * len(conversations)
        self._waiting[number] = result
        try:
            # the worker reports a deadline itself, unless a function blocks its event loop
            async with asyncio.timeout(timeout_s + REWARD_EXIT_GRACE_S):
                await self._loop.run_in_executor(self._sending, self._worker.socket.send, job)
                found = await asyncio.shield(result)
        except TimeoutError:
            self._killed_for = self._killed_for or (
                f"timeout after {timeout_s:g}s: an async reward blocked the event loop of its process, which was killed"
            )
            self._worker.kill()
            found = await result
        except OSError:  # the process is exiting, and the reading thread reports how
            found = await result
        finally:
            self._waiting.pop(number, None)
        return [RewardResult(failure=found)] * len(conversations) if isinstance(found, str) else found

    def close(self) -> None:
        self._killed_for = self._killed_for or CLOSED
        self.is_over = True
        # again and again, because the thread may be just starting the process
        while self._thread.is_alive():
            self._worker.kill()
            self._thread.join(timeout=0.1)

    def _serve(self) -> None:
        """Start the process, and pass the results on until it ends. Runs in the thread."""
        try:
            self._worker.load()
        except Exception as error:  # whatever it is: its callers would wait for ever
            self._call(self._refuse, error)
            return
        self._call(self._accept)
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, results = self._worker.socket.recv()
                self._call(self._deliver, number, results)
        self._call(self._end, f"the worker process {self._worker.reap()}")

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(function, *arguments)

    def _accept(self) -> None:
        self._loaded.set_result(None)

    def _refuse(self, error: Exception) -> None:
        self.is_over = True
        self._sending.shutdown(wait=False)
        if not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # if nobody waits, Python would print an error that nobody retrieves

    def _deliver(self, number: int, results: list[RewardResult]) -> None:
        waiter = self._waiting.get(number)
        if waiter is not None and not waiter.done():  # its group may have been cancelled
            waiter.set_result(results)

    def _end(self, why: str) -> None:
        self.is_over = True
        self._sending.shutdown(wait=False)
        self._killed_for = self._killed_for or why
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(self._killed_for)
