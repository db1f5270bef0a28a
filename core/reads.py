"""Record which settings are read: one that was set and is never read does nothing."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, TypeVar

from core.strict_model import StrictModel

S = TypeVar("S", bound=StrictModel)


def record_reads(section: S, reads: set[str], prefix: str = "", *, everywhere: bool = False) -> S:
    """Return a copy that adds the name of each attribute that is read to `reads`.

    Sections that are declared in the same file, or with `everywhere` in any file, are copied likewise, with a dotted
    prefix. Validation and model_dump read nothing.
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
        if isinstance(value, StrictModel) and (everywhere or type(value).__module__ == cls.__module__):
            inside[name] = record_reads(value, reads, f"{prefix}{name}.", everywhere=everywhere)
    object.__setattr__(twin, "__class__", twin_cls)  # the model itself is frozen
    return twin
