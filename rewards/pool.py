"""Pool of reward processes that can be killed.

If a reward raises, hangs or ends the process, only the current sample fails. Each worker has one sample at a time and a
separate socket, and shares neither queue nor lock. Workers are new interpreters that never import the main module, not
forks of a process with threads. So the pool works in a plain process and in a Ray actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from multiprocessing import Pipe

from core.cluster.child_process import start_module
from core.errors import UserError
from core.timing.deadlines import REWARD_EXIT_GRACE_S, REWARD_START_TIMEOUT_S
from core.types.samples import Message, Prompt
from rewards.several import RewardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Reward of one sample: parts or a failure, never both."""

    reward_parts: dict[str, float] = field(default_factory=dict[str, float])
    failure: str = ""
    """Last line of the traceback, or how the worker ended. "" if the reward succeeded."""


class RewardPool:
    """Pool of `workers` processes for the reward functions of a recipe.

    A sample's timeout starts when a worker begins, so time in the queue does not count. `close()` kills the workers.
    They also die with the process that owns the pool.
    """

    def __init__(self, reward: RewardPlan, workers: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._workers = [_Worker(reward) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        # The kernel ties a worker to the thread that started it, so these threads both start and feed them.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        for worker in self._workers:
            self._idle.put(worker)
            self._threads.submit(worker.start)

    async def compute_reward(self, prompt: Prompt, messages: list[Message]) -> RewardResult:
        """Return the reward's parts or failure. Raises UserError if the reward cannot be loaded."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run_in_worker, prompt, messages)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.kill()  # again: a thread may have been starting it
            worker.reap()

    def _run_in_worker(self, prompt: Prompt, messages: list[Message]) -> RewardResult:
        # there are as many threads as workers, so an idle worker is always in the queue
        worker = self._idle.get()
        try:
            return worker.compute_reward(prompt, messages, self.timeout_s)
        finally:
            self._idle.put(worker)


class _Worker:
    """Reward process. A dead process is replaced at the next sample."""

    def __init__(self, reward: RewardPlan) -> None:
        self._reward = reward
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. Errors of loading the reward are reported with the first sample."""
        self._socket, far_end = Pipe()
        self._ready = False
        self._process = start_module("rewards.worker", far_end.fileno())
        far_end.close()

    def compute_reward(self, prompt: Prompt, messages: list[Message], timeout_s: float) -> RewardResult:
        if self._process is None:
            self.start()
        if not self._ready:
            self._send_reward()
        try:
            # fields, not the Prompt: unpickling it would import torch in the worker
            self._socket.send(({f.name: getattr(prompt, f.name) for f in fields(prompt)}, messages))
            if not self._socket.poll(timeout_s):
                self.kill()
                self.reap()
                return RewardResult(failure=f"timeout after {timeout_s:g}s")
            parts, failure = self._socket.recv()
        except (EOFError, OSError):  # the process is exiting
            return RewardResult(failure=f"the worker process {self.reap()}")
        return RewardResult(reward_parts=parts, failure=failure)

    def kill(self) -> None:
        """Kill the process and its children. Another thread may be waiting for the result."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Wait for an exiting process, or kill it, and clean up. Return how it ended, in words."""
        if self._process is None:
            return "was not running"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REWARD_EXIT_GRACE_S)
        self.kill()  # its children too, which may still run
        code = self._process.wait()
        self._socket.close()
        self._process = None
        return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def _send_reward(self) -> None:
        try:
            self._socket.send(self._reward)
            refusal = self._socket.recv() if self._socket.poll(REWARD_START_TIMEOUT_S) else "takes too long to load"
        except (EOFError, OSError):
            refusal = f"{self._reward.path}: the worker process {self.reap()} while it loaded the reward"
        if refusal:
            self.reap()
            raise UserError(refusal)
        self._ready = True
