"""Base class of all settings; refuses unknown keys and implausible numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from core.loading import reduce_by_file

LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e9
Seconds = Annotated[float, Field(gt=0, le=1e7)]
"""Deadline in seconds, up to 115 days."""
LearningRate = Annotated[float, Field(gt=0, le=100)]


class StrictModel(BaseModel):
    """Base of all settings: frozen, without unknown keys, with validated defaults.

    A number field accepts neither booleans nor NaN, infinity only if the field allows it, and only plausible sizes.
    """

    # By default pydantic ignores unknown keys, and trusts defaults without checking them.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with changes. pydantic validates none of them, and would take any name."""
        if unknown := (update or {}).keys() - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no field {min(unknown)}")
        return super().model_copy(update=update, deep=deep)

    def __reduce__(self) -> Any:
        return reduce_by_file(self, self.__getstate__())  # the class of an algorithm may lie in a file of the user's

    @field_validator("*", mode="before")
    @classmethod
    def numbers_are_no_switches(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        # YAML reads `yes` and `on` as booleans, and Python counts a boolean as an integer: lr=true would be 1.
        if isinstance(value, bool) and _is_number(cls.model_fields[info.field_name].annotation):
            raise ValueError(f"{str(value).lower()} is not valid, a number is expected")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def texts_are_text(cls, value: Any) -> Any:
        # Neither a file name nor a program takes them, and a file of text cannot hold the second.
        if wrong := find_odd_character(value):
            raise ValueError(f"{wrong} is not allowed: leave it out")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def numbers_have_a_size(cls, value: Any) -> Any:
        # A field that allows infinity turns pydantic's own check for NaN off too.
        if isinstance(value, float) and math.isnan(value):
            raise ValueError("nan is not valid, a number is expected")
        too_large = (isinstance(value, int) and abs(value) > LARGEST_INT) or (
            isinstance(value, float) and LARGEST_FLOAT < abs(value) < math.inf
        )
        if too_large:
            most = LARGEST_INT if isinstance(value, int) else f"{LARGEST_FLOAT:g}"
            shown = f"{value:.6g}" if abs(value) < 1e300 else "the number"  # an integer may be too large for a float
            raise ValueError(f"{shown} is too large, at most {most} is allowed")
        return value


def find_odd_character(value: Any) -> str:
    r"""Name a character that no text may hold, NUL or half of a character, anywhere in a value; "" without one.

    >>> find_odd_character({"a": ["b\0"]}), find_odd_character(["\ud800"]), find_odd_character({"\udfff": 3})
    ('a NUL character', 'half of a character', 'half of a character')
    """
    if isinstance(value, str):
        is_half = any("\ud800" <= char <= "\udfff" for char in value)
        return "a NUL character" if "\0" in value else "half of a character" if is_half else ""
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(find_odd_character, inside)), "")


def _is_number(annotation: Any) -> bool:
    """Tell whether a field's type includes int or float but not bool."""
    kinds = {annotation, *get_args(annotation)}
    return bool(kinds & {int, float}) and bool not in kinds
