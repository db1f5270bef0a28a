"""Facts of a model's folder about conversations: its chat template, its stop tokens, and whether it sees images."""

from __future__ import annotations

import os
import re
from pathlib import Path

from core.errors import UserError, first_line, name_error, quote
from core.text.text_files import read_text
from modeling.hf_config import needs_images
from modeling.pretrained import load_pretrained

TEMPLATE_KEY = "data.chat_template"
GENERATION_TAG = r"\{%-?\s*(end)?generation\s*-?%\}"
"""Jinja tag added by transformers. It contains no arguments."""


def check_template(found: str | dict[str, str] | None, who: str, *, sees: bool) -> None:
    """Raise UserError for a model without a chat template that can be used. found: as transformers has it."""
    if not found and sees:
        raise UserError(f"{who} has no chat template: add one to its processor")
    if not found:
        raise UserError(f"{who} has no chat template: set data.template=plain, or {TEMPLATE_KEY}")
    if isinstance(found, dict) and "default" not in found:
        names = ", ".join(sorted(found))
        raise UserError(f"{who} has no default chat template, only {names}: name the file of one in {TEMPLATE_KEY}")


def read_template(given: str) -> str:
    """Return the text of data.chat_template, which is a path or the text itself."""
    is_text = "{{" in given or "{%" in given
    text = given if is_text else read_text(Path(given), f"{TEMPLATE_KEY}={quote(given)}")
    find_variables(text, TEMPLATE_KEY if is_text else f"{TEMPLATE_KEY}={quote(given)}")
    return text


def find_variables(template: str, key: str) -> set[str]:
    """Return the names of the variables that a template reads. Raises UserError for a template that is not Jinja."""
    from jinja2 import Environment, meta
    from jinja2.exceptions import TemplateError

    # the template is parsed, not rendered: a variable read in one branch only is found too
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return meta.find_undeclared_variables(environment.parse(re.sub(GENERATION_TAG, "", template)))
    except TemplateError as error:
        raise UserError(f"{key}: the chat template cannot be read: {first_line(error)}") from error


def sees_images(path: str, key: str, trust_remote_code: bool) -> bool:
    if os.path.isdir(path) and not (Path(path) / "config.json").is_file():  # a tokenizer alone
        return False
    return needs_images(path, key=key, trust_remote_code=trust_remote_code)


def read_stop_ids(path: str, key: str, *, trust_remote_code: bool) -> list[int]:
    """Return the stop tokens of the model's generation config. Chat models may have several."""
    from transformers import GenerationConfig

    if os.path.isdir(path) and not (Path(path) / "generation_config.json").is_file():
        return []
    try:
        found = load_pretrained(GenerationConfig, path, trust_remote_code=trust_remote_code).eos_token_id
    except Exception as error:  # a border, as above
        raise UserError(
            f"{key}={path}: its generation_config.json cannot be read, but it names the stop tokens: "
            f"{name_error(error)}"
        ) from error
    return found if isinstance(found, list) else [] if found is None else [found]
