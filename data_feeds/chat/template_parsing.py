"""Parse replies with a response template of transformers: the tokenizer's, a file's, or a built-in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.errors import UserError, first_line
from core.text.json_text import holds_lone_surrogate
from core.types.messages import FunctionCall, ToolSpec
from data_feeds.chat.decoding import decode_exactly, list_special_tokens
from data_feeds.chat.parsed_reply import ParsedReply, PlainParser, finish_reply, refuse_reply
from data_feeds.chat.reply_forms import ReplyForm

if TYPE_CHECKING:
    from data_feeds.chat.tokenizer import ChatTokenizer


class TemplateParser:
    """Reply parser based on a response template of transformers."""

    def __init__(self, tokenizer: ChatTokenizer, form: ReplyForm, *, only_with_tools: bool = False):
        """only_with_tools: return replies to prompts without tools unchanged."""
        self.tokenizer, self.form, self.only_with_tools = tokenizer, form, only_with_tools
        # A header such as "<think>\n" opens a region before the first sampled token, so the parser must see it as a
        # prefix.
        header = tokenizer.reply_header
        begun = [header[header.rindex(text) :] for text in form.begins or () if text in header]
        self.prefix = header if form.begins is None else "".join(begun[:1])
        self.skipped = list_special_tokens(tokenizer.hf).values() if tokenizer.skip_special_tokens else ()

    def parse(self, ids: list[int], text: str, tools: Sequence[ToolSpec]) -> ParsedReply:
        """Parse a reply. Malformed calls become a problem, never an exception."""
        if self.only_with_tools and not tools:
            return PlainParser().parse(ids, text, tools)
        hf = self.tokenizer.hf
        try:
            found = hf.parse_response(
                decode_exactly(hf, self.tokenizer.without_stop(ids), special=True),
                self.form.template,
                prefix=self.prefix,
                tools=list(tools),
            )
            calls = [
                FunctionCall(name=call["name"], arguments=_find_arguments(call, self.form.arguments))
                for call in _list_functions(found.get("tool_calls", []))
            ]
        except Exception as error:  # a border: the library raises all kinds of errors on what a model may write
            return refuse_reply(text, f"The tool call could not be read: {_shorten_error(error)}.")
        content, reasoning = (self._to_text(found.get(region)) for region in ("content", "thinking"))
        return finish_reply(ids, content=content, reasoning=reasoning, calls=calls, tools=tools)

    def _to_text(self, found: Any) -> str:
        """Return the text of a region without the tokens to skip. A region may have several texts."""
        text = "\n".join(map(str, found)) if isinstance(found, list) else str(found or "")
        for token in self.skipped:
            text = text.replace(token, "")
        return text.strip()


def load_form(template: Any, *, key: str) -> ReplyForm:
    """Return the tool-call format of a response template. Raises UserError, beginning with `key`, if it is invalid."""
    from transformers.utils.chat_parsing import ResponseParser

    try:
        ResponseParser(template, prefix="")
    except Exception as error:  # a border: a template that is not one
        raise UserError(f"{key} is no response template of transformers: {first_line(error)}") from error
    return ReplyForm(template=template)


def _list_functions(found: Any) -> list[Mapping[str, Any]]:
    """Return the called functions. Some templates produce nested lists of calls."""
    if isinstance(found, list):
        return [function for one in found for function in _list_functions(one)]
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict):
        raise ValueError("it is no object with a name and arguments")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("it has no name")
    if holds_lone_surrogate(function["name"]):
        raise ValueError("its name holds half of a character")
    return [function]


def _find_arguments(function: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    given = next((function[key] for key in keys if key in function), None)
    arguments = json.loads(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        raise ValueError(f"its {keys[-1]} are no JSON object")
    return arguments


def _shorten_error(error: Exception) -> str:
    """Return a short description of a parsing error."""
    cause = error.__cause__
    if isinstance(cause, json.JSONDecodeError):
        return f"its JSON is not whole or not valid ({cause.msg} at character {cause.pos})"
    return first_line(error).removesuffix(".")
