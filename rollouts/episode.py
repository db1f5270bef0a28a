"""Episode loop: policy and environment alternate until one of them stops."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from core.errors import RunStopped, UserError
from core.timing.limit_blocking import LimitBlocking
from core.types.messages import Message
from core.types.samples import Prompt
from data_feeds.chat.template_append import ImagesDoNotFit
from data_feeds.chat.tool_parsing import ParsedReply
from rewards.calls import call_user_code, last_line
from rollouts.engines.base import Engine
from rollouts.envs.base import Env
from rollouts.envs.check_env import check_answers, check_turn_scores
from rollouts.opponents import Opponent, ServedOpponent, ServerFailed, count_game
from rollouts.stops import join_turn
from rollouts.transcript import Tokenizer, Transcript
from rollouts.turns import EpisodeRules, Played, begin_transcript, sample_reply

T = TypeVar("T")


async def run_episode(
    engine: Engine,
    make_env: Callable[[Prompt], Env],
    prompt: Prompt,
    tokenizer: Tokenizer,
    rules: EpisodeRules,
    opponent: Opponent | None = None,
) -> list[Played]:
    """Run an episode of a prompt; return a sample per player, with the environment's scores as reward parts.

    With an opponent only the policy's side has a sample, which fails if the game ended before its first reply.
    An environment that raises yields failed samples. Raises RunStopped if the environment blocks the process too long,
    and for an invalid completion. Raises UserError for a prompt that is too long, and if the template changes earlier
    turns.
    """
    episode = _Episode(engine, tokenizer, rules, prompt, opponent)
    failure = ""
    try:
        try:
            with rules.in_environment(), _CATCHING:
                episode.env = make_env(prompt)
                opening = await episode.open(episode.env)
            await episode.converse(opening)
            if _implements(episode.env, "end"):
                with rules.in_environment(), _CATCHING:
                    await episode.wait_for(episode.env.end(), "Env.end()")
        except _EnvironmentFailed as error:
            failure = str(error)
        # before close(), after which an environment may have no scores
        played = episode.finish(failure)
    finally:
        failure = await episode.close()
    return [one.fail(failure) for one in played] if failure else played


@dataclass
class _Episode:
    engine: Engine
    tokenizer: Tokenizer
    rules: EpisodeRules
    prompt: Prompt
    opponent: Opponent | None = None
    env: Env | None = None
    slots: dict[int, Transcript] = field(default_factory=dict[int, Transcript])
    """Transcript of each player with at least one turn."""
    served: dict[int, list[Message]] = field(default_factory=dict[int, list[Message]])
    """Messages of each player of an opponent behind a server, with the prompt's."""
    n_replies: int = 0
    """Number of replies of all players."""

    async def open(self, env: Env) -> list[Message]:
        """Return the environment's messages between the prompt and the first reply."""
        if not _implements(env, "open"):
            return []
        return check_answers(await self.wait_for(env.open(), "Env.open()"), "Env.open()") or []

    async def converse(self, given: list[Message]) -> None:
        """Alternate replies and environment steps. The last turn is the policy's.

        given: messages for the first player after the prompt. Replies are decoded for environment and reward, and never
        re-encoded: encode(decode(ids)) may differ from ids.
        """
        assert self.env is not None
        env = self.env
        if self.opponent is not None and env.sides < 2:
            raise _EnvironmentFailed(f"Env.sides is {env.sides}, and rollout.opponent needs a game of two or more")
        for turn in range(self.rules.max_turns):
            reply = await self._ask_player(env, given, turn)
            # cut off by the budget: the environment sees complete replies only
            if reply is None:
                return
            with self.rules.in_environment(), _CATCHING:
                answers = check_answers(await self._take_step(env, reply), "Env.step()")
            if answers is None:
                return
            # a player's first turn may be without messages, since the prompt is there; later turns may not
            if not answers and env.player in self.slots | self.served:
                raise _EnvironmentFailed("Env.step() returned no message: return None to end the episode")
            given = answers
        # no return above: the limit on replies ended the episode
        for script in self.slots.values():
            script.stop = "turns"

    async def _ask_player(self, env: Env, given: list[Message], turn: int) -> ParsedReply | None:
        """Return the reply of the player whose turn it is; None if it exceeds the token budget."""
        model = self._choose_model(env)
        if isinstance(model, ServedOpponent):
            return await self._ask_server(model, env, given, turn)
        try:
            script = self._continue_seat(env, given)
        except ImagesDoNotFit as error:
            raise _EnvironmentFailed(str(error)) from error
        if script is None:
            return None
        seed, is_routed = self.rules.seed_of_turn(turn), self.rules.is_routed and model is self.engine
        reply = await sample_reply(model, script, self.tokenizer, self.rules, seed=seed, is_routed=is_routed)
        self.n_replies += 1
        return None if script.stop == "length" else reply

    async def _ask_server(
        self, server: ServedOpponent, env: Env, given: list[Message], turn: int
    ) -> ParsedReply | None:
        """Return a server's reply. Nothing is trained on it, so its side has messages and no tokens."""
        said = self.served.setdefault(env.player, [*self.prompt.messages])
        said += given
        budget, seed, tools = self.rules.max_new_tokens, self.rules.seed_of_turn(turn), [*self.prompt.tools, *env.tools]
        try:
            with self.rules.in_environment():
                reply = await server.reply(said, tools, max_new_tokens=budget, seed=seed)
        except ServerFailed as error:
            raise _EnvironmentFailed(str(error)) from error
        self.n_replies += 1
        if reply is not None:
            said.append(reply.message)
        return reply

    def _continue_seat(self, env: Env, given: list[Message]) -> Transcript | None:
        """Append new messages for the next player. Return None if that exceeds the token budget."""
        script = self.slots.get(env.player)
        if script is None:
            return self._begin_seat(env, given)
        if not script.may_fit(self.tokenizer, given):
            return None
        # a reply that ended at a stop string or an extra token lacks the template's end of turn, so it is added
        closing = [] if self.rules.stops is None else self.rules.stops.close_turn(script.last_ids)
        following = self.tokenizer.render_turns(script.messages[-1], given, script.prompt.tools)
        observed = join_turn(script.last_ids, closing, following)
        # with the prompt, the budget fills the engine's context, so messages of the environment count too
        if not script.spend(len(observed)):
            return None
        script.messages += given
        script.append_given(self.tokenizer, observed, given)
        return script

    def _begin_seat(self, env: Env, given: list[Message]) -> Transcript:
        script = begin_transcript(self.prompt, given, env.tools, self.tokenizer, self.rules)
        self.slots[env.player] = script
        return script

    def _choose_model(self, env: Env) -> Engine | ServedOpponent:
        """Return the model that plays the side whose turn it is."""
        if self.opponent is None or env.player == self.opponent.leaves_to_policy(env):
            return self.engine
        return self.opponent.model

    async def _take_step(self, env: Env, reply: ParsedReply) -> Any:
        """Call the environment's step. Raises TypeError if it is not a coroutine."""
        answers = env.step(reply)
        if not inspect.isawaitable(answers):
            raise TypeError(f"Env.step() must be defined by `async def`, it returned {answers!r:.80}")
        return await self.wait_for(answers, "Env.step()")

    async def wait_for(self, call: Awaitable[T], who: str) -> T:
        """Await an environment call. Raises RunStopped if it blocks the process."""
        return await LimitBlocking(call, who=who, seconds=self.rules.timeout_s, key="rollout.timeout_s")

    def finish(self, failure: str) -> list[Played]:
        """Return every player's sample. The first sample has the counts of the episode."""
        env = _NoEnv(self.prompt) if self.env is None else self.env  # one may have a length, and be false
        side = None if self.opponent is None else self.opponent.leaves_to_policy(env)
        if side is not None and side not in self.slots:
            failure = failure or f"the game ended before the policy's side ({side}) had a turn: rollout.opponent is set"
        # the trainer expects a sample for every episode, so this one has only the prompt
        if not self.slots if side is None else side not in self.slots:
            empty = _NoEnv(self.prompt)
            empty.player = side or 0
            self._begin_seat(empty, [])
        counts, broken = count_game(env, self.opponent, failed=bool(failure))
        # a constant 1 would be noise in the log
        if self.rules.max_turns > 1:
            counts = {"turns": float(self.n_replies)} | counts
        played: list[Played] = []
        for player, script in sorted(self.slots.items()):
            if side not in (None, player):
                continue  # the opponent's
            parts, unscored = call_user_code(partial(env.scores_of, player), "Env.scores()")
            of_turns, uneven = check_turn_scores(partial(env.turn_scores, player), len(script.turns))
            wrong = failure or broken or unscored or uneven
            # the first player carries the counts, or the log would count them once per player
            sample = script.make_player_sample(
                self.tokenizer, player, {} if wrong else parts, {} if played else counts, wrong
            )
            played.append(Played(sample=sample, messages=script.messages, turn_scores=of_turns))
        return played

    async def close(self) -> str:
        """Close the environment, also after an error. Return the reason of a failure, or ""."""
        if self.env is not None and _implements(self.env, "close"):
            try:
                # a deadline of its own: that of the episode may be over, and the others wait for its place
                with self.rules.in_environment(), _CATCHING:
                    async with asyncio.timeout(self.rules.timeout_s):
                        await self.wait_for(self.env.close(), "Env.close()")
            except _EnvironmentFailed as error:
                return str(error)
        return ""


def _implements(env: Env, method: str) -> bool:
    """Return whether an environment has a method of its own: the base class does nothing, once per sample."""
    return getattr(type(env), method) is not getattr(Env, method)


class _NoEnv(Env):
    """Placeholder for an environment that could not be created."""

    sides = 2

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        return None


class _EnvironmentFailed(Exception):
    """Error of the user's environment, with the source line."""


class _EnvironmentErrors(AbstractContextManager[None]):
    """Context manager that raises _EnvironmentFailed for whatever the user's environment raises."""

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        # RunStopped, UserError: the recipe or the machine is wrong, not this episode, so the run ends
        if isinstance(error, Exception) and not isinstance(error, RunStopped | UserError):
            raise _EnvironmentFailed(last_line(error)) from error


_CATCHING = _EnvironmentErrors()
