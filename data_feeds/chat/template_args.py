"""Arguments of the chat template: check that it uses them, and pin the date that it writes."""

from __future__ import annotations

import inspect
from datetime import datetime
from typing import Any, TypeVar

from configs.data_schema import TemplateConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError, quote
from core.timing.progress import say
from core.types.samples import Message
from data_feeds.chat.model_files import find_variables
from data_feeds.chat.template_append import TemplateRefuses
from data_feeds.chat.tokenizer import ChatTokenizer

T = TypeVar("T", bound=TemplateConfig)
CLOCK = "strftime_now"
"""Function of transformers that formats the present time, for templates that write the date."""
TRIALS: list[list[Message]] = [
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]
"""Conversations rendered with and without the recipe's arguments, to compare the text."""


def make_tokenizer(model: ModelConfig, data: TemplateConfig, *, skip_special_tokens: bool = True) -> ChatTokenizer:
    """Load the tokenizer of a run. skip_special_tokens: of the text of replies (`rollout.skip_special_tokens`)."""
    arguments = data.template_args | make_clock(data.template_date)
    tokenizer = ChatTokenizer(
        model.path,
        data.template,
        trust_remote_code=model.trust_remote_code,
        template_args=arguments,
        chat_template=data.chat_template,
        end_of_turn=data.end_of_turn,
        images=model.images,
    )
    tokenizer.skip_special_tokens = skip_special_tokens
    return tokenizer


def pin_date(tokenizer: ChatTokenizer, data: T, earlier: str | None) -> T:
    """Fix the date that the template writes, for the tokenizer and in the keys: given, `earlier`, or now.

    earlier: the date of the run that is resumed. Unchanged if the template writes no date.
    """
    if not writes_date(tokenizer) or data.template_date is not None:
        return data
    pinned = earlier or datetime.now().isoformat(timespec="seconds")
    tokenizer.template_args |= make_clock(pinned)
    return data.model_copy(update={"template_date": pinned})


def writes_date(tokenizer: ChatTokenizer) -> bool:
    """Tell whether the chat template asks for the present time."""
    # a tokenizer may have several templates, by name
    return tokenizer.template == "chat" and CLOCK in str(tokenizer.hf.chat_template)


def make_clock(pinned: str | None) -> dict[str, Any]:
    """Return the template argument that stands in for transformers' function of the same name; {} for None."""
    return {} if pinned is None else {CLOCK: datetime.fromisoformat(pinned).strftime}


def check_template_args(tokenizer: ChatTokenizer, data: TemplateConfig) -> None:
    """Raise UserError for an argument or system prompt that the template ignores. Log arguments without effect."""
    for name in data.template_args:
        _check_argument(tokenizer, name)
    if data.template_date is not None and not writes_date(tokenizer):
        raise UserError("data.template_date: the chat template of this model writes no date: leave it out")
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
    found = find_variables(tokenizer.hf.get_chat_template(), "data.template_args")
    ours = {*inspect.signature(tokenizer.hf.apply_chat_template).parameters, "messages"}
    set_by_transformers = {"raise_exception", CLOCK, *tokenizer.hf.special_tokens_map}
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
