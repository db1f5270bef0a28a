"""Readings of a verdict: the value that a judge states, or the reason why there is none.

A verdict stands in a tag, or under a key, with the hash of the policy's text. The policy's text cannot contain that
hash, so a verdict that the judge quotes from it is not read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from core.numbers import is_finite
from rewards.judging.settings import JudgeSettings
from rewards.replies import cut_reasoning

Choice = Mapping[str, Any]
"""First entry of `choices` of a chat completion."""
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?", re.ASCII)
MOST_BRACES = 20
"""Maximum number of places in a text at which a JSON object is looked for."""
LEAST_MASS = 0.5
"""Minimum probability of yes and no together."""


class Unreadable(Exception):
    """Verdict that cannot be read. The message says why."""


def read_verdict(choice: Choice, settings: JudgeSettings, key: str) -> float:
    """Return the value that a judge states. Raises Unreadable."""
    if settings.verdict == "probability":
        return _read_probability(choice, settings.words)
    text = read_text(choice)
    if choice.get("finish_reason") == "length":
        raise Unreadable("the verdict was cut off by max_tokens")
    if not text.strip():
        raise Unreadable("the judge wrote nothing")
    # a verdict in the judge's reasoning is a draft
    text = cut_reasoning(text)
    values = _list_json(text, key) if settings.verdict == "json" else _list_tagged(text, settings, key)
    if not values:
        raise Unreadable("the judge stated no verdict in the form asked for")
    if len({*values}) > 1:
        raise Unreadable("the judge stated several verdicts that differ")
    if settings.verdict != "letter" and not settings.scale[0] <= values[0] <= settings.scale[1]:
        raise Unreadable(f"the verdict {values[0]:g} is outside of scale")
    return values[0]


def find_choice(answer: Mapping[str, Any]) -> Choice | None:
    """Return the first choice of a chat completion; None if it has none, as an error of a gateway."""
    choices = answer.get("choices")
    first: Any = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


def read_text(choice: Choice) -> str:
    """Return the text of a judge; "" if it has refused."""
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, str) else ""


def _list_tagged(text: str, settings: JudgeSettings, key: str) -> list[float]:
    """Return the values between verdict tags. Raises Unreadable if the last is none."""
    found = re.findall(rf"<verdict-{key}>(.*?)</verdict-{key}>", text, re.DOTALL)
    labels = {label.lower(): value for label, value in settings.labels.items()}
    values: list[float | None] = []
    for inside in map(str.strip, found):
        if settings.verdict == "letter":
            values.append(labels.get(inside.lower()))
        else:
            values.append(float(inside) if NUMBER.fullmatch(inside) else None)
    if values and values[-1] is None:
        raise Unreadable(f"the verdict {found[-1].strip()!r:.60} is not of the form asked for")
    # a judge may repeat the instruction, which has no value
    return [value for value in values if value is not None]


def _list_json(text: str, key: str) -> list[float]:
    """Return the values of all JSON objects with the key of the verdict."""
    name, decoder = f"verdict_{key}", json.JSONDecoder(object_pairs_hook=_refuse_repeated)
    values: list[float] = []
    end = 0
    # each brace may cost a look at the whole text, which a hostile one would make long
    for at in [found.start() for found in re.finditer(r"\{", text[: text.rfind(name) + 1])][-MOST_BRACES:]:
        if at < end:
            continue  # inside of the object before
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            continue
        if name in found:
            values.append(_read_number(found[name]))
    return values


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return dict(pairs)


def _read_number(value: Any) -> float:
    if not is_finite(value):
        raise Unreadable(f"the verdict {value!r:.60} is not a number")
    return float(value)


def _read_probability(choice: Choice, words: tuple[str, str]) -> float:
    """Return P(yes) / (P(yes) + P(no)) of the first token. words: yes and no."""
    try:
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        pairs = [(str(one["token"]).strip().lower(), math.exp(float(one["logprob"]))) for one in top]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise Unreadable("the server reported no log-probabilities (logprobs, top_logprobs)") from error
    yes, no = (sum(p for token, p in pairs if token == word.lower()) for word in words)
    if not yes + no >= LEAST_MASS:
        raise Unreadable(f"the judge's first word is neither {words[0]} nor {words[1]}")
    return yes / (yes + no)
