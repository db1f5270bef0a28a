"""Instruments of the proofs: hold detached values, note which settings are read, try other settings."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from algs.base import Algorithm, PolicyGradient
from core.strict_model import StrictModel


class OtherPath(Exception):
    """The loss detached other things than at the base point: it branched on a number, which is a kink."""


@dataclass
class Tape:
    """What a loss detached, in order of call."""

    values: list[Tensor] = field(default_factory=list)
    full: bool = False
    """Recorded to the end: from now on it is played back."""


class Held(TorchFunctionMode):
    """Record every detached value the first time, and give the same ones back afterwards, wherever the input moved.

    A value is detached on purpose by `.detach()` or under `torch.no_grad()`. What left the graph some other way
    (`.item()`, `.tolist()`, `.data`, a numpy round trip) is not held: it moves with its input, and the differences
    show what the gradient lacks. The inside of an autograd.Function runs without gradient too, but nobody switched it
    off by a call, so it is not held either.
    """

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape, self.calls, self.switched_off = tape, 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "_set_grad_enabled":
            self.switched_off = not args[0]
        by_name = func in (Tensor.detach, Tensor.detach_) and torch.is_grad_enabled()
        by_context = self.switched_off and isinstance(out, Tensor) and out.is_floating_point() and _any_live(args)
        return self._hold(out) if by_name or by_context else out

    def _hold(self, out: Tensor) -> Tensor:
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


S = TypeVar("S", bound=StrictModel)


def noting_reads(section: S, reads: set[str], prefix: str = "") -> S:
    """A twin that adds the name of each attribute it is asked for to `reads`; sections of its own file do likewise."""
    cls = type(section)

    def note(self: Any, name: str) -> Any:
        reads.add(prefix + name)
        return super(twin_cls, self).__getattribute__(name)

    # past pydantic's metaclass, which would work out all fields anew: a hundred times the price of the class itself
    twin_cls = ABCMeta.__new__(
        type(cls), cls.__name__, (cls,), {"__getattribute__": note, "__module__": cls.__module__}
    )
    twin = section.model_copy()
    inside = vars(twin)
    for name, value in vars(section).items():
        if isinstance(value, StrictModel) and type(value).__module__ == cls.__module__:
            inside[name] = noting_reads(value, reads, f"{prefix}{name}.")
    object.__setattr__(twin, "__class__", twin_cls)  # the model itself is frozen
    return twin


def own_fields(alg: Algorithm) -> dict[str, Any]:
    """Annotations of the hyper-parameters that the algorithm's own file declares, by dotted name."""
    return dict(_declared(type(alg), type(alg).__module__, ""))


def _declared(cls: type[BaseModel], module: str, prefix: str) -> Iterator[tuple[str, Any]]:
    inherited = {n for b in cls.__mro__ if issubclass(b, BaseModel) and b.__module__ != module for n in b.model_fields}
    for name, info in cls.model_fields.items():
        if name in inherited:
            continue
        yield prefix + name, info.annotation
        if isinstance(info.annotation, type) and issubclass(info.annotation, StrictModel):
            yield from _declared(info.annotation, module, f"{prefix}{name}.")


def other_values(annotation: Any, value: Any) -> list[Any]:
    """What else a field might hold; some may be refused. Nothing for a text or a section."""
    if get_origin(annotation) in (Union, UnionType):
        return [v for kind in get_args(annotation) for v in other_values(kind, value) if v != value]
    if get_origin(annotation) is Literal:
        return [v for v in get_args(annotation) if v != value]
    if annotation is type(None):
        return [None]
    if annotation is bool:
        return [not value]
    if annotation in (int, float):
        near = [value * 2, value / 2, value + 1, value - 1] if isinstance(value, (int, float)) else [2, 0.5, 10, 0.1]
        return [annotation(v) for v in near if annotation(v) != value]
    return []


def value_of(alg: Algorithm, dotted: str) -> Any:
    value: Any = alg
    for key in dotted.split("."):
        value = getattr(value, key)
    return value


def changed(alg: Algorithm, changes: dict[str, Any]) -> Algorithm | None:
    """With other settings, by dotted name; None if they are refused."""
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


def variants(alg: Algorithm, base: dict[str, Any], name: str) -> list[Algorithm]:
    """The algorithm under `base` with each other value of one field of its own that is not refused."""
    found = [changed(alg, base | {name: v}) for v in other_values(own_fields(alg)[name], value_of(alg, name))]
    return [other for other in found if other is not None]


PLAIN: dict[str, Any] = {"kl.coef": 0.0, "overlong.mode": "none"}
SHARED: dict[str, dict[str, Any]] = {
    "kl.place: loss": {"kl.coef": 0.1, "kl.estimator": "auto", "kl.place": "loss"},
    "kl.place: reward": {"kl.coef": 0.1, "kl.estimator": "auto", "kl.place": "reward"},
    "overlong.mode: penalty": {"overlong.mode": "penalty", "overlong.max_tokens": 8, "overlong.buffer": 6},
    "overlong.mode: filter": {"overlong.mode": "filter"},
}
"""Settings of every policy gradient that its credit must heed: easily forgotten where credit is written anew."""


def modes(alg: Algorithm) -> list[tuple[dict[str, Any], Algorithm]]:
    """Settings under which something else may be read, the given ones first; and the algorithm under each."""
    tries: list[dict[str, Any]] = [{}]
    for name, kind in own_fields(alg).items():
        others = other_values(kind, value_of(alg, name))
        tries += [{name: v} for v in (others[:1] if kind in (int, float) else others)]
    if isinstance(alg, PolicyGradient):
        tries += [*SHARED.values(), *({**one, "correction.level": "none"} for one in tries if not changed(alg, one))]
    return [(mode, other) for mode in tries if (other := changed(alg, mode)) is not None]
