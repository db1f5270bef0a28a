"""Messages in channels by their ids alone, and the sentences of replies that leave the format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from data_feeds.chat.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    HarmonyParser,
    Marks,
    NotHarmony,
    writes_channels,
)
from data_feeds.chat.tokenizer import ChatTokenizer
from unit_tests.helpers.chat_families import TOOLS
from unit_tests.helpers.sentences import tell
from unit_tests.helpers.template_families import FAMILIES

S, C, J, M, E, L, R = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
STOP = "<|stop|>"
"""Stop of the model's files that is no mark of the format."""
TEXTS = (S, C, J, M, E, L, R, STOP)
WORDS = (
    *("assistant", "user", "analysis", "commentary", "final", "secret", " to=f", " to=g", " json", " x"),
    *("a", "b"),
)
IDS = {text: i for i, text in enumerate((*TEXTS, *WORDS), start=1)}
NAMES = {i: text for text, i in IDS.items()}
MARKS = Marks(
    texts={IDS[text]: text for text in TEXTS if text != STOP}, stops=frozenset(IDS[text] for text in (L, R, STOP))
)


def read(*texts: str) -> list[tuple[Any, ...]]:
    ids = [IDS[text] for text in texts]
    found = MARKS.read_messages(ids, lambda some: "".join(NAMES[i] for i in some))
    return [(m.channel, m.recipient, m.text, m.end, m.behind) for m in found]


@pytest.mark.parametrize(
    ("texts", "messages"),
    [
        ((S, "assistant", C, "final", M, "a", "b", R), [("final", "", "ab", R, 8)]),
        (
            (S, "assistant", C, "analysis", M, "a", E, S, "assistant", C, "final", M, "b", R),
            [("analysis", "", "a", E, 7), ("final", "", "b", R, 14)],
        ),
        ((S, "assistant", C, "final", M, R), [("final", "", "", R, 6)]),
        # every stop ends a message
        ((S, "assistant", C, "final", M, "a", STOP), [("final", "", "a", R, 7)]),
        # other marks are text
        ((S, "assistant", C, "final", M, "a", M, S, C, J, "b", E), [("final", "", f"a{M}{S}{C}{J}b", E, 12)]),
        # the recipient behind the role, behind the channel, and both
        ((S, "assistant", " to=f", C, "commentary", M, "a", L), [("commentary", "f", "a", L, 8)]),
        ((S, "assistant", C, "commentary", " to=g", J, " json", M, "a", L), [("commentary", "g", "a", L, 10)]),
        ((S, "assistant", " x", " to=f", C, "commentary", " x", " to=g", M, "a", L), [("commentary", "f", "a", L, 11)]),
        ((S, "assistant", C, "commentary", J, " json", " to=f", M, "a", L), [("commentary", "", "a", L, 10)]),
        # cut off in a header
        ((S, "assistant", C, "final"), []),
        ((S,), []),
        ((), []),
        ((S, "assistant", C, "analysis", M, "a", E, S, "assistant"), [("analysis", "", "a", E, 7)]),
    ],
)
def test_messages_are_read_by_their_marks(texts, messages):
    assert read(*texts) == messages


def test_a_message_that_was_cut_off_has_no_end():
    [(channel, recipient, text, end, behind)] = read(S, "assistant", C, "analysis", M, "a", "b")
    assert (channel, recipient, text, end) == ("analysis", "", "ab", "") and behind >= 7


NO_MESSAGE = "a message has no <|message|>"
NO_ASSISTANT = "a message is not the assistant's, or has two channels"


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (("a", S, "assistant", C, "final", M, "a", R), "text stands between two messages"),
        ((M, "a", R), "text stands between two messages"),
        ((S, "assistant", C, "final", R), NO_MESSAGE),
        ((S, "assistant", C, "final", S, "assistant", C, "final", M, "a", R), NO_MESSAGE),
        ((S, "assistant", STOP, M, "a", R), NO_MESSAGE),
        ((S, "user", C, "final", M, "a", R), NO_ASSISTANT),
        ((S, C, "final", M, "a", R), NO_ASSISTANT),
        ((S, "assistant", C, "final", C, "final", M, "a", R), NO_ASSISTANT),
        ((S, "assistant", C, "secret", M, "a", R), "a message has the channel secret"),
        ((S, "assistant", C, M, "a", R), "a message has the channel of no name"),
        ((S, "assistant", M, "a", R), "a message has the channel of no name"),
    ],
)
def test_what_leaves_the_format_is_told(texts, sentence):
    assert tell(lambda: read(*texts), NotHarmony) == sentence


def test_the_messages_before_a_wrong_one_are_read():
    ids = [IDS[text] for text in (S, "assistant", C, "final", M, "a", E, "b")]
    found = MARKS.read_messages(ids, lambda some: "".join(NAMES[i] for i in some))
    assert next(found).text == "a"
    assert tell(lambda: next(found), NotHarmony) == "text stands between two messages"


TEMPLATE = (
    "{%- for m in messages %}{{- '<|start|>' + m.role + '<|channel|>final<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last else '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'HEADER' }}{%- endif %}"
)
SPECIAL = (START, MESSAGE, CHANNEL, END, CONSTRAIN)


def load(folder: Any, header: str = "<|start|>assistant", **changes: Any) -> ChatTokenizer:
    family: dict[str, Any] = {
        "template": TEMPLATE.replace("HEADER", header),
        "special": SPECIAL,
        "stops": [CALL],
        **changes,
    }
    return replace(FAMILIES["gpt-oss"], **family).load(folder.mktemp("harmony"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> ChatTokenizer:
    return load(tmp_path_factory)


OSLO = '{"place": "Oslo"}'
ASKS = f"{CHANNEL}commentary to=functions.weather{MESSAGE}"
NEXT = f"{START}assistant"
AT_ONCE = f"{CHANNEL}analysis{MESSAGE}hm{END}{NEXT}"


@pytest.mark.parametrize(
    ("text", "content", "problem"),
    [
        (
            f"{ASKS}{OSLO}{RETURN}",
            OSLO,
            "The reply could not be read: the call of weather does not end with <|call|>.",
        ),
        (
            f"{ASKS}{OSLO}{END}{NEXT}{CHANNEL}final{MESSAGE}x{RETURN}",
            f"{OSLO}\nassistantfinalx",
            "The reply could not be read: the call of weather does not end with <|call|>.",
        ),
        (
            f"{ASKS}[2]{CALL}",
            "[2]",
            "The reply could not be read: the arguments of weather are no JSON object.",
        ),
        (
            f"{ASKS}{{{CALL}",
            "{",
            "The reply could not be read: the JSON of the call of weather is not valid (Expecting property name "
            "enclosed in double quotes: line 1 column 2 (char 1)).",
        ),
        (
            f"{CHANNEL}commentary{MESSAGE}x{CALL}",
            "x",
            "The reply could not be read: a message to nobody ends with <|call|>.",
        ),
        (
            f"{CHANNEL}commentary to=functions.{MESSAGE}x{CALL}",
            "x",
            "The reply could not be read: a message to nobody ends with <|call|>.",
        ),
        ("x" + RETURN, "assistantx", "The reply could not be read: a message has no <|message|>."),
    ],
)
def test_a_call_that_cannot_be_made_is_one_sentence_and_its_text_stays(chat, text, content, problem):
    found = HarmonyParser(chat, key="k").parse(chat.encode(AT_ONCE + text), "", TOOLS)
    assert (found.problem, found.message["content"]) == (problem, content)
    assert found.message.get("reasoning") == "hm" and "tool_calls" not in found.message


@pytest.mark.parametrize("to", ["functions.weather", "weather"])
def test_a_tool_is_called_by_its_name_with_and_without_the_prefix(chat, to):
    ids = chat.encode(f"{CHANNEL}commentary to={to}{MESSAGE}{OSLO}{CALL}")
    found = HarmonyParser(chat, key="k").parse(ids, "", TOOLS)
    [made] = found.message.get("tool_calls", [])
    assert made["function"] == {"name": "weather", "arguments": {"place": "Oslo"}} and not found.problem
    assert found.message["content"] == "" and "reasoning" not in found.message


@pytest.mark.parametrize("channel", ["commentary", "analysis"])
def test_without_tools_a_call_is_content_and_no_thought(chat, channel):
    ids = chat.encode(f"{AT_ONCE}{CHANNEL}{channel} to=functions.weather{MESSAGE}{OSLO}{CALL}")
    found = HarmonyParser(chat, key="k").parse(ids, "", [])
    assert found.message == {"role": "assistant", "content": OSLO, "reasoning": "hm"} and not found.problem


def test_texts_of_several_messages_are_lines(chat):
    said = f"{CHANNEL}commentary{MESSAGE} one {END}{NEXT}{CHANNEL}final{MESSAGE}two {RETURN}"
    thought = f"{CHANNEL}analysis{MESSAGE} hm{END}{NEXT}"
    found = HarmonyParser(chat, key="k").parse(chat.encode(thought + AT_ONCE + said), "", TOOLS)
    assert found.message == {"role": "assistant", "content": "one \ntwo", "reasoning": "hm\nhm"}


def test_a_reply_begins_with_the_last_start_of_its_header(tmp_path_factory):
    twice = load(tmp_path_factory, f"{START}system{MESSAGE}be brief{END}{START}assistant")
    found = HarmonyParser(twice, key="k").parse(twice.encode(f"{CHANNEL}final{MESSAGE}4{RETURN}"), "", [])
    assert (found.message["content"], found.problem) == ("4", "")


def test_a_parser_of_channels_says_what_the_model_lacks(chat, tmp_path_factory):
    assert HarmonyParser(chat, key="k").deaf == "" and writes_channels(chat)
    plain = load(tmp_path_factory, "assistant:")
    assert tell(lambda: HarmonyParser(plain, key="k")) == (
        "k: the chat template does not begin a reply with <|start|>: name another parser"
    )
    assert not writes_channels(plain)
    lacks = load(tmp_path_factory, special=(START, CHANNEL, END), stops=[CALL])
    assert tell(lambda: HarmonyParser(lacks, key="k")) == (
        "k: the tokenizer of this model has no token <|message|>: name another parser"
    )
    assert not writes_channels(lacks)
    deaf = load(tmp_path_factory, special=(*SPECIAL, CALL), stops=[])
    [number] = deaf.hf.convert_tokens_to_ids([CALL])
    assert HarmonyParser(deaf, key="k").deaf == (
        "k: no reply would stop at a call, because eos_token_id in generation_config.json of the model lacks "
        f"{number}, the token <|call|>: add it"
    )
