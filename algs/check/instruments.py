"""Tools of the obligations: replay of detached values, and variation of settings."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from algs.base import Algorithm, PolicyGradient
from core.patches import is_grad_switch
from core.strict_model import StrictModel
from core.types.terms import Term

S = TypeVar("S", bound=StrictModel)


class OtherPath(Exception):
    """The loss detached other values than at the base point: a branch on a number, so a kink."""


@dataclass
class Tape:
    """Values that a loss detached, in order of call."""

    values: list[Tensor] = field(default_factory=list)
    full: bool = False
    """True after the recording is complete; then values are replayed."""


class ReplayDetached(TorchFunctionMode):
    """Mode that records every detached value the first time, and returns the same values afterwards.

    Only `.detach()` and `torch.no_grad()` detach on purpose. Values that left the graph in another way (`.item()`,
    `.tolist()`, `.data`, a numpy round trip) are not replayed. They change with their input, and central differences
    reveal the missing gradient. An autograd.Function also runs without gradient, but no call switched gradients off, so
    its values are not replayed either.
    """

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape, self.calls, self.switched_off = tape, 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # torch.no_grad() switches gradients off by a call of its own, which this mode sees
        if is_grad_switch(func):
            self.switched_off = not args[0]
        by_name = func in (Tensor.detach, Tensor.detach_) and torch.is_grad_enabled()
        by_context = self.switched_off and isinstance(out, Tensor) and out.is_floating_point() and _any_live(args)
        return self._record_or_replay(out) if by_name or by_context else out

    def _record_or_replay(self, out: Tensor) -> Tensor:
        # a clone: an algorithm may change the tensor in place afterwards
        if not self.tape.full:
            self.tape.values.append(out.clone())
            return out
        self.calls += 1
        if self.calls > len(self.tape.values) or self.tape.values[self.calls - 1].shape != out.shape:
            raise OtherPath
        return self.tape.values[self.calls - 1].clone()


def _any_live(args: Any) -> bool:
    flat = [x for a in args for x in (cast(list[Any], a) if isinstance(a, (list, tuple)) else [a])]
    return any(isinstance(x, Tensor) and x.requires_grad for x in flat)


def record_reads(section: S, reads: set[str], prefix: str = "") -> S:
    """Return a copy of the settings that adds the dotted name of each attribute that is read to `reads`.

    Sections that are declared in the same file are copied likewise. Validation and model_dump read nothing.
    """
    cls = type(section)

    def record_read(self: Any, name: str) -> Any:
        reads.add(prefix + name)
        return super(twin_cls, self).__getattribute__(name)

    # not through pydantic's metaclass, which would build all fields again: a hundred times slower
    twin_cls = ABCMeta.__new__(
        type(cls), cls.__name__, (cls,), {"__getattribute__": record_read, "__module__": cls.__module__}
    )
    twin = section.model_copy()
    inside = vars(twin)
    for name, value in vars(section).items():
        if isinstance(value, StrictModel) and type(value).__module__ == cls.__module__:
            inside[name] = record_reads(value, reads, f"{prefix}{name}.")
    object.__setattr__(twin, "__class__", twin_cls)  # the model itself is frozen
    return twin


def with_terms(alg: Algorithm, terms: tuple[Term, ...]) -> Algorithm:
    """Return the algorithm with these terms alone."""
    cls = type(alg)
    twin_cls = ABCMeta.__new__(type(cls), cls.__name__, (cls,), {"terms": terms, "__module__": cls.__module__})
    twin = alg.model_copy()
    object.__setattr__(twin, "__class__", twin_cls)  # as in record_reads
    return twin


def list_own_fields(alg: Algorithm) -> dict[str, Any]:
    """Return annotations of the hyper-parameters that the algorithm's own file declares, by dotted name."""
    return dict(_list_declared(type(alg), type(alg).__module__, ""))


def _list_declared(cls: type[BaseModel], module: str, prefix: str) -> Iterator[tuple[str, Any]]:
    inherited = {n for b in cls.__mro__ if issubclass(b, BaseModel) and b.__module__ != module for n in b.model_fields}
    for name, info in cls.model_fields.items():
        if name in inherited:
            continue
        yield prefix + name, info.annotation
        if isinstance(info.annotation, type) and issubclass(info.annotation, StrictModel):
            yield from _list_declared(info.annotation, module, f"{prefix}{name}.")


def propose_values(annotation: Any, value: Any) -> list[Any]:
    """Return other values for a field; the model may refuse some. Empty for a string or a section.

    >>> propose_values(float, 0.2)
    [0.4, 0.1, 1.2, -0.8]
    """
    if get_origin(annotation) in (Union, UnionType):
        return [v for kind in get_args(annotation) for v in propose_values(kind, value) if v != value]
    if get_origin(annotation) is Literal:
        return [v for v in get_args(annotation) if v != value]
    if annotation is type(None):
        return [None]
    if annotation is bool:
        return [not value]
    if annotation in (int, float):
        # several, because one may be refused, or have no effect on the made-up step
        near = [value * 2, value / 2, value + 1, value - 1] if isinstance(value, (int, float)) else [2, 0.5, 10, 0.1]
        return [annotation(v) for v in near if annotation(v) != value]
    return []


def with_settings(alg: Algorithm, changes: dict[str, Any]) -> Algorithm | None:
    """Return the algorithm with other settings, by dotted name; None if invalid."""
    # dumped and validated again: a combination that the algorithm refuses is no variant of it
    raw = alg.model_dump()
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        node = raw
        for key in parents:
            node = node[key]
        node[last] = value
    try:
        return type(alg).model_validate(raw)
    except ValidationError:
        return None


def list_variants(alg: Algorithm, base: dict[str, Any], name: str) -> list[Algorithm]:
    """Return the algorithm under `base`, once per other valid value of a field."""
    values = propose_values(list_own_fields(alg)[name], attrgetter(name)(alg))
    return [other for v in values if (other := with_settings(alg, base | {name: v})) is not None]


PLAIN: dict[str, Any] = {"kl.coef": 0.0, "overlong.mode": "none"}
SHARED: dict[str, dict[str, Any]] = {
    "kl.place: loss": {"kl.coef": 0.1, "kl.estimator": "auto", "kl.place": "loss"},
    "kl.place: reward": {"kl.coef": 0.1, "kl.estimator": "auto", "kl.place": "reward"},
    "overlong.mode: penalty": {"overlong.mode": "penalty", "overlong.max_tokens": 8, "overlong.buffer": 6},
    "overlong.mode: filter": {"overlong.mode": "filter"},
    "credit: turn": {"credit": "turn", "turn_discount": 0.5},
}
"""Policy-gradient settings that `compute_advantages` must respect, easily forgotten in a new algorithm."""


def list_modes(alg: Algorithm) -> list[tuple[dict[str, Any], Algorithm]]:
    """Return settings under which other fields may be read, and the algorithm under each; the given settings first."""
    tries: list[dict[str, Any]] = [{}]
    for name, kind in list_own_fields(alg).items():
        others = propose_values(kind, attrgetter(name)(alg))
        tries += [{name: v} for v in (others[:1] if kind in (int, float) else others)]
    if isinstance(alg, PolicyGradient):
        tries += [
            *SHARED.values(),
            {"credit": "episode", "turn_discount": 1.0},
            *({**one, "correction.level": "none"} for one in tries if not with_settings(alg, one)),
        ]
    return [(mode, other) for mode in tries if (other := with_settings(alg, mode)) is not None]
