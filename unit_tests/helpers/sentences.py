"""Sentences of errors, for tests that compare them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from core.errors import UserError


def tell(function: Callable[[], Any], kind: type[Exception] = UserError) -> str:
    """Return the sentence of the error that a function raises."""
    with pytest.raises(kind) as raised:
        function()
    return str(raised.value)
