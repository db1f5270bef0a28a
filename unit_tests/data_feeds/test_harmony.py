"""Replies in channels, read by ids: reasoning, content and calls, as the published format writes them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest

from core.errors import UserError
from data_feeds.chat.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, Marks
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.chat.tool_parsing import PlainParser, check_parser, make_parser
from rollouts.agents.session import AgentSession, Request
from rollouts.agents.wire import BadRequest, ChatRequest, ChatResponse
from rollouts.engines.base import Completion
from rollouts.stops import Stops
from unit_tests.helpers.chat_families import TOOLS, user
from unit_tests.helpers.scripted_policy import PROMPT, check_exact, make_sampler
from unit_tests.helpers.template_families import FAMILIES

TEMPLATE = (
    "{%- if tools %}{{- '<|start|>developer<|message|># Tools ' + tools | tojson + '<|end|>' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}"
    "{%- set call = m.tool_calls[0].function %}"
    "{%- if m.content or m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson + '<|call|>' }}"
    "{%- elif m.role == 'assistant' %}{%- if loop.last and m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last else '<|end|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- m.content | tojson + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
"""As gpt-oss writes turns and calls."""
GPT_OSS = replace(FAMILIES["gpt-oss"], template=TEMPLATE, special=(START, MESSAGE, CHANNEL, END, CONSTRAIN))
THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
OSLO = '{"place": "Oslo"}'
ASKS = "commentary to=functions.weather <|constrain|>json<|message|>" + OSLO


@dataclass(frozen=True)
class Reply:
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    problem: str = ""
    own: bool = False
    """True if openai_harmony reads it, and a policy may not write it here."""


CALLED = (("weather", {"place": "Oslo"}),)
REPLIES = {
    "final": Reply("<|channel|>final<|message|>4<|return|>", content="4"),
    "thought and final": Reply(
        THOUGHT + "<|channel|>final<|message|>4<|return|>", content="4", reasoning="Two and two."
    ),
    "two thoughts": Reply(
        THOUGHT + THOUGHT + "<|channel|>final<|message|>4<|return|>",
        content="4",
        reasoning="Two and two.\nTwo and two.",
    ),
    "call behind the channel": Reply(THOUGHT + "<|channel|>" + ASKS + CALL, reasoning="Two and two.", calls=CALLED),
    "call behind the role": Reply(
        " to=functions.weather<|channel|>commentary json<|message|>" + OSLO + CALL, calls=CALLED
    ),
    "what is said before a call": Reply(
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>" + ASKS + CALL,
        content="I look.",
        calls=CALLED,
    ),
    "a tool of the server's": Reply(
        "<|channel|>analysis to=browser.search<|message|>{}<|call|>",
        calls=(("browser.search", {}),),
        problem="There is no function browser.search",
    ),
    "wrong arguments": Reply(
        "<|channel|>commentary to=functions.weather<|message|>{}<|call|>",
        calls=(("weather", {}),),
        problem="'place' is a required property",
    ),
    "cut off in a thought": Reply("<|channel|>analysis<|message|>Two and", reasoning="Two and"),
    "cut off in a header": Reply(THOUGHT + "<|channel|>fin", reasoning="Two and two."),
    # openai_harmony leaves the next two to whoever runs the call
    "not JSON": Reply(
        "<|channel|>commentary to=functions.weather<|message|>{Oslo<|call|>", content="{Oslo", problem="is not valid"
    ),
    "a list": Reply(
        "<|channel|>commentary to=functions.weather<|message|>[]<|call|>", content="[]", problem="no JSON object"
    ),
    # a reply ends there, and nobody is called
    "call to nobody": Reply("<|channel|>final<|message|>4<|call|>", content="4", problem="to nobody ends with"),
    "call without its end": Reply("<|channel|>" + ASKS + RETURN, content=OSLO, problem="does not end with <|call|>"),
    # the next two raise HarmonyError
    "no channel": Reply("4<|return|>", content="4", problem="no <|message|>"),
    "text after a message": Reply(
        "<|channel|>final<|message|>4<|end|>5<|return|>", content="4\n5", problem="text stands between"
    ),
    "a message of the user": Reply(
        "<|channel|>final<|message|>4<|end|><|start|>user<|message|>More<|end|>",
        content="4\nuserMore",
        problem="not the assistant's",
        own=True,
    ),
    "a channel of its own": Reply(
        "<|channel|>secret<|message|>4<|return|>", content="secret4", problem="the channel secret", own=True
    ),
    # a special token is no text for rewards
    "marks in a text": Reply("<|channel|>final<|message|>4<|message|><|start|>5<|return|>", content="45"),
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> ChatTokenizer:
    return GPT_OSS.load(tmp_path_factory.mktemp("harmony"))


@pytest.mark.parametrize("name", REPLIES)
def test_reasoning_content_and_calls_are_read(chat, name):
    reply = REPLIES[name]
    ids = chat.encode(reply.text)
    found = make_parser("harmony", chat).parse(ids, chat.decode(ids), TOOLS)
    calls = tuple((c["function"]["name"], c["function"]["arguments"]) for c in found.message.get("tool_calls", []))
    assert (found.message["content"], found.message.get("reasoning", ""), calls) == (
        reply.content,
        reply.reasoning,
        reply.calls,
    )
    assert reply.problem in found.problem and bool(found.problem) == bool(reply.problem)


def test_a_template_that_writes_channels_needs_no_key(chat, families):
    parser = make_parser(None, chat)
    ids = chat.encode(REPLIES["thought and final"].text)
    assert chat.decode(ids) == "analysisTwo and two.assistantfinal4", "what rewards would read without a parser"
    assert parser.parse(ids, chat.decode(ids), []).message["content"] == "4"
    assert isinstance(make_parser(None, families["hermes"]), PlainParser)


def test_a_call_ends_a_turn_and_its_result_follows_the_sampled_tokens(chat):
    ids = chat.encode(THOUGHT + "<|channel|>" + ASKS + CALL)
    reply = make_parser("harmony", chat).parse(ids, "", TOOLS).message
    assert Stops(chat, [], []).close_turn(ids) == []
    result = {"role": "tool", "name": "weather", "content": "cold", "tool_call_id": reply["tool_calls"][0]["id"]}
    follows = chat.hf.decode(chat.render_turns(reply, [result], TOOLS))
    assert follows == (
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"cold"<|end|><|start|>assistant'
    )
    final = chat.encode(REPLIES["final"].text)
    reply = make_parser("harmony", chat).parse(final, "", TOOLS).message
    asked = chat.hf.decode(chat.render_turns(reply, [user("And 3?")], TOOLS))
    assert asked == "<|start|>user<|message|>And 3?<|end|><|start|>assistant"


def test_an_agent_gets_content_and_reasoning_with_tools_and_without(chat):
    """Its next request goes on after all sampled tokens, though the template leaves thoughts out of history."""

    class Thinker:
        tokenizer, log = chat, []

        async def generate(self, token_ids, *, max_new_tokens, seed):
            ids = chat.encode(REPLIES["thought and final"].text)
            self.log.append((token_ids, ids))
            return Completion(token_ids=ids, logp=[-1.0] * len(ids), versions=[0] * len(ids), stop="eos")

    policy = Thinker()

    async def go(tools):
        sampler = replace(make_sampler(policy), parser=make_parser(None, chat))
        session = AgentSession(sampler, PROMPT, lambda turn: 0)
        said = [*PROMPT.messages]
        for n in range(2):
            async with session.answering(Request(ask=ChatRequest(messages=said, tools=tools), digest=str(n))) as answer:
                assert (answer.message["content"], answer.message["reasoning"]) == ("4", "Two and two.")
                said = [*said, answer.message, user("And?")]
        return session.trace.list_branches()

    for tools in (TOOLS, []):
        policy.log.clear()
        [branch] = asyncio.run(go(tools))
        check_exact([branch], policy.log)
        assert branch.turn_numbers == [0, 1]


def ask(chat: ChatTokenizer, name: str, **request: Any) -> ChatResponse:
    class Policy:
        tokenizer = chat

        async def generate(self, token_ids, *, max_new_tokens, seed):
            ids = chat.encode(REPLIES[name].text)
            return Completion(token_ids=ids, logp=[-1.0] * len(ids), versions=[0] * len(ids), stop="eos")

    async def go():
        sampler = replace(make_sampler(Policy()), parser=make_parser(None, chat))
        session = AgentSession(sampler, PROMPT, lambda turn: 0)
        wanted = Request(ask=ChatRequest(messages=PROMPT.messages, **request), digest="")
        async with session.answering(wanted) as answer:
            return answer

    return asyncio.run(go())


@pytest.mark.parametrize("request_", [{"tools": []}, {"tools": TOOLS, "may_call": False}, {"tools": TOOLS}])
def test_an_agent_gets_calls_only_if_it_may_have_them(chat, request_):
    may_call = request_ == {"tools": TOOLS}
    answer = ask(chat, "call behind the channel", **request_)
    assert ("tool_calls" in answer.message, answer.finish_reason == "tool_calls") == (may_call, may_call)
    assert (answer.message["content"], answer.message["reasoning"]) == ("" if may_call else OSLO, "Two and two.")


def test_what_the_format_needs_is_asked_for_at_the_start(families, tmp_path):
    with pytest.raises(UserError, match=r"tool_parser=harmony: the tokenizer of this model has no token <\|start\|>"):
        make_parser("harmony", families["hermes"])
    deaf = replace(GPT_OSS, special=(*GPT_OSS.special, CALL), stops=[]).load(tmp_path)
    with pytest.raises(UserError, match=r"no reply would stop at a call, .* lacks \d+, the token <\|call\|>: add it"):
        check_parser(None, deaf, has_tools=True)
    check_parser(None, deaf, has_tools=False)
    # an agent brings tools that no check has seen
    with pytest.raises(BadRequest, match="no reply would stop at a call"):
        ask(deaf, "final", tools=TOOLS)


@pytest.mark.parametrize("text", ["", "\x00", MESSAGE * 40, START, "<|channel|>" + ASKS[:-17] + "[" * 9000 + CALL])
def test_no_reply_makes_the_parser_raise(chat, text):
    for ids in (chat.encode(text), chat.encode(text)[::-1]):
        assert make_parser("harmony", chat).parse(ids, "", TOOLS).message["role"] == "assistant"


def test_openai_harmony_reads_the_same():
    """By OpenAI's own parser and vocabulary."""
    harmony = pytest.importorskip("openai_harmony")
    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        pytest.skip("openai_harmony downloads its vocabulary: TIKTOKEN_ENCODINGS_BASE names a folder that has it")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)

    def encode(text: str) -> list[int]:
        return encoding.encode(text, allowed_special="all")

    texts = {encode(text)[0]: text for text in (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)}
    marks = Marks(texts=texts, stops=frozenset(encoding.stop_tokens_for_assistant_actions()))
    for name, reply in REPLIES.items():
        if reply.own:
            continue
        ids = encode(reply.text)
        try:
            theirs = encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
        except harmony.HarmonyError:
            assert reply.problem or name.startswith("cut off"), name
            continue
        ours = list(marks.read_messages([*encode("<|start|>assistant"), *ids], encoding.decode))
        want = [(m.channel, m.recipient or "", m.content[0].text) for m in theirs]
        assert [(m.channel, m.recipient, m.text) for m in ours] == want, name
