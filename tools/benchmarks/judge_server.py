"""A judge without a model, to measure and to try out rewards: python -m tools.benchmarks.judge_server --port 8000

It speaks OpenAI's chat completions. The verdict on a reply is the share of sevens among the first eight characters, on
the scale of the settings. It can be slow, unreadable every so often, and refuse requests above a number in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

REPLY = re.compile(r"<reply-([0-9a-f]+)>\n(.*)\n</reply-\1>", re.DOTALL)
UNREADABLE = "I like it."


@dataclass(frozen=True, slots=True)
class Asked:
    """Request to a judge."""

    reply: str
    """Policy's text in the prompt."""
    key: str
    """Hash in the tags."""
    body: dict[str, Any]


def read_request(body: dict[str, Any]) -> Asked:
    """Return the parts of a request."""
    found = REPLY.search(body["messages"][0]["content"])
    assert found is not None, "the prompt has no reply"
    return Asked(found[2], found[1], body)


def count_sevens(asked: Asked) -> str:
    """Return a verdict from 1 to 10: the share of sevens among the first eight characters."""
    return f"I count them. <verdict-{asked.key}>{1 + 9 * asked.reply[:8].count('7') / 8:.3f}</verdict-{asked.key}>"


@dataclass
class JudgeServer:
    """Server with a function as the judge. The counters are for tests."""

    judge: Callable[[Asked], str | dict[str, Any]] = count_sevens
    """Returns the text of the answer, or a whole `choice`."""
    seconds: float = 0.0
    """Time that an answer takes."""
    unreadable_every: int = 0
    """Every so many answers has no verdict; 0: none."""
    at_once: int = 0
    """Requests in flight; above it they are refused with 429. 0: unlimited."""
    key: str = ""
    """Key that a request must have."""
    statuses: deque[int] = field(default_factory=deque[int])
    """Status codes of the next requests, in place of an answer. 0: the connection breaks."""
    headers: dict[str, str] = field(default_factory=lambda: {"Retry-After": "0.05"})
    """Headers of a refusal."""
    answered: int = 0
    refused: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def complete(self, request: web.Request) -> web.Response:
        """Answer a chat completion."""
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return self._refuse(401, f"wrong key {request.headers.get('Authorization')}")
        if self.at_once and self.in_flight >= self.at_once:
            return self._refuse(429, "too many requests")
        if self.statuses:
            status = self.statuses.popleft()
            if not status and request.transport is not None:
                request.transport.abort()
            return self._refuse(status or 500, "scripted")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            body = await request.json()
            self.bodies.append(body)
            await asyncio.sleep(self.seconds)
            self.answered += 1
            is_odd = self.unreadable_every and self.answered % self.unreadable_every == 0
            return web.json_response(describe(UNREADABLE if is_odd else self.answer(body)))
        finally:
            self.in_flight -= 1

    def answer(self, body: dict[str, Any]) -> str | dict[str, Any]:
        """Return the text of an answer, or a whole `choice`."""
        return self.judge(read_request(body))

    def _refuse(self, status: int, said: str) -> web.Response:
        self.refused += 1
        return web.json_response({"error": {"message": said}}, status=status, headers=self.headers)

    def make_app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/health", _answer_health)
        return app

    @contextmanager
    def running(self) -> Generator[str]:
        """Serve in a thread; yield the address."""
        started, address = threading.Event(), [""]
        stop: list[Callable[[], object]] = []

        async def serve() -> None:
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            runner = web.AppRunner(self.make_app(), shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address[0] = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            started.set()
            await ended.wait()
            await runner.cleanup()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        started.wait()
        try:
            yield address[0]
        finally:
            stop[0]()
            thread.join()


async def _answer_health(_: web.Request) -> web.Response:
    return web.Response(text="ok")


def describe(answer: str | dict[str, Any]) -> dict[str, Any]:
    """Return an answer in OpenAI's form."""
    whole = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    choice = answer if isinstance(answer, dict) else whole
    return {"id": "j", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice], "usage": usage}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=0.0, help="time that an answer takes")
    args = parser.parse_args()
    web.run_app(JudgeServer(seconds=args.seconds).make_app(), host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
