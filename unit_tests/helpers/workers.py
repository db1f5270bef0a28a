"""A rollout worker whose engine says digits, and whose rewards are computed in this process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from configs.rollout_schema import RewardConfig, RolloutConfig
from core.types.messages import Message
from core.types.samples import Prompt
from rewards.scored import RewardResult
from rollouts.engines.base import Completion, Engine
from rollouts.envs.single_turn import SingleTurn
from rollouts.worker import RolloutWorker
from unit_tests.helpers.episodes import Words

MINE: Message = {"role": "user", "content": "1 2"}
PROMPT = Prompt(id="p", messages=[MINE], source="a")


class Digits(Engine):
    """Says a digit of the seed after some seconds."""

    def __init__(self, seconds: float = 5.0, **more: Any) -> None:
        self.seconds, self.more, self.notes = seconds, more, list[Any]()
        self.asked: list[dict[str, Any]] = []

    async def generate(self, token_ids, *, max_new_tokens, seed):
        self.asked.append({"ids": token_ids, "max": max_new_tokens, "seed": seed})
        await asyncio.sleep(self.seconds)
        done = Completion(token_ids=[50 + seed % 40], logp=[-0.5], versions=[0], stop="eos")
        return replace(done, **self.more)

    async def sleep(self):
        self.notes.append("sleep")
        await asyncio.sleep(1.0)

    async def wake(self, part):
        self.notes.append(f"wake {part}")
        await asyncio.sleep(7.0)

    async def start_trace(self, *, trace, memory):
        self.notes.append(("start", trace, memory))

    async def stop_trace(self, stem):
        return [f"{stem}.json"]

    async def close(self):
        self.notes.append("engine")


@dataclass
class Rewards:
    """Rewards of this process: 1 for each message. Notes whom it is asked about."""

    fast: bool = False
    compares: bool = False
    seconds: float = 2.0
    asked: list[Any] = field(default_factory=list[Any])
    fails: str = ""
    """Last text that has no reward."""

    def is_fast(self, source: str) -> bool:
        assert source == "a"
        return self.fast

    def scores_groups(self, source: str) -> bool:
        assert source == "a"
        return self.compares

    def score(self, prompt: Prompt, messages: list[Message]) -> RewardResult:
        said = [m["content"] for m in messages]
        if said and said[-1] == self.fails:
            return RewardResult(failure="no such digit")
        return RewardResult(reward_parts={"n": float(len(said))}, counts={"judge/calls": 1.0})

    async def compute_reward(self, prompt: Prompt, messages: list[Message]) -> RewardResult:
        self.asked.append([m["content"] for m in messages])
        await asyncio.sleep(self.seconds)
        return self.score(prompt, messages)

    async def compute_each(self, prompt: Prompt, conversations: list[list[Message]]) -> list[RewardResult]:
        self.asked.append(len(conversations))
        await asyncio.sleep(self.seconds)
        return [self.score(prompt, one) for one in conversations]

    async def compute_group(self, prompt: Prompt, conversations: list[list[Message]]) -> list[RewardResult]:
        assert prompt.recorded == ()
        self.asked.append([one[-1]["content"] for one in conversations])
        await asyncio.sleep(self.seconds)
        parts = [{"place": float(i), "of": float(len(conversations))} for i in range(len(conversations))]
        return [RewardResult(reward_parts=one, counts={"judge/calls": 10.0}) for one in parts]

    def close(self) -> None:
        self.asked.append("closed")


def a_worker(engine: Any, rewards: Any, env: Any = SingleTurn, rollout: Any = None, **more: Any) -> RolloutWorker:
    return RolloutWorker(
        engine,
        more.pop("tokenizer", None) or Words(),
        env,
        rewards,
        reward=RewardConfig(function="x", weights=more.pop("weights", {"n": 0.5})),
        rollout=RolloutConfig(**{"max_new_tokens": 20, "max_turns": 3, "timeout_s": 60.0} | (rollout or {})),
        seed=11,
        **more,
    )


class Turns(Words):
    """Encodes a demonstration, word by word."""

    def split_turns(self, messages, train_on, tools=()):
        return [(m["content"], bool(m["train"])) for m in messages]

    def encode_pieces(self, pieces):
        return [([int(w) for w in text.split()], [learnt] * len(text.split())) for text, learnt in pieces]

    def place(self, ids, images, begin=0):
        return ()
