"""Parts of the processes that compute rewards, in this process: loading, answers, deadlines, and a run's facts."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from configs.rollout_schema import RewardConfig
from core.errors import UserError
from core.loading import load_module
from core.types.samples import Prompt
from rewards import Failed, RewardRun, RunJudge, Scored, resolve_reward
from rewards.async_worker import answer, fail_all, serve
from rewards.calls import RewardCalls, join_functions
from rewards.pool import describe_prompt
from rewards.reward_model import join_begun
from rewards.scored import RewardResult
from rewards.several import RewardPlan
from rewards.weights import plan_rewards
from rewards.worker import load_calls, read_prompt
from unit_tests.helpers.one_reward import one_reward
from unit_tests.helpers.sentences import tell

NOTES = """
SEEN = []

def score(prompt, messages, *, n=1, run):
    return {"n": n, "engines": run.engines, "said": float(messages[-1]["content"])}

def prepare(*, n=1, run):
    SEEN.append(("prepare", n, run.engines))

def check(deadline_s, *, n=1):
    SEEN.append(("check", deadline_s, n))
"""
WAITS = """
import asyncio

async def score(prompt, messages):
    said = messages[-1]["content"]
    if said == "hang":
        await asyncio.sleep(60)
    if said == "late":
        raise TimeoutError("of my own")
    return {"said": float(said), "length": len(prompt.answer)}
"""


def write(folder: Path, text: str, name: str = "mine") -> str:
    (file := folder / f"{name}.py").write_text(text)
    return str(file)


def said(*texts: str) -> list[Any]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_the_facts_of_a_run_have_their_defaults():
    assert asdict(RewardRun()) == {"engines": 1, "folder": None, "earlier_folder": None, "judge": None}
    of_judge = {"model": "m", "is_frozen": True, "is_greedy": False, "words": (), "urls": (), "key": ""}
    assert asdict(RunJudge(model="m")) == of_judge
    assert "secret" not in repr(RunJudge(model="m", key="secret"))
    assert asdict(RewardPlan(functions=())) == {
        **{"functions": (), "by_source": {}, "otherwise": ()},
        "run": asdict(RewardRun()),
    }
    assert asdict(Scored({"a": 1.0})) == {
        **{"parts": {"a": 1.0}, "turn_parts": (), "token_parts": {}, "notes": (), "counts": {}}
    }
    assert (str(Failed("why")), Failed("why").notes, Failed("why").counts) == ("why", (), {})


def test_every_function_of_a_plan_is_checked_and_prepared(tmp_path):
    paths = [write(tmp_path, NOTES, name) for name in ("one", "two")]
    config = RewardConfig(functions={path: {"n": 1.0} for path in paths}, settings={paths[1]: {"n": 5}})
    plan = plan_rewards(config, engines=3)
    plan.check(7.5)
    plan.prepare()
    seen = [load_module(function.spec).SEEN for function in plan.functions]
    assert seen == [[("check", 7.5, n), ("prepare", n, 3)] for n in (1, 5)]
    functions = plan.load()
    assert [*functions] == ["one", "two"]
    found = [function(None, said("4")[0]) for function in functions.values()]
    assert found == [{"n": n, "engines": 3, "said": 4.0} for n in (1, 5)]


def ask_to_load(send: Callable[[Connection], None]) -> tuple[RewardCalls | None, list[Any]]:
    """Return what a worker has loaded, and what it has told its pool. send: what the pool sends."""
    pool, worker = Pipe()
    with pool, worker:
        send(pool)
        calls = load_calls(worker)
        worker.close()
        told: list[Any] = []
        try:
            while True:
                told.append(pool.recv())
        except (EOFError, OSError):
            return calls, told


def test_a_worker_loads_its_plan_and_says_what_is_wrong(tmp_path):
    plan = one_reward(resolve_reward(write(tmp_path, NOTES)), {"n": 2})
    calls, told = ask_to_load(lambda pool: pool.send(plan))
    assert calls is not None and told == [""]
    assert load_module(plan.functions[0].spec).SEEN == [("prepare", 2, 1)]
    [found] = calls.score(read_prompt(describe_prompt(Prompt(id="p", messages=[]))), said("6"))
    assert found == RewardResult(reward_parts={"n": 2.0, "engines": 1.0, "said": 6.0})
    wrong = one_reward(resolve_reward(write(tmp_path, NOTES, "other")), {"m": 2})
    calls, [why] = ask_to_load(lambda pool: pool.send(wrong))
    assert calls is None and why.startswith("reward.settings does not fit score() of ")
    assert ask_to_load(lambda pool: pool.close()) == (None, [])


def test_a_prompt_arrives_with_its_fields():
    prompt = Prompt(id="row/7", messages=[{"role": "user", "content": "?"}], answer="x", extra={"a": [1]}, source="s")
    found = read_prompt(describe_prompt(prompt))
    assert (found.id, found.messages, found.answer, found.extra, found.source) == (
        *(prompt.id, prompt.messages, "x", {"a": [1]}, "s"),
    )
    assert found.extra is not prompt.extra


def answer_all(calls: RewardCalls, *jobs: Any) -> list[Any]:
    """Return the answers of a worker to its jobs, in the order in which they come."""
    pool, worker = Pipe()

    async def go() -> list[Any]:
        await asyncio.gather(*(answer(worker, calls, job) for job in jobs))
        return [pool.recv() for _ in jobs]

    with pool, worker:
        return asyncio.run(go())


def test_a_sample_is_answered_with_its_number_or_after_its_deadline(tmp_path):
    calls = RewardCalls(one_reward(resolve_reward(write(tmp_path, WAITS))))
    prompt = describe_prompt(Prompt(id="p", messages=[], answer="abc"))
    got = answer_all(calls, (7, 0.02, prompt, said("hang")), (3, 20.0, prompt, said("2.5")))
    assert got == [
        (3, [RewardResult(reward_parts={"said": 2.5, "length": 3.0})]),
        (7, [RewardResult(failure="timeout after 0.02s")]),
    ]
    [(number, [own])] = answer_all(calls, (4, 20.0, prompt, said("late")))
    assert number == 4 and own.failure == "TimeoutError: of my own (mine.py, line 9)", "not of the deadline"
    [(number, failed)] = answer_all(calls, (5, 20.0, b"no pickle", said("1", "2")))
    assert number == 5 and len(failed) == 2 and failed[0] == failed[1]
    assert failed[0].failure.startswith("UnpicklingError: ")
    assert fail_all("why", said("1", "2", "3")) == [RewardResult(failure="why")] * 3


def test_a_pool_that_has_closed_is_no_failure_of_a_sample(tmp_path):
    calls = RewardCalls(one_reward(resolve_reward(write(tmp_path, WAITS))))
    pool, worker = Pipe()
    pool.close()
    with worker, pytest.raises(OSError, match="Broken pipe"):
        asyncio.run(answer(worker, calls, (1, 20.0, pickle.dumps({"source": "", "answer": ""}), said("1"))))


def test_a_worker_serves_samples_together_until_its_pool_closes(tmp_path):
    calls = RewardCalls(one_reward(resolve_reward(write(tmp_path, WAITS))))
    pool, worker = Pipe()
    thread = threading.Thread(target=lambda: asyncio.run(serve(worker, calls)), daemon=True)
    thread.start()
    prompt = describe_prompt(Prompt(id="p", messages=[]))
    for number in (1, 2):
        pool.send((number, 0.2 if number == 1 else 20.0, prompt, said("hang" if number == 1 else "4")))
    assert [pool.recv()[0] for _ in range(2)] == [2, 1]
    pool.close()
    thread.join(10)
    assert not thread.is_alive()
    worker.close()


def test_functions_are_joined_for_each_conversation():
    one = [RewardResult(reward_parts={"a": 1.0}), RewardResult(failure="broke")]
    two = [RewardResult(reward_parts={"a": 2.0}), RewardResult(reward_parts={"a": 3.0})]
    assert join_functions({"x": one, "y": two}, 2) == [
        RewardResult(reward_parts={"x.a": 1.0, "y.a": 2.0}),
        RewardResult(failure="broke"),
    ]
    assert join_functions({"": one}, 2) == one and join_functions({}, 2) == [RewardResult()] * 2


def message(role: str, content: str, **more: Any) -> Any:
    return {"role": role, "content": content, **more}


USER, BEGUN = message("user", "q"), message("assistant", "It is ")
REPLY, AFTER = message("assistant", "7.", tool_calls=[3]), message("tool", "t")


@pytest.mark.parametrize(
    ("asked", "answered", "whole"),
    [
        ([USER], [REPLY, AFTER], [USER, REPLY, AFTER]),
        ([USER, BEGUN], [REPLY, AFTER], [USER, message("assistant", "It is 7.", tool_calls=[3]), AFTER]),
        ([USER, BEGUN], [AFTER, REPLY], [USER, BEGUN, AFTER, REPLY]),
        ([USER, BEGUN], [], [USER, BEGUN]),
        ([], [REPLY], [REPLY]),
        ([BEGUN, USER], [REPLY], [BEGUN, USER, REPLY]),
    ],
)
def test_a_reply_that_the_prompt_begins_is_one_turn(asked, answered, whole):
    assert join_begun(asked, answered) == whole
    assert BEGUN["content"] == "It is " and REPLY["content"] == "7."


def test_a_plan_without_a_source_has_the_functions_of_all_others():
    config = RewardConfig(functions={"gsm8k": 1.0}, by_source={"s": {"arithmetic": 2.0}})
    plan = plan_rewards(config)
    assert (plan.list_names("s"), plan.list_names("t")) == (("arithmetic",), ("gsm8k",))
    assert tell(lambda: plan_rewards(RewardConfig(function="gsm9k"))).startswith("reward.function: there is no 'gsm9k'")
    for where, config in (
        ("reward.functions", RewardConfig(functions={"gsm9k": 1.0})),
        ("reward.by_source", RewardConfig(functions={"gsm8k": 1.0}, by_source={"s": {"gsm9k": 1.0}})),
    ):
        with pytest.raises(UserError, match=rf"^{where}: there is no 'gsm9k'"):
            plan_rewards(config)
