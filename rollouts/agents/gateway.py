"""OpenAI-compatible endpoint of a rollout worker, on the loopback address: an agent's harness talks to the policy here.

    POST /s/<session>/v1/chat/completions      a reply, streamed or not
    GET  /s/<session>/v1/models                the one model that there is

A session is one episode, with a key of its own. What is asked is read in rollouts/agents/wire.py and answered in
rollouts/agents/session.py; here is only HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from core.errors import shorten
from rollouts.agents.session import AgentSession, Request
from rollouts.agents.wire import BadRequest, ChatRequest, list_models, read_ask, write_answer, write_chunks

HOST = "127.0.0.1"
LARGEST_BODY = 64 * 2**20
"""Bytes of a request."""
RETRY_COUNT = "x-stainless-retry-count"
"""Header in which OpenAI's clients count their retries."""


class Gateway:
    """Server of one rollout worker. It starts with the first episode, in the event loop of that."""

    def __init__(self) -> None:
        self.sessions: dict[str, AgentSession] = {}
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self.port = 0

    @asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncGenerator[str]:
        """ChatResponse the requests of an episode while the body runs; yield its base URL."""
        await self._start()
        self.sessions[session.id] = session
        try:
            yield f"http://{HOST}:{self.port}/s/{session.id}/v1"
        finally:
            del self.sessions[session.id]
            await session.close()

    async def close(self) -> None:
        """Close the server and its connections."""
        if self._runner is not None and self._loop is asyncio.get_running_loop():
            await self._runner.cleanup()
        self._runner = None

    async def _start(self) -> None:
        """Listen, if nothing does in this event loop."""
        async with self._starting:
            if self._runner is not None and self._loop is asyncio.get_running_loop():
                return
            app = web.Application(client_max_size=LARGEST_BODY)
            app.router.add_post("/s/{session}/v1/chat/completions", self._complete)
            app.router.add_get("/s/{session}/v1/models", self._list_models)
            app.router.add_route("*", "/{rest:.*}", self._refuse_path)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
            await runner.setup()
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._runner, self._loop = runner, asyncio.get_running_loop()

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        try:
            session = self._find_session(http)
        except BadRequest as refusal:
            return _refuse(refusal)
        try:
            body = await _read_body(http)
            request = _read_request(http, body, session)
            async with session.answering(request) as answer:
                created = int(time.time())
                if request.ask.streams:
                    wants_usage = request.ask.wants_usage
                    return await _stream(http, [*write_chunks(answer, created=created, wants_usage=wants_usage)])
                return await _send(http, write_answer(answer, created=created))
        except BadRequest as refusal:
            session.count_refusal(refusal)
            return _refuse(refusal)
        except ConnectionError:  # the harness has gone; what was sampled waits for its retry
            return web.Response(status=400)

    async def _list_models(self, http: web.Request) -> web.StreamResponse:
        try:
            self._find_session(http)
        except BadRequest as refusal:
            return _refuse(refusal)
        return web.json_response(list_models(created=int(time.time())))

    async def _refuse_path(self, http: web.Request) -> web.StreamResponse:
        what = shorten(f"{http.method} {http.path}")
        return _refuse(
            BadRequest(f"there is no {what} here, only chat/completions and models below the base URL", status=404)
        )

    def _find_session(self, http: web.Request) -> AgentSession:
        """Return the episode that a request belongs to. Raises BadRequest without its key."""
        session = self.sessions.get(http.match_info["session"])
        if session is None:
            raise BadRequest(
                "there is no such episode, or it has ended: each one has a base URL of its own", status=404
            )
        given = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), session.key.encode()):
            raise BadRequest(
                "the API key is not that of this episode: use the one that the agent was given (OPENAI_API_KEY)",
                status=401,
            )
        return session


async def _read_body(http: web.Request) -> bytes:
    try:
        return await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise BadRequest(f"the body of a request may have {LARGEST_BODY} bytes: send less", status=413) from error


def _read_request(http: web.Request, body: bytes, session: AgentSession) -> Request:
    try:
        parsed: Any = json.loads(body)
    except ValueError as error:
        raise BadRequest("the body of a request must be JSON") from error
    ask: ChatRequest = read_ask(parsed, temperature=session.sampler.temperature)
    retries = http.headers.get(RETRY_COUNT, "")
    return Request(
        ask=ask,
        digest=hashlib.sha256(body).hexdigest(),
        retry=int(retries) if retries.isdecimal() else None,
    )


async def _send(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Send a whole answer; return when it is on its way, or raise ConnectionError."""
    response = web.json_response(body)
    await response.prepare(http)
    await response.write_eof()
    return response


async def _stream(http: web.Request, chunks: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    for chunk in [*map(json.dumps, chunks), "[DONE]"]:
        await response.write(f"data: {chunk}\n\n".encode())
    await response.write_eof()
    return response


def _refuse(refusal: BadRequest) -> web.Response:
    return web.json_response(refusal.write(), status=refusal.status)
