"""Pool of reward processes that can be killed.

If a reward raises, hangs or ends the process, only the current sample fails. Samples that finish at the same time are
sent together, unless the reward is slow. Each worker has a separate socket, and shares neither queue nor lock. Workers
are new interpreters that never import the main module, not forks of a process with threads. So the pool works in a
plain process and in a Ray actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from multiprocessing import Pipe

from core.cluster.child_process import start_module
from core.errors import UserError
from core.timing.deadlines import REWARD_EXIT_GRACE_S, REWARD_START_TIMEOUT_S
from core.types.samples import Message, Prompt
from rewards.scored import RewardResult
from rewards.several import RewardPlan

SECONDS_PER_SHARE = 0.005
"""Seconds of work that one hand-over to a worker may hold. Slower rewards get one sample at a time."""
Job = tuple[Prompt, list[list[Message]]]
"""Sample for the reward: the prompt, and the messages after it. Or a group: the messages of each sibling."""


class RewardPool:
    """Pool of `workers` processes for the plain reward functions of a recipe, all of one kind.

    A sample's timeout starts when a worker begins, so time in the queue does not count. `close()` kills the workers.
    They also die with the process that owns the pool.
    """

    def __init__(self, reward: RewardPlan, workers: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._workers = [Worker(reward) for _ in range(workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._waiting: list[tuple[Job, asyncio.Future[list[RewardResult]]]] = []
        self._shares: set[asyncio.Task[None]] = set()
        self._sample_s = SECONDS_PER_SHARE
        """Recent seconds per sample."""
        # The kernel ties a worker to the thread that started it, so these threads both start and feed them.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        for worker in self._workers:
            self._idle.put(worker)
            self._threads.submit(worker.start)

    @property
    def is_fast(self) -> bool:
        """True if several samples fit a hand-over, by the seconds of the last ones."""
        return self._sample_s <= SECONDS_PER_SHARE

    async def compute_group(self, prompt: Prompt, conversations: list[list[Message]]) -> list[RewardResult]:
        """Return the results of siblings, which `score_group` compares. Raises UserError if it cannot be loaded."""
        return await self._submit((prompt, conversations))

    async def compute_each(self, prompt: Prompt, conversations: list[list[Message]]) -> list[RewardResult]:
        """Return the result of `score` for each conversation. Raises UserError if it cannot be loaded."""
        each = await asyncio.gather(*(self._submit((prompt, [one])) for one in conversations))
        return [result for [result] in each]

    def _submit(self, job: Job) -> asyncio.Future[list[RewardResult]]:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[list[RewardResult]] = loop.create_future()
        self._waiting.append((job, result))
        if len(self._waiting) == 1:
            loop.call_soon(self._hand_over)  # after everything else that this iteration of the event loop finishes
        return result

    def _hand_over(self) -> None:
        """Distribute the waiting samples over the workers, in shares of about SECONDS_PER_SHARE seconds."""
        waiting = [(sample, result) for sample, result in self._waiting if not result.done()]
        self._waiting = []
        # At most an equal part of the samples, rounded up, or some workers would stay idle.
        size = max(1, min(int(SECONDS_PER_SHARE / self._sample_s), -(-len(waiting) // len(self._workers))))
        for i in range(0, len(waiting), size):
            task = asyncio.ensure_future(self._compute_share(waiting[i : i + size]))
            # the event loop keeps only weak references to tasks
            self._shares.add(task)
            task.add_done_callback(self._shares.discard)

    async def _compute_share(self, share: list[tuple[Job, asyncio.Future[list[RewardResult]]]]) -> None:
        samples, waiting = [sample for sample, _ in share], [result for _, result in share]
        try:
            loop = asyncio.get_running_loop()
            results, seconds = await loop.run_in_executor(self._threads, self._run_in_worker, samples)
        except asyncio.CancelledError:  # the pool was closed
            for result in waiting:
                result.cancel()
            raise
        except Exception as error:  # whatever it is: its callers would wait for ever
            for result in waiting:
                if not result.done():
                    result.set_exception(error)
            return
        # a running average, so that the size of a share follows a reward that becomes slower or faster
        self._sample_s = (self._sample_s + seconds / len(samples)) / 2
        for waiter, result in zip(waiting, results, strict=True):
            if not waiter.done():  # its group may have been cancelled
                waiter.set_result(result)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.kill()  # again: a thread may have been starting it
            worker.reap()

    def _run_in_worker(self, samples: Sequence[Job]) -> tuple[list[list[RewardResult]], float]:
        """Return the results of a share, and its seconds."""
        # there are as many threads as workers, so an idle worker is always in the queue
        worker = self._idle.get()
        try:
            start = time.perf_counter()
            return worker.compute_rewards(samples, self.timeout_s), time.perf_counter() - start
        finally:
            self._idle.put(worker)


def describe_samples(samples: Sequence[Job]) -> list[tuple[bytes, list[list[Message]]]]:
    """Return samples for a worker, each with its prompt as pickled fields: a Prompt would import torch there.

    The worker unpickles the fields for every sample, so siblings share no object that a reward could change.
    """
    of_prompts: dict[int, bytes] = {}
    for prompt, _ in samples:
        if id(prompt) not in of_prompts:
            of_prompts[id(prompt)] = describe_prompt(prompt)
    return [(of_prompts[id(prompt)], conversations) for prompt, conversations in samples]


def describe_prompt(prompt: Prompt) -> bytes:
    """Return the pickled fields of a prompt."""
    return pickle.dumps({f.name: getattr(prompt, f.name) for f in fields(prompt)})


class Worker:
    """Reward process. A dead process is replaced at the next sample."""

    def __init__(self, reward: RewardPlan, module: str = "rewards.worker") -> None:
        """Take a plan, and the program of the process."""
        self._reward, self._module = reward, module
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. Errors of loading the reward are reported with the first sample."""
        self.socket, far_end = Pipe()
        self._ready = False
        self._process = start_module(self._module, far_end.fileno())
        # an open copy here would hide the worker's death: recv would wait instead of raising EOFError
        far_end.close()

    def compute_rewards(self, samples: Sequence[Job], timeout_s: float) -> list[list[RewardResult]]:
        """Return the results of samples, in order. A sample that ends the process fails alone."""
        results: list[list[RewardResult]] = []
        # after a death, the next pass starts a new process for the samples behind the fatal one
        while len(results) < len(samples):
            results += self._compute_until_death(samples[len(results) :], timeout_s)
        return results

    def _compute_until_death(self, samples: Sequence[Job], timeout_s: float) -> list[list[RewardResult]]:
        """Return the results of the samples, up to the sample that ended the process."""
        self.load()
        results: list[list[RewardResult]] = []
        try:
            self.socket.send(describe_samples(samples))
            for prompt, _ in samples:
                # The worker answers each sample before it begins the next, so this deadline is that of one sample. Its
                # functions run one after another, and each may take timeout_s.
                deadline_s = timeout_s * len(self._reward.list_names(prompt.source))
                if not self.socket.poll(deadline_s):
                    self.kill()
                    self.reap()
                    failure = f"timeout after {deadline_s:g}s"
                    break
                results.append(self.socket.recv())
            else:
                return results
        except (EOFError, OSError):  # the process is exiting
            failure = f"the worker process {self.reap()}"
        _, fatal = samples[len(results)]
        return [*results, [RewardResult(failure=failure)] * len(fatal)]

    def kill(self) -> None:
        """Kill the process and its children. Another thread may be waiting for the result."""
        process = self._process  # the other thread may clear it
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                # start_module makes the worker the leader of a process group, in which its children are too
                os.killpg(process.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Wait for an exiting process, or kill it, and clean up. Return how it ended, in words."""
        if self._process is None:
            return "was not running"
        with contextlib.suppress(subprocess.TimeoutExpired):
            # first wait, so that the exit code is the worker's own and not that of our kill
            self._process.wait(REWARD_EXIT_GRACE_S)
        self.kill()  # its children too, which may still run
        code = self._process.wait()
        self.socket.close()
        self._process = None
        return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def load(self) -> None:
        """Start the process if it is not running, and load the reward in it. Raises UserError if that fails."""
        if self._process is None:
            self.start()
        if self._ready:
            return
        try:
            self.socket.send(self._reward)
            refusal = self.socket.recv() if self.socket.poll(REWARD_START_TIMEOUT_S) else "takes too long to load"
        except (EOFError, OSError):
            refusal = f"{self._reward.path}: the worker process {self.reap()} while it loaded the reward"
        if refusal:
            self.reap()
            raise UserError(refusal)
        self._ready = True
