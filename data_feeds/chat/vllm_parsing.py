"""Tool parsers of vLLM, by name. They parse replies as vLLM's server does. vLLM is imported only if one is named.

vLLM's parsers do not report malformed calls; they return the text. A text without parsed calls counts as malformed if
it contains the mark that opens a call. For formats of bare JSON, it counts if it begins like a call.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from core.errors import UserError, first_line, quote
from core.text.json_text import holds_lone_surrogate
from core.types.messages import FunctionCall, ToolSpec
from data_feeds.chat.decoding import decode_exactly
from data_feeds.chat.parsed_reply import ParsedReply, finish_reply, refuse_reply

if TYPE_CHECKING:
    from data_feeds.chat.tokenizer import ChatTokenizer

MARKS = ("start", "bot_token")
"""Substrings of attribute names under which vLLM's parsers store the opening mark of a call."""
BARE_CALL = re.compile(r"\s*\{[^{}]*\"name\"")
"""Start of a call in a format of bare JSON."""
SHORTEST_MARK = 3


class VllmParser:
    """Reply parser based on a tool parser of vLLM, and optionally a reasoning parser."""

    def __init__(self, tokenizer: ChatTokenizer, make_parser: Any, make_reasoning: Any):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self.tokenizer, self.make_parser, self.make_reasoning = tokenizer, make_parser, make_reasoning
        self.make_request: Any = ChatCompletionRequest
        marks = _list_marks(make_parser(tokenizer.hf))
        self.marks = list(marks.values())
        self.is_bare = not any("start" in name for name in marks)
        if make_reasoning is not None:
            make_reasoning(tokenizer.hf)  # raises here, at the start of the run, if the tokenizer lacks its tokens

    def parse(self, ids: list[int], text: str, tools: Sequence[ToolSpec]) -> ParsedReply:
        """Parse a reply. Malformed calls become a problem, never an exception."""
        hf = self.tokenizer.hf
        try:
            request = self.make_request(messages=[{"role": "user", "content": "."}], tools=list(tools) or None)
            # a new parser per reply, since it is constructed with the tools of the request
            parser = self.make_parser(hf, request.tools)
            # the parser decides whether special tokens are decoded: some formats mark calls by them
            request = parser.adjust_request(request)
            # None is vLLM's default from 0.33 on, and as True
            special = request.skip_special_tokens is False or not self.tokenizer.skip_special_tokens
            said = decode_exactly(hf, self.tokenizer.without_stop(ids), special=special)
            reasoning = ""
            if self.make_reasoning is not None:
                thought, left = self.make_reasoning(hf).extract_reasoning(said, request)
                reasoning, said = thought or "", left or ""
            elif hasattr(parser, "skip_reasoning_parsing"):
                parser.skip_reasoning_parsing = True
            found = parser.extract_tool_calls(said, request)
            calls = [_read_call(call) for call in found.tool_calls]
        except Exception as error:  # a border: the parsers raise all kinds of errors on what a model may write
            return refuse_reply(text, f"The tool call could not be read: {first_line(error).removesuffix('.')}.")
        content = found.content or ""
        # Content that differs from the reply has lost a part: the parser recognized a call but could not parse it.
        is_cut = content.strip() != said.strip() or any(mark in said for mark in self.marks)
        if not calls and (is_cut or (self.is_bare and BARE_CALL.match(said))):
            return refuse_reply(text, "The tool call could not be read: it is not whole, or not in the model's form.")
        return finish_reply(ids, content=content.strip(), reasoning=reasoning.strip(), calls=calls, tools=tools)


def make_vllm_parser(name: str, tokenizer: ChatTokenizer, *, key: str) -> VllmParser:
    """Create a parser of vLLM from TOOLS or TOOLS+REASONING. Raises UserError for an unknown name."""
    try:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise UserError(f"{key}: vLLM cannot be imported ({first_line(error)}): install it, or name another") from error
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # else every malformed call is a traceback
    for_tools, _, for_reasoning = name.partition("+")
    tools: Any = ToolParserManager
    thoughts: Any = ReasoningParserManager
    _check_name(for_tools, tools.list_registered(), "tool", key)
    if "+" in name:
        _check_name(for_reasoning, thoughts.list_registered(), "reasoning", key)
    try:
        make_reasoning = thoughts.get_reasoning_parser(for_reasoning) if for_reasoning else None
        return VllmParser(tokenizer, tools.get_tool_parser(for_tools), make_reasoning)
    except Exception as error:  # a border: a parser may ask for tokens that the tokenizer does not have
        raise UserError(f"{key}: vLLM's parser cannot be used with this tokenizer: {first_line(error)}") from error


def _check_name(name: str, known: list[str], kind: str, key: str) -> None:
    if name not in known:
        near = ", ".join(get_close_matches(name, known)) or ", ".join(known)
        raise UserError(f"{key}: vLLM has no {kind} parser {quote(name)}; it has {near}")


def _list_marks(parser: Any) -> dict[str, str]:
    """Return the opening marks of calls, by attribute name of the parser."""
    names = [name for name in dir(parser) if name[0] != "_" and any(part in name for part in MARKS)]
    found = {name: getattr(parser, name, None) for name in names}
    # a mark of one or two characters, such as "[", also occurs in plain text
    return {name: text for name, text in found.items() if isinstance(text, str) and len(text) >= SHORTEST_MARK}


def _read_call(call: Any) -> FunctionCall:
    arguments = json.loads(call.function.arguments)
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no JSON object")
    if holds_lone_surrogate(call.function.name):
        raise ValueError("its name holds half of a character")
    return FunctionCall(name=call.function.name, arguments=arguments)
