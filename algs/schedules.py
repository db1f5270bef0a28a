"""Schedules of hyper-parameters, and numeric hyper-parameters by their dotted names (kl.coef)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import Field

from core.strict_model import StrictModel

M = TypeVar("M", bound=StrictModel)


class Schedule(StrictModel):
    """Values of a hyper-parameter over the first steps; `end` afterwards."""

    start: float
    end: float
    steps: int = Field(ge=1)
    """Steps from start to end: step k has the share k / steps of the way."""
    shape: Literal["linear", "cosine"] = "linear"
    """cosine: slow at both ends."""

    def value_at(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        if step >= self.steps:
            return self.end
        way = step / self.steps
        if self.shape == "cosine":
            way = (1 - math.cos(math.pi * way)) / 2
        return self.start + (self.end - self.start) * way


def value_at(parts: list[Schedule], step: int) -> float:
    """Return the value of schedules that follow each other.

    >>> value_at([Schedule(start=0, end=1, steps=2), Schedule(start=1, end=0, steps=4)], 3)
    0.75
    """
    for part in parts[:-1]:
        if step < part.steps:
            return part.value_at(step)
        step -= part.steps
    return parts[-1].value_at(step)


def flatten_schedules(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return schedules by dotted name; sections may be nested, as the command line writes them.

    >>> flatten_schedules({"kl": {"coef": {"start": 1}}, "mu": []})
    {'kl.coef': {'start': 1}, 'mu': []}
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        inside = cast(dict[str, Any], value) if isinstance(value, dict) else {}
        is_section = inside and all(isinstance(one, dict | list) for one in inside.values())
        found |= flatten_schedules(inside, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return found


def kinds_of(cls: type[Any], dotted: str) -> set[type]:
    """Return int, float or both for a numeric field by its dotted name; empty for any other, and for no field."""
    name, _, rest = dotted.partition(".")
    info = cls.model_fields.get(name)
    if info is None:
        return set()
    if rest:
        inside = info.annotation
        return kinds_of(inside, rest) if isinstance(inside, type) and issubclass(inside, StrictModel) else set()
    is_union = get_origin(info.annotation) in (Union, UnionType)  # list[float] has float as an argument, too
    kinds: set[Any] = {*get_args(info.annotation)} if is_union else {info.annotation}
    return kinds & {int, float} if bool not in kinds else set()


def list_numbers(cls: type[Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, info in cls.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, StrictModel):
            found += list_numbers(info.annotation, f"{prefix}{name}.")
        elif kinds_of(cls, name):
            found.append(prefix + name)
    return found


def read_value(section: Any, dotted: str) -> float:
    for name in dotted.split("."):
        section = getattr(section, name)
    return section


def write_value(raw: dict[str, Any], dotted: str, value: float) -> None:
    """Set a value in nested settings; sections on the way are copied."""
    name, _, rest = dotted.partition(".")
    if rest:
        inside = raw.get(name, {})
        inside = inside.model_dump() if isinstance(inside, StrictModel) else inside
        if not isinstance(inside, dict):
            return  # reported as a wrong section
        raw[name] = dict(cast(dict[str, Any], inside))
        write_value(raw[name], rest, value)
    else:
        raw[name] = value


def with_values(section: M, values: Mapping[str, float]) -> M:
    """Return a copy with these values, by dotted name."""
    own: dict[str, Any] = {}
    for dotted, value in values.items():
        name, _, rest = dotted.partition(".")
        own[name] = with_values(own.get(name, getattr(section, name)), {rest: value}) if rest else value
    return section.model_copy(update=own)
