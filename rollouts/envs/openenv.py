"""Environments of OpenEnv, on a server that speaks the WebSocket protocol. The package of OpenEnv is not needed.

Columns of the row: `env_url` is the server's address (http://...), and `reset` the arguments of the reset, such as
{"seed": 3}. An action with one text field takes the reply's text. Other actions are calls of a tool `act`, whose
parameters are the action's fields. An episode waits while the server has no free session.

Source: https://github.com/meta-pytorch/OpenEnv, versions 0.3 and 0.10: /ws and /schema.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, ClassVar

import aiohttp

from core.errors import UserError, name_error, quote
from core.numbers import is_finite
from core.text.json_text import decode_json, holds_lone_surrogate
from core.timing.deadlines import OPENENV_CLOSE_TIMEOUT_S
from core.types.messages import Message, ToolSpec
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.base import Env

CAPACITY = "CAPACITY_REACHED"
"""Code of the server's error without a free session."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0
"""Seconds between two requests for a session: doubled each time, up to a bound."""
LARGEST_ANSWER = 100 * 2**20
"""Maximum size of an answer, in bytes."""
TOOL = "act"
CALL = f"Call the tool {TOOL} to act."


class OpenEnv(Env):
    """Session of an OpenEnv server. The scores are `return`, `steps` and `finished`."""

    timeout_s: ClassVar[float] = 60.0
    """Deadline of the server's answer, in seconds. A late answer fails the sample."""

    def __init__(self, prompt: Prompt):
        super().__init__(prompt)
        self.url = read_url(prompt)
        self.earned: list[float] = []
        """Reward of every reply."""
        self.steps, self.finished, self.field = 0, False, ""
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def open(self) -> list[Message]:
        """Read the action's fields, wait for a session, and reset. Return the first observation."""
        self._http = aiohttp.ClientSession()
        fields, required = await self._read_action(self._http)
        if is_text(fields):
            [self.field] = fields
        else:
            self.tools = [describe_tool(fields, required)]
        seen = await self._reset(self._http)
        return read_observation(seen)

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        """Perform the reply's actions. Return the observations, or None at the end."""
        self.earned.append(0.0)
        if self.field:
            seen = await self._act({self.field: reply.message["content"]})
            return None if self.finished else read_observation(seen)
        told: list[Message] = []
        for call in reply.message.get("tool_calls", []):
            seen = await self._act(call["function"]["arguments"])
            if self.finished:
                return None
            text = "\n".join(message["content"] for message in read_observation(seen))
            told.append({"role": "tool", "content": text, "tool_call_id": call["id"]})
        return told or [{"role": "user", "content": CALL}]

    def scores(self) -> dict[str, float]:
        return {"return": sum(self.earned), "steps": float(self.steps), "finished": float(self.finished)}

    def turn_scores(self, player: int) -> list[dict[str, float]]:
        return [{"return": reward} for reward in self.earned]

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None and not self._socket.closed:
            # the server frees the session; one that has died has none
            try:
                await self._socket.send_str(json.dumps({"type": "close"}))
            except ConnectionError:
                self._socket = None
        if self._socket is not None:
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def _act(self, action: Any) -> dict[str, Any]:
        seen = await self._ask("step", action)
        reward = seen.get("reward")
        if reward is not None and not is_finite(reward):
            raise BrokenServer(f"{self.url}: the reward is {reward!r:.80}, where a number is expected")
        self.earned[-1] += float(reward or 0.0)
        self.steps += 1
        self.finished = seen.get("done") is True
        return seen

    async def _read_action(self, http: aiohttp.ClientSession) -> tuple[dict[str, Any], list[str]]:
        """Return the JSON schemas of the action's fields, and those that are required."""
        try:
            async with asyncio.timeout(self.timeout_s), http.get(f"{self.url}/schema") as answer:
                found = decode_json(await answer.text())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BrokenServer(f"{self.url}/schema cannot be read: {name_error(error)}") from error
        action = found.get("action") if isinstance(found, dict) else None
        fields = action.get("properties") if isinstance(action, dict) else None
        if not isinstance(action, dict) or not isinstance(fields, dict):
            raise BrokenServer(f"{self.url}/schema has no action with properties: is it a server of OpenEnv?")
        if holds_lone_surrogate(action):
            raise BrokenServer(f"{self.url}/schema has a text that holds half of a character")
        # every action has `metadata`, which is not the policy's
        return {name: schema for name, schema in fields.items() if name != "metadata"}, action.get("required", [])

    async def _reset(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        """Return the answer to a reset, once the server has a session for it."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                address = f"{self.url.replace('http', 'ws', 1)}/ws"  # https:// becomes wss://
                async with asyncio.timeout(self.timeout_s):
                    self._socket = await http.ws_connect(
                        address,
                        max_msg_size=LARGEST_ANSWER,
                        timeout=aiohttp.ClientWSTimeout(ws_close=OPENENV_CLOSE_TIMEOUT_S),
                    )
                return await self._ask("reset", self.prompt.extra.get("reset") or {})
            except NoSession:
                assert self._socket is not None
                await self._socket.close()
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise BrokenServer(f"{self.url}/ws cannot be reached: {name_error(error)}") from error

    async def _ask(self, kind: str, data: Any) -> dict[str, Any]:
        """Send a message, and return the observation in the answer."""
        assert self._socket is not None
        try:
            async with asyncio.timeout(self.timeout_s):
                # of a server that has closed the connection, the reason may have been received already
                with suppress(ConnectionError):
                    await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                given = await self._socket.receive()
        except TimeoutError as error:
            raise BrokenServer(f"{self.url}: no answer to a {kind} within {self.timeout_s:g} s") from error
        if given.type is not aiohttp.WSMsgType.TEXT:
            raise BrokenServer(f"{self.url} closed the connection, where the answer to a {kind} is expected")
        return read_answer(given.data, self.url)


class BrokenServer(Exception):
    """Answer, or lack of an answer, that fails the sample."""


class NoSession(Exception):
    """Error of a server whose sessions are all in use."""


def read_url(prompt: Prompt) -> str:
    """Return the server's address. Raises UserError if the row has none."""
    url = prompt.extra.get("env_url")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise UserError(
            f"rollout.env=openenv: the row {prompt.id} must have the address of a server in its column env_url "
            f"(http://localhost:8000), found {quote(str(url))}"
        )
    return url.rstrip("/")


def read_answer(text: str, url: str) -> dict[str, Any]:
    """Return the data of an answer with an observation. Raises BrokenServer and NoSession."""
    try:
        found = decode_json(text)
    except ValueError:
        found = None
    data = found.get("data") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(data, dict):
        raise BrokenServer(f"{url} answered {text!r:.80}, where a JSON object with type and data is expected")
    if found.get("type") == "error":
        if data.get("code") == CAPACITY:
            raise NoSession
        raise BrokenServer(f"{url} answered with an error: {data.get('message')} ({data.get('code')})")
    if not isinstance(data.get("observation"), dict):
        raise BrokenServer(f"{url} answered {text!r:.80}, which has no observation")
    return data


def read_observation(data: dict[str, Any]) -> list[Message]:
    """Return an observation as messages: those that it holds, or the text, or else all of it as JSON."""
    observation = data["observation"]
    messages = observation.get("messages")
    if isinstance(messages, list) and messages and all(map(is_message, messages)):
        return [{"role": message["role"], "content": message["content"]} for message in messages]
    for name in ("text", "prompt"):
        if isinstance(observation.get(name), str):
            return [{"role": "user", "content": observation[name]}]
    return [{"role": "user", "content": json.dumps(observation, ensure_ascii=False)}]


def is_message(given: Any) -> bool:
    """Return whether a value is a message with text."""
    return isinstance(given, dict) and isinstance(given.get("role"), str) and isinstance(given.get("content"), str)


def is_text(fields: dict[str, Any]) -> bool:
    """Return whether an action is one text."""
    return len(fields) == 1 and all(schema.get("type") == "string" for schema in fields.values())


def describe_tool(fields: dict[str, Any], required: list[str]) -> ToolSpec:
    """Return the tool with which the policy acts."""
    parameters = {"type": "object", "properties": fields, "required": required}
    function = {"name": TOOL, "description": "Act in the environment.", "parameters": parameters}
    return {"type": "function", "function": function}
