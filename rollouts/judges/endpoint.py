"""HTTP server of a judge in the run: chat completions of one engine, for the reward processes.

    POST /v1/chat/completions      model, messages, max_tokens, seed; logprobs with two allowed tokens

The engine may be the judge's own, or the policy's. The temperature is of the engine, so a request has none.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from core.cluster.addresses import listen_at
from core.errors import RunStopped, quote
from core.text.json_text import decode_json, holds_lone_surrogate
from core.timing.deadlines import SERVER_CLOSE_GRACE_S
from core.types.messages import Message, ToolSpec
from rollouts.engines.base import Completion, Engine

LOOPBACK = "127.0.0.1"
LARGEST_BODY = 2**24
"""Maximum size of a request, in bytes."""
READ = {"model", "messages", "max_tokens", "seed", "logprobs", "top_logprobs"}


class JudgeTokenizer(Protocol):
    """Tokenizer methods of a judge; see data_feeds/chat/tokenizer.py."""

    def render(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Model that is served, with the limits and the key."""

    model: str
    max_model_len: int
    """Maximum number of tokens of a request and its verdict."""
    key: str = field(repr=False)
    choices: tuple[int, ...] = ()
    """The only two tokens of the engine, whose log-probabilities are reported; empty without them."""


class Refused(Exception):
    """Refused request, with an HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class JudgeEndpoint:
    """Server of an engine. The address is known before the start, and requests wait until then."""

    def __init__(
        self, engine: Engine, tokenizer: JudgeTokenizer, served: Served, address: str = LOOPBACK, port: int = 0
    ) -> None:
        """address, port: where to listen; port 0 takes a free one."""
        self._engine, self._tokenizer, self._served = engine, tokenizer, served
        self.key = served.key
        self._socket = listen_at(address, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{self.port}/v1"
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._n_sampled = 0
        """Requests that the engine samples for."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Serve requests, unless the server already runs."""
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=LARGEST_BODY)
            app.router.add_post("/v1/chat/completions", self._complete)
            # a request whose client has gone is not sampled to its end
            runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=SERVER_CLOSE_GRACE_S
            )
            await runner.setup()
            await web.SockSite(runner, self._socket).start()
            self._runner = runner

    async def wait_until_idle(self) -> None:
        """Wait until the engine samples for no request."""
        await self._idle.wait()
        for _ in range(8):  # an engine drops a request whose client has gone with the next token
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Close the server and all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket.close()

    async def _complete(self, http: web.Request) -> web.Response:
        try:
            given = http.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._served.key.encode()):
                raise Refused("the key is not that of this run", status=401)
            try:
                body = await http.json(loads=decode_json)
            except ValueError as error:
                raise Refused("the body is no JSON") from error
            return web.json_response(await self._answer(body))
        except Refused as refusal:
            return _refuse(str(refusal), refusal.status)
        except RunStopped as error:  # of an engine that sleeps or ends: the client asks again
            return _refuse(str(error), 503)

    async def _answer(self, body: Any) -> dict[str, Any]:
        """Return the response to a request. Raises Refused."""
        served = self._served
        messages = read_messages(body, served)
        ids = self._tokenizer.render(messages, [])
        longest = served.max_model_len - len(ids)
        asked = body.get("max_tokens") or max(longest, 1)
        if asked > longest:
            raise Refused(
                f"the request has {len(ids)} tokens, and with max_tokens={asked} more than judge.max_model_len="
                f"{served.max_model_len}: raise that, or lower reward.settings.max_tokens"
            )
        with self._sampling():
            done = await self._engine.generate(ids, max_new_tokens=asked, seed=body.get("seed") or 0)
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": self._tokenizer.decode(done.token_ids)},
            "finish_reason": "length" if done.stop == "length" else "stop",
        }
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [self._list_logprobs(done)]}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(done.token_ids)}
        return {"object": "chat.completion", "model": served.model, "choices": [choice], "usage": usage}

    @contextmanager
    def _sampling(self) -> Generator[None]:
        """Count a request while the engine samples for it."""
        self._n_sampled += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._n_sampled -= 1
            if not self._n_sampled:
                self._idle.set()

    def _list_logprobs(self, done: Completion) -> dict[str, Any]:
        """Return the log-probabilities of both choices for the first token. The engine reports that of the sampled."""
        sampled, logp = done.token_ids[0], min(done.logp[0], 0.0)
        # of two tokens, the other has the rest; -inf is no JSON
        rest = math.log(max(-math.expm1(logp), 1e-30))
        top = [
            {"token": self._tokenizer.decode([choice]), "logprob": logp if choice == sampled else rest}
            for choice in self._served.choices
        ]
        return {"token": self._tokenizer.decode([sampled]), "logprob": logp, "top_logprobs": top}


def read_messages(body: Any, served: Served) -> list[Message]:
    """Return the messages of a request. Raises Refused."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object with model and messages")
    given: dict[str, Any] = body
    if unknown := sorted(given.keys() - READ):
        raise Refused(f"the judge of a run takes no {quote(unknown[0])}: leave it out")
    if given.get("model") != served.model:
        raise Refused(f"there is no model {quote(given.get('model'))} here: it is called {served.model}", status=404)
    if given.get("logprobs") and not served.choices:
        raise Refused("log-probabilities are of two tokens: set judge.allowed_tokens")
    messages: Any = given.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):  # pyright: ignore[reportUnknownArgumentType]
        raise Refused("messages must be a list of objects with a role and a text as content")
    read: list[Message] = [{"role": message["role"], "content": message["content"]} for message in messages]
    if holds_lone_surrogate(read):
        raise Refused("a message holds half of a character")
    for name in ("max_tokens", "seed"):
        value = given.get(name)
        if value is not None and (type(value) is not int or not 0 <= value < 2**63):  # as in vLLM
            raise Refused(f"{name} must be a number, found {quote(value)}")
    return read


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and all(isinstance(given.get(name), str) for name in ("role", "content"))  # pyright: ignore[reportUnknownMemberType]


def _refuse(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
