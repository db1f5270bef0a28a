"""One episode: policy and environment take turns until one of them stops."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np

from core.blocking import Unblocked
from core.errors import RunStopped
from core.types import ROLES, Message, Prompt, Sample, Stop
from rewards.worker import call_user_code, last_line
from rollouts.engines.base import Completion, CompletionStop, Engine
from rollouts.envs.base import Env
from rollouts.stops import Stops

LOGP_ROUNDING = 1e-4
"""Largest log-probability that is taken for 0."""
LARGEST_ID = 2**31 - 1
"""Largest token id that a Sample holds."""


class Tokenizer(Protocol):
    """Interface of a tokenizer to an episode; see data_feeds/tokenizer.py."""

    def render(self, messages: list[Message]) -> list[int]: ...
    def render_turn(self, message: Message) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass
class Transcript:
    """Episode so far: its tokens, which are only appended, and its messages after the prompt."""

    ids: list[int] = field(default_factory=list[int])
    action_mask: list[bool] = field(default_factory=list[bool])
    logp: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    said: list[Message] = field(default_factory=list[Message])

    def append_given(self, ids: list[int]) -> None:
        self._append(ids, [0.0] * len(ids), [-1] * len(ids), sampled=False)

    def append_sampled(self, done: Completion) -> None:
        self._append(done.token_ids, done.logp, done.versions, sampled=True)

    @property
    def completion_ids(self) -> list[int]:
        """Tokens from the first sampled one on, those of the environment included."""
        return self.ids[self.action_mask.index(True) :] if any(self.action_mask) else []

    def _append(self, ids: list[int], logp: list[float], versions: list[int], *, sampled: bool) -> None:
        self.ids = self.ids + ids  # a new list: the engine may still hold the old one
        self.action_mask += [sampled] * len(ids)
        self.logp += logp
        self.versions += versions


async def run_episode(
    engine: Engine,
    make_env: Callable[[Prompt], Env],
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    seed_of_turn: Callable[[int], int],
    max_new_tokens: int,
    max_turns: int,
    timeout_s: float,
    stops: Stops | None = None,
) -> tuple[Sample, list[Message]]:
    """Run one episode of `prompt`; return its sample, and the messages after the prompt.

    `seed_of_turn` gives the sampling seed of a turn; `max_new_tokens` is the budget of all turns together, the
    environment's included; `stops` are the recipe's ends of replies. The sample's parts are the environment's scores;
    one that raises makes a failed sample.

    Raises RunStopped for an environment that blocks this process for `timeout_s`, and for an impossible completion.
    """
    script = Transcript()
    script.append_given(tokenizer.render(prompt.messages))
    stop: Stop = "turns"
    parts: dict[str, float] = {}
    try:
        with _catch_environment_errors():
            env = make_env(prompt)
        stop = await _converse(
            engine, env, tokenizer, script, seed_of_turn, max_new_tokens, max_turns, timeout_s, stops
        )
        parts, failure = call_user_code(env.scores, "Env.scores()")
    except _EnvironmentFailed as error:
        failure = str(error)
    sample = Sample(
        prompt=prompt,
        token_ids=np.array(script.ids, dtype=np.int32),
        action_mask=np.array(script.action_mask, dtype=np.bool_),
        rollout_logp=np.array(script.logp, dtype=np.float32),
        versions=np.array(script.versions, dtype=np.int32),
        stop=stop,
        reward_parts=parts,
        failure=failure,
        completion=tokenizer.decode(script.completion_ids),
    )
    return sample, script.said


async def _converse(
    engine: Engine,
    env: Env,
    tokenizer: Tokenizer,
    script: Transcript,
    seed_of_turn: Callable[[int], int],
    left: int,
    max_turns: int,
    timeout_s: float,
    stops: Stops | None,
) -> Stop:
    """Continue `script` by at most `left` tokens and `max_turns` replies; the last turn is the policy's.

    A reply is decoded for environment and reward and never encoded again: encode(decode(ids)) may differ from ids.
    """
    for turn in range(max_turns):
        done = await engine.generate(script.ids, max_new_tokens=left, seed=seed_of_turn(turn))
        check_completion(done, max_new_tokens=left)
        if stops is not None:
            stops.check_completion(done.token_ids, done.stop)
        script.append_sampled(done)
        left -= len(done.token_ids)
        script.said.append({"role": "assistant", "content": tokenizer.decode(done.token_ids)})
        if done.stop == "length":
            return "length"
        with _catch_environment_errors():
            answer = _check_answer(await _take_step(env, script.said[-1]["content"], timeout_s))
        if answer is None:
            return "eos"
        if turn + 1 == max_turns:
            break
        observed = ([] if stops is None else stops.close_turn(done.token_ids)) + tokenizer.render_turn(answer)
        left -= len(observed)
        if left <= 0:
            return "length"
        script.said.append(answer)
        script.append_given(observed)
    return "turns"


def check_completion(done: Completion, *, max_new_tokens: int) -> None:
    """Raise RunStopped for a completion that no engine may return: it would be trained on as if it were one."""
    n = len(done.token_ids)
    wrong = None
    if {len(done.logp), len(done.versions)} != {n}:
        wrong = f"{n} tokens with {len(done.logp)} log-probabilities and {len(done.versions)} versions"
    elif not 1 <= n <= max_new_tokens:
        wrong = f"{n} tokens where 1 to {max_new_tokens} were asked for"
    elif any(not math.isfinite(logp) or logp > LOGP_ROUNDING for logp in done.logp):
        bad = next(logp for logp in done.logp if not math.isfinite(logp) or logp > LOGP_ROUNDING)
        wrong = f"the log-probability {bad}, where a finite number up to 0 is possible"
    elif any(not isinstance(t, int) or not 0 <= t <= LARGEST_ID for t in done.token_ids):
        wrong = f"the token ids {done.token_ids[:8]}, where integers from 0 to {LARGEST_ID} are possible"
    elif done.stop not in get_args(CompletionStop):
        wrong = f"the stop reason {done.stop!r}, where {' or '.join(get_args(CompletionStop))} is possible"
    if wrong:
        raise RunStopped(f"the engine (rollout.engine) returned {wrong}: correct its generate()")


async def _take_step(env: Env, reply: str, timeout_s: float) -> Any:
    """Return what the environment answers, whatever that is. Raises TypeError for a step that is no coroutine."""
    answers = env.step(reply)
    if not inspect.isawaitable(answers):
        raise TypeError(f"Env.step() must be defined by `async def`, it returned {answers!r:.80}")
    return await Unblocked(answers, who="Env.step()", seconds=timeout_s, key="rollout.timeout_s")


def _check_answer(answer: Any) -> Any:
    """Return what an environment answered. Raises TypeError for anything but a message or None."""
    if answer is None:
        return None
    if not isinstance(answer, dict) or {*answer} != {"role", "content"} or not isinstance(answer["content"], str):
        raise TypeError(f"Env.step() must return None or {{role, content}} texts, it returned {answer!r:.80}")
    if answer["role"] not in ROLES:
        raise TypeError(f"Env.step() answered as {answer['role']!r}, which is none of {', '.join(ROLES)}")
    return answer


class _EnvironmentFailed(Exception):
    """Error of the user's environment, with its place."""


@contextmanager
def _catch_environment_errors() -> Generator[None]:
    try:
        yield
    except RunStopped:
        raise
    except Exception as error:  # the border to the user's environment, whatever it raises
        raise _EnvironmentFailed(last_line(error)) from error


def make_seed(run_seed: int, ticket: int, sibling: int, turn: int) -> int:
    """Return the seed of a request, below 2^63; it does not depend on when the request is served."""
    digest = hashlib.blake2b(f"{run_seed}/{ticket}/{sibling}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
