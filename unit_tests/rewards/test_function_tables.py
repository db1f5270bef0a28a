"""Reward functions of a recipe in exact results and sentences: weights, calls and batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from configs.judge_schema import JudgeConfig
from configs.rollout_schema import RewardConfig
from core.errors import UserError
from core.types.samples import Prompt
from rewards import (
    Failed,
    RewardRun,
    RunJudge,
)
from rewards.batches import Batcher
from rewards.calls import RewardCalls, call_user_code, read_error
from rewards.kinds import Kind
from rewards.rewarder import Rewarder
from rewards.scored import RewardResult
from rewards.several import RewardPlan
from rewards.weights import describe_judge, find_weights, list_missing, plan_rewards, weigh_parts, weigh_turns


def prompt_of(**more: Any) -> Prompt:
    return Prompt(id="row/7", messages=[], **more)


def reply(text: str, **more: Any) -> Any:
    return {"role": "assistant", "content": text, **more}


# Weights ------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    texts = {
        "a": "def score(prompt, messages, *, n=1): return {'x': n, 'y': 2}",
        "b": "async def score(prompt, messages, *, run): return 0.5",
        "c": "def score_group(prompt, conversations): return [0.25] * len(conversations)",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return {name: str(tmp_path / f"{name}.py") for name in texts}


def test_a_plan_has_every_function_under_its_name_and_kind(files):
    config = RewardConfig(
        functions={files["a"]: {"x": 1.0}, files["b"]: 2.0},
        by_source={"s": {files["c"]: 3.0}, "t": {files["a"]: {"y": 1.0}}},
        settings={files["a"]: {"n": 5}},
    )
    plan = plan_rewards(config, engines=4, judge=JudgeConfig(model="m", allowed_tokens=["y", "n"], temperature=0))
    assert [(f.name, f.settings, f.kind.name, f.kind.is_async) for f in plan.functions] == [
        *(("a", {"n": 5}, "score", False), ("b", {}, "score", True), ("c", {}, "score_group", False))
    ]
    assert plan.otherwise == ("a", "b") and plan.by_source == {"s": ("c",), "t": ("a",)}
    assert plan.list_names("s") == ("c",) and plan.list_names("other") == ("a", "b")
    assert plan.run == RewardRun(engines=4, judge=RunJudge(model="m", is_greedy=True, words=("y", "n")))
    assert plan.path == ", ".join(files.values())
    assert [*plan.files] == [f"reward.functions.{name}" for name in "abc"]
    assert plan.kinds == [Kind(), Kind(is_group=True), Kind(is_async=True)] and plan.may_ask_judge
    own = plan.select(Kind())
    assert [f.name for f in own.functions] == ["a"] and not own.may_ask_judge
    assert (own.otherwise, own.by_source) == (("a",), {"s": (), "t": ("a",)})
    only = plan_rewards(RewardConfig(function=files["b"], settings={"base_url": "http://h"}))
    assert (only.otherwise, [*only.files], only.may_ask_judge) == (("",), ["reward.function"], False)
    assert only.run == RewardRun()


@pytest.mark.parametrize(
    ("judge", "facts"),
    [
        ({"model": "m"}, {"is_frozen": True}),
        ({"model": "m", "temperature": 0}, {"is_frozen": True, "is_greedy": True}),
        ({"model": "policy"}, {"is_frozen": False}),
    ],
)
def test_the_judge_of_a_run_is_described_for_rewards(judge, facts):
    config = JudgeConfig(**judge)
    found = describe_judge(config)
    assert (found.model, found.urls, found.key, found.words) == (config.model, (), "", ())
    assert found.is_frozen is not config.is_policy
    assert found.is_greedy is (not config.is_policy and not config.temperature)
    assert {name: getattr(found, name) for name in facts}.keys() == facts.keys()


PARTS = {"a.x": 1.0, "a.y": 2.0, "b.correct": 4.0, "b.format": 8.0, "env.won": 16.0}


@pytest.mark.parametrize(
    ("config", "source", "parts", "weights"),
    [
        ({"function": "gsm8k"}, "", {"correct": 1.0, "format": 0.0}, {"correct": 1.0}),
        (
            {"function": "gsm8k", "weights": {"correct": 2, "format": 0.5}},
            "s",
            {"correct": 1.0, "format": 0.0},
            {"correct": 2.0, "format": 0.5},
        ),
        ({"functions": {"b": 2.0}}, "", PARTS, {"b.correct": 2.0}),
        ({"functions": {"a": {"x": 1, "y": -1}, "b": 2.0}}, "", PARTS, {"a.x": 1.0, "a.y": -1.0, "b.correct": 2.0}),
        ({"functions": {"b": 2.0}, "weights": {"env.won": 3.0}}, "", PARTS, {"b.correct": 2.0, "env.won": 3.0}),
        ({"functions": {"b": 2.0}, "by_source": {"s": {"a": {"x": 1}}}}, "s", PARTS, {"a.x": 1.0}),
        ({"function": "gsm8k", "by_source": {"s": {"a": {"x": 1}}}}, "s", PARTS, {"a.x": 1.0}),
        ({"functions": {"a": 2.0}}, "", {"a.x": 1.0}, {"a.x": 2.0}),
        (
            {"functions": {"a": 0.5}},
            "",
            PARTS,
            "the reward a has one weight and returns x, y: give every part that counts a weight of its own "
            "(a: {x: 0.5})",
        ),
        (
            {"functions": {"a": {"x": 1, "z": 1}}},
            "",
            PARTS,
            "the weights of the reward a name 'z', but it returns only x, y: correct the name",
        ),
        (
            {"function": "gsm8k", "weights": {"correct": 1, "no": 1}},
            "",
            {"format": 1.0, "correct": 1.0},
            "reward.weights names 'no', but the reward returns only correct, format: correct the name",
        ),
    ],
)
def test_the_weights_of_a_row_are_of_its_source_or_one_sentence(config, source, parts, weights):
    reward = RewardConfig(**config)
    if isinstance(weights, str):
        with pytest.raises(UserError) as raised:
            find_weights(reward, parts, source)
        assert str(raised.value) == weights
        return
    assert find_weights(reward, parts, source) == weights and list_missing(reward, parts, source) == []
    assert weigh_parts(weights, parts) == sum(parts[name] * weight for name, weight in weights.items())
    turns = [parts, {}, {"unknown": 3.0}]
    assert weigh_turns(weights, turns) == (weigh_parts(weights, parts), 0, 0) and weigh_turns(weights, []) == ()


# Calls --------------------------------------------------------------------------------------------------------


class Pool:
    """Pool of a kind, which notes its calls."""

    is_fast = True

    def __init__(self, name: str, notes: list[str], result: RewardResult) -> None:
        self.name, self.notes, self.result = name, notes, result

    async def compute_each(self, prompt: Any, conversations: list[Any]) -> list[RewardResult]:
        self.notes.append(f"{self.name} each {len(conversations)}")
        return [self.result] * len(conversations)

    async def compute_group(self, prompt: Any, conversations: list[Any]) -> list[RewardResult]:
        self.notes.append(f"{self.name} group {len(conversations)}")
        return [self.result] * len(conversations)

    def close(self) -> None:
        self.notes.append(f"{self.name} closed")


def test_a_rewarder_asks_the_pools_of_a_source_and_joins_their_results(files):
    config = RewardConfig(
        functions={files["a"]: {"x": 1.0}, files["b"]: 1.0, files["c"]: 1.0},
        by_source={"plain": {files["a"]: {"x": 1.0}}, "group": {files["c"]: 1.0}},
    )
    found, notes = Rewarder.__new__(Rewarder), list[str]()
    found.plan, found._kinds = plan_rewards(config), {}
    made = {
        Kind(): Pool("plain", notes, RewardResult(reward_parts={"a.x": 1.0}, counts={"n": 1.0})),
        Kind(is_async=True): Pool("async", notes, RewardResult(reward_parts={"b.correct": 2.0}, counts={"n": 2.0})),
        Kind(is_group=True): Pool("group", notes, RewardResult(reward_parts={"c.correct": 3.0})),
    }
    found._pools = cast(Any, made)

    def ask(source: str, n: int, *, group: bool = False) -> Any:
        notes.clear()
        call = found.compute_group if group else found.compute_each
        return asyncio.run(call(prompt_of(source=source), [[]] * n))

    joined = RewardResult(reward_parts={"a.x": 1.0, "b.correct": 2.0}, counts={"n": 3.0})
    assert ask("", 2) == [joined] * 2 and notes == ["plain each 2", "async each 2"]
    assert ask("plain", 1) == [made[Kind()].result] and notes == ["plain each 1"]
    assert ask("group", 2) == [RewardResult()] * 2 and notes == []
    assert ask("", 2, group=True) == [made[Kind(is_group=True)].result] * 2 and notes == ["group group 2"]
    alone = RewardResult(failure="score_group: no live sibling to compare with")
    assert ask("", 1, group=True) == [alone] and ask("", 0, group=True) == [] and notes == []
    assert asyncio.run(found.compute_reward(prompt_of(source="plain"), [])) == made[Kind()].result
    assert [found.scores_groups(source) for source in ("", "plain", "group")] == [True, False, True]
    assert [found.is_fast(source) for source in ("", "plain", "group")] == [True] * 3
    made[Kind(is_async=True)].is_fast = False
    made[Kind(is_group=True)].is_fast = False
    assert [found.is_fast(source) for source in ("", "plain", "group")] == [False, True, True]
    made[Kind()].result = RewardResult(stop="MY_KEY is not set")
    with pytest.raises(UserError, match=r"^MY_KEY is not set$"):
        ask("", 2)
    notes.clear()
    found.close()
    assert notes == ["plain closed", "async closed", "group closed"]


def test_a_call_is_read_by_the_name_of_its_function(files, tmp_path):
    config = RewardConfig(functions={files["a"]: {"x": 1.0}}, settings={files["a"]: {"n": 3}})
    [found] = RewardCalls(plan_rewards(config)).score(prompt_of(), [[reply("")]])
    assert found == RewardResult(reward_parts={"a.x": 3.0, "a.y": 2.0})
    groups = RewardCalls(plan_rewards(RewardConfig(function=files["c"])))
    assert groups.score(prompt_of(), [[], []]) == [RewardResult(reward_parts={"correct": 0.25})] * 2
    waits = RewardCalls(plan_rewards(RewardConfig(functions={files["b"]: 1.0})))
    assert asyncio.run(waits.score_async(prompt_of(), [[]])) == [RewardResult(reward_parts={"b.correct": 0.5})]
    Path(files["c"]).write_text("def score_group(prompt, conversations): return prompt.extra['said']")
    (tmp_path / "d.py").write_text(Path(files["c"]).read_text())
    for functions, who in (
        ({"function": str(tmp_path / "d.py")}, "score_group()"),
        ({"functions": {str(tmp_path / "d.py"): 1.0}}, "score_group() of d"),
    ):
        calls = RewardCalls(plan_rewards(RewardConfig(**functions)))
        for said in ([0.5], {"a": 1}, "xy"):
            got = calls.score(prompt_of(extra={"said": said}), [[], []])
            why = f"{who} must return a list of 2 results, one per conversation, it returned {said!r}"
            assert got == [RewardResult(failure=why)] * 2
        [failed, _] = calls.score(prompt_of(), [[], []])
        assert failed.failure == "KeyError: 'said' (d.py, line 1)"
    assert RewardCalls(RewardPlan(functions=())).score(prompt_of(), [[]]) == [RewardResult()]


def test_an_error_of_a_function_stops_fails_or_is_told_with_its_line():
    assert read_error(UserError("wrong")) == RewardResult(stop="wrong")
    assert read_error(Failed("why", counts={"n": 1})) == RewardResult(failure="why", counts={"n": 1.0})

    def broken() -> Any:
        raise ValueError("a\n  b" + "x" * 400)

    parts, why = call_user_code(broken, "env()")
    line = broken.__code__.co_firstlineno + 1
    told = ("ValueError: a b" + "x" * 400)[:300]
    assert (parts, why) == ({}, f"{told} ({Path(__file__).name}, line {line})")
    assert call_user_code(lambda: {"a": 1}, "env()") == ({"a": 1.0}, "")
    assert call_user_code(lambda: 3, "env()") == ({}, "env() must return a dict of named numbers, it returned 3")


def test_calls_that_wait_together_run_in_batches_of_similar_lengths():
    ran: list[list[int]] = []

    def run(items: list[int]) -> list[str]:
        ran.append(items)
        if 13 in items:
            raise ValueError("thirteen")
        return [f"of {item}" for item in items]

    async def go(*items: int) -> list[Any]:
        batcher = Batcher(run, lambda item: item, 12)
        calls = [asyncio.ensure_future(batcher.call(item)) for item in items]
        await asyncio.sleep(0)
        if 9 in items:
            calls[items.index(9)].cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert asyncio.run(go(4, 1, 4, 5, 4, 3)) == [f"of {n}" for n in (4, 1, 4, 5, 4, 3)]
    assert ran == [[1, 3, 4], [4, 4], [5]], "the number of items times the longest is at most 12"
    ran.clear()
    [one, odd, other] = asyncio.run(go(1, 13, 30))
    assert (one, other) == ("of 1", "of 30") and str(odd) == "thirteen" and ran == [[1], [13], [30]]
    ran.clear()
    found = asyncio.run(go(2, 9, 3))
    assert isinstance(found[1], asyncio.CancelledError) and found[::2] == ["of 2", "of 3"] and ran == [[2, 3]]
    ran.clear()

    async def again() -> list[Any]:
        batcher = Batcher(run, lambda item: item, 12)
        return [await batcher.call(1), *await asyncio.gather(batcher.call(2), batcher.call(3))]

    assert asyncio.run(again()) == ["of 1", "of 2", "of 3"] and ran == [[1], [2, 3]]
