"""Requests of a harness that is broken or hostile: each is a 4xx that is counted, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import string
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollouts.agents.bounded_json import Unreadable, read_json
from rollouts.agents.gateway import RETRY_COUNT, Gateway
from rollouts.agents.session import MAX_REFUSED, AgentSession
from unit_tests.helpers.chat_families import TOOLS
from unit_tests.helpers.scripted_policy import Policy, make_session, say_calls

USER = {"role": "user", "content": "Which?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
ROOM = {"max_turns": 10**6, "max_new_tokens": 10**9, "room": 4000}
BLOCKED_S = 0.2


def nest(depth: int, kind: str = "[") -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "[" else {"a": value}
    return value


def draw_png(side: int) -> str:
    file = io.BytesIO()
    Image.fromarray(np.zeros((side, side), dtype=np.uint8)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


FUNCTION = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
BODIES: dict[str, tuple[str, Any, Callable[[str], Any]]] = {
    "/chat/completions": (
        "messages",
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ],
            "tools": TOOLS,
        },
        lambda url: {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}],
        },
    ),
    "/responses": (
        "input",
        {
            "input": [
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]},
            ],
            "instructions": "x",
            "tools": [{"type": "function", **FUNCTION}],
        },
        lambda url: {"role": "user", "content": [{"type": "input_image", "image_url": url}]},
    ),
    "/messages": (
        "messages",
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "x", "signature": ""},
                        {"type": "tool_use", "id": "c1", "name": "weather", "input": {}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}]},
            ],
            "system": [{"type": "text", "text": "x"}],
            "tools": [{"name": "weather", "description": "d", "input_schema": FUNCTION["parameters"]}],
        },
        lambda url: {
            "role": "user",
            "content": [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]},
                },
            ],
        },
    ),
}
"""By path: the key of the conversation, a turn with tools, and a turn with an image."""


class Junk:
    """Values that are not what a key wants, and places to put them."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def text(self) -> str:
        alphabet = string.printable + "\0\x1b\x7f\x9b\u202e\u2028\ud800\udfff\U0001f600<|im_end|><tool_call>{}%é"
        return "".join(self.rng.choices(alphabet, k=self.rng.choice((0, 1, 5, 40, 2000))))

    def value(self) -> Any:
        rng = self.rng
        simple = (None, True, False, 0, -1, 1, 2**63, 10**399, 1.5, float("nan"), float("inf"), "", "none", "required")
        match rng.randrange(8):
            case 0 | 1 | 2:
                return rng.choice(simple)
            case 3 | 4:
                return self.text()
            case 5:
                return nest(rng.choice((1, 3, 63, 64, 65, 300)), rng.choice("[{"))
            case 6:
                return [self.value() for _ in range(rng.randrange(4))]
            case _:
                return {self.text()[:9]: self.value() for _ in range(rng.randrange(4))}

    def body(self, path: str = "/chat/completions") -> bytes:
        """A valid body with some of its values replaced, dropped or added anywhere."""
        rng = self.rng
        key, with_tools, with_image = BODIES.get(path, BODIES["/chat/completions"])
        body: Any = {"model": "policy", key: [dict(USER)]}
        if rng.random() < 0.6:
            more = json.loads(json.dumps(with_tools))
            body |= {**more, key: body[key] + more[key]}
        if rng.random() < 0.3:
            body[key].append(with_image(rng.choice((draw_png(3), "data:,x", "http://x"))))
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            if not (places := [*list_places(body)]):
                break
            place, key = rng.choice(places)
            match rng.randrange(5):
                case 0 if isinstance(place, dict):
                    del place[key]
                case 1 if isinstance(place, dict):
                    keys = ("name", "tool_calls", "reasoning", "stop", "max_tokens", "tool_choice", "stream", "n", "x")
                    keys += ("type", "content", "system", "instructions", "thinking", "stop_sequences", "output")
                    place[rng.choice(keys)] = self.value()
                case 2:
                    place[key] = json.dumps(self.value())
                case _:
                    place[key] = self.value()
        text = json.dumps(body)
        if rng.random() < 0.15:  # what json.dumps does not write
            text = text.replace(
                '"Which?"', rng.choice(("[" * 3000 + "]" * 3000, "1" * 5000, "-0.0e-999", "'x'", "[,]"))
            )
        return text.encode(errors="surrogatepass")

    def some_bytes(self, path: str) -> bytes:
        """A valid body with some of its bytes changed; or only bytes."""
        rng = self.rng
        if rng.random() < 0.2:
            return rng.randbytes(rng.choice((0, 1, 30, 3000)))
        body = bytearray(self.body(path))
        for _ in range(rng.choice((1, 3, 30))):
            at = rng.randrange(len(body) + 1)
            body[at : at + rng.choice((0, 1, 9))] = rng.randbytes(rng.choice((0, 1, 2)))
        return bytes(body)

    def headers(self, session: AgentSession) -> list[bytes]:
        rng = self.rng
        key = b"Bearer " + session.key.encode()
        chosen = [b"Authorization: " + (key if rng.random() < 0.9 else rng.choice((b"", b"\xff\xfe", b"Bearer \xe9")))]
        if rng.random() < 0.2:
            digits = rng.choice((b"0", b"1", b"-1", b"9" * 5000, b"\xd9\xa3", "²".encode(), b"1.5"))
            chosen.append(RETRY_COUNT.encode() + b": " + digits)
        if rng.random() < 0.1:
            chosen.append(
                rng.choice((b"Content-Encoding: gzip", b"Expect: 200-nothing", b"Content-Type: \xff", b"x: y"))
            )
        return chosen


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container below a value with each of its keys."""
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from list_places(below)


@dataclass
class Address:
    """A gateway with an episode, and the seconds for which its event loop did not turn."""

    gateway: Gateway
    session: AgentSession
    url: str
    gap_s: float = 0.0
    said: str = ""

    async def watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            self.gap_s = max(self.gap_s, time.perf_counter() - before - 0.005)

    async def send(self, raw: bytes, *, ends: bool) -> int | None:
        """Send bytes as they are; return the status, None where the connection is closed without one.

        ends: nothing more will come. The gateway takes it for a client that has gone.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        try:
            for start in range(0, len(raw), 2**20):  # in pieces, or the copies of the sender would stop the loop
                writer.write(raw[start : start + 2**20])
                await writer.drain()
            if ends:
                writer.write_eof()
            head = await asyncio.wait_for(reader.readline(), 300)
            self.said = (await reader.read()).decode(errors="replace")
        except ConnectionError:
            return None
        finally:
            writer.close()
        return int(head.split()[1]) if head else None

    async def post(self, body: bytes, *headers: bytes, path: str = "/chat/completions", method: str = "POST") -> int:
        target = "/" + self.url.split("/", 3)[3] + path
        lines = [f"{method} {target} HTTP/1.1".encode(), b"Host: x", b"Connection: close", *headers]
        status = await self.send(b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body]), ends=False)
        assert status is not None
        return status

    @property
    def key(self) -> bytes:
        return b"Authorization: Bearer " + self.session.key.encode()


def serve(policy: Policy, run: Callable[[Address], Any], **limits: int) -> Any:
    async def body() -> Any:
        gateway, session = Gateway(), make_session(policy, **(ROOM | limits))
        async with gateway.serving(session) as url:
            address = Address(gateway, session, url)
            watching = asyncio.create_task(address.watch())
            try:
                return await run(address)
            finally:
                watching.cancel()
                await gateway.close()

    return asyncio.run(body())


def fuzz(qwen: Any, caplog: Any, n: int, *, seed: int) -> Counter[int]:
    """Send n requests in episodes of some hundred. Each is answered by 200 or 4xx, and each 4xx is counted."""
    junk, statuses, answered = Junk(seed), Counter[int](), set[str]()
    policy = Policy(qwen, lambda _: junk.rng.choice(("Seven.", say_calls("", ("weather", {"place": "Oslo"})))))

    async def play(address: Address) -> None:
        refused = 0
        while statuses.total() < n and refused < MAX_REFUSED:
            path = junk.rng.choice((*BODIES, *BODIES, *BODIES, "/models", "/x", "/../\x1b"))
            body = junk.body(path) if statuses.total() % 2 else junk.some_bytes(path)
            method = junk.rng.choice(("POST",) * 9 + ("GET", "PUT"))
            path = path.encode("unicode_escape").decode()
            status = await address.post(body, *junk.headers(address.session), path=path, method=method)
            statuses[status] += 1
            answered.update([path] if status == 200 else [])
            refused += status >= 400
            failed = address.session.failed
            assert not (failed.done() and failed.exception()), (failed.exception(), body)
            assert status == 200 or 400 <= status < 500, (status, body)
            assert address.session.counts.refused == refused, (status, method, path, body)
            assert address.session.failed.done() == (refused == MAX_REFUSED), body

    while statuses.total() < n:
        serve(policy, play)
    assert BODIES.keys() <= answered, answered
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")], caplog.text[:3000]
    return statuses


def test_a_bad_request_is_refused_and_counted(qwen, caplog):
    statuses = fuzz(qwen, caplog, 400, seed=1)
    assert {200, 400, 401, 404} <= statuses.keys(), statuses


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_five_thousand_bad_requests_are_refused_and_counted(qwen, caplog):
    statuses = fuzz(qwen, caplog, 5000, seed=2)
    print(dict(statuses))


def test_bytes_that_are_no_http_are_no_error_of_ours(qwen, caplog):
    rng = random.Random(3)
    start = b"POST /s/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    heads = [
        b"\0" * 50,
        b"GET\r\n\r\n",
        start + b"Content-Length: -1\r\n\r\n",
        start + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
        start + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        start + b"x: " + b"y" * 10**5 + b"\r\n\r\n",
        *(rng.randbytes(rng.randrange(1, 300)) + b"\r\n\r\n" for _ in range(40)),
    ]

    async def run(address: Address) -> list[int | None]:
        return [await address.send(head, ends=True) for head in heads]

    statuses = serve(Policy(qwen, []), run)
    assert all(status is None or 400 <= status < 500 for status in statuses), statuses
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")], caplog.text[:3000]


def ask(**more: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": [USER], **more}).encode()


def tool(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}


REFUSED = {
    "a deep body": (lambda: ask(x=nest(900)), "has more than 64 lists and objects in each other"),
    "a body of brackets": (lambda: b"[" * 10**5, "must be JSON"),
    "deep parameters": (lambda: ask(tools=[tool(nest(900, "{"))]), "has more than 64 lists and objects"),
    "deep arguments": (
        lambda: ask(messages=[call_with("[" * 3000 + "]" * 3000), USER]),
        "messages[0].tool_calls[0].function.arguments must be JSON",
    ),
    "arguments that are half of a character": (
        lambda: ask(messages=[call_with('{"a": "\\ud800"}'), USER]),
        "arguments has a text that holds half of a character",
    ),
    "a long number": (lambda: ask(max_tokens=1).replace(b": 1}", b": " + b"1" * 5000 + b"}"), "more than 400 digits"),
    "many small messages": (lambda: ask(messages=[USER] * 200_000), "more than 1048576 quotes, commas"),
    "more messages than tokens": (lambda: ask(messages=[USER] * 5000), "the conversation has 5000 messages"),
    "more text than tokens": (
        lambda: ask(messages=[{"role": "user", "content": "ab " * 10**6}]),
        "the conversation has more than 4000 tokens",
    ),
    "packed": (lambda: zlib.compress(ask()), "must be JSON"),
}


def call_with(arguments: str) -> Any:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def test_what_is_too_deep_or_too_large_is_named(qwen, caplog):
    async def run(address: Address) -> None:
        for n, (name, (make, words)) in enumerate(REFUSED.items(), start=1):
            assert await address.post(make(), address.key) == 400, name
            assert words in address.said and len(address.said) < 600, (name, address.said)
            assert address.session.counts.refused == n
        fine = await address.post(ask(messages=[call_with('{"a": 1}'), USER]), address.key)
        assert fine == 200, "what is neither is answered"

    serve(Policy(qwen, lambda _: "Seven."), run)
    assert caplog.records == []


LARGE = {
    "8 MiB of small messages": lambda: ask(messages=[USER] * 190_000),
    "57 MiB of small messages": lambda: ask(messages=[USER] * 1_350_000),
    "as many messages as are read": lambda: ask(messages=[{"role": "user", "content": ""}] * 80_000),
    "numbers": lambda: b'{"a": [' + b",".join([b"1e308"] * 10**6) + b"]}",
    "long integers": lambda: b'{"a": [' + b",".join([b"1" * 400] * 10**5) + b"]}",
    "empty lists": lambda: b'{"a": [' + b",".join([b"[]"] * (2**19 - 9)) + b"]}",
    "a text of 60 MiB": lambda: ask(messages=[{"role": "user", "content": "word " * (12 * 2**20)}]),
    "a text of one letter": lambda: ask(messages=[{"role": "user", "content": "a" * 2**25}]),
    "spaces": lambda: b"{" + b" " * (2**26 - 99) + b"}",
    "large images": lambda: ask(
        messages=[
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": draw_png(8192)}} for _ in range(6)]}
        ]
    ),
    "/responses": lambda: json.dumps(
        {"model": "policy", "input": [{"type": "function_call", "name": "f", "arguments": "{}"}] * 45_000 + [USER]}
    ).encode(),
    "/messages": lambda: json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 70_000}]}
    ).encode(),
}
"""Large bodies; the name may be the path that gets them."""


@pytest.mark.slow
def test_no_large_request_stops_the_event_loop(qwen):
    """A request stops it only where it does so every time: other programs may take the processor for a while."""
    blocked: dict[str, float] = {}

    async def run(address: Address) -> None:
        for name, make in LARGE.items():
            body, shortest, path = make(), float("inf"), name if name in BODIES else "/chat/completions"
            for _ in range(8):
                address.gap_s = 0.0
                # from a thread: what sends it must not count
                sent = partial(address.post, body, address.key, path=path)
                status = await asyncio.to_thread(lambda sent=sent: asyncio.run(sent()))
                assert 400 <= status < 500, (name, status)
                shortest = min(shortest, address.gap_s)
                if shortest < BLOCKED_S:
                    break
            blocked[name] = round(shortest, 3)

    serve(Policy(qwen, lambda _: "Seven."), run)
    print(blocked)
    assert all(seconds < BLOCKED_S for seconds in blocked.values()), blocked


def test_a_large_request_is_read_while_the_event_loop_turns(qwen):
    """Without a clock: between the arrival of a large request and its answer the loop turns many times."""

    async def run(address: Address) -> int:
        body = ask(messages=[{"role": "user", "content": "word " * 10**6}])
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += address.session.reading.locked() or bool(address.session.counts.refused == 0)

        turning = asyncio.create_task(turn())
        assert await address.post(body, address.key) == 400
        turning.cancel()
        return turns

    assert serve(Policy(qwen, []), run) > 100


def test_other_threads_go_on_while_numbers_are_read():
    """The text ends too early, so that it is only parsed. Three tries, since other programs take the processor too."""
    text = "[" + "1.5," * (4 * 10**5)

    def read() -> float:
        """Return the longest time for which another thread has waited, as a share of the whole."""
        over, waited_s = threading.Event(), 0.0

        def turn() -> None:
            nonlocal waited_s
            last = time.perf_counter()
            while not over.is_set():
                time.sleep(0)  # lets go of the interpreter, and waits for it
                now = time.perf_counter()
                waited_s, last = max(waited_s, now - last), now

        thread, begin = threading.Thread(target=turn), time.perf_counter()
        thread.start()
        try:
            with pytest.raises(Unreadable):
                read_json(text)
        finally:
            over.set()
            thread.join()
        return waited_s / (time.perf_counter() - begin)

    assert any(read() < 0.5 for _ in range(3))
