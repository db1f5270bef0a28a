"""Async reward functions, functions of whole groups, and results with notes, turns and tokens."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import rewards.async_pool
from configs.rollout_schema import RewardConfig
from core.errors import UserError
from core.types.messages import Message
from core.types.samples import Prompt
from driver.start.rollouts import share_concurrency
from rewards import Failed, resolve_reward
from rewards.async_pool import AsyncRewardPool, _Process
from rewards.async_worker import answer
from rewards.calls import read_error
from rewards.kinds import Kind, find_kind
from rewards.pool import Worker
from rewards.rewarder import Rewarder
from rewards.scored import RewardResult
from rewards.weights import plan_rewards
from unit_tests.helpers.one_reward import one_reward

WAITING = """
import asyncio, os, time
from rewards import Failed, Scored, Steps
from core.errors import UserError

NOW, MOST = 0, 0

async def score(prompt, messages):
    global NOW, MOST
    said = messages[-1]["content"]
    NOW += 1
    MOST = max(MOST, NOW)
    try:
        await asyncio.sleep(0.05 if said != "hang" else 3600)
    finally:
        NOW -= 1
    if said == "raise":
        raise ValueError("six")
    if said == "fail":
        raise Failed("no verdict", notes=[{"by": "me", "text": "?"}], counts={"judge/calls": 2})
    if said == "stop":
        raise UserError("MY_KEY is not set")
    if said == "block":
        time.sleep(3600)
    if said == "exit":
        os._exit(3)
    if said == "rich":
        return Scored({"good": 1.0}, turn_parts=[{"good": 1.0}], token_parts={"steps": Steps("\\n", [0.5, 0.25])})
    return {"pid": os.getpid(), "most": MOST}
"""
PROMPT = Prompt(id="test/0", messages=[{"role": "user", "content": "?"}], answer="yes")


@contextmanager
def rewarder(folder: Path, code: str, *, at_once: int = 32, timeout_s: float = 20.0) -> Iterator[Rewarder]:
    file = folder / "mine.py"
    file.write_text(code)
    with closing(Rewarder(one_reward(resolve_reward(str(file)), {}), 1, timeout_s, at_once)) as found:
        yield found


def test_an_engine_has_its_share_of_the_calls_in_flight():
    """reward.max_concurrency is of the whole run: 10 over 4 engines are 2 each, and never none."""
    plan = plan_rewards(RewardConfig(function="arithmetic", max_concurrency=10), engines=4)
    assert share_concurrency(10, plan) == 2 and share_concurrency(3, plan) == 1


def ask(found: Rewarder, *replies: str) -> list[RewardResult]:
    async def all_of_them() -> list[RewardResult]:
        calls = [found.compute_reward(PROMPT, [{"role": "assistant", "content": r}]) for r in replies]
        return await asyncio.gather(*calls)

    return asyncio.run(all_of_them())


def test_async_samples_are_in_flight_together_up_to_the_limit(tmp_path):
    with rewarder(tmp_path, WAITING, at_once=4) as found:
        results = ask(found, *map(str, range(12)))
    assert len({r.reward_parts["pid"] for r in results}) == 1
    assert max(r.reward_parts["most"] for r in results) == 4


def test_closing_ends_the_process_of_an_async_reward(tmp_path):
    with rewarder(tmp_path, WAITING) as found:
        [outcome] = ask(found, "fine")
    with pytest.raises(ProcessLookupError):
        os.kill(int(outcome.reward_parts["pid"]), 0)


def test_each_way_to_fail_costs_one_async_sample_and_says_why(tmp_path):
    with rewarder(tmp_path, WAITING, timeout_s=0.5) as found:
        raised, failed, late, rich, fine = ask(found, "raise", "fail", "hang", "rich", "fine")
    assert raised.failure == "ValueError: six (mine.py, line 18)"
    assert (failed.failure, failed.counts) == ("no verdict", {"judge/calls": 2.0})
    assert [note["text"] for note in failed.notes] == ["?"]
    assert late.failure == "timeout after 0.5s"
    assert rich.reward_parts == {"good": 1.0, "steps": 0.75} and rich.turn_parts == ({"good": 1.0},)
    assert not fine.failure


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"notes": ["?"]}, "no verdict (a note of Failed must be an object with the texts by and text, it is '?')"),
        (
            {"notes": [{"by": "me", "text": "t", "seconds": None}]},
            "no verdict (seconds of a note of Failed must be a number, they are None)",
        ),
        ({"notes": [{"by": "me", "text": "?", "reading": {1}}]}, "no verdict (notes of Failed must be JSON: Object"),
        ({"counts": {"calls": "two"}}, "no verdict (counts of Failed must return numbers up to 1e+09 by name, it"),
    ],
)
def test_a_badly_made_failure_keeps_its_reason(more, said):
    result = read_error(Failed("no verdict", **more))
    assert result.failure.startswith(said) and (result.notes, result.counts) == ((), {})


@pytest.mark.parametrize("fault", ["in scoring", "in sending"])
def test_whatever_goes_wrong_with_an_async_sample_it_is_answered(fault):
    sent: list[tuple[int, list[RewardResult]]] = []

    async def score_async(prompt: Any, conversations: Any) -> list[Any]:
        if fault == "in scoring":
            raise KeyError("text")
        return ["a result that cannot be pickled"]

    def send(answer: tuple[int, list[Any]]) -> None:
        if not isinstance(answer[1][0], RewardResult):
            raise TypeError("cannot pickle this")
        sent.append(answer)

    pool, calls = cast(Any, SimpleNamespace(send=send)), cast(Any, SimpleNamespace(score_async=score_async))
    asyncio.run(answer(pool, calls, (7, 20.0, pickle.dumps({}), [[]])))
    [(number, [result])] = sent
    assert number == 7 and result.failure.startswith(
        "KeyError" if fault == "in scoring" else "TypeError: cannot pickle"
    )


def test_a_pool_closes_while_its_process_is_starting(tmp_path, monkeypatch):
    (file := tmp_path / "mine.py").write_text(WAITING)
    begun, closing_now, start = threading.Event(), threading.Event(), Worker.start

    def start_late(worker: Worker) -> None:
        begun.set()
        closing_now.wait()
        start(worker)

    said: list[dict[str, Any]] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        process = _Process(one_reward(resolve_reward(str(file))))
        begun.wait()
        monkeypatch.setattr(process._worker, "kill", lambda: (Worker.kill(process._worker), closing_now.set()))
        # a thread of its own, because a close that hangs must not hang the test
        closer = threading.Thread(target=process.close, daemon=True)
        closer.start()
        closer.join(60)
        is_hanging = closer.is_alive()
        Worker.kill(process._worker)
        assert not is_hanging
        await asyncio.sleep(0)  # the loop is told that the process could not be loaded
        assert process._loaded.done()

    monkeypatch.setattr(Worker, "start", start_late)
    asyncio.run(play())
    monkeypatch.undo()  # it holds the process
    for _ in range(3):  # what one pass frees may hold more
        gc.collect()
    assert said == [], "nobody waits for the process, so nobody is told"


def test_samples_that_are_over_are_forgotten(tmp_path):
    """A process lasts as long as the run, which may have millions of them."""
    (file := tmp_path / "mine.py").write_text(WAITING)

    async def play() -> None:
        with closing(_Process(one_reward(resolve_reward(str(file))))) as process:
            for reply in ("rich", "raise"):
                await process.compute(PROMPT, [[{"role": "assistant", "content": reply}]], 20.0)
                assert not process._waiting, reply

    asyncio.run(play())


def test_a_process_that_blocks_or_ends_fails_its_samples_and_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards.async_pool, "REWARD_EXIT_GRACE_S", 0.2)
    file = tmp_path / "mine.py"
    file.write_text(WAITING)

    async def play() -> list[RewardResult]:
        with closing(Rewarder(one_reward(resolve_reward(str(file))), 1, 0.5)) as found:
            results = []
            for reply in ("block", "exit", "fine"):
                results.append(await found.compute_reward(PROMPT, [{"role": "assistant", "content": reply}]))
        return results

    blocked, ended, fine = asyncio.run(play())
    assert "an async reward blocked the event loop" in blocked.failure
    assert ended.failure == "the worker process exited with code 3"
    assert not fine.failure


def test_siblings_that_come_to_a_process_that_has_ended_fail_like_its_last(tmp_path):
    (file := tmp_path / "mine.py").write_text(WAITING)

    async def play() -> list[RewardResult]:
        with closing(_Process(one_reward(resolve_reward(str(file))))) as process:
            said: list[list[Message]] = [[{"role": "assistant", "content": reply}] for reply in ("exit", "fine")]
            last = await process.compute(PROMPT, said[:1], 20.0)
            return last + await process.compute(PROMPT, said, 20.0)

    assert [result.failure for result in asyncio.run(play())] == ["the worker process exited with code 3"] * 3


def test_a_process_that_was_closed_is_over_and_takes_no_sample(tmp_path):
    (file := tmp_path / "mine.py").write_text(WAITING)

    async def play() -> list[RewardResult]:
        process = _Process(one_reward(resolve_reward(str(file))))
        said: list[Message] = [{"role": "assistant", "content": "fine"}]
        with closing(process):
            [first] = await process.compute(PROMPT, [said], 20.0)
        assert not first.failure and process.is_over
        return await process.compute(PROMPT, [said, said], 20.0)

    assert [result.failure for result in asyncio.run(play())] == ["the run has ended"] * 2


def test_a_sample_that_waits_when_its_pool_closes_starts_no_process(tmp_path):
    (file := tmp_path / "mine.py").write_text(WAITING)

    async def play() -> list[RewardResult]:
        with closing(AsyncRewardPool(one_reward(resolve_reward(str(file))), 1, 20.0)) as pool:
            said: list[list[Message]] = [[{"role": "assistant", "content": reply}] for reply in ("hang", "fine")]
            each = asyncio.ensure_future(pool.compute_each(PROMPT, said))
            while pool._process is None or not pool._process._waiting:
                await asyncio.sleep(0.01)
            pool.close()
            return [*await each, *await pool.compute_group(PROMPT, said)]

    assert [result.failure for result in asyncio.run(play())] == ["the run has ended"] * 4


def test_samples_that_a_stuck_process_does_not_read_fail_at_the_deadline(tmp_path, monkeypatch):
    """A regular expression that goes back for ever holds the interpreter's lock, so no thread reads the socket."""
    monkeypatch.setattr(rewards.async_pool, "REWARD_EXIT_GRACE_S", 0.1)
    code = "import re\nasync def score(prompt, messages): return {'n': float(bool(re.match('(a+)+$', 'a' * 60 + 'b')))}"
    with rewarder(tmp_path, code, timeout_s=0.3) as found:
        # more than a socket holds
        results = ask(found, *["x" * 100_000] * 8)
    assert len(results) == 8 and all("an async reward blocked the event loop" in r.failure for r in results)


def test_a_mistake_of_the_user_that_a_reward_finds_stops_the_run(tmp_path):
    with rewarder(tmp_path, WAITING) as found, pytest.raises(UserError, match="MY_KEY is not set"):
        ask(found, "stop")


def test_an_async_reward_that_cannot_be_loaded_is_one_sentence(tmp_path):
    code, said = "async def score(prompt, messages): ...\nimport nowhere", "mine.py, line 2, cannot be imported"
    with rewarder(tmp_path, code) as found, pytest.raises(UserError, match=said):
        ask(found, "1")


@pytest.mark.parametrize("word", ["", "async "])
def test_siblings_are_scored_together(tmp_path, word):
    code = f"""
from rewards import Failed
{word}def score_group(prompt, conversations):
    said = [messages[-1]["content"] for messages in conversations]
    return [Failed("empty") if not text else {{"longest": len(text) == max(map(len, said))}} for text in said]
"""
    with rewarder(tmp_path, code) as found:
        conversations = [[{"role": "assistant", "content": text}] for text in ("a", "bbb", "")]
        assert found.scores_groups("any")
        results = asyncio.run(found.compute_group(PROMPT, conversations))
        alone = asyncio.run(found.compute_group(PROMPT, conversations[:1]))
    assert [r.reward_parts for r in results] == [{"longest": 0.0}, {"longest": 1.0}, {}]
    assert [r.failure for r in results] == ["", "", "empty"]
    assert [r.failure for r in alone] == ["score_group: no live sibling to compare with"]


def test_a_group_function_must_answer_for_each_sibling(tmp_path):
    with rewarder(tmp_path, "def score_group(prompt, conversations): return [1.0]") as found:
        results = asyncio.run(found.compute_group(PROMPT, [[{"role": "assistant", "content": "a"}]] * 2))
    assert [r.failure for r in results] == [
        "score_group() must return a list of 2 results, one per conversation, it returned [1.0]"
    ] * 2


def test_the_kind_is_read_without_running_the_file(tmp_path):
    file = tmp_path / "mine.py"
    for code, kind in {
        "1 / 0\nasync def score(prompt, messages): ...": Kind(is_async=True),
        "def score_group(prompt, conversations): ...": Kind(is_group=True),
        "score = print": Kind(),
    }.items():
        file.write_text(code)
        assert find_kind(resolve_reward(str(file))) == kind
