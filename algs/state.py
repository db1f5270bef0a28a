"""State and schedules: what an algorithm may change from step to step.

    state_0   = initial_state()
    state_k+1 = next_state(step k)          reads self.state, which is state_k, and the reduced metrics of step k

An algorithm is frozen. At each step the framework replaces it by a copy with the state and the scheduled
hyper-parameters of that step, on the driver and on every trainer. The state is in the checkpoint, and a schedule is a
function of the step number, so a resumed run has the numbers of one that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from algs.schedules import (
    Schedule,
    flatten_schedules,
    kinds_of,
    list_numbers,
    read_value,
    value_at,
    with_values,
    write_value,
)
from core.errors import RunStopped, UserError, suggest_name
from core.strict_model import StrictModel
from core.types.arrays import Floats
from core.types.samples import Group, Sample

State = Mapping[str, Any]
"""Floats and arrays [n] by name."""
STRUCTURE = ("required_columns", "needs_entropy", "needs_siblings", "whole_groups", "whole_episodes")
"""Properties that are read once, at the start, so that no schedule may change them."""
HIDDEN = (
    "{who}.accept_group reads {what}, which moves from step to step, and with max_staleness above 0 groups finish "
    "while it moves: set max_staleness: 0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """A finished step, as next_state sees it."""

    number: int
    """Number of the step, from 0."""
    groups: list[Group]
    """The step's groups in the order of the data, whenever they were complete, as compute_advantages received them: a
    sample per episode, a player per group. With advantages and columns."""
    means: Mapping[str, float]
    """The trainer's metrics, averaged over the tokens of the step with their weights, over all ranks."""

    def mean(self, metric: str) -> float:
        """Return the mean of a metric of the loss, such as kl_ref. Raises UserError for one that was not measured."""
        if metric not in self.means:
            raise UserError(
                f"next_state asks for the mean of {metric}, which the step did not measure; it has "
                f"{', '.join(sorted(self.means))}"
            )
        return self.means[metric]

    @property
    def n_samples(self) -> int:
        """Number of samples with trained tokens; an episode counts once."""
        return sum(s.n_trained > 0 for g in self.groups for s in g)

    def group_by(
        self, name: Callable[[Sample], str], compute: Callable[[Sample], float | None]
    ) -> dict[str, list[float]]:
        """Return a number of each sample, such as its reward, by a name such as its source; without None."""
        found: dict[str, list[float]] = {}
        for sample in (s for g in self.groups for s in g):
            if (number := compute(sample)) is not None:
                found.setdefault(name(sample), []).append(number)
        return found


class Controller(StrictModel):
    """Section of hyper-parameters with a state of its own, such as an adaptive coefficient.

    The entries are in the algorithm's state, beside those of initial_state and next_state.
    """

    def initial_entries(self) -> dict[str, float]:
        """Return the entries at the first step; {} for a section that does not adapt."""
        return {}

    def next_entries(self, state: State, step: StepSeen) -> dict[str, float]:
        """Return the entries of the next step."""
        return {}


class Stateful(StrictModel):
    """Base of Algorithm: state and schedules."""

    schedules: dict[str, list[Schedule]] = Field(default={})
    """Values of numeric hyper-parameters by step, by their dotted names: {clip_high: {start: 0.2, end: 0.28,
    steps: 100, shape: linear or cosine}}. A list follows one after the other."""
    _state: dict[str, float | Floats] | None = PrivateAttr(None)
    _step: int = PrivateAttr(0)
    _hides_state: bool = PrivateAttr(False)

    def initial_state(self) -> dict[str, float | Floats]:
        """Return the state of the first step: floats, and small arrays [n]."""
        return {}

    def next_state(self, step: StepSeen) -> dict[str, float | Floats]:
        """Return the state of the next step, from self.state and a finished step. Pure.

        Called once per step on the driver, unless every update of the step was skipped.
        """
        return dict(self.state)

    @property
    def state(self) -> State:
        """State of the current step, read-only."""
        if self._hides_state:
            raise RunStopped(HIDDEN.format(who=type(self).__name__, what="the state"))
        return MappingProxyType(self._first_state() if self._state is None else self._state)

    @property
    def step_number(self) -> int:
        """Number of the step that this copy is for, from 0."""
        if self._hides_state:
            raise RunStopped(HIDDEN.format(who=type(self).__name__, what="step_number"))
        return self._step

    @property
    def trains_policy(self) -> bool:
        """False in a step that trains the value model alone."""
        return True

    @property
    def has_state(self) -> bool:
        """True if steps may differ in the state."""
        return bool(self.state) or type(self).next_state is not Stateful.next_state

    def with_state(self, state: State, *, step: int = 0) -> Self:
        """Return a copy for a step, with this state and the step's scheduled hyper-parameters.

        Raises UserError for anything but numbers and float arrays [n], and RunStopped unless they are finite.
        """
        values = {name: self._round(name, value_at(parts, step)) for name, parts in self.schedules.items()}
        copy = with_values(self, values)
        copy._state = _check_state(type(self).__name__, state)
        copy._step = step
        return copy

    def after(self, step: StepSeen) -> Self:
        """Return the algorithm of the next step, from this one and the finished step."""
        moved = _check_state(type(self).__name__, self.next_state(step))
        for section in self._controllers():
            moved |= section.next_entries(self.state, step)
        return self.with_state(moved, step=step.number + 1)

    def hide_state(self) -> Self:
        """Return a copy of which neither the state nor a scheduled hyper-parameter can be read."""
        copy = self.model_copy()
        copy._hides_state = True
        copy._remove_scheduled()
        return copy

    def _remove_scheduled(self) -> None:
        for name in self.schedules:
            vars(self).pop(name.partition(".")[0], None)

    if not TYPE_CHECKING:  # the type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Explain the lack of a hyper-parameter that hide_state has removed."""
            if name in type(self).model_fields and self._hides_state:
                raise RunStopped(HIDDEN.format(who=type(self).__name__, what=name))
            return super().__getattr__(name)

    def scheduled_values(self) -> dict[str, float]:
        """Return the current values of the scheduled hyper-parameters, by dotted name."""
        return {name: read_value(self, name) for name in self.schedules}

    def _controllers(self) -> list[Controller]:
        # not by getattr: algs.check would take every hyper-parameter for one that is read
        return [value for value in vars(self).values() if isinstance(value, Controller)]

    def _first_state(self) -> dict[str, float | Floats]:
        state = _check_state(type(self).__name__, self.initial_state())
        for section in self._controllers():
            state |= section.initial_entries()
        return _check_state(type(self).__name__, state)

    def _round(self, name: str, value: float) -> float:
        return value if float in kinds_of(type(self), name) else round(value)

    @model_validator(mode="before")
    @classmethod
    def begins_as_scheduled(cls, raw: Any) -> Any:
        # the first value stands in the field, so that all checks of the algorithm see it
        if not isinstance(raw, dict) or not isinstance(given := cast(dict[str, Any], raw).get("schedules"), dict):
            return raw
        filled = dict(cast(dict[str, Any], raw))
        for name, parts in flatten_schedules(cast(dict[str, Any], given)).items():
            first: Any = parts[0] if isinstance(parts, list) and parts else parts
            start = first.get("start") if isinstance(first, dict) else getattr(first, "start", None)
            kinds = kinds_of(cls, name)
            if kinds and isinstance(start, int | float) and math.isfinite(start):  # the others are reported below
                write_value(filled, name, start if float in kinds else round(start))
        return filled

    @field_validator("schedules", mode="before")
    @classmethod
    def schedules_name_numbers(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        named = flatten_schedules(cast(dict[str, Any], given))
        for name, parts in named.items():
            if not kinds_of(cls, name):
                hint = suggest_name(name, list_numbers(cls)) or f": it has {', '.join(list_numbers(cls))}"
                raise ValueError(f"there is no numeric hyper-parameter {name}{hint}")
            each = cast(list[Any], parts) if isinstance(parts, list) else [parts]
            if not each or not all(isinstance(part, dict | Schedule) for part in each):
                raise ValueError(f"the schedule of {name} is {parts!r:.100}, and must have start, end and steps")
        return {name: parts if isinstance(parts, list) else [parts] for name, parts in named.items()}

    @model_validator(mode="after")
    def schedules_stay_valid(self) -> Self:
        for name, parts in self.schedules.items():
            for value in (v for part in parts for v in (part.start, part.end)):
                raw = self.model_dump(exclude={"schedules"})
                write_value(raw, name, self._round(name, value))
                try:
                    there = type(self).model_validate(raw)
                except ValidationError as error:
                    raise ValueError(f"schedules.{name} comes to {value:g}: {error.errors()[0]['msg']}") from error
                for prop in STRUCTURE:
                    if getattr(there, prop) != getattr(self, prop):
                        raise ValueError(
                            f"schedules.{name} comes to {value:g}, where the algorithm's {prop} is another than at "
                            f"{parts[0].start:g}, and it is read once, at the start: use a small number instead of 0"
                        )
        return self


def _check_state(who: str, state: object) -> dict[str, float | Floats]:
    if not isinstance(state, Mapping):
        raise UserError(f"{who}: the state must be a dict of numbers and arrays, found {type(state).__name__}")
    return {str(name): _check_entry(who, str(name), value) for name, value in cast(State, state).items()}


def _check_entry(who: str, name: str, value: object) -> float | Floats:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim == 1:
        entry: float | Floats = value.copy()
        entry.setflags(write=False)
    elif isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool):
        entry = float(value)
    else:
        raise UserError(
            f"{who}: the state's {name} is a {type(value).__name__}, expected a number or a numpy array of floats [n]: "
            "write float(x), and x.cpu().numpy() for a tensor"
        )
    if not np.isfinite(entry).all():
        raise RunStopped(f"{who}: the state's {name} is {entry}, and it must be finite: look at its next_state")
    return entry
