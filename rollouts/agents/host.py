"""Host of agents' episodes for runs on other machines: `rollout.agent: {address: [http://this-machine:9000]}`.

    python -m rollouts.agents.host --file my_agent.py
    python -m rollouts.agents.host --listen 10.0.0.2 --insecure -- my_agent --with arguments

Every run that knows the key, the environment variable FEYNRL_AGENT_KEY, may start episodes; without the variable this
is loopback only. It speaks plain HTTP, so an address that other machines reach is refused without --insecure.
rollouts/agents/remote.py describes the requests. Ctrl-C ends all episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from configs.agent_schema import AgentConfig
from core.cli import Parser, run_guarded
from core.errors import UserError, quote
from core.numbers import is_finite
from core.tasks import start_task
from core.text.json_text import decode_json
from core.timing.deadlines import AGENT_END_TIMEOUT_S, AGENT_HOST_POLL_S, SERVER_CLOSE_GRACE_S
from core.timing.progress import say
from rollouts.agents.launching import check_agent
from rollouts.agents.processes import AgentProcesses
from rollouts.agents.results import AgentResult
from rollouts.agents.task import HOST_KEY, Task
from rollouts.registry import resolve_agent

LARGEST_BODY = 64 * 2**20
FORGET_S = AGENT_HOST_POLL_S + 2 * AGENT_END_TIMEOUT_S
"""Seconds after which an episode that nobody asks for is ended."""


@dataclass(slots=True, kw_only=True)
class Hosted:
    """Episode on this host."""

    playing: asyncio.Task[AgentResult]
    log: bytearray
    asked_at: float = field(default_factory=time.monotonic)
    """Time of the last request for it, on the monotonic clock."""


class AgentHost:
    """HTTP server of episodes."""

    def __init__(self, agents: AgentProcesses, *, most: int, key: str):
        """most: maximum number of episodes at a time. key: "" for none."""
        self.agents, self.most, self.key = agents, most, key
        self.episodes: dict[str, Hosted] = {}

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[self._check_key])
        app.router.add_post("/episodes", self._begin)
        app.router.add_get("/episodes/{id}", self._wait)
        app.router.add_delete("/episodes/{id}", self._end)
        app.cleanup_ctx.append(self._forget)
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self.key.encode()):
            raise web.HTTPUnauthorized(text=f"the key is not that of {HOST_KEY} on this host")
        return await handler(request)

    async def _begin(self, http: web.Request) -> web.Response:
        try:
            name, task, timeout_s = read_start(await http.json(loads=decode_json))
        except (ValueError, TypeError, KeyError) as error:
            raise web.HTTPBadRequest(text=f"no episode can be read: {error}") from error
        if name in self.episodes:  # the answer to an earlier request was lost
            return web.json_response({})
        if sum(not one.playing.done() for one in self.episodes.values()) >= self.most:
            raise web.HTTPServiceUnavailable
        log = bytearray()
        playing = start_task(self.agents.run(task, timeout_s=timeout_s, log=log))
        self.episodes[name] = Hosted(playing=playing, log=log)
        return web.json_response({})

    async def _wait(self, http: web.Request) -> web.Response:
        if (one := self.episodes.get(http.match_info["id"])) is None:
            raise web.HTTPNotFound
        one.asked_at = time.monotonic()
        await asyncio.wait([one.playing], timeout=AGENT_HOST_POLL_S)
        one.asked_at = time.monotonic()
        if not one.playing.done():
            return web.Response(status=202)
        if error := one.playing.exception():
            raise web.HTTPInternalServerError(text=str(error)) from error
        found = one.playing.result()
        answer = {"parts": found.parts, "failure": found.failure, "timed_out": found.timed_out}
        return web.json_response(answer | {"log": one.log.decode(errors="backslashreplace")})

    async def _end(self, http: web.Request) -> web.Response:
        await self._drop(http.match_info["id"])
        return web.json_response({})

    async def _drop(self, name: str) -> None:
        if (one := self.episodes.pop(name, None)) is not None:
            one.playing.cancel()
            await asyncio.wait([one.playing])

    async def _forget(self, app: web.Application) -> AsyncGenerator[None]:
        """End episodes whose run has died, and at the end all."""

        async def look() -> None:
            while True:
                await asyncio.sleep(FORGET_S / 10)
                before = time.monotonic() - FORGET_S
                for name in [name for name, one in self.episodes.items() if one.asked_at < before]:
                    await self._drop(name)

        looking = start_task(look())
        yield
        looking.cancel()
        for name in [*self.episodes]:
            await self._drop(name)
        await self.agents.close()


def read_start(body: Any) -> tuple[str, Task, float]:
    """Return id, task and deadline of an episode. Raises ValueError, TypeError or KeyError for any other body."""
    name, task, timeout_s = body["id"], Task(**body["task"]), body["timeout_s"]
    if not isinstance(name, str) or not all(isinstance(text, str) for text in (task.base_url, task.api_key)):
        raise TypeError("id, base_url and api_key must be texts")
    if not is_finite(timeout_s) or timeout_s <= 0:
        raise ValueError("timeout_s must be a number of seconds above 0")
    return name, task, float(timeout_s)


def read_options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m rollouts.agents.host", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--file", help="Python file with a function run(task)")
    parser.add_argument("--serve", action="store_true", default=None, help="as rollout.agent.serve")
    parser.add_argument("--listen", default="127.0.0.1", help="IP address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=9000, help="(default %(default)s)")
    parser.add_argument("--insecure", action="store_true", help="allow plain HTTP on an address other machines reach")
    parser.add_argument("--most", type=int, default=32, help="most episodes at a time (default %(default)s)")
    parser.add_argument("command", nargs="*", help="program with arguments, after --, in place of --file")
    return parser.parse_args(argv)


def check_options(options: argparse.Namespace, key: str) -> None:
    """Raise UserError for options that cannot be used, or open this machine to others."""
    try:
        is_local = ip_address(options.listen).is_loopback
    except ValueError as error:
        raise UserError(f"--listen {options.listen} must be an IP address, such as 127.0.0.1") from error
    if not 0 <= options.port < 2**16:
        raise UserError(f"--port {options.port} must be from 0 to 65535; 0 is any free port")
    if options.most < 1:
        raise UserError(f"--most {options.most} must be at least 1")
    if not key and not is_local:
        raise UserError(f"--listen {options.listen} lets anybody start episodes: set {HOST_KEY} here and for the run")
    if not is_local and not options.insecure:
        raise UserError(
            f"--listen {options.listen} is plain HTTP on an address that other machines reach, where keys and texts "
            "can be read: listen on 127.0.0.1 behind a proxy with TLS, or give --insecure"
        )
    if is_local and options.insecure:
        raise UserError(f"--insecure has no effect, because only this machine reaches {options.listen}: leave it out")
    if bool(options.file) == bool(options.command):
        raise UserError("give --file or a command, and not both")


async def serve(options: argparse.Namespace) -> None:
    """Serve until a signal. Raises UserError for an agent that cannot be used."""
    key = os.environ.get(HOST_KEY, "")
    check_options(options, key)
    plan = resolve_agent(AgentConfig(file=options.file, command=options.command, address=[], serve=options.serve))
    check_agent(plan)
    host = AgentHost(AgentProcesses(plan), most=options.most, key=key)
    runner = web.AppRunner(
        host.make_app(), access_log=None, handler_cancellation=True, shutdown_timeout=SERVER_CLOSE_GRACE_S
    )
    await runner.setup()
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    try:
        await web.TCPSite(runner, options.listen, options.port).start()
        risk = ", in plain HTTP: keys and texts can be read on the way" if options.insecure else ""
        say(f"episodes of {quote(plan.name)} at http://{options.listen}:{runner.addresses[0][1]}{risk}")
        await over.wait()
    except OSError as error:
        raise UserError(f"--listen {options.listen} --port {options.port}: {error.strerror}; choose another") from error
    finally:
        await runner.cleanup()


def main(argv: list[str] | None = None) -> int:
    asyncio.run(serve(read_options(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
