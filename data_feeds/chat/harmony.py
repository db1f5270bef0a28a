"""Replies in channels: OpenAI's Harmony format, which gpt-oss writes, read by token ids.

A reply is one message or more. The header of the prompt, `<|start|>assistant`, begins the first:

    <|start|>assistant<|channel|>analysis<|message|>Two and two.<|end|>
    <|start|>assistant<|channel|>final<|message|>4<|return|>

    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>

analysis is reasoning. final is content, and so is commentary without a recipient. A recipient makes a message a tool
call, which ends the reply. https://github.com/openai/harmony
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import UserError, first_line
from core.text.json_text import decode_json
from core.types.messages import FunctionCall, ToolSpec
from data_feeds.chat.decoding import decode_exactly
from data_feeds.chat.parsed_reply import ParsedReply, finish_reply

if TYPE_CHECKING:
    from data_feeds.chat.tokenizer import ChatTokenizer

NAME = "harmony"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
NEEDED = (START, CHANNEL, MESSAGE, END, CALL)
"""Tokens without which a tokenizer cannot write channels."""
FUNCTIONS = "functions."
"""Start of the recipients that are tools of the conversation."""


class NotHarmony(ValueError):
    """Error of tokens that are no messages of this format, or no call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMessage:
    """Message of a reply."""

    channel: str
    recipient: str
    """Tool that is called; "" without one."""
    text: str
    end: str
    """Token that ended it; "" if the reply was cut off."""
    behind: int
    """Place of the first token behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Token ids of the format."""

    texts: dict[int, str]
    """Texts of the tokens of this module, by id."""
    stops: frozenset[int]
    """Tokens that end a reply."""

    def read_messages(self, ids: Sequence[int], decode: Callable[[list[int]], str]) -> Iterator[ChannelMessage]:
        """Yield the messages of a reply, from a `<|start|>` on. decode: returns the text of tokens.

        Raises NotHarmony where the ids leave the format, after the messages before. A header without its message, at
        the end of a reply that was cut off, yields nothing.
        """
        at = 0
        while at < len(ids):
            if self.texts.get(ids[at]) != START:
                raise NotHarmony("text stands between two messages")
            body = self._find_mark(ids, at + 1, beyond=(CHANNEL, CONSTRAIN))
            if body == len(ids):
                return
            if self.texts.get(ids[body]) != MESSAGE:
                raise NotHarmony("a message has no <|message|>")
            # other marks are text here, as OpenAI's parser has it
            end = self._find_mark(ids, body + 1, beyond=(START, CHANNEL, CONSTRAIN, MESSAGE))
            mark = "" if end == len(ids) else self.texts.get(ids[end], RETURN)
            channel, recipient = self._read_header(ids[at + 1 : body], decode)
            at = end + 1
            text = decode([*ids[body + 1 : end]])
            yield ChannelMessage(channel=channel, recipient=recipient, text=text, end=mark, behind=at)

    def _find_mark(self, ids: Sequence[int], at: int, *, beyond: Sequence[str] = ()) -> int:
        """Return the place of the next mark or stop, but for those in `beyond`; the length without one."""
        marks = (i for i in range(at, len(ids)) if ids[i] in self.texts or ids[i] in self.stops)
        return next((i for i in marks if self.texts.get(ids[i]) not in beyond), len(ids))

    def _read_header(self, ids: Sequence[int], decode: Callable[[list[int]], str]) -> tuple[str, str]:
        """Return channel and recipient; the recipient may stand behind the role or behind the channel."""
        parts: list[list[int]] = [[]]
        kinds = [START]
        for token in ids:
            if token in self.texts:
                parts.append([])
                kinds.append(self.texts[token])
            else:
                parts[-1].append(token)
        words = {kind: decode(part).split() for kind, part in zip(kinds, parts, strict=True)}
        role, behind = words[START], words.get(CHANNEL, [])
        if len(words) < len(kinds) or role[:1] != ["assistant"]:
            raise NotHarmony("a message is not the assistant's, or has two channels")
        if behind[:1] not in (["analysis"], ["commentary"], ["final"]):
            raise NotHarmony(f"a message has the channel {' '.join(behind[:1]) or 'of no name'}")
        named = [word.removeprefix("to=") for word in (*role[1:], *behind[1:]) if word.startswith("to=")]
        return behind[0], "".join(named[:1])


class HarmonyParser:
    """Reply parser of the format."""

    def __init__(self, tokenizer: ChatTokenizer, *, key: str):
        """Raise UserError if the tokenizer lacks tokens of the format."""
        if lacking := [text for text in NEEDED if text not in tokenizer.hf.get_vocab()]:
            raise UserError(f"{key}: the tokenizer of this model has no token {lacking[0]}: name another parser")
        self.tokenizer = tokenizer
        known = {text: tokenizer.hf.get_vocab().get(text) for text in (*NEEDED, CONSTRAIN, RETURN)}
        self.marks = Marks(
            texts={token: text for text, token in known.items() if token is not None},
            stops=frozenset(tokenizer.stop_token_ids),
        )
        self.deaf = ""
        """One sentence why no reply would stop at a call, else ""."""
        if known[CALL] not in self.marks.stops:
            self.deaf = (
                f"{key}: no reply would stop at a call, because eos_token_id in generation_config.json of the model "
                f"lacks {known[CALL]}, the token {CALL}: add it"
            )
        header = tokenizer.encode(tokenizer.reply_header)
        begun = [at for at, token in enumerate(header) if token == known[START]]
        if not begun:
            raise UserError(f"{key}: the chat template does not begin a reply with {START}: name another parser")
        self.header = header[begun[-1] :]

    def parse(self, ids: list[int], text: str, tools: Sequence[ToolSpec]) -> ParsedReply:
        """Parse a reply. What leaves the format becomes a problem: what was read before is kept, the rest is content.

        Without tools, or with a call that cannot be parsed, calls are content.
        """
        read: list[ChannelMessage] = []
        calls: list[FunctionCall] = []
        whole, problem, rest = [*self.header, *ids], "", ""
        try:
            for message in self.marks.read_messages(whole, self._decode):
                read.append(message)
                if tools and (message.recipient or message.end == CALL):
                    calls.append(_read_call(message))
        except NotHarmony as error:
            problem = f"The reply could not be read: {error}."
            rest = self._decode(whole[read[-1].behind if read else len(self.header) :])
            calls = []
        called = [m for m in read if m.recipient and calls]
        thoughts = [m for m in read if m.channel == "analysis" and not m.recipient]
        content = "\n".join([*(m.text for m in read if m not in called and m not in thoughts), rest]).strip()
        reasoning = "\n".join(m.text for m in thoughts).strip()
        found = finish_reply(ids, content=content, reasoning=reasoning, calls=calls, tools=tools)
        return ParsedReply(message=found.message, refusal=problem, tools=tools)

    def _decode(self, ids: list[int]) -> str:
        return decode_exactly(self.tokenizer.hf, ids, special=not self.tokenizer.skip_special_tokens)


def writes_channels(tokenizer: ChatTokenizer) -> bool:
    """Tell whether a tokenizer has the tokens of the format, and its template begins replies with them."""
    vocabulary = tokenizer.hf.get_vocab()
    return all(text in vocabulary for text in NEEDED) and START in tokenizer.reply_header


def _read_call(message: ChannelMessage) -> FunctionCall:
    name = message.recipient.removeprefix(FUNCTIONS)
    if not name:
        raise NotHarmony(f"a message to nobody ends with {CALL}")
    if message.end != CALL:
        raise NotHarmony(f"the call of {name} does not end with {CALL}")
    try:
        arguments = decode_json(message.text)
    except ValueError as error:
        raise NotHarmony(f"the JSON of the call of {name} is not valid ({first_line(error)})") from error
    if not isinstance(arguments, dict):
        raise NotHarmony(f"the arguments of {name} are no JSON object")
    return FunctionCall(name=name, arguments=arguments)
