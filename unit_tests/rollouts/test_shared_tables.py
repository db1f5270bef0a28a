"""Servers of opponents, turns of a judge, places and second rewards, in tables of events and whole sentences."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from configs.rollout_schema import RewardConfig
from core.types.allowed_tokens import EVERY_TOKEN
from core.types.notes import Note
from core.types.samples import Sample
from rewards.judging import client
from rewards.scored import Failed, RewardResult
from rollouts.allowed_tokens import resolve_allowed_tokens
from rollouts.opponents import Opponent, ServedOpponent, ServerFailed
from rollouts.places import EpisodeTimedOut, Places
from rollouts.scheduling.judge_turns import JudgeTurns
from rollouts.second_reward import SecondReward
from tools.benchmarks.judge_server import JudgeServer
from tools.benchmarks.simulated_run import answer, run_in_virtual_time
from unit_tests.helpers.episodes import Scripted, Tool
from unit_tests.helpers.sentences import tell

HOST = "http://host:1/v1"
ONE_MODEL = "name the address of a server of one model, such as http://host:8000/v1"


def served(monkeypatch, found: Any, **settings: Any) -> ServedOpponent:
    """Ask a server of opponents that answers /models so."""

    def get(url: str, *, timeout: float) -> httpx.Response:
        assert (url, timeout) == (f"{HOST}/models", 7.0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(httpx, "get", get)
    return ServedOpponent(f"{HOST}/", **{"temperature": 0.5, "timeout_s": 7.0, "engines": 5} | settings)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (httpx.ConnectError("refused"), f"rollout.opponent={HOST} does not answer (ConnectError: refused): start it"),
        (httpx.InvalidURL("odd"), f"rollout.opponent={HOST} does not answer (InvalidURL: odd): start it"),
        *(
            (
                httpx.Response(200, json=body),
                f"rollout.opponent={HOST}: /models must name one model, found {what}: {ONE_MODEL}",
            )
            for body, what in (
                ({"data": [{"id": "a"}, {"id": 2}]}, "a, 2"),
                ({"data": []}, 'status 200, {"data":[]}'),
                ({}, "status 200, {}"),
                ({"data": [{}]}, 'status 200, {"data":[{}]}'),
                ([], "status 200, []"),
            )
        ),
        (
            httpx.Response(502, text="down"),
            f"rollout.opponent={HOST}: /models must name one model, found status 502, down: {ONE_MODEL}",
        ),
    ],
)
def test_a_server_must_name_its_only_model(monkeypatch, found, said):
    assert tell(lambda: served(monkeypatch, found)) == said


def test_a_server_is_asked_as_a_chat_and_its_answer_is_a_reply(monkeypatch):
    made: list[Any] = []
    answers: list[Any] = []

    class Client:
        def __init__(self, settings, limit, server):
            made.append((settings.model, settings.timeout_s, limit, server.urls, server.who))

        async def ask(self, body):
            made.append(body)
            found = answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found, None

        async def close(self):
            made.append("closed")

    monkeypatch.setattr(client, "JudgeClient", Client)
    for engines, limit in ((5, 6), (32, 1), (33, 1)):
        theirs = served(monkeypatch, httpx.Response(200, json={"data": [{"id": "m"}]}), engines=engines)
        assert made.pop() == ("m", 7.0, limit, (f"{HOST}/chat/completions",), "rollout.opponent")
    said: Any = [{"role": "user", "content": "1", "name": "x"}, {"role": "assistant", "content": "2"}]

    def ask(answer: Any) -> Any:
        answers.append(answer)
        return asyncio.run(theirs.reply(said, [], max_new_tokens=9, seed=3))

    def choice(content: Any, end: str) -> dict[str, Any]:
        return {"choices": [{"message": {"content": content}, "finish_reason": end}, {}]}

    reply = ask(choice("4", "stop"))
    assert reply.message == {"role": "assistant", "content": "4"} and ask(choice("4", "length")) is None
    shown = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert made[0] == {"model": "m", "messages": shown, "temperature": 0.5, "max_tokens": 9, "seed": 3}
    for wrong, told in (
        (Failed("it is down"), "it is down"),
        ({"choices": []}, "rollout.opponent returned no chat completion: {'choices': []}"),
        (choice(None, "stop"), "rollout.opponent ended a reply with 'stop' and the content None"),
        (choice("\ud800", "stop"), "rollout.opponent's reply holds half of a character: '\\ud800'"),
        (choice("4", "tool_calls"), "rollout.opponent ended a reply with 'tool_calls' and the content '4'"),
    ):
        assert tell(lambda wrong=wrong: ask(wrong), ServerFailed) == told
    tool: Any = {"type": "function"}
    assert tell(lambda: asyncio.run(theirs.reply(said, [tool], max_new_tokens=9, seed=3))) == (
        f"rollout.opponent={HOST} gets text alone, and the game has tools: name the folder of a model"
    )
    asyncio.run(theirs.close())
    assert made[-1] == "closed"


def test_groups_and_a_judge_take_turns_on_the_devices():
    events: list[tuple[float, str]] = []

    def note(what: str) -> None:
        events.append((asyncio.get_running_loop().time(), what))

    class Devices:
        async def begin_judging(self) -> None:
            await asyncio.sleep(1.0)
            note("judge awake")

        async def end_judging(self) -> None:
            await asyncio.sleep(1.0)
            note("judge asleep")

        async def resume_engines(self) -> None:
            note("engines")

    async def body() -> None:
        turns = JudgeTurns(Devices())

        async def play(name: str, seconds: float) -> None:
            async with turns.playing():
                await asyncio.sleep(seconds)
                note(f"{name} played")

        async def judge(name: str, seconds: float) -> None:
            async with turns.judging():
                await asyncio.sleep(seconds)
                note(f"{name} judged")

        first = [asyncio.create_task(one) for one in (play("a", 3.0), play("b", 5.0))]
        await asyncio.sleep(0.0)
        second = [asyncio.create_task(one) for one in (judge("a", 2.0), judge("b", 4.0))]
        await asyncio.sleep(5.5)
        third = [asyncio.create_task(play("c", 1.0))]
        await asyncio.gather(*first, *second, *third)
        # one that is cancelled as the judge wakes leaves it asleep
        lost = asyncio.create_task(judge("d", 1.0))
        await asyncio.sleep(0.5)
        lost.cancel()
        await asyncio.wait([lost])
        assert lost.cancelled()
        await play("e", 1.0)

    run_in_virtual_time(body())
    assert events == [
        *((0.0, "engines"), (0.0, "engines"), (3.0, "a played"), (5.0, "b played"), (6.0, "judge awake")),
        *((8.0, "a judged"), (10.0, "b judged"), (11.0, "judge asleep"), (11.0, "engines"), (12.0, "c played")),
        *((13.0, "judge awake"), (14.0, "judge asleep"), (14.0, "engines"), (15.0, "e played")),
    ]


def test_an_episode_has_its_deadline_from_its_place_on():
    async def body(places: Places, seconds: float) -> str:
        async with places.take():
            await asyncio.sleep(seconds)
        return "done"

    async def play(places: Places, *seconds: float) -> tuple[list[str], float]:
        found = await asyncio.gather(*(body(places, s) for s in seconds), return_exceptions=True)
        return [one if isinstance(one, str) else type(one).__name__ for one in found], asyncio.get_running_loop().time()

    late = EpisodeTimedOut.__name__
    for limit, found, ended in (
        (1, ["done", late, "done"], 5.0 + 9.0 + 8.0),
        (2, ["done", late, "done"], 13.0),
        (None, ["done"] * 3, 20.0),
    ):
        assert run_in_virtual_time(play(Places(limit, 9.0), 5.0, 20.0, 8.0)) == (found, ended)

    async def own_error() -> None:
        async with Places(1, 9.0).take():
            raise TimeoutError("of the engine")

    assert tell(lambda: run_in_virtual_time(own_error()), TimeoutError) == "of the engine"


SAMPLE = replace(answer(3, 0), counts={"turns": 2.0, "judge/calls": 1.0}, notes=[Note(by="me", text="fine")])


def add(result: RewardResult, sample: Sample = SAMPLE) -> Sample:
    asked: list[Any] = []

    async def compute_reward(prompt: Any, messages: Any) -> RewardResult:
        asked.append((prompt, messages))
        return result

    rewards: Any = SimpleNamespace(compute_reward=compute_reward)
    second = SecondReward(config=RewardConfig(function="x", weights={"a": 2.0, "b": -1.0}), rewards=rewards)
    messages: Any = [{"role": "assistant", "content": "2"}]
    found = asyncio.run(second.add(messages, sample))
    assert asked == ([] if found is sample else [(sample.prompt, messages)])
    return found


def test_a_second_reward_is_logged_beside_the_first():
    result = RewardResult(
        reward_parts={"a": 3.0, "b": 1.0}, counts={"judge/calls": 4.0, "seen": 1.0}, notes=(Note(by="it", text="ok"),)
    )
    found = add(result)
    parts = {"second/a": 3.0, "second/b": 1.0, "second/mean": 5.0, "second/failed": 0.0}
    assert found.counts == {"turns": 2.0, "judge/calls": 5.0, "seen": 1.0} | parts
    assert found.notes == [Note(by="me", text="fine"), Note(by="it", text="ok")] and found.reward == SAMPLE.reward
    failed = add(RewardResult(failure="no server", counts={"judge/calls": 4.0}))
    assert failed.counts == {"turns": 2.0, "judge/calls": 5.0, "second/failed": 1.0}
    assert failed.notes == [Note(by="me", text="fine"), Note(by="eval_reward", text="no server")]
    for kind in ({"failure": "broken"}, {"origin": "other"}):
        sample = replace(SAMPLE, **kind)
        assert add(result, sample) is sample
    assert tell(lambda: add(RewardResult(reward_parts={"a": 1.0, "mean": 1.0, "corr": 1.0}))) == (
        "eval_reward returns a part 'corr', and eval/second_reward/corr is another metric: rename the part"
    )


class Words:
    stop_token_ids = (2,)
    images: Any = None

    def encode(self, text: str) -> list[int]:
        return [{"one": 9, "uno": 9, "two": 5, "end": 2, "also": 3, "<image>": 7}[word] for word in text.split()]


def test_allowed_tokens_are_single_and_sorted_with_those_that_end_a_reply():
    words: Any = Words()
    assert resolve_allowed_tokens(words, [], [2]) is EVERY_TOKEN
    assert resolve_allowed_tokens(words, ["one", "two"], [2, 3]).allowed == (2, 3, 5, 9)
    name = "rollout.allowed_tokens names "
    seeing: Any = Words()
    seeing.images = SimpleNamespace(placeholder_ids=frozenset({8, 7}))
    assert resolve_allowed_tokens(seeing, [], [2]).banned == (7, 8)
    for tokenizer, texts, said in (
        (
            words,
            ["one two"],
            "one two, which is 2 tokens of the model's tokenizer: name single tokens, or add this text to the "
            "tokenizer as a token",
        ),
        (words, ["one", "uno"], "uno and one, which are one token: leave one of them out"),
        (seeing, ["two", "<image>"], "<image>, which stands for an image and is never sampled: leave it out"),
        (words, ["also"], "also, which ends a reply and is always allowed: leave it out"),
    ):
        assert tell(lambda t=tokenizer, texts=texts: resolve_allowed_tokens(t, texts, [2, 3])) == name + said


@pytest.mark.parametrize(
    ("game", "sides", "side"), [(0, 2, 0), (3, 2, 1), (4, 3, 1), (5, 3, 2), (6, 3, 0), (7, 1, 0), (7, 0, 0)]
)
def test_the_side_of_the_policy_goes_round_with_the_games(game, sides, side):
    env = Tool()
    env.sides = sides
    assert Opponent(model=Scripted(), game=game).leaves_to_policy(env) == side


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (401, "the server wants a key, and none is sent: name a server without keys in rollout.opponent"),
        (403, "the server wants a key, and none is sent: name a server without keys in rollout.opponent"),
        (404, "the server knows no such address: correct rollout.opponent, such as http://host:8000/v1"),
    ],
)
def test_a_server_that_cannot_be_asked_is_the_recipes_mistake(monkeypatch, status, why):
    models = httpx.Response(200, json={"data": [{"id": "m"}]})
    monkeypatch.setattr(httpx, "get", lambda url, *, timeout: models)
    with JudgeServer(statuses=deque([status])).running() as address:
        theirs = ServedOpponent(address, temperature=0.5, timeout_s=7.0, engines=5)
        said = tell(lambda: asyncio.run(theirs.reply([], [], max_new_tokens=9, seed=3)))
    assert said.startswith(f"rollout.opponent at {address}/chat/completions answered {status}: {why}")
