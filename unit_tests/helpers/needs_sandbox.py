"""Whether tests of code that is run can run here; CI says by a variable that they must."""

from __future__ import annotations

import asyncio
import os

import pytest

from rewards.sandbox import Bubblewrap, SandboxUnavailable


def find_lack() -> str:
    """Why code cannot be run here, "" if it can."""
    try:
        asyncio.run(Bubblewrap().check())
    except SandboxUnavailable as error:
        return str(error)
    return ""


LACK = "" if os.environ.get("FEYNRL_NEEDS_SANDBOX") else find_lack()
needs_sandbox = pytest.mark.skipif(bool(LACK), reason=LACK)
