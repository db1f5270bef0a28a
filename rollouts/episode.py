"""One episode: the policy talks, the environment answers, until one of them stops."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

from core.types import Message, Prompt, Sample, Stop
from rewards.worker import attempt, last_line
from rollouts.engine import Engine
from rollouts.envs import Env


class Tokenizer(Protocol):
    """What an episode asks of a tokenizer; see data_feeds/tokenizer.py."""

    def render(self, messages: list[Message]) -> list[int]: ...
    def render_turn(self, message: Message) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


async def run_episode(
    engine: Engine,
    make_env: Callable[[Prompt], Env],
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    seed: Callable[[int], int],
    max_new_tokens: int,
    max_turns: int,
) -> tuple[Sample, list[Message]]:
    """Play `prompt` to the end: the tokens to learn from, and what was said after the prompt.

    Tokens are only ever appended: what the engine sampled is what is trained on. A reply is decoded for
    others to read and never encoded again, because encode(decode(ids)) need not be ids. `seed` gives the
    sampling seed of a turn; `max_new_tokens` is the budget of all turns together, the environment's included.
    The sample's parts are the environment's scores; one that raises makes a failed sample.
    """
    ids = tokenizer.render(prompt.messages)
    mask = [False] * len(ids)
    logp = [0.0] * len(ids)
    versions = [-1] * len(ids)
    said: list[Message] = []
    left = max_new_tokens
    stop: Stop = "turns"
    env: Env | None = None
    failure = ""
    try:
        env = make_env(prompt)
    except Exception as error:  # the border to the user's environment
        failure = last_line(error)

    for turn in range(max_turns if env else 0):
        done = await engine.generate(ids, max_new_tokens=left, seed=seed(turn))
        ids = ids + done.token_ids
        mask += [True] * len(done.token_ids)
        logp += done.logp
        versions += done.versions
        left -= len(done.token_ids)
        said.append({"role": "assistant", "content": tokenizer.decode(done.token_ids)})
        if done.stop == "length":
            stop = "length"
            break
        try:
            answer = await env.step(said[-1]["content"])
        except Exception as error:  # the border to the user's environment
            failure = last_line(error)
            break
        if answer is None:
            stop = "eos"
            break
        observed = tokenizer.render_turn(answer)
        if turn + 1 == max_turns or left - len(observed) <= 0:
            stop = "turns" if turn + 1 == max_turns else "length"
            break  # the policy never sees this answer, so it was not said: the last word is the policy's
        said.append(answer)
        left -= len(observed)
        ids = ids + observed
        mask += [False] * len(observed)
        logp += [0.0] * len(observed)
        versions += [-1] * len(observed)

    parts: dict[str, float] = {}
    if env and not failure:
        parts, failure = attempt(env.scores, "Environment.scores()")
    sample = Sample(
        prompt=prompt,
        token_ids=ids,
        mask=mask,
        rollout_logp=logp,
        versions=versions,
        stop=stop,
        parts=parts,
        failure=failure,
    )
    return sample, said


def seed_of(run_seed: int, ticket: int, sibling: int, turn: int) -> int:
    """A seed of the request, not of the moment it is served: below 2^63."""
    digest = hashlib.blake2b(f"{run_seed}/{ticket}/{sibling}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
