"""The tree of an agent's requests against a plain list, under harnesses drawn by chance.

They append, rewrite, compact, fork, lose answers and retry. The list keeps every conversation as a whole.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.types.messages import Message
from data_feeds.chat.tokenizer import ChatTokenizer
from rollouts.agents.session import AgentSession, Request
from rollouts.agents.wire import ChatRequest
from unit_tests.helpers.chat_families import TOOLS, assistant, user
from unit_tests.helpers.scripted_policy import PROMPT, Policy, make_session

TEXTS = st.text("abc7", min_size=1, max_size=3)


@dataclass(frozen=True)
class Act:
    """What a harness does next, and what the policy says if it is asked."""

    how: str
    pick: int
    """Conversation that it goes on with, of those that it knows."""
    told: str
    said: str
    is_cut: bool
    """Whether the reply ends at its limit."""
    uses_tools: bool
    arrives: bool
    """Whether the harness gets the answer."""


ACTS = st.builds(
    Act,
    how=st.sampled_from(
        ["append", "append", "append", "rewrite", "insert", "compact", "again", "again", "retry", "ask once more"]
    ),
    pick=st.integers(0, 50),
    told=TEXTS,
    said=st.sampled_from(["7", "7", "abc"]),  # few, so that two replies to one context are often equal
    is_cut=st.booleans(),
    uses_tools=st.integers(0, 3).map(lambda n: n == 0),
    arrives=st.integers(0, 3).map(bool),
)


@dataclass
class Reply:
    """Reply that was sampled, with all that led to it."""

    messages: list[Message]
    """The whole conversation, the reply included."""
    tools: list[Any]
    parent: int | None
    ids: list[int]
    """All tokens, the reply's included."""
    begin: int
    """First token of the reply."""
    is_kept: bool = False


class Harness:
    def __init__(self, chat: ChatTokenizer, session: AgentSession, policy: Policy, script: list[str]):
        self.chat, self.session, self.policy, self.script = chat, session, policy, script
        self.replies: list[Reply] = []
        self.sent: list[tuple[Request, int]] = []
        """Requests, each with the number of the reply that answers it."""
        self.known: list[list[Message]] = []
        """Conversations that the harness has got, each ending in a reply."""
        self.arrived: set[int] = set()
        self.n_repeated = self.n_rewritten = 0

    async def act(self, act: Act) -> None:
        if act.how in ("retry", "ask once more") and self.sent:
            before, number = self.sent[act.pick % len(self.sent)]
            # a retry is one of the latest request with its body
            number = max(n for request, n in self.sent if request.digest == before.digest)
            is_counted = act.how == "retry"
            request = Request(ask=before.ask, digest=before.digest, retry=1 if is_counted else None)
            # a client that does not count asks for a second reply, unless the first did not arrive
            expected = number if is_counted or number not in self.arrived else None
        else:
            messages, tools = self.write(act), TOOLS if act.uses_tools else []
            request = Request(ask=ChatRequest(messages=messages, tools=tools), digest=repr((messages, tools)), retry=0)
            expected = None
        await self.send(request, expected, act)

    def write(self, act: Act) -> list[Message]:
        messages = [*self.known[act.pick % len(self.known)]] if self.known else []
        if not messages or act.how == "compact":
            return [user(f"so far {act.told}")] if messages else [*PROMPT.messages]
        if act.how == "again":
            return messages[:-1]
        if act.how == "rewrite":
            messages[-1] = assistant(messages[-1]["content"] + act.told)
        if act.how == "insert":
            messages += [user(act.told), assistant(act.told)]
        return [*messages, user(act.told)]

    async def send(self, request: Request, expected: int | None, act: Act) -> None:
        n = len(self.policy.log)
        self.script.append(act.said + ("..." if act.is_cut else ""))
        try:
            async with self.session.answering(request) as answer:
                message = answer.message
                if not act.arrives:
                    raise ConnectionError
        except ConnectionError:
            pass
        if expected is None:
            assert len(self.policy.log) == n + 1, "a reply was sampled"
            expected = self.add(request, message)
        else:
            assert len(self.policy.log) == n, "nothing was sampled for a retry"
            self.script.pop()
        reply = self.replies[expected]
        assert message == reply.messages[-1]
        self.sent.append((request, expected))
        if act.arrives:
            self.known.append(reply.messages)
            self.arrived.add(expected)
            number: int | None = expected
            while number is not None:
                self.replies[number].is_kept, number = True, self.replies[number].parent

    def add(self, request: Request, message: Message) -> int:
        """Note a new reply, after checking what the engine was given for it."""
        asked, tools = request.ask.messages, request.ask.tools
        context, sampled = self.policy.log[-1]
        begun = [
            (len(r.messages), number)
            for number, r in enumerate(self.replies)
            if r.tools == tools and asked[: len(r.messages)] == r.messages and len(asked) > len(r.messages)
        ]
        parent = max(begun)[1] if begun else None
        before = self.replies[parent].ids if parent is not None else []
        assert context[: len(before)] == before, "the tokens that were sampled, and not their text again"
        whole = self.chat.render_text(asked, reply_next=True, tools=tools)
        assert self.chat.hf.decode(context) == whole, "what the chat template writes of the whole request"
        self.replies.append(Reply([*asked, message], tools, parent, context + sampled, len(context)))
        repeated = len(self.path_of(len(self.replies) - 1)) - 1
        self.n_repeated += repeated
        self.n_rewritten += sum(m["role"] == "assistant" for m in asked) - repeated
        return len(self.replies) - 1

    def path_of(self, number: int | None) -> list[int]:
        path: list[int] = []
        while number is not None:
            path.insert(0, number)
            number = self.replies[number].parent
        return path

    def list_branches(self) -> list[tuple[Any, ...]]:
        """Return every path to a kept reply that no kept reply continues; each reply is trained on in the first."""
        kept = [number for number, reply in enumerate(self.replies) if reply.is_kept]
        inner = {self.replies[number].parent for number in kept}
        seen: set[int] = set()
        found = []
        for path in sorted(self.path_of(number) for number in kept if number not in inner):
            own = [number for number in path if number not in seen]
            seen |= {*path}
            leaf = self.replies[path[-1]]
            turns = [(self.replies[n].begin, len(self.replies[n].ids)) for n in own]
            found.append((leaf.ids, leaf.messages, own, turns, path[-1]))
        return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(ACTS, min_size=1, max_size=14))
def test_branches_are_those_of_a_plain_list_of_conversations(qwen, acts):
    async def play() -> None:
        script: list[str] = []
        policy = Policy(qwen, script)
        session = make_session(policy, room=50_000, max_new_tokens=40_000)
        harness = Harness(qwen, session, policy, script)
        for act in acts:
            await harness.act(act)
        branches = session.trace.list_branches()
        found = [(b.ids, b.messages, b.turn_numbers, b.turns, b.last) for b in branches]
        assert found == harness.list_branches()
        for branch in branches:
            trained = [i for begin, end in branch.turns for i in range(begin, end)]
            assert [i for i, is_trained in enumerate(branch.action_mask) if is_trained] == trained
            assert [i for i, version in enumerate(branch.versions) if version >= 0] == trained
        assert (session.trace.n_repeated, session.trace.n_rewritten) == (harness.n_repeated, harness.n_rewritten)
        assert len({*policy.seeds}) == len(policy.log), "no two replies share a seed"
        await session.close()

    asyncio.run(play())
