"""Command line of the programs. Exit codes: 0 done, 1 stopped, 2 bad input, 130 Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import bdb
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from core.text.plain_text import escape_controls, print_line


def parse_arguments(description: str) -> argparse.Namespace:
    """Parse the command line."""
    # No heavy import comes before this call, so --help answers at once.
    parser = Parser(description=description)
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML recipe; see configs/")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print the resolved configuration and the arithmetic that follows from it, and start nothing",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as trainer.lr=1e-5 steps=50")
    return parser.parse_args()


class Parser(argparse.ArgumentParser):
    """Argument parser that escapes arguments in its errors."""

    def error(self, message: str) -> NoReturn:
        super().error(escape_controls(message, keep=""))


def run_guarded(run: Callable[[], int]) -> int:
    """Run a program and return its exit code. Expected errors print one sentence; others keep their traceback."""
    # Imported here: the command line is parsed before anything else of the repository loads.
    from core.cluster.signals import EXIT_CODE, end_on_signals, interrupt_start
    from core.errors import RunStopped, UserError

    end_on_signals(first=interrupt_start)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character must not end the run
            stream.reconfigure(errors="backslashreplace")
    try:
        return run()
    except UserError as error:
        print_line(f"error: {error}", file=sys.stderr)
        return 2
    except RunStopped as error:
        print_line(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_CODE
    except bdb.BdbQuit:
        print("interrupted: the debugger was left with q", file=sys.stderr)
        return EXIT_CODE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at the end
        print(
            "stopped: the output was closed, as by `| head`: write it to a file to keep the run going", file=sys.stderr
        )
        return 1
