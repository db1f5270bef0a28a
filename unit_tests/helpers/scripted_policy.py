"""A policy that says what a script tells it, in tokens that the tokenizer would not choose for that text.

The tokenizer has one token per character, and tokens for whole marks such as <tool_call>. The policy spells marks
letter by letter: whoever encodes its text again gets other ids.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from core.timing.clock import ActivityTimer
from core.timing.phases import ENGINE_ACTIVITIES
from core.types.samples import Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.chat.tool_parsing import make_parser
from rollouts.agents.session import AgentSession, Sampler
from rollouts.agents.trace import Branch
from rollouts.engines.base import Completion
from rollouts.stops import Stops

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "Which?"}], answer="7")


class Policy:
    """Engine with a script: texts to say, one after the other, or a function of the context. `log` is what it did."""

    def __init__(self, tokenizer: ChatTokenizer, script: Sequence[str] | Callable[[str], str]):
        self.tokenizer, self.script, self.n = tokenizer, script, 0
        self.log: list[tuple[list[int], list[int]]] = []
        self.seeds: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        """Set by the first request."""

    async def generate(self, token_ids: list[int], *, max_new_tokens: int, seed: int) -> Completion:
        self.asked.set()
        n, self.n = self.n, self.n + 1
        await self.gate.wait()
        text = self.script(self.tokenizer.hf.decode(token_ids)) if callable(self.script) else self.script[n]
        ids = spell(self.tokenizer, text)[:max_new_tokens]
        cut = ids[-1] not in self.tokenizer.stop_token_ids
        self.log.append((token_ids, ids))
        self.seeds.append(seed)
        logp = [-0.125 * (i % 8) for i in range(len(ids))]
        return Completion(token_ids=ids, logp=logp, versions=[n] * len(ids), stop="length" if cut else "eos")


def spell(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Return one token per character, then the end of the turn; "..." at the end is a reply that is cut there."""
    ids = tokenizer.hf.convert_tokens_to_ids(list(text.removesuffix("...")))
    return ids if text.endswith("...") else [*ids, tokenizer.hf.eos_token_id]


def say_calls(text: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Return a reply with tool calls, as Hermes writes them."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return text + "".join(f"\n<tool_call>\n{one}\n</tool_call>" for one in written)


def make_sampler(policy: Policy, *, max_new_tokens: int = 2000, max_turns: int = 20, room: int = 4000) -> Sampler:
    tokenizer = policy.tokenizer
    engine: Any = policy
    return Sampler(
        engine=engine,
        tokenizer=tokenizer,
        stops=Stops(tokenizer, [], []),
        parser=make_parser("hermes", tokenizer),
        timer=ActivityTimer(*ENGINE_ACTIVITIES),
        temperature=1.0,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        max_model_len=room,
    )


def make_session(policy: Policy, prompt: Prompt = PROMPT, **limits: int) -> AgentSession:
    return AgentSession(make_sampler(policy, **limits), prompt, lambda turn: hash(turn) % 2**31)


def check_exact(branches: Sequence[Branch], log: Sequence[tuple[list[int], list[int]]]) -> None:
    """Every reply that the engine sampled is trained on exactly once, after exactly the tokens that it was given."""
    left = [(tuple(context), tuple(sampled)) for context, sampled in log]
    for branch in branches:
        assert len(branch.ids) == len(branch.action_mask) == len(branch.logp) == len(branch.versions)
        trained = [i for begin, end in branch.turns for i in range(begin, end)]
        assert trained == [i for i, learnt in enumerate(branch.action_mask) if learnt]
        for begin, end in branch.turns:
            left.remove((tuple(branch.ids[:begin]), tuple(branch.ids[begin:end])))
        for i, learnt in enumerate(branch.action_mask):
            assert learnt == (branch.versions[i] >= 0) and (learnt or branch.logp[i] == 0.0)
    assert left == [], "what was sampled and is in no sample"
