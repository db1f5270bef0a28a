"""Edges of rewards: replies that are counted, seeds of votes, pools that are closed, and what a sandbox shows."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from core.types.samples import Prompt
from rewards import environment, mathvista, resolve_reward
from rewards import pool as pools
from rewards.async_pool import AsyncRewardPool
from rewards.judging.judge import make_body
from rewards.judging.settings import JudgeSettings
from rewards.pool import RewardPool
from rewards.sandbox import bubblewrap
from rewards.sandbox.usage import measure_folders
from rewards.scored import RewardResult
from unit_tests.helpers.one_reward import one_reward
from unit_tests.helpers.processes import wait_until

PROMPT = Prompt(id="0", messages=[])
PLAN = one_reward(resolve_reward("arithmetic"))


def said(*roles: str) -> Any:
    return [{"role": role, "content": ""} for role in roles]


@pytest.mark.parametrize(
    ("roles", "n"),
    [((), 0), (("assistant",), 1), (("assistant", "tool", "assistant", "user"), 2), (("user",), 0)],
)
def test_the_environments_reward_is_the_number_of_replies(roles, n):
    assert environment.score(PROMPT, said(*roles)) == {"replies": float(n)}


def test_the_seeds_of_votes_use_all_of_thirty_one_bits():
    settings = JudgeSettings(base_url="http://h/v1", model="m")
    seeds = [
        make_body(settings, "text", vote=vote, attempt=attempt)["seed"] for vote in range(50) for attempt in (0, 1)
    ]
    assert len({*seeds}) == 100 and 2**30 < max(seeds) < 2**31


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[1, 2.0].", [1, 2.0]),
        ("1, 2", None),
        ("[x]", None),
        ("[1 +]", None),
        # more than Python's parser takes
        ("[" + "-" * 20_000 + "1]", None),
        ("[" + "(" * 20_000 + "1]", None),
    ],
    ids=["numbers", "no list", "a name", "broken", "signs", "parentheses"],
)
def test_a_list_is_read_or_there_is_none_however_it_is_nested(text, found):
    assert mathvista.read_list(text) == found


class Held(pools.Worker):
    """Worker that scores once it may."""

    def __init__(self, plan: Any) -> None:
        self.has_begun, self.is_over = threading.Event(), threading.Event()

    def start(self) -> None: ...

    def compute_rewards(self, samples: Any, timeout_s: float) -> list[list[RewardResult]]:
        self.has_begun.set()
        assert self.is_over.wait(10)
        return [[RewardResult(reward_parts={"n": 1.0})] for _ in samples]

    def kill(self) -> None: ...

    def reap(self) -> str:
        return ""


def test_samples_that_wait_when_a_pool_is_closed_are_cancelled_silently(monkeypatch):
    monkeypatch.setattr(pools, "Worker", Held)
    told: list[str] = []

    async def go() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        pool = RewardPool(PLAN, 1, 7.0)
        calls = [asyncio.ensure_future(pool.compute_group(PROMPT, [[]])) for _ in range(3)]
        await asyncio.sleep(0)
        [worker] = pool._workers
        while not worker.has_begun.is_set():  # pyright: ignore[reportAttributeAccessIssue]
            await asyncio.sleep(0)
        shut_down = pool._threads.shutdown

        def cancel_first(**options: bool) -> None:
            shut_down(wait=False, **options)
            worker.is_over.set()  # pyright: ignore[reportAttributeAccessIssue]
            shut_down()

        monkeypatch.setattr(pool._threads, "shutdown", cancel_first)
        pool.close()
        found = await asyncio.gather(*calls, return_exceptions=True)
        while pool._shares:
            await asyncio.sleep(0)
        return found

    first, *others = asyncio.run(go())
    gc.collect()
    assert first == [RewardResult(reward_parts={"n": 1.0})] and told == []
    assert [type(one) for one in others] == [asyncio.CancelledError] * 2


def test_a_sample_at_its_deadline_does_not_wait_for_its_process(tmp_path: Path, monkeypatch):
    """Only a process that is ending by itself has time for that."""
    monkeypatch.setattr(pools, "REWARD_EXIT_GRACE_S", 3600.0)
    (tmp_path / "mine.py").write_text("import time\n\ndef score(prompt, messages): time.sleep(3600)\n")
    with closing(RewardPool(one_reward(resolve_reward(str(tmp_path / "mine.py"))), 1, 0.2)) as pool:
        found = asyncio.run(asyncio.wait_for(pool.compute_each(PROMPT, [said("assistant")]), 30))
    assert found == [RewardResult(failure="timeout after 0.2s")]


WAITS = """
import asyncio
from pathlib import Path

async def score(prompt, messages):
    Path(messages[-1]["content"]).touch()
    await asyncio.sleep(3600)
"""


def test_an_async_sample_in_flight_when_its_pool_is_closed_says_so(tmp_path: Path):
    (tmp_path / "mine.py").write_text(WAITS)
    mark = tmp_path / "begun"

    async def go() -> list[RewardResult]:
        pool = AsyncRewardPool(one_reward(resolve_reward(str(tmp_path / "mine.py")), {}), 4, 20.0)
        call = asyncio.ensure_future(pool.compute_each(PROMPT, [[{"role": "assistant", "content": str(mark)}]]))
        await asyncio.to_thread(wait_until, mark.exists)
        pool.close()
        return await call

    assert asyncio.run(go()) == [RewardResult(failure="the run has ended")]


def test_a_sandbox_sees_the_programs_of_the_machine_and_nothing_else(tmp_path: Path, monkeypatch):
    """A machine where /bin is a folder, /sbin a link, and /lib missing."""
    for name in ("bin", "lib64", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "sbin").symlink_to("usr/sbin")
    monkeypatch.setattr(bubblewrap, "Path", lambda root, name: tmp_path / root[1:] / name)
    shown = [["--ro-bind", *[str(tmp_path / name)] * 2] for name in ("bin", "lib64")]
    link = ["--symlink", "usr/sbin", str(tmp_path / "sbin")]
    assert bubblewrap.mount_system() == ["--ro-bind", "/usr", "/usr", *shown[0], *link, *shown[1]]


@pytest.mark.skipif(os.getuid() != 0, reason="only root reads every folder")
def test_root_counts_files_however_deep_they_are_closed(tmp_path: Path):
    levels = [tmp_path / "/".join("d" * depth) for depth in range(1, 67)]
    levels[-1].mkdir(parents=True)
    for level in reversed(levels):
        level.chmod(0)
    assert measure_folders(levels[:1])[1] == 65
