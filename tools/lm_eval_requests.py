"""What lm_eval asks of a generated text: its generation arguments, as settings of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import UserError

MAX_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the longest reply, the first that is given counts."""
DEFAULT_MAX_NEW_TOKENS = 256
"""Tokens of a reply where the task does not say; the harness's models have this number too."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "typical_p": (None, 1, 1.0),
    "repetition_penalty": (None, 1, 1.0),
    "num_beams": (None, 1),
    "n": (None, 1),
}
"""Arguments that our engines do not have, with the values that change nothing."""
OF_SAMPLING = ("top_p", "top_k", "min_p", "typical_p")
"""Those that change nothing where the most probable token is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Text that is asked for."""

    context: str
    ends: tuple[str, ...]
    """Texts before which the reply stops."""
    temperature: float
    """0 is greedy."""
    max_new_tokens: int


def read_request(context: str, arguments: Mapping[str, Any]) -> Asked:
    """Return what a request asks for. Raises UserError for what our engines do not do.

    >>> read_request("1+1=", {"until": "\\n", "do_sample": False, "temperature": 0.7, "max_gen_toks": 4})
    Asked(context='1+1=', ends=('\\n',), temperature=0.0, max_new_tokens=4)
    """
    given = dict(arguments)
    until = given.pop("until", None)
    ends = (until,) if isinstance(until, str) else tuple(until or ())
    longest = [int(value) for name in MAX_NEW_TOKENS if (value := given.pop(name, None)) is not None]
    temperature = _read_temperature(given.pop("do_sample", None), given.pop("temperature", None))
    for name, value in given.items():
        if name not in NEUTRAL:
            raise UserError(f"a task asks for {name}={value!r} (generation_kwargs), which our engines do not have")
        if value not in NEUTRAL[name] and (temperature or name not in OF_SAMPLING):
            raise UserError(
                f"a task asks for {name}={value!r} (generation_kwargs), and our engines sample from the whole "
                f"distribution of the model: set {name}={NEUTRAL[name][1]} with --gen_kwargs"
            )
    return Asked(
        context=context,
        ends=ends,
        temperature=temperature,
        max_new_tokens=longest[0] if longest else DEFAULT_MAX_NEW_TOKENS,
    )


def _read_temperature(do_sample: bool | None, temperature: float | None) -> float:
    """Return the temperature; without do_sample one above 0 samples."""
    value = float(temperature or 0.0)
    if do_sample and not value:
        raise UserError("a task asks for do_sample without a temperature: set one with --gen_kwargs temperature=1")
    return 0.0 if do_sample is False else value
