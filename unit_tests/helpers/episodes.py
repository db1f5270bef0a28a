"""Environments, engines and tokenizers of ten lines, with which an episode is played."""

import asyncio
from typing import Any

from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.engines.base import Completion, Engine
from rollouts.envs.base import Env
from rollouts.episode import run_episode
from rollouts.turns import EpisodeRules

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "1 2"}])


class Words:
    """Token id k is the word "k"."""

    images = None

    def render(self, messages, tools=()):
        return [int(w) for m in messages for w in m["content"].split()]

    def render_turns(self, reply, answers, tools=()):
        return self.render(answers)

    def decode(self, ids):
        return " ".join(map(str, ids))

    def bound_tokens(self, messages, *, limit, tools=()):
        return None


class Scripted(Engine):
    """Says each reply in turn; the version goes up between turns, as if weights landed in mid-episode."""

    def __init__(self, *replies, stop="eos"):
        self.replies, self.stop, self.version, self.asked = list(replies), stop, 7, []

    async def generate(self, token_ids, *, max_new_tokens, seed):
        self.asked.append((token_ids, max_new_tokens, seed))
        ids = self.replies.pop(0)
        self.version += 1
        n = len(ids)
        return Completion(token_ids=ids, logp=[-0.5] * n, versions=[self.version - 1] * n, stop=self.stop)


class Tool(Env):
    """Answers a reply that begins with 3, and ends the episode on anything else."""

    def __init__(self, prompt=None, answer="9 9"):
        self.answer = answer

    async def step(self, reply):
        said = reply.message["content"]
        if said.startswith("4"):
            raise OSError("the tool broke")
        return [{"role": "tool", "content": self.answer}] if said.startswith("3") else None


class Duel(Tool):
    """Two players in turn; each is shown what the other said."""

    sides = 2

    async def open(self):
        return [{"role": "user", "content": "7"}]

    async def step(self, reply):
        if reply.message["content"] == "6":
            return None
        self.player = 1 - self.player
        return [{"role": "user", "content": reply.message["content"]}]

    def scores_of(self, player):
        return {"won": float(player)}

    def result_of(self, player):
        return "won" if player else "lost"

    def turn_scores(self, player):
        return [{"won": 0.0}, {"won": 1.0}] if player else []


def play(engine, **how):
    [only] = play_all(engine, **how)
    return only


def said(text):
    """A reply as an environment gets it."""
    return ParsedReply(message={"role": "assistant", "content": text})


def play_all(engine, *, env=None, prompt=PROMPT, tokenizer=None, opponent=None, **rules):
    """Every player's sample and messages."""
    settings = {"seed_of_turn": lambda turn: 100 + turn, "max_new_tokens": 10, "max_turns": 3, "timeout_s": 60.0}
    rules = EpisodeRules(**settings | rules)
    played = asyncio.run(
        run_episode(engine, lambda prompt: env or Tool(), prompt, tokenizer or Words(), rules, opponent)
    )
    return [(one.sample, one.messages) for one in played]


def calls_of(*calls: tuple[str, dict[str, Any]]) -> ParsedReply:
    """A reply that makes these calls."""
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return ParsedReply(message={"role": "assistant", "content": "", "tool_calls": made})
