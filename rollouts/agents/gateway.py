"""HTTP server of a rollout worker. An agent's harness requests replies of the policy here, in one of three protocols.

    POST /s/<session>/v1/chat/completions      a reply, streamed or not, as OpenAI's clients ask for it
    POST /s/<session>/v1/responses             the same, by OpenAI's Responses API
    POST /s/<session>/v1/messages              the same, as Anthropic's clients ask for it
    GET  /s/<session>/v1/models                the list of models, which is one
    HEAD /s/<session>                          whether the episode is running

A session is an episode with an API key. rollouts/agents/dialects/ parses requests and rollouts/agents/session.py
answers them. This file is only HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from configs.gateway_schema import GatewayConfig
from core.errors import UserError, shorten
from core.timing.deadlines import AGENT_REQUEST_TIMEOUT_S, SERVER_CLOSE_GRACE_S
from core.timing.progress import say
from rollouts.agents.bounded_json import Unreadable, count_marks, read_json
from rollouts.agents.dialects.chat import CHAT
from rollouts.agents.dialects.messages import MESSAGES
from rollouts.agents.dialects.responses import RESPONSES
from rollouts.agents.session import AgentSession, Request, Sampler, run_in_thread
from rollouts.agents.wire import BadRequest, ChatRequest, Dialect, list_models, refuse_slow

DIALECTS = (CHAT, RESPONSES, MESSAGES)
"""Protocols by which a reply is requested."""

# Images are part of the body, as data URIs.
LARGEST_BODY = 64 * 2**20
"""Maximum size of a request body, in bytes."""
REFUSAL = web.ResponseKey("refusal", str)
"""Key of a response with the reason why the request was refused."""
RETRY_COUNT = "x-stainless-retry-count"
"""Header with the retry count of OpenAI's clients."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Tell whether an error is not that of a client. Bytes that are no HTTP would fill the log with tracebacks."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_is_ours)


class Gateway:
    """HTTP server of one rollout worker. It starts with the first episode, in the same event loop."""

    def __init__(self, config: GatewayConfig | None = None, engine: int = 0) -> None:
        """config: keys of `rollout.gateway`. engine: number of the worker's engine."""
        self.config, self.engine = config or GatewayConfig(), engine
        self.sessions: dict[str, AgentSession] = {}
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self.port: int
        """Port of the server, once it has started."""

    @asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncGenerator[str]:
        """Serve the requests of an episode while the body runs. Yield the base URL."""
        await self._start()
        self.sessions[session.id] = session
        try:
            yield f"{self.config.write_url(self.engine, self.port)}/s/{session.id}/v1"
        finally:
            # first, so that an ended episode takes no new request while the running ones are cancelled
            del self.sessions[session.id]
            await session.close()

    async def close(self) -> None:
        """Close the server and all connections."""
        # a server of an earlier event loop died with that loop
        if self._runner is not None and self._loop is asyncio.get_running_loop():
            await self._runner.cleanup()
        self._runner = None

    async def _start(self) -> None:
        """Start listening, unless the server already runs in this event loop."""
        async with self._starting:
            if self._runner is not None and self._loop is asyncio.get_running_loop():
                return
            app = web.Application(client_max_size=LARGEST_BODY)
            app.on_response_prepare.append(self._count_refusal)
            for dialect in DIALECTS:
                app.router.add_post(f"/s/{{session}}/v1/{dialect.path}", partial(self._complete, dialect))
            app.router.add_get("/s/{session}/v1/models", self._list_models)
            app.router.add_head("/s/{session}", self._greet)
            app.router.add_route("*", "/{rest:.*}", self._refuse_path)
            # A dropped connection cancels its handler, so the request counts as undelivered and a retry receives the
            # same reply. Closing waits for no connection: an episode may end with requests open.
            # Compressed bodies stay as they are, and are refused: some bytes can hold gigabytes.
            runner = web.AppRunner(
                app,
                access_log=None,
                logger=_LOG,
                handler_cancellation=True,
                shutdown_timeout=SERVER_CLOSE_GRACE_S,
                auto_decompress=False,
            )
            await runner.setup()
            await self._listen(runner)
            self.port = runner.addresses[0][1]
            self._runner, self._loop = runner, asyncio.get_running_loop()
            if self.config != GatewayConfig():
                risk = ", in plain HTTP: keys and texts can be read on the way" if self.config.insecure else ""
                url = self.config.write_url(self.engine, self.port)
                say(f"rollout.gateway: agents reach engine {self.engine} at {url} (port {self.port}){risk}")

    async def _listen(self, runner: web.AppRunner) -> None:
        # port 0: several workers share a machine, so the system picks a free port
        port = self.config.find_port(self.engine)
        try:
            await web.TCPSite(runner, self.config.listen, port).start()
        except OSError as error:
            await runner.cleanup()
            raise UserError(
                f"rollout.gateway: engine {self.engine} cannot listen on {self.config.listen}, port {port} "
                f"({error.strerror}): free it, or choose another"
            ) from error

    async def _complete(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        try:
            session = self._find_session(http)
            request = await _read_request(http, session, dialect)
            async with session.answering(request) as answer:
                created = int(time.time())
                if request.ask.streams:
                    return await _stream(http, dialect.stream(answer, created, request.ask))
                return await _send(http, dialect.write(answer, created))
        except BadRequest as refusal:
            return _refuse(refusal, dialect)
        except ConnectionError:  # the harness closed the connection; the sampled reply is kept for a retry
            return web.Response(status=400)

    async def _greet(self, http: web.Request) -> web.StreamResponse:
        """Answer a client that looks whether the address exists, before it sends the key."""
        return web.Response(status=200 if http.match_info["session"] in self.sessions else 404)

    async def _list_models(self, http: web.Request) -> web.StreamResponse:
        try:
            self._find_session(http)
        except BadRequest as refusal:
            return _refuse(refusal)
        return web.json_response(list_models(created=int(time.time())))

    async def _refuse_path(self, http: web.Request) -> web.StreamResponse:
        what = shorten(f"{http.method} {http.path}")
        paths = ", ".join(dialect.path for dialect in DIALECTS)
        return _refuse(BadRequest(f"there is no {what} here, only {paths} and models below the base URL", status=404))

    async def _count_refusal(self, http: web.BaseRequest, response: web.StreamResponse) -> None:
        """Count a refused request for its episode, by the path: only the agent knows the id. aiohttp refuses some."""
        is_refused = REFUSAL in response or isinstance(response, web.HTTPException)
        session = self.sessions.get(http.path.removeprefix("/s/").partition("/")[0])
        if is_refused and session is not None:
            session.count_refusal(response.get(REFUSAL) or response.reason)

    def _find_session(self, http: web.Request) -> AgentSession:
        """Return the episode of a request. Raises BadRequest without the right API key."""
        session = self.sessions.get(http.match_info["session"])
        if session is None:
            raise BadRequest(
                "there is no such episode, or it has ended: each one has a base URL of its own", status=404
            )
        # compared in constant time, so that another process of the machine cannot guess the key by timing
        given = (http.headers.get("Authorization", "").removeprefix("Bearer "), http.headers.get("x-api-key", ""))
        if not any(_is_key(one, session.key) for one in given):
            raise BadRequest(
                "the API key is not that of this episode: use the one that the agent was given (OPENAI_API_KEY or "
                "ANTHROPIC_API_KEY)",
                status=401,
            )
        return session


def _is_key(given: str, key: str) -> bool:
    return hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode())


async def _read_body(http: web.Request) -> bytes:
    try:
        return await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise BadRequest(f"the body of a request may have {LARGEST_BODY} bytes: send less", status=413) from error


async def _read_request(http: web.Request, session: AgentSession, dialect: Dialect) -> Request:
    """Read a request. Raises BadRequest."""
    until = time.monotonic() + AGENT_REQUEST_TIMEOUT_S
    retries = http.headers.get(RETRY_COUNT, "")
    if not re.fullmatch(r"[0-9]{0,9}", retries):
        raise BadRequest(f"{RETRY_COUNT} must be a number of at most nine digits: leave it out")
    try:
        async with asyncio.timeout(AGENT_REQUEST_TIMEOUT_S), session.reading:
            body = await _read_body(http)
            ask, digest = await run_in_thread(partial(_parse_body, body, dialect, session.sampler, until=until))
    except TimeoutError as error:
        raise refuse_slow() from error
    return Request(ask=ask, digest=digest, retry=int(retries) if retries else None)


def _parse_body(body: bytes, dialect: Dialect, sampler: Sampler, *, until: float) -> tuple[ChatRequest, str]:
    """Return a request and its digest."""
    try:
        count_marks(body)
        parsed = read_json(body)
    except Unreadable as error:
        raise BadRequest(f"the body of a request {error}") from error
    ask = dialect.read(parsed, temperature=sampler.temperature, truncation=sampler.truncation, until=until)
    digest = hashlib.sha256(dialect.path.encode())
    digest.update(body)
    return ask, digest.hexdigest()


async def _send(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Send a complete response. Raises ConnectionError if the client has disconnected."""
    response = web.json_response(body)
    # not left to aiohttp: only here does an error show that the client has not received the reply
    await response.prepare(http)
    await response.write_eof()
    return response


async def _stream(http: web.Request, events: Iterable[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    for event in events:
        await response.write(event.encode())
    await response.write_eof()
    return response


def _refuse(refusal: BadRequest, dialect: Dialect = CHAT) -> web.Response:
    response = web.json_response(dialect.refuse(refusal), status=refusal.status)
    response[REFUSAL] = str(refusal)
    return response
