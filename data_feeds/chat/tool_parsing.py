"""Reply parser of a run: content, reasoning and tool calls. Malformed calls never raise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import UserError, quote
from core.loading import FileSpec, hash_file
from core.text.text_files import parse_json, read_text
from data_feeds.chat.harmony import NAME as HARMONY
from data_feeds.chat.harmony import HarmonyParser as HarmonyParser
from data_feeds.chat.harmony import writes_channels
from data_feeds.chat.parsed_reply import ParsedReply as ParsedReply
from data_feeds.chat.parsed_reply import PlainParser as PlainParser
from data_feeds.chat.parsed_reply import ReplyParser as ReplyParser
from data_feeds.chat.parsed_reply import rename_taken as rename_taken
from data_feeds.chat.reply_forms import REPLY_FORMS
from data_feeds.chat.template_parsing import TemplateParser, load_form

if TYPE_CHECKING:
    from data_feeds.chat.tokenizer import ChatTokenizer

KEY = "rollout.tool_parser"
VLLM = "vllm:"
OWN = "response_template"
"""Name of the parser that uses the tokenizer's own response template."""


def make_parser(name: str | None, tokenizer: ChatTokenizer) -> ReplyParser:
    """Create the parser that `rollout.tool_parser` names. Raises UserError for an unknown name."""
    own, key = getattr(tokenizer.hf, OWN, None), f"{KEY}={quote(name)}"
    if name == HARMONY or (name is None and writes_channels(tokenizer)):
        return HarmonyParser(tokenizer, key=key if name else f"{KEY} is unset, and the model writes channels")
    if name is None and own is None:
        return PlainParser()
    if name is None:  # the recipe named no parser: replies to prompts without tools stay plain text
        form = load_form(own, key=f"the {OWN} of the tokenizer")
        return TemplateParser(tokenizer, form, only_with_tools=True)
    if name == OWN:
        if own is None:
            raise UserError(f"{key}: the tokenizer of this model brings none; {_list_names()}")
        return TemplateParser(tokenizer, load_form(own, key=key))
    if name in REPLY_FORMS:
        return TemplateParser(tokenizer, REPLY_FORMS[name])
    if name.startswith(VLLM):
        from data_feeds.chat.vllm_parsing import make_vllm_parser

        return make_vllm_parser(name.removeprefix(VLLM), tokenizer, key=key)
    if name.endswith(".json"):
        if not os.path.isfile(name):
            raise UserError(f"{key}: there is no such file")
        return TemplateParser(tokenizer, load_form(parse_json(read_text(Path(name), key), key), key=key))
    raise UserError(f"{key} is no parser; {_list_names()}")


def locate_parser(name: str | None) -> FileSpec | None:
    """Return the file of a parser, or None if it is not read from a file."""
    if name is None or not name.endswith(".json") or not os.path.isfile(name):
        return None
    path = Path(name).absolute()
    return FileSpec(module=path.stem, path=str(path), sha256=hash_file(path), in_package=False)


def check_parser(name: str | None, tokenizer: ChatTokenizer, *, has_tools: bool) -> None:
    """Raise UserError if the parser cannot be created, or if tools are present and their calls would not be read."""
    parser = make_parser(name, tokenizer)
    if has_tools and isinstance(parser, PlainParser):
        raise UserError(
            f"{KEY} is unset, there are tools, and the tokenizer has no response template: nothing would read the "
            f"calls; {_list_names()}"
        )
    if has_tools and (why := say_deaf(parser)):
        raise UserError(why)


def say_deaf(parser: ReplyParser) -> str:
    """Return one sentence why a parser reads no calls of tools, else ""."""
    if isinstance(parser, PlainParser):
        return (
            f"{KEY} is unset and the tokenizer has no response template, so nothing would read the calls of tools: set "
            "that key in the recipe, or leave tools out"
        )
    return parser.deaf if isinstance(parser, HarmonyParser) else ""


def _list_names() -> str:
    names = ", ".join((*REPLY_FORMS, HARMONY))
    return f"name the form in which the model writes calls: {names}, {VLLM}NAME, or a .json file"
