"""Shares of samples that a pool of reward processes hands over, with workers that only note them."""

from __future__ import annotations

import asyncio
import pickle
import select
import subprocess
from contextlib import closing
from typing import Any, ClassVar, cast

import pytest

from core.errors import UserError
from core.types.samples import Prompt
from rewards import pool as pools
from rewards import resolve_reward
from rewards.pool import RewardPool, Worker, describe_samples
from rewards.scored import RewardResult
from unit_tests.helpers.one_reward import one_reward

PLAN = one_reward(resolve_reward("arithmetic"))


class Noting:
    """Worker that gives the number of messages, and fails for none."""

    shares: ClassVar[list[int]] = []
    events: ClassVar[list[str]] = []

    def __init__(self, reward: Any) -> None:
        assert reward is PLAN

    def start(self) -> None:
        self.events.append("start")

    def compute_rewards(self, samples: Any, timeout_s: float) -> list[list[RewardResult]]:
        assert timeout_s == 7.0
        self.shares.append(len(samples))
        if any(not conversations for _, conversations in samples):
            raise UserError("no conversation")
        return [[RewardResult(reward_parts={"n": float(len(one))}) for one in each] for _, each in samples]

    def kill(self) -> None:
        self.events.append("kill")

    def reap(self) -> None:
        self.events.append("reap")


@pytest.fixture
def pool(monkeypatch):
    Noting.shares, Noting.events = [], []
    monkeypatch.setattr(pools, "Worker", Noting)
    with closing(RewardPool(PLAN, 3, 7.0)) as made:
        yield made


def ask(pool: RewardPool, *lengths: int) -> list[Any]:
    prompt = Prompt(id="0", messages=[])
    Noting.shares.clear()
    conversations: list[Any] = [[{"role": "user", "content": ""}] * n for n in lengths]
    return [result.reward_parts["n"] for result in asyncio.run(pool.compute_each(prompt, conversations))]


def test_a_share_is_of_the_seconds_that_samples_take(pool):
    assert ask(pool, 1, 2, 3, 4, 5, 6, 7) == [1, 2, 3, 4, 5, 6, 7]
    assert Noting.shares == [1] * 7, "nothing is known of the first"
    for sample_s, n, shares in (
        (1e-6, 7, [1, 3, 3]),  # a third, rounded up
        (1e-6, 3, [1, 1, 1]),
        (0.001, 30, [5] * 6),
        (0.0026, 8, [1] * 8),
        (0.02, 4, [1] * 4),
    ):
        pool._sample_s = sample_s
        assert ask(pool, *range(n)) == [*range(n)] and sorted(Noting.shares) == shares, sample_s
    for sample_s, is_fast in ((0.005, True), (0.0051, False), (0.0, True)):
        pool._sample_s = sample_s
        assert pool.is_fast is is_fast


def test_an_error_is_of_its_share_and_a_cancelled_sample_costs_nothing(pool):
    prompt = Prompt(id="0", messages=[])

    async def go() -> list[Any]:
        calls = [asyncio.ensure_future(pool.compute_group(prompt, group)) for group in ([[]], [], [[], []], [[]])]
        await asyncio.sleep(0)
        calls[3].cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    one, failed, two, cancelled = asyncio.run(go())
    assert one == [RewardResult(reward_parts={"n": 0.0})] and two == one * 2
    assert isinstance(failed, UserError) and isinstance(cancelled, asyncio.CancelledError)
    pool._sample_s = 1.0
    before = pool._sample_s
    ask(pool, 1)
    assert 0.5 <= pool._sample_s < 0.51 < before, "half of the old and half of the new"


def test_closing_kills_each_worker_before_and_after_its_thread_has_ended(pool):
    ask(pool, 1)
    pool.close()
    assert Noting.events == ["start"] * 3 + ["kill"] * 3 + ["kill", "reap"] * 3
    Noting.events.clear()


def test_a_prompt_is_described_once_for_all_of_its_samples():
    one, other = Prompt(id="a", messages=[], answer="x"), Prompt(id="b", messages=[])
    told = describe_samples([(one, [[]]), (other, [[]]), (one, [[], []])])
    assert told[0][0] is told[2][0] and [conversations for _, conversations in told] == [[[]], [[]], [[], []]]
    assert pickle.loads(told[0][0])["answer"] == "x" and pickle.loads(told[1][0])["id"] == "b"


class Socket:
    """Socket to a process that gives these answers, and then no more, or ends."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.sent, self.waited, self.closed = [*answers], list[Any](), list[float](), 0

    def send(self, what: Any) -> None:
        self.sent.append(what)

    def poll(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return bool(self.answers)

    def recv(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


class Process:
    def __init__(self, code: int) -> None:
        self.pid, self.code = 2**22 + 1, code

    def wait(self, timeout: float | None = None) -> int:
        return self.code


def worker_of(socket: Socket, code: int = 0, *, is_ready: bool = True) -> Any:
    made = cast(Any, Worker(PLAN))
    made._process, made.socket, made._ready = Process(code), socket, is_ready
    return made


def test_a_worker_tells_how_its_process_ended():
    for code, said in ((0, "exited with code 0"), (3, "exited with code 3"), (-9, "was killed by SIGKILL")):
        worker = worker_of(socket := Socket(), code)
        assert worker.reap() == said and worker.reap() == "was not running" and socket.closed == 1
        worker.kill()  # nothing is there


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 20 & exit 3", "exited with code 3"),
        ("sleep 20", "was killed by SIGKILL"),
        ("sleep 20; true", "was killed by SIGKILL"),
    ],
)
def test_no_child_of_a_worker_outlives_it(monkeypatch, script, said):
    monkeypatch.setattr(pools, "REWARD_EXIT_GRACE_S", 0.2)
    worker = worker_of(Socket())
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        worker._process = process
        assert worker.reap() == said
        assert select.select([process.stdout], [], [], 5.0)[0], "a child has the pipe"


def test_a_sample_that_ends_its_process_fails_and_the_next_has_a_new_one(monkeypatch):
    good, prompt = [RewardResult(reward_parts={"n": 1.0})], Prompt(id="0", messages=[])
    sockets = [Socket(good, EOFError()), Socket("", good), Socket("")]
    worker = worker_of(sockets[0], -11)
    started = iter(sockets[1:])

    def start() -> None:
        worker._process, worker.socket, worker._ready = Process(-11), next(started), False

    monkeypatch.setattr(worker, "start", start)
    found = worker.compute_rewards([(prompt, [[]]), (prompt, [[], []]), (prompt, [[]]), (prompt, [[]])], 2.5)
    died = RewardResult(failure="the worker process was killed by SIGSEGV")
    late = RewardResult(failure="timeout after 2.5s")
    assert found == [good, [died, died], good, [late]]
    assert [len(sockets[0].sent[0]), len(sockets[1].sent[1])] == [4, 2] and sockets[1].sent[0] is PLAN
    assert sockets[0].waited == [2.5, 2.5] and sockets[1].waited == [pools.REWARD_START_TIMEOUT_S, 2.5, 2.5]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (("wrong setting",), "wrong setting"),
        ((), "takes too long to load"),
        ((EOFError(),), f"{PLAN.path}: the worker process exited with code 5 while it loaded the reward"),
        ((OSError(),), f"{PLAN.path}: the worker process exited with code 5 while it loaded the reward"),
    ],
)
def test_a_reward_that_does_not_load_is_the_users_mistake(answers, says):
    worker = worker_of(Socket(*answers), 5, is_ready=False)
    with pytest.raises(UserError) as raised:
        worker.load()
    assert str(raised.value) == says and worker._process is None
    ready = worker_of(socket := Socket(""), is_ready=False)
    ready.load()
    ready.load()
    assert socket.sent == [PLAN] and ready._ready
