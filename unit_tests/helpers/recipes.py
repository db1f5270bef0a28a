"""The keys of the schema."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from configs.load import sections_in


def list_keys(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, class that declares it, field) for every key of the schema."""
    for name, info in cls.model_fields.items():
        inside = sections_in(info.annotation)
        yield prefix + name, cls.__name__, name
        for section in inside:
            yield from list_keys(section, f"{prefix}{name}.")
