"""Check that the chat template uses `data.template_args` and `data.system_prompt`."""

from __future__ import annotations

import inspect
import re
from typing import Any

from configs.data_schema import TemplateConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError, first_line, quote
from core.timing.progress import say
from core.types.samples import Message
from data_feeds.chat.template_append import TemplateRefuses
from data_feeds.chat.tokenizer import ChatTokenizer

TRIALS: list[list[Message]] = [
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]
"""Conversations rendered with and without the recipe's arguments, to compare the text."""
GENERATION_TAG = r"\{%-?\s*(end)?generation\s*-?%\}"
"""Jinja tag added by transformers. It contains no arguments."""


def make_tokenizer(model: ModelConfig, data: TemplateConfig) -> ChatTokenizer:
    """Load the tokenizer of a run."""
    return ChatTokenizer(
        model.path, data.template, trust_remote_code=model.trust_remote_code, template_args=data.template_args
    )


def check_template_args(tokenizer: ChatTokenizer, data: TemplateConfig) -> None:
    """Raise UserError for an argument or system prompt that the template ignores. Log arguments without effect."""
    for name in data.template_args:
        _check_argument(tokenizer, name)
    if data.system_prompt is not None:
        _check_system_prompt(tokenizer, data.system_prompt)


def _check_argument(tokenizer: ChatTokenizer, name: str) -> None:
    key = f"data.template_args.{quote(name)}"
    # such as add_generation_prompt: our own calls depend on their values
    if name in inspect.signature(tokenizer.hf.apply_chat_template).parameters:
        raise UserError(f"{key} is set by FeynRL: leave it out")
    read = list_arguments(tokenizer)
    if name not in read:
        raise UserError(
            f"{key}: the chat template of this model does not read it; it reads {', '.join(sorted(read)) or 'none'}"
        )
    given = tokenizer.template_args
    written = _write_trials(tokenizer, given)
    if written == _write_trials(tokenizer, {k: v for k, v in given.items() if k != name}):
        say(f"{key}={given[name]!r}: the chat template writes the same text without it")


def list_arguments(tokenizer: ChatTokenizer) -> set[str]:
    """Return the names of the variables that only `data.template_args` can set."""
    from jinja2 import Environment, meta
    from jinja2.exceptions import TemplateError

    template = tokenizer.hf.get_chat_template()
    # the template is parsed, not rendered: a variable read in one branch only is found too
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        found = meta.find_undeclared_variables(environment.parse(re.sub(GENERATION_TAG, "", template)))
    except TemplateError as error:
        raise UserError(f"data.template_args: the chat template cannot be read: {first_line(error)}") from error
    ours = {*inspect.signature(tokenizer.hf.apply_chat_template).parameters, "messages"}
    set_by_transformers = {"raise_exception", "strftime_now", *tokenizer.hf.special_tokens_map}
    return found - ours - set_by_transformers


def _write_trials(tokenizer: ChatTokenizer, arguments: dict[str, Any]) -> list[str]:
    """Render the trial conversations with these arguments. A rejected trial gives the reason as its text."""
    before, tokenizer.template_args = tokenizer.template_args, arguments
    try:
        return [_write(tokenizer, trial, next_) for trial in TRIALS for next_ in (False, True)]
    finally:
        tokenizer.template_args = before


def _write(tokenizer: ChatTokenizer, messages: list[Message], reply_next: bool) -> str:
    try:
        return tokenizer.render_text(messages, reply_next=reply_next)
    except TemplateRefuses as refusal:
        return f"refused: {refusal}"


def _check_system_prompt(tokenizer: ChatTokenizer, prompt: str) -> None:
    turn: Message = {"role": "system", "content": prompt}
    try:
        text = tokenizer.render_text([turn, *TRIALS[0]], reply_next=True)
    except TemplateRefuses as refusal:
        raise UserError(f"data.system_prompt: the chat template refuses a system turn: {refusal}") from refusal
    # stripped, because templates trim the content of a turn
    if prompt.strip() not in text:
        raise UserError("data.system_prompt: the chat template does not write the system turn: leave it out")
