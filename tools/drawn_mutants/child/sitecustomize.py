"""Coverage of a process that a test starts: saved every moment, because many of them are killed, and at its end."""

import atexit
import os
import threading

import coverage


def _save_for_ever(measured: coverage.Coverage) -> None:
    while not threading.Event().wait(0.5):
        measured.save()


if os.environ.get("PYTEST_CURRENT_TEST") and "LINES_CONFIG" in os.environ:
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    measured = coverage.Coverage(config_file=os.environ["LINES_CONFIG"], data_suffix=True)
    measured.start()
    measured.switch_context(f"{test}|child")
    atexit.register(measured.save)
    threading.Thread(target=_save_for_ever, args=(measured,), daemon=True).start()
