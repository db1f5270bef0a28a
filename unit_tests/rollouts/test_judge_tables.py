"""The endpoint of a judge in tables: requests with their whole answers, refusals word by word, sleep, and the end."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from core.errors import RunStopped
from rollouts.engines.base import Completion
from rollouts.judges.endpoint import LARGEST_BODY, JudgeEndpoint, Served
from rollouts.judges.worker import JudgeWorker
from unit_tests.helpers.characters import Characters

KEY = "sk-of-this-run"
ASKED: dict[str, Any] = {"model": "j", "messages": [{"role": "user", "content": "abc"}]}


@dataclass
class Says:
    """Engine that says "no", notes its requests, and waits for `go` where there is one."""

    stop: str = "eos"
    logp: tuple[float, float] = (math.log(0.75), -9.0)
    error: Exception | None = None
    go: asyncio.Event | None = None
    asked: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    running: int = 0

    async def generate(self, token_ids: list[int], **how: Any) -> Completion:
        self.asked.append(("".join(map(chr, token_ids)), how))
        if self.error is not None:
            raise self.error
        self.running += 1
        try:
            if self.go is not None:
                await self.go.wait()
        finally:
            self.running -= 1
        stop: Any = self.stop
        return Completion(token_ids=[ord("n"), ord("o")], logp=[*self.logp], versions=[0, 0], stop=stop)

    async def sleep(self) -> None:
        self.notes.append(f"sleeps with {self.running} requests")

    async def wake(self, part: str) -> None:
        self.notes.append(f"wakes {part}")

    async def close(self) -> None:
        self.notes.append("closes")


def served(**more: Any) -> Served:
    return Served(**{"model": "j", "max_model_len": 10, "key": KEY, **more})


def post(
    *bodies: Any, engine: Says | None = None, tokenizer: Characters | None = None, headers: Any = None, **more: Any
) -> list[tuple[int, Any]]:
    """Send requests to an endpoint; return statuses and answers."""
    headers = {"Authorization": f"Bearer {KEY}"} if headers is None else headers

    async def send() -> list[tuple[int, Any]]:
        given: Any = (engine or Says(), tokenizer or Characters(), served(**more))
        endpoint = JudgeEndpoint(*given)
        await endpoint.start()
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            texts = [body if isinstance(body, str) else json.dumps(body) for body in bodies]
            found = [await client.post(endpoint.url + "/chat/completions", content=text) for text in texts]
        await endpoint.close()
        return [(one.status_code, one.json() if "json" in one.headers["content-type"] else None) for one in found]

    return asyncio.run(send())


def answer_with(**choice: Any) -> dict[str, Any]:
    return {
        "object": "chat.completion",
        "model": "j",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "no"}, "finish_reason": "stop"} | choice,
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }


@pytest.mark.parametrize(
    ("more", "how"),
    [
        ({}, {"max_new_tokens": 7, "seed": 0}),
        ({"max_tokens": None, "seed": None, "logprobs": False}, {"max_new_tokens": 7, "seed": 0}),
        ({"max_tokens": 7, "seed": 2**63 - 1}, {"max_new_tokens": 7, "seed": 2**63 - 1}),
        ({"max_tokens": 1, "seed": 0}, {"max_new_tokens": 1, "seed": 0}),
    ],
)
def test_a_request_is_sampled_as_it_asks_and_answered_whole(more, how):
    engine, tokenizer = Says(), Characters()
    assert post(ASKED | more, engine=engine, tokenizer=tokenizer) == [(200, answer_with())]
    assert engine.asked == [("abc", how)] and tokenizer.rendered == [(ASKED["messages"], [])]


def test_a_message_has_only_its_role_and_its_text():
    tokenizer = Characters()
    messages = [{"role": "system", "content": "a", "name": "x"}, {"role": "user", "content": "bc"}]
    assert post(ASKED | {"messages": messages}, tokenizer=tokenizer)[0][0] == 200
    assert tokenizer.rendered == [([{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}], [])]


def test_a_verdict_that_was_cut_off_says_so():
    assert post(ASKED, engine=Says(stop="length")) == [(200, answer_with(finish_reason="length"))]


@pytest.mark.parametrize(
    ("logp", "of_no", "of_yes"),
    [
        ((math.log(0.75), -9.0), math.log(0.75), math.log(0.25)),
        ((math.log(0.1), -9.0), math.log(0.1), math.log(0.9)),
        ((0.0, -9.0), 0.0, math.log(1e-30)),
        ((1e-6, -9.0), 0.0, math.log(1e-30)),
    ],
)
def test_the_first_token_s_two_probabilities_add_up_to_one(logp, of_no, of_yes):
    [(_, found)] = post(ASKED | {"logprobs": True}, engine=Says(logp=logp), choices=(ord("y"), ord("n")))
    [first] = found["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"]) == ("n", pytest.approx(of_no))
    assert [(one["token"], one["logprob"]) for one in first["top_logprobs"]] == [
        ("y", pytest.approx(of_yes)),
        ("n", pytest.approx(of_no)),
    ]


NO_MESSAGES = "messages must be a list of objects with a role and a text as content"
TOO_LONG = "the request has {} tokens, and with max_tokens={} more than judge.max_model_len=10: raise that, or lower "
TOO_LONG += "reward.settings.max_tokens"
REFUSED: list[tuple[Any, int, str]] = [
    ("{", 400, "the body is no JSON"),
    ("[" * 5000, 400, "the body is no JSON"),
    ("3", 400, "the body must be a JSON object with model and messages"),
    (ASKED | {"top_p": 1, "n": 2}, 400, "the judge of a run takes no n: leave it out"),
    (ASKED | {"model": "k"}, 404, "there is no model k here: it is called j"),
    (ASKED | {"logprobs": True}, 400, "log-probabilities are of two tokens: set judge.allowed_tokens"),
    (ASKED | {"messages": []}, 400, NO_MESSAGES),
    (ASKED | {"messages": "abc"}, 400, NO_MESSAGES),
    (ASKED | {"messages": [*ASKED["messages"], {"role": "user", "content": 3}]}, 400, NO_MESSAGES),
    (ASKED | {"messages": [{"content": "abc"}]}, 400, NO_MESSAGES),
    (ASKED | {"messages": [["role", "content"]]}, 400, NO_MESSAGES),
    (ASKED | {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "a message holds half of a character"),
    (ASKED | {"messages": [{"role": "\udc00", "content": "a"}]}, 400, "a message holds half of a character"),
    (ASKED | {"seed": -1}, 400, "seed must be a number, found -1"),
    (ASKED | {"seed": True}, 400, "seed must be a number, found True"),
    (ASKED | {"seed": 2**63}, 400, f"seed must be a number, found {2**63}"),
    (ASKED | {"max_tokens": 1.5}, 400, "max_tokens must be a number, found 1.5"),
    (ASKED | {"max_tokens": "8"}, 400, "max_tokens must be a number, found 8"),
    (ASKED | {"max_tokens": 8}, 400, TOO_LONG.format(3, 8)),
    (ASKED | {"messages": [{"role": "user", "content": "a" * 10}]}, 400, TOO_LONG.format(10, 1)),
    (ASKED | {"messages": [{"role": "user", "content": "a" * 9}], "max_tokens": 2}, 400, TOO_LONG.format(9, 2)),
]


def test_what_is_refused_is_said_in_one_sentence_and_not_sampled():
    engine = Says()
    found = post(*(body for body, _, _ in REFUSED), engine=engine)
    assert found == [(status, {"error": {"message": said}}) for _, status, said in REFUSED]
    assert engine.asked == []
    last = ASKED | {"messages": [{"role": "user", "content": "a" * 9}]}
    assert post(last, last | {"max_tokens": 1}, engine=engine)[1][0] == 200
    assert [how["max_new_tokens"] for _, how in engine.asked] == [1, 1]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk"}, {"Authorization": b"Bearer \xff"}])
def test_a_request_without_the_key_is_refused(headers):
    engine = Says()
    refused = (401, {"error": {"message": "the key is not that of this run"}})
    assert post(ASKED, engine=engine, headers=headers) == [refused] and engine.asked == []


def test_a_request_to_an_engine_that_sleeps_may_be_sent_again():
    engine = Says(error=RunStopped("the engine sleeps"))
    assert post(ASKED, engine=engine) == [(503, {"error": {"message": "the engine sleeps"}})]


def test_a_request_may_have_16_mib():
    assert LARGEST_BODY == 16 * 1024 * 1024
    text = json.dumps(ASKED)
    [(fits, _), (is_larger, _)] = post(text.ljust(LARGEST_BODY), text.ljust(LARGEST_BODY + 1))
    assert (fits, is_larger) == (200, 413)


def test_requests_are_no_lines_of_the_log(caplog):
    with caplog.at_level("INFO", logger="aiohttp.access"):
        post(ASKED)
    assert [record for record in caplog.records if record.name == "aiohttp.access"] == []


def make_endpoint(engine: Says, **where: Any) -> JudgeEndpoint:
    given: Any = (engine, Characters(), served())
    return JudgeEndpoint(*given, **where)


def test_an_endpoint_has_an_address_until_its_end():
    async def go() -> None:
        endpoint = make_endpoint(Says())
        assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/v1" and endpoint.key == KEY
        socket.create_connection(("127.0.0.1", endpoint.port)).close()
        await endpoint.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", endpoint.port))
        again = make_endpoint(Says(), port=endpoint.port)
        assert again.port == endpoint.port
        await again.close()

    asyncio.run(go())


def test_an_address_of_ipv6_has_brackets():
    try:
        endpoint = make_endpoint(Says(), address="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert endpoint.url == f"http://[::1]:{endpoint.port}/v1"
    asyncio.run(endpoint.close())


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def listen(engine: Says) -> JudgeWorker:
    given: Any = (engine, Characters(), served())
    return JudgeWorker(*given)


def test_a_judge_sleeps_once_all_its_requests_are_answered():
    async def go() -> None:
        engine = Says(go=asyncio.Event())
        worker = listen(engine)
        url, port = await worker.listen("127.0.0.1", 0)
        assert url == f"http://127.0.0.1:{port}/v1"
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            first, second = (asyncio.create_task(client.post(url + "/chat/completions", json=ASKED)) for _ in range(2))
            await until(lambda: engine.running == 2)
            second.cancel()  # a client that has gone
            await until(lambda: engine.running == 1)
            sleeping = asyncio.create_task(worker.sleep())
            for _ in range(50):
                await asyncio.sleep(0)
            assert engine.notes == [], "one request is not answered yet"
            assert engine.go is not None
            engine.go.set()
            await sleeping
            assert (await first).status_code == 200
        await worker.wake()
        await worker.close()
        assert engine.notes == ["sleeps with 0 requests", "wakes weights", "wakes kv_cache", "closes"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    asyncio.run(go())


def test_a_judge_without_an_address_sleeps_and_closes():
    async def go() -> list[str]:
        worker = listen(engine := Says())
        await worker.sleep()
        await worker.close()
        return engine.notes

    assert asyncio.run(go()) == ["sleeps with 0 requests", "closes"]


def test_a_judge_closes_while_it_is_asked():
    """The client learns of it at once, and asks another engine."""

    async def go() -> None:
        engine = Says(go=asyncio.Event())
        url, _ = await (worker := listen(engine)).listen("127.0.0.1", 0)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            asking = asyncio.create_task(client.post(url + "/chat/completions", json=ASKED))
            await until(lambda: engine.running == 1)
            await worker.close()
            with pytest.raises((httpx.RemoteProtocolError, httpx.NetworkError)):
                await asking
        assert engine.running == 0

    asyncio.run(go())


def test_an_idle_engine_is_left_a_few_steps_of_the_loop_and_no_time():
    async def go() -> None:
        endpoint = make_endpoint(Says())
        waiting = asyncio.create_task(endpoint.wait_until_idle())
        for _ in range(4):
            await asyncio.sleep(0)
        assert not waiting.done(), "the engine drops a request whose client has gone"
        for _ in range(10):
            await asyncio.sleep(0)
        assert waiting.done()
        await endpoint.close()

    asyncio.run(go())


def test_the_key_is_not_shown_with_the_settings():
    assert KEY not in repr(served()) and "max_model_len=10" in repr(served())
