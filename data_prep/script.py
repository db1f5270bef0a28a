"""Common parts of the scripts: errors with exit code 2, and validated arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from core.cli import run_guarded
from core.errors import UserError


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run a script, then exit. Errors are reported as in main_rl.py."""

    def run() -> int:
        try:
            main()
        except OSError as error:  # of --out: a folder that cannot be written, a full disk
            raise UserError(f"{error.filename or '--out'} cannot be written: {error.strerror or error}") from error
        return 0

    sys.exit(run_guarded(run))


def whole(at_least: int) -> Callable[[str], int]:
    """Return a parser of integer arguments from `at_least` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = at_least - 1
        if value < at_least:
            raise argparse.ArgumentTypeError(f"give a whole number from {at_least} on, found {text!r:.60}")
        return value

    return parse


def share(text: str) -> float:
    """Parse a share. Raises ArgumentTypeError unless it is a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"give a share between 0 and 1, found {text!r:.60}")
    return value


def check_form(parser: argparse.ArgumentParser, form: str, *places: str) -> None:
    """End the program if --prompt-form has other placeholders than these."""
    try:
        # filled once with plain text: this finds unknown names, attribute access and broken braces alike
        filled = form.format(**dict.fromkeys(places, "x"))
    except (KeyError, IndexError, ValueError, AttributeError):
        parser.error(f"--prompt-form {form!r}: the places to fill are {_list(places)}")
    if filled == form:
        parser.error(f"--prompt-form {form!r} has no place to fill: write {{{places[0]}}} into it")


def _list(places: tuple[str, ...]) -> str:
    *first, last = [f"{{{place}}}" for place in places]
    return f"{', '.join(first)} and {last}" if first else last
