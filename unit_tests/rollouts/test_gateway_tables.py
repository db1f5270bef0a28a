"""The gateway in tables: keys, headers, paths and bodies of requests, and one gateway in several event loops."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp.http_exceptions import HttpProcessingError

from configs.gateway_schema import GatewayConfig
from core.types.truncation import Truncation
from rollouts.agents import gateway as serving
from rollouts.agents.gateway import LARGEST_BODY, RETRY_COUNT, Gateway
from rollouts.agents.session import AgentSession, Request
from rollouts.agents.wire import ChatResponse
from unit_tests.helpers.scripted_policy import PROMPT, Policy, make_sampler, make_session

BODY = {"model": "policy", "messages": [{"role": "user", "content": "Which?"}], "max_tokens": 9}
Answer = tuple[int, dict[str, str], str]
"""Status, headers and text."""


class Address:
    """Episode at the gateway, and requests to it."""

    def __init__(self, session: AgentSession, url: str, http: aiohttp.ClientSession) -> None:
        self.session, self.url, self.http = session, url, http

    async def send(
        self,
        path: str,
        body: Any = BODY,
        *,
        headers: dict[str, str] | None = None,
        method: str = "POST",
        base: str | None = None,
    ) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.session.key}"} if headers is None else headers
        url = (self.url if base is None else base) + path
        async with self.http.request(method, url, data=data, headers=headers) as answer:
            return answer.status, dict(answer.headers), await answer.text()

    async def refuse(self, path: str, body: Any = BODY, **more: Any) -> tuple[int, str]:
        """Return the status and the sentence of a refusal."""
        status, _, text = await self.send(path, body, **more)
        return status, json.loads(text)["error"]["message"]

    def with_key(self, **more: str) -> dict[str, str]:
        return {"x-api-key": self.session.key} | more


def play(
    session_of: Callable[[], AgentSession], use: Callable[[Address], Awaitable[None]], gateway: Any = None
) -> None:
    async def run() -> None:
        served, session = gateway or Gateway(), session_of()
        async with served.serving(session) as url, aiohttp.ClientSession() as http:
            await asyncio.wait_for(use(Address(session, url, http)), 30)
        if gateway is None:
            await served.close()

    asyncio.run(run())


def test_the_key_is_taken_from_either_header(qwen):
    async def use(address: Address) -> None:
        key = address.session.key
        cases: list[tuple[dict[str, str], int]] = [
            ({"Authorization": f"Bearer {key}"}, 200),
            ({"Authorization": key}, 200),
            ({"Authorization": f"Bearer  {key}"}, 200),
            ({"x-api-key": key}, 200),
            ({"Authorization": "Bearer other", "x-api-key": key}, 200),
            ({"Authorization": f"Bearer {key}", "x-api-key": "other"}, 200),
            ({}, 401),
            ({"Authorization": f"Bearer {key}x"}, 401),
            ({"Authorization": f"Basic {key}"}, 401),
            ({"x-api-key": f"Bearer {key}"}, 401),
            ({"x-api-key": key[:-1]}, 401),
        ]
        for headers, expected in cases:
            status, _, text = await address.send("/models", b"", headers=headers, method="GET")
            assert status == expected, headers
            if status == 401:
                assert json.loads(text)["error"] == {
                    "message": "the API key is not that of this episode: use the one that the agent was given "
                    "(OPENAI_API_KEY or ANTHROPIC_API_KEY)",
                    **{"type": "authentication_error", "param": None, "code": None},
                }
        assert address.session.counts.refused == 5

    play(lambda: make_session(Policy(qwen, [])), use)


@pytest.mark.parametrize(
    ("retry", "is_number"),
    [
        ("", True),
        ("0", True),
        ("7", True),
        ("9" * 9, True),
        ("1" * 10, False),
        ("-1", False),
        ("1.5", False),
        ("x", False),
    ],
)
def test_a_count_of_retries_has_at_most_nine_digits(qwen, retry, is_number):
    policy = Policy(qwen, ["Seven."])

    async def use(address: Address) -> None:
        headers = address.with_key(**{RETRY_COUNT: retry})
        if is_number:
            assert (await address.send("/chat/completions", headers=headers))[0] == 200
            return
        said = "x-stainless-retry-count must be a number of at most nine digits: leave it out"
        assert await address.refuse("/chat/completions", headers=headers) == (400, said)
        assert policy.n == 0

    play(lambda: make_session(policy), use)


def test_a_retry_is_one_of_the_same_protocol(qwen):
    """The same body asks two protocols for two replies, however often its client has tried."""
    policy = Policy(qwen, ["Seven.", "Eight."])

    async def use(address: Address) -> None:
        chat, messages = [
            json.loads((await address.send(path, headers=address.with_key(**{RETRY_COUNT: "1"})))[2])
            for path in ("/chat/completions", "/messages")
        ]
        assert chat["choices"][0]["message"]["content"] == "Seven." and messages["content"][0]["text"] == "Eight."
        again = await address.send("/chat/completions", headers=address.with_key(**{RETRY_COUNT: "2"}))
        assert json.loads(again[2])["choices"] == chat["choices"] and policy.n == 2

    play(lambda: make_session(policy), use)


def test_sampling_of_the_run_is_that_of_a_request(qwen):
    sampler = replace(make_sampler(Policy(qwen, [])), temperature=0.75, truncation=Truncation(top_p=0.5, top_k=7))
    cases = (
        ({"temperature": 1}, "temperature is 1, and this run samples at rollout.temperature=0.75: leave it out"),
        ({"top_p": 1}, "top_p is 1, and this run samples at rollout.top_p=0.5: leave it out"),
        ({"top_k": -1}, "top_k is -1, and this run samples at rollout.top_k=7: leave it out"),
        # those of the run are accepted, so that another is refused
        ({"temperature": 0.75, "top_p": 0.5, "top_k": 7, "n": 2}, "n is 2, "),
    )

    async def use(address: Address) -> None:
        for changes, sentence in cases:
            status, said = await address.refuse("/chat/completions", BODY | changes)
            assert status == 400 and said.startswith(sentence), said

    play(lambda: AgentSession(sampler, PROMPT, lambda _: 0), use)


def test_other_paths_and_episodes_are_not_there(qwen):
    paths = "only chat/completions, responses, messages and models below the base URL"

    async def use(address: Address) -> None:
        path = address.url.removeprefix("http://").partition("/")[2]
        said = f"there is no POST /{path}/completions here, {paths}"
        assert await address.refuse("/completions") == (404, said)
        said = f"there is no GET /{path}/messages here, {paths}"
        assert await address.refuse("/messages", method="GET") == (404, said)
        status, said = await address.refuse("/" + "x" * 500)
        assert status == 404 and said.startswith("there is no POST /s/") and said.endswith(f"xxx... here, {paths}")
        assert address.session.counts.refused == 3
        other = address.url.replace(address.session.id, "0" * 16)
        assert await address.refuse("/messages", base=other) == (
            404,
            "there is no such episode, or it has ended: each one has a base URL of its own",
        )
        assert address.session.counts.refused == 3, "that is another one's"
        root = address.url.removesuffix("/v1")
        assert [(await address.send("", b"", method="HEAD", base=url))[0] for url in (root, root + "x")] == [200, 404]
        status, headers, text = await address.send("/models", b"", method="GET")
        [model] = json.loads(text)["data"]
        assert (status, model["id"]) == (200, "policy") and model["created"] > 1.7e9
        assert headers["Content-Type"].startswith("application/json")

    play(lambda: make_session(Policy(qwen, [])), use)


def test_a_body_has_at_most_64_mib(qwen):
    async def use(address: Address) -> None:
        body = json.dumps(BODY | {"n": 2}).encode()
        said = f"the body of a request may have {LARGEST_BODY} bytes: send less"
        assert LARGEST_BODY == 2**26
        status, _, text = await address.send("/messages", body.ljust(LARGEST_BODY + 1))
        assert (status, json.loads(text)["error"]["message"]) == (413, said)

    play(lambda: make_session(Policy(qwen, [])), use)


def test_a_compressed_body_is_not_unpacked(qwen):
    """Some bytes can hold gigabytes."""

    async def use(address: Address) -> None:
        packed = gzip.compress(json.dumps(BODY).encode())
        headers = address.with_key(**{"Content-Encoding": "gzip", "Content-Type": "application/json"})
        status, said = await address.refuse("/chat/completions", packed, headers=headers)
        assert status == 400 and "must be JSON" in said

    play(lambda: make_session(Policy(qwen, [])), use)


def test_a_request_that_does_not_arrive_in_time_is_refused(qwen, monkeypatch):
    monkeypatch.setattr(serving, "AGENT_REQUEST_TIMEOUT_S", 0.1)

    async def use(address: Address) -> None:
        port = int(address.url.split(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        path = address.url.split("/", 3)[3]
        head = [f"POST /{path}/chat/completions HTTP/1.1", "Host: a", f"x-api-key: {address.session.key}"]
        writer.write("\r\n".join([*head, "Connection: close", "Content-Length: 9", "", "{"]).encode())
        answer = (await reader.readuntil(b"}")).decode()
        assert answer.startswith("HTTP/1.1 413 ")
        assert "the request was not received, parsed and rendered within " in answer
        writer.close()

    play(lambda: make_session(Policy(qwen, [])), use)


def test_episodes_share_a_server_and_another_event_loop_gets_its_own(qwen):
    policy = Policy(qwen, lambda context: "Seven.")
    gateway = Gateway()

    async def answer(address: Address) -> None:
        assert (await address.send("/chat/completions"))[0] == 200

    for _ in range(2):
        play(lambda: make_session(policy), answer, gateway)
    asyncio.run(gateway.close())

    async def run() -> None:
        one, two = make_session(policy), make_session(policy)
        async with gateway.serving(one) as first, aiohttp.ClientSession() as http:
            port = gateway.port
            async with gateway.serving(two) as second:
                assert gateway.port == port and first.split("/s/")[0] == second.split("/s/")[0]
                assert gateway.sessions == {one.id: one, two.id: two}
                await answer(Address(two, second, http))
                # a key of another episode is none
                wrong = {"x-api-key": one.key}
                assert (await Address(two, second, http).send("/models", b"", method="GET", headers=wrong))[0] == 401
            assert gateway.sessions == {one.id: one}
            await answer(Address(one, first, http))
        for _ in range(2):
            await gateway.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
        async with gateway.serving(make_session(policy)) as third, aiohttp.ClientSession() as http:
            status = (await Address(two, third, http).send("/models", b"", method="GET"))[0]
            assert status == 401, "it has begun again"
        await gateway.close()

    asyncio.run(run())


def test_an_address_in_plain_http_is_said_with_its_risk(qwen, capsys):
    gateway = Gateway(GatewayConfig(url="http://10.0.0.1:{port}/e{engine}", insecure=True), engine=3)

    async def run() -> None:
        session = make_session(Policy(qwen, []))
        async with gateway.serving(session) as url:
            assert url == f"http://10.0.0.1:{gateway.port}/e3/s/{session.id}/v1"
        await gateway.close()

    asyncio.run(run())
    assert capsys.readouterr().err == (
        f"rollout.gateway: agents reach engine 3 at http://10.0.0.1:{gateway.port}/e3 (port {gateway.port}), in plain "
        "HTTP: keys and texts can be read on the way\n"
    )


def test_errors_are_logged_but_for_those_of_clients(caplog):
    log = logging.getLogger("rollouts.agents.gateway")
    for error in (None, ValueError("ours"), HttpProcessingError(code=400, message="theirs")):
        log.error("it failed", exc_info=error)
    assert [record.exc_info and str(record.exc_info[1]) for record in caplog.records] == [None, "ours"]


def test_a_request_that_the_server_refuses_is_counted_with_its_reason(qwen):
    async def use(address: Address) -> None:
        for _ in range(199):
            address.session.count_refusal("an earlier one")
        port = int(address.url.split(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = [f"POST /s/{address.session.id}/v1/messages HTTP/1.1", "Host: a", "Expect: nothing", "Connection: close"]
        writer.write("\r\n".join([*head, "Content-Length: 0", "", ""]).encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 417 ")
        said = "the agent has made 200 requests that were refused, the last because: Expectation Failed"
        assert await address.session.failed == said
        writer.close()

    play(lambda: make_session(Policy(qwen, [])), use)


class Long(AgentSession):
    """Session whose only reply is longer than any connection holds unread."""

    was_delivered = False

    @asynccontextmanager
    async def answering(self, request: Request) -> AsyncGenerator[ChatResponse]:
        message: Any = {"role": "assistant", "content": "x" * 2**25}
        try:
            yield ChatResponse(id="1", message=message, finish_reason="stop", prompt_tokens=1, completion_tokens=1)
            self.was_delivered = True
        finally:
            self.has_ended.set()


@pytest.mark.parametrize("body", [BODY, BODY | {"stream": True}])
def test_a_reply_that_is_not_read_to_its_end_is_not_delivered(qwen, body):
    async def run() -> None:
        session, gateway = Long(make_sampler(Policy(qwen, [])), PROMPT, lambda _: 0), Gateway()
        session.has_ended = asyncio.Event()
        async with gateway.serving(session), asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            data = json.dumps(body)
            head = [f"POST /s/{session.id}/v1/chat/completions HTTP/1.1", "Host: a", f"Content-Length: {len(data)}"]
            writer.write("\r\n".join([*head, f"x-api-key: {session.key}", "", data]).encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.transport.abort()
            await session.has_ended.wait()
        await gateway.close()
        assert not session.was_delivered, "a retry gets it again"

    asyncio.run(run())
