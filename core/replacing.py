"""Parts of a library that it gives no setting for, replaced for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replacing(owner: Any, **attributes: Any) -> Generator[None]:
    """Give a module or class these attributes in the body; afterwards it has its own again."""
    usual = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in usual.items():
            setattr(owner, name, value)
