"""Coverage of a process that a test starts: saved every moment, because many of them are killed, and at its end."""

import _thread
import atexit
import os
import time

import coverage


def _save_for_ever() -> None:
    while True:
        time.sleep(0.5)
        with saving:
            measured.save()


def _save_last() -> None:
    saving.acquire()  # for ever: the thread saves nothing more while the interpreter ends
    measured.save()


if os.environ.get("PYTEST_CURRENT_TEST") and "LINES_CONFIG" in os.environ:
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    measured = coverage.Coverage(config_file=os.environ["LINES_CONFIG"], data_suffix=True)
    measured.start()
    measured.switch_context(f"{test}|child")
    saving = _thread.allocate_lock()
    atexit.register(_save_last)
    # a fork in the middle would leave coverage's own locks closed for ever
    os.register_at_fork(before=saving.acquire, after_in_parent=saving.release, after_in_child=saving.release)
    # not by `threading`: code that counts threads would do something else
    _thread.start_new_thread(_save_for_ever, ())
