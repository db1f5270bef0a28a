"""What is read of replies: calls, reasoning and content, and one sentence for a call that cannot be made.

REPLIES is a table of replies with what vLLM's parsers read, the families' reference. Where ours differ, a comment says
why.
"""

import json
import re
import sys
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest

from core.errors import UserError
from core.loading import FileSpec
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.chat.tool_parsing import PlainParser, check_parser, locate_parser, make_parser
from unit_tests.helpers.chat_families import FAMILIES, TOOLS, load_family

OSLO = {"name": "weather", "arguments": {"place": "Oslo"}}
SUM = {"name": "add", "arguments": {"a": 1, "b": 2.5}}


def hermes(*calls: Any) -> str:
    return "\n".join(f"<tool_call>\n{one if isinstance(one, str) else json.dumps(one)}\n</tool_call>" for one in calls)


@dataclass(frozen=True)
class Reply:
    """A reply, and what is read of it: calls, content, reasoning, and words of the problem."""

    text: str
    calls: tuple[dict[str, Any], ...] = ()
    content: str = ""
    reasoning: str = ""
    problem: str = ""
    unlike_vllm: bool = False
    """True if vLLM reads something else; the comment says what."""


HERMES_REPLIES = {
    "no call": Reply("It is cold.", content="It is cold."),
    "one call": Reply(hermes(OSLO), calls=(OSLO,)),
    "two calls": Reply(hermes(OSLO, SUM), calls=(OSLO, SUM)),
    "content and call": Reply("I look.\n" + hermes(OSLO), calls=(OSLO,), content="I look."),
    "no space": Reply(f"<tool_call>{json.dumps(OSLO)}</tool_call>", calls=(OSLO,)),
    "nested": Reply(
        hermes({"name": "weather", "arguments": {"place": 'a "b" {c} \n</x>'}}),
        calls=({"name": "weather", "arguments": {"place": 'a "b" {c} \n</x>'}},),
    ),
    "letters of the world": Reply(
        hermes('{"name": "weather", "arguments": {"place": "Z\\u00fcrich"}}'),
        calls=({"name": "weather", "arguments": {"place": "Zürich"}},),
    ),
    "not closed": Reply(f"<tool_call>\n{json.dumps(OSLO)}", calls=(OSLO,)),
    # malformed: no call in any implementation
    "cut off": Reply(hermes(OSLO)[:40], problem="its JSON is not whole or not valid"),
    "not JSON": Reply(hermes("weather(place='Oslo')"), problem="its JSON is not whole or not valid"),
    "trailing comma": Reply(hermes('{"name": "weather", "arguments": {"place": "Oslo",}}'), problem="not valid"),
    "second malformed": Reply(hermes(OSLO, "{"), problem="not valid"),
    "empty call": Reply(hermes(""), problem="not valid"),
    "a list": Reply(hermes(f"[{json.dumps(OSLO)}]"), problem="no object with a name and arguments"),
    "half of a name": Reply(
        hermes('{"name": "\\ud800", "arguments": {}}'), problem="its name holds half of a character"
    ),
    "no name": Reply(hermes('{"arguments": {"place": "Oslo"}}'), problem="it has no name"),
    "no arguments": Reply(hermes('{"name": "weather"}'), problem="arguments are no JSON object"),
    "parameters": Reply(hermes('{"name": "weather", "parameters": {"place": "Oslo"}}'), problem="arguments"),
    # vLLM passes on what is no object as text, which is refused here
    "arguments are a list": Reply(hermes('{"name": "weather", "arguments": ["Oslo"]}'), problem="arguments"),
    # readable, and no tool can answer: the implementations pass these on
    "unknown function": Reply(
        hermes({"name": "fly", "arguments": {}}),
        calls=({"name": "fly", "arguments": {}},),
        problem="There is no function fly; there are weather, add.",
    ),
    "missing argument": Reply(
        hermes({"name": "add", "arguments": {"a": 1}}),
        calls=({"name": "add", "arguments": {"a": 1}},),
        problem="The arguments of add do not fit its schema: 'b' is a required property.",
    ),
    "wrong type": Reply(
        hermes({"name": "weather", "arguments": {"place": "Oslo", "days": [1]}}),
        calls=({"name": "weather", "arguments": {"place": "Oslo", "days": [1]}},),
        problem="do not fit its schema: days: [1] is not of type 'integer'.",
    ),
    # vLLM: the number stays text, and does not fit. It is cast by the schema here
    "number as text": Reply(
        hermes({"name": "weather", "arguments": {"place": "Oslo", "days": "2"}}),
        calls=({"name": "weather", "arguments": {"place": "Oslo", "days": 2}},),
        unlike_vllm=True,
    ),
    # vLLM leaves out what follows a call
    "content after": Reply(
        "I look.\n" + hermes(OSLO) + "\nWait.",
        calls=(OSLO,),
        content="I look.\nWait.",
        unlike_vllm=True,
    ),
    "reasoning": Reply("<think>\nhm\n</think>\n\nIt is cold.", content="It is cold.", reasoning="hm"),
    "reasoning and call": Reply("<think>\nhm\n</think>\n\n" + hermes(OSLO), calls=(OSLO,), reasoning="hm"),
    "reasoning cut off": Reply("<think>\nhm", reasoning="hm"),
    # vLLM's reasoning parser ends the reasoning where a call begins
    "call in reasoning": Reply(
        f"<think>\n{hermes(OSLO)}\n</think>\n\nNo.", content="No.", reasoning=hermes(OSLO), unlike_vllm=True
    ),
}
"""Qwen2.5, Qwen3, Hermes."""
LLAMA_CALL = '{"name": "weather", "parameters": {"place": "Oslo"}}'
LLAMA_SUM = '{"name": "add", "parameters": {"a": 1, "b": 2.5}}'
LLAMA_REPLIES = {
    "no call": Reply("It is cold.", content="It is cold."),
    "one call": Reply(LLAMA_CALL, calls=(OSLO,)),
    "tag": Reply("<|python_tag|>" + LLAMA_CALL, calls=(OSLO,)),
    "arguments": Reply(json.dumps(OSLO), calls=(OSLO,)),
    "two calls": Reply(f"{LLAMA_CALL}; {LLAMA_SUM}", calls=(OSLO, SUM)),
    "JSON that is no call": Reply('{"degrees": 3}', content='{"degrees": 3}'),
    "cut off": Reply(LLAMA_CALL[:30], problem="not whole or not valid"),
    "no arguments": Reply('{"name": "weather"}', problem="no JSON object"),
    "malformed": Reply('{"name": "weather", "parameters": {"place": Oslo}}', problem="not valid"),
    "unknown function": Reply(
        '{"name": "fly", "parameters": {}}', calls=({"name": "fly", "arguments": {}},), problem="no function fly"
    ),
    # vLLM takes JSON anywhere for a call, and leaves out the text around it; Llama's prompt asks for the call alone
    "content and call": Reply(f"I look: {LLAMA_CALL}", content=f"I look: {LLAMA_CALL}", unlike_vllm=True),
}
"""Llama 3."""
TABLE = [
    *((family, name) for family in ("qwen2.5", "qwen3", "hermes") for name in HERMES_REPLIES),
    *(("llama3", name) for name in LLAMA_REPLIES),
]


def find_reply(family: str, name: str) -> Reply:
    return (LLAMA_REPLIES if family == "llama3" else HERMES_REPLIES)[name]


def parse(chat, parser, text, *, tools=TOOLS, ends=True):
    ids = [*chat.encode(text), *([chat.hf.eos_token_id] if ends else [])]
    return parser.parse(ids, chat.decode(ids), tools)


def functions(parsed) -> list[dict[str, Any]]:
    return [call["function"] for call in parsed.message.get("tool_calls", [])]


def plain(text) -> str:
    """What a decoded reply says without special tokens."""
    return text.replace("<|python_tag|>", "")


@pytest.mark.parametrize(("family", "name"), TABLE, ids=[f"{family}, {name}" for family, name in TABLE])
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "cut"])
def test_a_reply_is_read_as_its_family_writes_it(families, family, name, ends):
    chat, reply = families[family], find_reply(family, name)
    parser = make_parser("llama3_json" if family == "llama3" else "hermes", chat)
    parsed = parse(chat, parser, reply.text, ends=ends)
    assert functions(parsed) == list(reply.calls)
    assert reply.problem in parsed.problem and bool(parsed.problem) == bool(reply.problem)
    unreadable = parsed.problem and not reply.calls
    assert parsed.message["content"] == (plain(reply.text) if unreadable else reply.content)
    assert parsed.message.get("reasoning", "") == reply.reasoning
    if parsed.problem:
        assert "\n" not in parsed.problem and parsed.problem.endswith(".") and len(parsed.problem) < 400


def test_what_a_parser_reads_is_written_again_as_it_was(families):
    """A reply, read and put into the conversation, is written by the template with the tokens that were sampled."""
    for family in FAMILIES:
        chat = families[family]
        text = LLAMA_CALL if family == "llama3" else hermes(OSLO)
        if family == "qwen3":
            text = f"<think>\nhm\n</think>\n\n{text}"
        parsed = parse(chat, make_parser("llama3_json" if family == "llama3" else "hermes", chat), text)
        asked = chat.render([{"role": "user", "content": "?"}], TOOLS)
        ids, mask = chat.mask_turns([{"role": "user", "content": "?"}, parsed.message], tools=TOOLS)
        assert ids[: len(asked)] == asked
        learnt = [i for i, m in zip(ids, mask, strict=True) if m]
        assert learnt == [*chat.encode(text), chat.hf.eos_token_id]


def test_calls_have_ids_of_their_own_that_depend_on_the_tokens_alone(families):
    chat = families["hermes"]
    parser = make_parser("hermes", chat)
    first, again, other = (parse(chat, parser, text) for text in (hermes(OSLO, SUM), hermes(OSLO, SUM), hermes(SUM)))
    ids = [call["id"] for call in first.message.get("tool_calls", [])]
    assert first == again and len({*ids, other.message["tool_calls"][0]["id"]}) == 3
    assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_reasoning_that_the_header_begins_is_reasoning(families):
    """Some templates write <think> themselves: then it is not in the reply."""
    chat = families["qwen3"]
    chat.hf.chat_template = FAMILIES["qwen3"].replace(
        "assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}"
    )
    try:
        chat.__dict__.pop("reply_header", None)
        parsed = parse(chat, make_parser("hermes", chat), "hm\n</think>\n\n" + hermes(OSLO))
    finally:
        chat.hf.chat_template = FAMILIES["qwen3"]
        chat.__dict__.pop("reply_header", None)
    assert functions(parsed) == [OSLO] and parsed.message.get("reasoning") == "hm" and not parsed.problem


OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+) ",
            "close": "END",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}
"""Response template of a family that nobody knows."""


def test_a_tokenizer_that_says_how_its_calls_look_needs_no_key(families, tiny_path, tmp_path):
    chat = load_family(tiny_path, tmp_path, "hermes")
    chat.hf.response_template = OWN
    chat.save(tmp_path / "saved")
    again = ChatTokenizer(str(tmp_path / "saved"), "chat")
    text = 'CALL weather {"place": "Oslo"}END'
    for parser in (make_parser(None, again), make_parser("response_template", again)):
        assert functions(parse(again, parser, text)) == [OSLO]
    check_parser(None, again, has_tools=True)
    without = parse(again, make_parser(None, again), text, tools=[])
    assert without.message == {"role": "assistant", "content": text}, "recipes without tools get the text as ever"
    (tmp_path / "own.json").write_text(json.dumps(OWN), encoding="utf-8")
    parser = make_parser(str(tmp_path / "own.json"), families["hermes"])
    assert functions(parse(families["hermes"], parser, text)) == [OSLO]


def test_every_text_around_calls_is_content(families, tmp_path):
    """A response template may leave several texts of a region unjoined."""
    fields = {**OWN["fields"], "content": {"content": "text", "repeats": True}}
    (tmp_path / "own.json").write_text(json.dumps(OWN | {"fields": fields}), encoding="utf-8")
    parser = make_parser(str(tmp_path / "own.json"), families["hermes"])
    parsed = parse(families["hermes"], parser, 'I look. CALL weather {"place": "Oslo"}END Wait.')
    assert parsed.message["content"].split() == ["I", "look.", "Wait."] and functions(parsed) == [OSLO]


def test_special_tokens_within_a_reply_are_no_text(families):
    chat = families["hermes"]
    parsed = parse(chat, make_parser("hermes", chat), "It <|header|>is<|begin|> cold.<|eot|>")
    assert parsed.message["content"] == "It is cold."


def test_a_parser_that_is_not_there_is_one_sentence(families, tmp_path):
    chat = families["hermes"]
    cases = {
        "hermis": "rollout.tool_parser=hermis is no parser; name the form .* hermes, llama3_json, harmony, vllm:NAME",
        "response_template": "rollout.tool_parser=response_template: the tokenizer of this model brings none",
        str(tmp_path / "no.json"): "there is no such file",
        str(tmp_path / "text.json"): "is not JSON",
        str(tmp_path / "other.json"): "is no response template of transformers: .*fields",
    }
    (tmp_path / "text.json").write_text("{", encoding="utf-8")
    (tmp_path / "other.json").write_text('{"fields": {}}', encoding="utf-8")
    for name, words in cases.items():
        with pytest.raises(UserError, match=words):
            make_parser(name, chat)
    with pytest.raises(UserError, match=r"rollout\.tool_parser is unset, there are tools, and the tokenizer has no"):
        check_parser(None, chat, has_tools=True)
    check_parser(None, chat, has_tools=False)
    check_parser("hermes", chat, has_tools=True)
    assert isinstance(make_parser(None, chat), PlainParser)


@pytest.mark.parametrize(
    "text", ["", "\x00", "<tool_call>" * 40, hermes("[" * 5000), "</tool_call>", "<think>" * 3, "\ud7ff"]
)
def test_no_reply_makes_a_parser_raise(families, text):
    for family, chat in families.items():
        parser = make_parser("llama3_json" if family == "llama3" else "hermes", chat)
        for ids in ([], [chat.hf.eos_token_id], chat.encode(text)):
            parsed = parser.parse(ids, chat.decode(ids), TOOLS)
            assert parsed.message["role"] == "assistant"


def test_arguments_that_json_does_not_have_are_a_problem(families):
    chat = families["hermes"]
    parser = make_parser("hermes", chat)
    assert "do not fit" in parse(chat, parser, hermes('{"name": "add", "arguments": {"a": 1, "b": true}}')).problem
    nan = parse(chat, parser, hermes('{"name": "add", "arguments": {"a": NaN, "b": 1}}')).problem
    assert "hold a number or a depth that JSON does not have" in nan
    half = parse(chat, parser, hermes('{"name": "weather", "arguments": {"place": "\\ud800"}}')).problem
    assert "half of a character" in half


def test_a_parser_of_a_file_is_located_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "own.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert locate_parser("own.json") == FileSpec(
        module="own", path=f"{tmp_path}/own.json", sha256=sha256(b"{}").hexdigest(), in_package=False
    )
    assert [locate_parser(name) for name in (None, "hermes", "other.json", str(tmp_path))] == [None] * 4


def test_without_vllm_its_parsers_are_refused(tiny_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.reasoning", None)
    with pytest.raises(UserError) as refused:
        make_parser("vllm:hermes", ChatTokenizer(tiny_path, "chat"))
    assert re.fullmatch(
        r"rollout\.tool_parser=vllm:hermes: vLLM cannot be imported \(.*vllm.*\): install it, or name another",
        str(refused.value),
    )


@pytest.mark.slow
def test_special_tokens_are_skipped_where_a_request_of_vllm_leaves_it_open(families):
    """As one of vLLM 0.33 does, by None; with tools, most parsers then set it to False."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    class Request(ChatCompletionRequest):
        skip_special_tokens: bool | None = None

    chat = families["hermes"]
    read = make_parser("vllm:hermes", chat)
    read.make_request = Request
    ids = [*chat.encode("No"), chat.hf.bos_token_id or chat.hf.eos_token_id, *chat.encode("!")]
    assert read.parse(ids, chat.decode(ids), []).message["content"] == "No!"


@pytest.mark.slow
def test_a_reply_keeps_its_thoughts_where_no_parser_of_vllm_reads_them(families):
    chat, text = families["qwen3"], "<think>\nhm\n</think>\n\nIt is cold"
    for name, content, thoughts in (("step3p5", text, None), ("step3p5+qwen3", "It is cold", "hm")):
        parsed = parse(chat, make_parser(f"vllm:{name}", chat), text)
        assert (parsed.message["content"], parsed.message.get("reasoning"), parsed.problem) == (content, thoughts, "")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "parser"), [("qwen3", "vllm:hermes+qwen3"), ("llama3", "vllm:llama3_json")])
def test_vllm_reads_the_same(families, family, parser):
    """By its parsers; reasoning as its server does, before the calls."""
    chat = families[family]
    read = make_parser(parser, chat)
    differ: dict[str, str] = {}
    for name, reply in (LLAMA_REPLIES if family == "llama3" else HERMES_REPLIES).items():
        text = reply.text
        if family == "qwen3" and "<think>" not in text:
            text = "<think>\n\n</think>\n\n" + text
        parsed = parse(chat, read, text)
        readable = not reply.problem or bool(reply.calls)
        expected = (list(reply.calls), reply.content, reply.reasoning) if readable else ([], plain(text), "")
        found = (functions(parsed), parsed.message["content"], parsed.message.get("reasoning", ""))
        if (found == expected and bool(parsed.problem) == bool(reply.problem)) == reply.unlike_vllm:
            differ[name] = f"{parsed}, expected {expected}"
    assert differ == {}


@pytest.mark.slow
def test_a_parser_of_vllm_that_cannot_be_had_is_one_sentence(tiny_path):
    chat = ChatTokenizer(tiny_path, "chat")
    cases = {
        "vllm:hermis": r"rollout\.tool_parser=vllm:hermis: vLLM has no tool parser hermis; it has hermes",
        "vllm:hermes+qwen33": "vLLM has no reasoning parser qwen33; it has qwen3",
        "vllm:llama3_json": "vLLM's parser cannot be used with this tokenizer",
    }
    for name, words in cases.items():
        with pytest.raises(UserError, match=words):
            make_parser(name, chat)
