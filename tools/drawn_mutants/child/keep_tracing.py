"""Plugin of pytest that starts coverage again where a test has ended it: by its own trace function, or a recursion."""

import sys

import coverage
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    measured = coverage.Coverage.current()
    if measured is not None and sys.gettrace() is None:
        measured.stop()
        measured.start()
