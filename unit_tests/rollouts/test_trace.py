"""The tree of an agent's conversations, under scripts that nobody would write: exact, and trained on once."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.types.messages import Message
from core.types.routes import extend
from core.types.samples import Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from rollouts.agents.trace import CannotContinue, Node, Trace, is_repeated
from rollouts.engines.base import Completion
from rollouts.stops import Stops
from unit_tests.helpers.chat_families import TOOLS, assistant, call, load_family, result, user
from unit_tests.helpers.scripted_policy import check_exact, spell

WORDS = st.text("abc 7", min_size=1, max_size=6)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "go on", "go on", "rewrite", "insert", "compact", "new", "again"]),
        st.integers(0, 100),
        WORDS,
        st.sampled_from(["a", "bc"]),
        st.sampled_from(["eos", "eos", "length"]),
        st.sampled_from(["user", "tool", "two tools"]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3", "hermes"])
def chat(request, tiny_path, tmp_path_factory) -> ChatTokenizer:
    return load_family(tiny_path, tmp_path_factory.mktemp("trace"), request.param)


class Player:
    """A harness that does what a list of actions says, with the conversations that it remembers."""

    def __init__(self, chat: ChatTokenizer):
        self.chat, self.log, self.asked = chat, [], 0
        self.trace = Trace(chat, Stops(chat, [], []).close_turn, [user("?")])
        self.known: list[list[Message]] = []
        """Conversations that end in a reply."""

    def act(self, action: str, pick: int, told: str, said: str, stop: Any, answer: str) -> None:
        messages = list(self.known[pick % len(self.known)]) if self.known else [user("?")]
        told = f"{told}#{self.asked}#"  # so that every message of the harness is another one
        if self.known:
            messages = self._change(action, messages, told, answer)
        planned = self.trace.plan_reply(messages, [])
        shown = re.findall(r"#\w+#", self.chat.hf.decode(planned.context))
        assert shown == re.findall(r"#\w+#", "".join(m["content"] for m in messages)), "the policy sees the request"
        ids = spell(self.chat, said)[: None if stop == "eos" else -1]
        done = Completion(token_ids=ids, logp=[-1.0] * len(ids), versions=[self.asked] * len(ids), stop=stop)
        self.asked += 1
        reply = assistant(self.chat.decode(ids), *([call("f", f"c{self.asked}")] if answer != "user" else []))
        self.log.append((planned.context, ids))
        self.trace.add_reply(planned, done, reply).keep()
        self.known.append([*messages, reply])

    def _change(self, action: str, messages: list[Message], told: str, answer: str) -> list[Message]:
        last = messages[-1]
        if action == "again":
            return messages[:-1]
        if action == "new":
            return [{"role": "system", "content": told}, user("?")]
        if action == "compact":
            return [user(f"so far: {told}")]
        if action == "rewrite":
            messages[-1] = {**last, "content": last["content"] + told}
        calls = last.get("tool_calls", [])
        if calls:
            messages += [result(told, one["id"]) for one in calls]
        if not calls or answer == "user":
            messages.append(user(told))
        if action == "insert":
            messages += [assistant("as I said"), user(told)]
        return messages


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_every_reply_of_a_script_is_trained_on_once_after_its_own_context(chat, actions):
    player = Player(chat)
    for action in actions:
        player.act(*action)
    branches = player.trace.list_branches()
    check_exact(branches, player.log)
    assert sorted(n for branch in branches for n in branch.turn_numbers) == [*range(len(actions))]
    assert len(branches) == len({branch.last for branch in branches})
    assert player.trace.n_replies == len(actions)


def sample(
    trace: Trace, chat: ChatTokenizer, messages: list[Message], text: str, tools: list[Any] | None = None
) -> Node:
    planned = trace.plan_reply(messages, tools or [])
    ids = spell(chat, text)
    done = Completion(token_ids=ids, logp=[-1.0] * len(ids), versions=[0] * len(ids), stop="eos")
    return trace.add_reply(planned, done, assistant(chat.decode(ids)))


def make_trace(chat: ChatTokenizer) -> Trace:
    return Trace(chat, Stops(chat, [], []).close_turn, [user("?")])


def test_a_request_continues_what_it_repeats_not_one_with_the_same_reply(chat):
    trace = make_trace(chat)
    first = sample(trace, chat, [user("?")], "yes")
    other = [user("another question"), first.reply, user("!")]
    assert list(trace.plan_reply(other, []).context) == list(chat.render(other, []))


def test_a_reply_nobody_got_is_in_no_sample_until_a_request_repeats_it(chat):
    trace = make_trace(chat)
    lost = sample(trace, chat, [user("?")], "lost")
    assert trace.list_branches() == []
    got = sample(trace, chat, [user("?"), lost.reply, user("!")], "got")
    got.keep()
    [branch] = trace.list_branches()
    assert branch.turn_numbers == [0, 1]


def test_a_token_of_a_branch_has_the_route_of_the_request_that_trains_it(chat):
    """A reply that two branches share is trained in the first; in the second its routes are those of the next request,
    as its tokens are context there.
    """
    trace = make_trace(chat)

    def ask(messages, number: int) -> Node:
        planned = trace.plan_reply(messages, [])
        ids = spell(chat, "ab")
        inputs = np.full((len(planned.context) + len(ids) - 1, 1, 2), number, dtype=np.uint8)
        routes = extend(inputs, len(inputs) + 1)  # the last token was no input
        columns = {"logp": [-1.0] * len(ids), "versions": [0] * len(ids), "stop": "eos", "routes": routes}
        return trace.add_reply(planned, Completion(token_ids=ids, **columns), assistant(chat.decode(ids)))

    first = ask([user("?")], 0)
    for number, words in ((1, "x"), (2, "y")):
        ask([user("?"), first.reply, user(words)], number).keep()
    samples = [branch.make_sample(Prompt(id="p", messages=[])) for branch in trace.list_branches()]
    end = len(first.prompt_ids) + len(first.completion.token_ids)
    for number, sample in zip((1, 2), samples, strict=True):
        seen = sample.routes[:, 0, 0].tolist()
        assert len(seen) == len(sample.token_ids) and seen[-1] == 255
        assert set(seen[: end - 1]) == {0 if number == 1 else 2} and set(seen[end - 1 : -1]) == {number}


def test_other_tools_are_another_branch(chat):
    trace = make_trace(chat)
    first = sample(trace, chat, [user("?")], "one", TOOLS)
    planned = trace.plan_reply([user("?"), first.reply, user("!")], TOOLS[:1])
    assert planned.parent is None and trace.plan_reply([user("?"), first.reply, user("!")], TOOLS).parent is first


def test_a_template_that_rewrites_begins_a_branch_and_is_counted(chat, tmp_path):
    strange = ChatTokenizer.__new__(ChatTokenizer)
    strange.__dict__.update(chat.__dict__)
    strange.hf = type(chat.hf).from_pretrained(chat.hf.name_or_path)
    strange.hf.chat_template = "{{ messages | length }}" + chat.hf.chat_template
    trace = make_trace(strange)
    first = sample(trace, strange, [user("?")], "one")
    second = trace.plan_reply([user("?"), first.reply, user("!")], [])
    assert second.parent is None and trace.n_not_appended == 1


def test_a_conversation_of_1200_turns_is_no_depth_for_python(tiny_path):
    chat = ChatTokenizer(tiny_path, "chat")
    trace = make_trace(chat)
    trace.tokenizer = Numbers()
    messages = [user("?")]
    for _ in range(1200):
        node = sample(trace, chat, messages, "a")
        messages = [*messages, node.reply, user("b")]
    node.keep()
    [branch] = trace.list_branches()
    assert len(branch.turns) == 1200


class Numbers:
    """One token per message, to make long conversations cheap."""

    images = None

    def render(self, messages, tools=()):
        return [1] * len(messages)

    def render_turns(self, reply, answers, tools=()):
        return [2] * len(answers)


REPEATED = {
    "as it was": ({}, True),
    "trimmed": ({"content": "I look."}, True),
    "without its reasoning": ({"reasoning": None}, True),
    "other reasoning": ({"reasoning": "ha"}, False),
    "other text": ({"content": "I looked."}, False),
    "other arguments": ({"tool_calls": [call("add", a=1, b=3)]}, False),
    "arguments in another order": ({"tool_calls": [call("add", b=2, a=1)]}, True),
    "another id": ({"tool_calls": [call("add", "x", a=1, b=2)]}, False),
    "without the call": ({"tool_calls": None}, False),
    "said by the user": ({"role": "user"}, False),
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_counts_as_the_same_reply(name):
    changes, same = REPEATED[name]
    reply = assistant(" I look.\n", call("add", a=1, b=2), reasoning="hm")
    sent: Any = {key: value for key, value in {**reply, **changes}.items() if value is not None}
    assert is_repeated(reply, sent) == same


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"tool_calls": []}, True),
        ({"tool_calls": [call("add", a=1)]}, False),
        ({"reasoning": ""}, True),
        ({"reasoning": " \n"}, True),
        ({"reasoning": "hm"}, False),
    ],
)
def test_a_reply_without_calls_and_reasoning_is_repeated_without_them(changes, same):
    assert is_repeated(assistant("7"), {**assistant("7"), **changes}) == same


def test_reasoning_may_come_back_trimmed():
    for kept, sent in ((" hm\n", "hm"), ("hm", " hm\n")):
        assert is_repeated(assistant("7", reasoning=kept), assistant("7", reasoning=sent))


def test_a_conversation_that_ends_with_the_assistant_is_refused(chat):
    trace = make_trace(chat)
    for messages in ([], [user("?"), assistant("Se")]):
        with pytest.raises(CannotContinue, match="last message"):
            trace.plan_reply(messages, [])
