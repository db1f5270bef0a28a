"""The tree of an agent's conversations over a tokenizer of one token per message: what is rendered, and what counts."""

from __future__ import annotations

from typing import Any

import pytest

from core.types.messages import Message
from data_feeds.chat.template_append import TemplateRefuses, TemplateRewrites
from rollouts.agents.trace import CannotContinue, Node, Trace
from rollouts.engines.base import Completion
from unit_tests.helpers.chat_families import TOOLS, assistant, user

ASKED = [user("?")]


class Marks:
    """Writes one token per message, and one for the tools; notes what it renders."""

    images = None

    def __init__(self, *, writes_tools: bool = True, error: Exception | None = None) -> None:
        self.writes_tools, self.error = writes_tools, error
        self.rendered: list[tuple[int, int]] = []
        """Numbers of messages and tools."""

    def render(self, messages, tools=()):
        self.rendered.append((len(messages), len(tools)))
        return [9] * bool(tools and self.writes_tools) + [1] * len(messages)

    def render_turns(self, reply, answers, tools=()):
        if self.error is not None:
            raise self.error
        return [2] * len(answers)


def make_trace(tokenizer: Any, prompt: list[Message] = ASKED) -> Trace:
    return Trace(tokenizer, lambda ids: [8], prompt)


def sample(trace: Trace, messages: list[Message], said: str = "7", tools: Any = ()) -> Node:
    done = Completion(token_ids=[5, 6], logp=[-1.0, -2.0], versions=[0, 0], stop="eos")
    return trace.add_reply(trace.plan_reply(messages, [*tools]), done, assistant(said))


@pytest.mark.parametrize("error", [TemplateRefuses("no"), TemplateRewrites("other")], ids=["refuses", "rewrites"])
def test_what_cannot_be_appended_is_rendered_in_full_and_counted(error):
    trace = make_trace(Marks(error=error))
    talk = [*ASKED, sample(trace, ASKED).reply, user("!")]
    planned = trace.plan_reply(talk, [])
    assert (planned.parent, planned.context, planned.prompt_ids) == (None, [1, 1, 1], [1, 1, 1])
    assert (planned.prompt_messages, planned.depth, trace.n_not_appended) == (talk, 1, 1)


def test_what_is_appended_follows_the_sampled_tokens():
    trace = make_trace(Marks())
    first = sample(trace, ASKED)
    second = sample(trace, [*ASKED, first.reply, user("a"), user("b")])
    planned = trace.plan_reply([*ASKED, first.reply, user("a"), user("b"), second.reply, user("c")], [])
    assert (second.parent, second.prompt_ids) == (first, [8, 2, 2])
    assert planned.context == [1, 5, 6, 8, 2, 2, 5, 6, 8, 2]
    assert (planned.parent, planned.prompt_ids, planned.prompt_messages) == (second, [8, 2], [user("c")])
    assert (planned.depth, trace.n_not_appended, trace.n_replies) == (2, 0, 2)


def test_turns_of_the_prompt_are_no_replies():
    """Those of a conversation that begins otherwise were written by the harness."""
    prompt = [user("1?"), assistant("1"), user("2?")]
    trace = make_trace(Marks(), prompt)
    first = sample(trace, prompt)
    assert (trace.plan_reply(prompt, []).depth, trace.n_rewritten, trace.n_repeated) == (0, 0, 0)
    sample(trace, [*prompt, first.reply, user("3?")])
    assert (trace.n_rewritten, trace.n_repeated) == (0, 1)
    sample(trace, [*prompt, assistant("other"), user("3?")])
    assert (trace.n_rewritten, trace.n_repeated) == (1, 1)
    sample(trace, [user("So far:"), assistant("1"), user("?"), assistant("2"), user("?")])
    assert (trace.n_rewritten, trace.n_repeated) == (3, 1)


def test_whether_the_template_writes_tools_is_looked_at_once():
    """By a render without them, which costs time."""
    tokenizer = Marks()
    trace = make_trace(tokenizer)
    for messages in (ASKED, [user("Else")], [user("More")]):
        trace.plan_reply(messages, TOOLS)
    trace.plan_reply([user("Plain")], [])
    n = len(TOOLS)
    assert tokenizer.rendered == [(1, n), (1, 0), (1, n), (1, n), (1, 0)]
    deaf = make_trace(Marks(writes_tools=False))
    for _ in range(2):
        with pytest.raises(CannotContinue, match=r"^the model's chat template does not write tools, so the policy"):
            deaf.plan_reply(ASKED, TOOLS)
    assert deaf.plan_reply(ASKED, []).context == [1]


def test_of_two_equal_replies_the_later_is_continued():
    trace = make_trace(Marks())
    first, second = sample(trace, ASKED), sample(trace, ASKED)
    assert trace.find_parent([*ASKED, first.reply, user("!")], []) is second
    deeper = sample(trace, [*ASKED, first.reply, user("!")])
    third = sample(trace, ASKED)
    talk = [*ASKED, third.reply, user("!"), deeper.reply, user("!")]
    assert trace.find_parent(talk, []) is deeper, "the longest, though it is not the last"
    assert trace.find_parent(talk[:4], []) is deeper and trace.find_parent(talk[:3], []) is third
    assert trace.find_parent(ASKED, []) is None


def test_a_branch_ends_for_the_reason_of_its_last_reply():
    trace = make_trace(Marks())
    first = sample(trace, ASKED)
    second = sample(trace, [*ASKED, first.reply, user("!")])
    second.keep()
    [branch] = trace.list_branches()
    assert (branch.stop, branch.last, branch.turn_numbers) == ("eos", 1, [0, 1])
    assert branch.ids == [1, 5, 6, 8, 2, 5, 6] and branch.turns == [(1, 3), (5, 7)]
    assert branch.messages == [*ASKED, first.reply, user("!"), second.reply]
    first.refused = "length"
    assert [branch.stop for branch in trace.list_branches()] == ["eos"], "it went on after that"
    second.refused = "turns"
    assert [branch.stop for branch in trace.list_branches()] == ["turns"]
