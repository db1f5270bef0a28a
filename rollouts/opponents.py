"""Frozen opponents of the policy in games (`rollout.opponent`): an engine beside the policy's, or a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import UserError, name_error, shorten
from core.loading import needs_part
from core.text.json_text import decode_json, holds_lone_surrogate
from core.types.messages import Message, ToolSpec, find_images
from data_feeds.chat.tool_parsing import ParsedReply
from rewards.calls import call_user_code
from rewards.scored import Failed
from rollouts.engines.base import Engine
from rollouts.envs.base import Env

MISTAKES = {
    401: "the server wants a key, and none is sent: name a server without keys in rollout.opponent",
    403: "the server wants a key, and none is sent: name a server without keys in rollout.opponent",
    404: "the server knows no such address: correct rollout.opponent, such as http://host:8000/v1",
}
WON, DRAWN, VERSION = "game/won", "game/drawn", "game/opponent_version"
"""Counts of a game with a result, and of one against a snapshot of the policy."""
MAX_REQUESTS = 32
"""Maximum number of requests in flight, of the whole run."""


class ServerFailed(Exception):
    """Request that the opponent's server did not answer as a chat completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opponent:
    """Frozen model that plays all sides of a game but one."""

    model: Engine | ServedOpponent
    game: int
    """Number of the game's group, from which the policy's side follows."""
    version: int | None = None
    """Training steps of a snapshot's weights; None for another opponent."""

    def leaves_to_policy(self, env: Env) -> int:
        """Return the side of the policy. It is the same for all episodes of a group, which are compared."""
        return self.game % max(env.sides, 1)


class OpponentSlot:
    """Current opponent of an engine, replaced by each newer snapshot."""

    def __init__(
        self,
        model: Engine | ServedOpponent,
        *,
        version: int | None = None,
        load: Callable[[str], Engine] | None = None,
    ) -> None:
        """version, load: of a policy's snapshot; `load` returns an engine with the weights of a folder."""
        self.model, self.version, self._load = model, version, load
        self._replacing = asyncio.Lock()

    def enter(self, game: int) -> Opponent:
        """Return the current opponent, for all games of a group."""
        return Opponent(model=self.model, game=game, version=self.version)

    async def replace(self, folder: str, version: int) -> None:
        """Let the snapshot of a folder play the groups that begin from now on."""
        async with self._replacing:  # a sync that is repeated must not load a second copy
            if version != self.version:
                assert self._load is not None
                # in a thread: games go on, and the process answers the health check
                model = await asyncio.to_thread(self._load, folder)
                self.model, self.version = model, version

    async def close(self) -> None:
        """Close an engine, or the connections to a server."""
        await self.model.close()


def count_game(env: Env, opponent: Opponent | None, *, failed: bool) -> tuple[dict[str, float], str]:
    """Return an episode's counts, and the reason of a failure or "".

    With an opponent they include the result of the game, if there is one. failed: there is none.
    """
    counts, broken = call_user_code(env.counts, "Env.counts()")
    if opponent is None or failed or broken:
        return counts, broken
    side = opponent.leaves_to_policy(env)
    if opponent.version is not None:
        counts[VERSION] = float(opponent.version)
    found, broken = call_user_code(lambda: _count_result(env.result_of(side)), "Env.result_of()")
    return counts | found, broken


def _count_result(result: Any) -> dict[str, float]:
    if result is None:
        return {}
    if result not in ("won", "drawn", "lost"):
        raise ValueError(f"Env.result_of() must return won, drawn, lost or None, and returned {shorten(repr(result))}")
    return {WON: float(result == "won"), DRAWN: float(result == "drawn")}


class ServedOpponent:
    """Opponent behind an OpenAI-compatible address, with a tokenizer of its own: it gets messages and returns text."""

    def __init__(self, url: str, *, temperature: float, timeout_s: float, engines: int) -> None:
        """Ask the server for the model's name. Raises UserError unless it serves a single one.

        timeout_s: deadline of a reply. engines: number of engines that share the limit of requests.
        """
        with needs_part("rollout.opponent"):
            from rewards.judging.client import COMPLETIONS, JudgeClient, Server
            from rewards.judging.settings import JudgeSettings

        self.url, self.temperature = url.rstrip("/"), temperature
        self.model = self._find_model(timeout_s)
        address = self.url + COMPLETIONS
        server = Server(name=address, urls=(address,), key=None, who="rollout.opponent", mistakes=MISTAKES)
        given = {"base_url": self.url, "model": self.model, "timeout_s": timeout_s}
        settings = JudgeSettings.model_validate(given)
        self._client = JudgeClient(settings, max(1, MAX_REQUESTS // engines), server)

    def _find_model(self, timeout_s: float) -> str:
        import httpx

        try:
            answer = httpx.get(f"{self.url}/models", timeout=timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(f"rollout.opponent={self.url} does not answer ({name_error(error)}): start it") from error
        try:
            names = [str(model["id"]) for model in decode_json(answer.text)["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if len(names) != 1:
            found = ", ".join(names) or f"status {answer.status_code}, {shorten(answer.text)}"
            raise UserError(
                f"rollout.opponent={self.url}: /models must name one model, found {found}: name the address of a "
                "server of one model, such as http://host:8000/v1"
            )
        return names[0]

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, max_new_tokens: int, seed: int
    ) -> ParsedReply | None:
        """Return the next reply to a conversation; None if it was cut off by `max_new_tokens`.

        Raises ServerFailed without a reply, and UserError for messages that are more than text.
        """
        if tools or find_images(messages):
            kind = "tools" if tools else "images"
            raise UserError(
                f"rollout.opponent={self.url} gets text alone, and the game has {kind}: name the folder of a model"
            )
        body = {
            "model": self.model,
            "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
            "temperature": self.temperature,
            "max_tokens": max_new_tokens,
            "seed": seed,
        }
        try:
            answer, _ = await self._client.ask(body)
        except Failed as error:
            raise ServerFailed(str(error)) from error
        return self._read(answer)

    def _read(self, answer: dict[str, Any]) -> ParsedReply | None:
        try:
            choice = answer["choices"][0]
            text, end = choice["message"]["content"], choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise ServerFailed(f"rollout.opponent returned no chat completion: {shorten(str(answer))}") from error
        if end == "length":
            return None
        if end != "stop" or not isinstance(text, str):
            raise ServerFailed(f"rollout.opponent ended a reply with {end!r} and the content {shorten(repr(text))}")
        if holds_lone_surrogate(text):
            raise ServerFailed(f"rollout.opponent's reply holds half of a character: {shorten(repr(text))}")
        return ParsedReply(message={"role": "assistant", "content": text})

    async def close(self) -> None:
        """Close the connections; the server stays."""
        await self._client.close()
