"""Command lines of the scripts: common options, what is written, and errors with exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from core.cli import run_guarded
from core.errors import RunStopped, UserError, quote
from core.text.json_text import holds_lone_surrogate
from data_feeds.rows.invalid_rows import InvalidRows
from data_prep.rows import Row, write_rows


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run a script, then exit. Errors are reported as in main_rl.py."""

    def run() -> int:
        if wrong := [quote(word) for word in sys.argv[1:] if holds_lone_surrogate(word)]:
            raise UserError(f"the command line holds bytes that are not UTF-8, in {wrong[0]}: write it in UTF-8")
        try:
            main()
        except OSError as error:  # of --out: a folder that cannot be written, a full disk
            raise UserError(f"{error.filename or '--out'} cannot be written: {error.strerror or error}") from error
        except RunStopped as error:
            raise UserError(str(error)) from error
        return 0

    sys.exit(run_guarded(run))


def conversion_parser(
    module: str, doc: str | None, *, prompt_form: str = "", place: str = "problem"
) -> argparse.ArgumentParser:
    """Return the parser of a script that converts a data set, with the options that `convert` reads.

    doc: the module's docstring, whose first line describes the script. prompt_form: default of --prompt-form, with a
    place for the question; without it there is no such option.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").split("\n")[0])
    parser.add_argument("--out", type=rows_file, required=True, help="a name that ends in .parquet or .jsonl")
    parser.add_argument("--limit", type=whole(1), help="only so many rows")
    if prompt_form:
        parser.add_argument("--prompt-form", type=form_of(place), default=prompt_form, help=f"with {{{place}}} in it")
    return parser


def convert(
    parser: argparse.ArgumentParser, args: argparse.Namespace, make: Callable[[], tuple[list[Row], InvalidRows]]
) -> None:
    """Write converted rows, and print the invalid rows. Errors end the program with one sentence."""
    try:
        rows, unfit = make()
    except UserError as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"none of {unfit.looked_at} {unfit.unit}s fits: {str(unfit) or 'it is empty'}")
    # cut after the conversion, so that --limit counts valid rows
    write_rows(args.out, rows[: args.limit])
    if unfit.rows:
        print(f"{args.out}: {unfit.rows} of {unfit.looked_at} {unfit.unit}s are invalid and excluded: {unfit}")


def read_options(parser: argparse.ArgumentParser, argv: list[str] | None) -> dict[str, Any]:
    """Return the options of a command line by their names, which are keywords of the script's `make`."""
    return vars(parser.parse_args(argv))


def task_parser(
    module: str, doc: str | None, *, train: int, held_out: int, rows: str, least: int = 0
) -> argparse.ArgumentParser:
    """Return the parser of a script that generates a task, with the options that every such script has.

    doc: as for conversion_parser. train, held_out: default numbers of rows. rows: their name in the help.
    least: lowest number of rows that --train and --eval accept.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the files, one per split")
    parser.add_argument("--train", type=whole(least), default=train, help=f"{rows} for RL (default %(default)s)")
    # named as in `make`, whose keywords the options are: `eval` is Python's
    parser.add_argument(
        "--eval", type=whole(least), default=held_out, dest="held_out", help=f"held-out {rows} (default %(default)s)"
    )
    parser.add_argument("--sft", type=whole(0), default=0, help=f"{rows} for SFT (default none)")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    return parser


def write_task(
    parser: argparse.ArgumentParser,
    make: Callable[..., dict[str, list[Any]]],
    *,
    out: Path,
    jsonl: bool = False,
    write: Callable[[Path, list[Any]], None] = write_rows,
    **options: Any,
) -> dict[str, list[Any]]:
    """Draw the splits of a task, write each that has rows to a file of its name in `out`, and return them.

    options: keywords of `make`, whose ValueError ends the program. write: function that writes one file.
    """
    try:
        splits = make(**options)
    except ValueError as error:
        parser.error(str(error))
    for split, rows in splits.items():
        if rows:
            write(out / f"{split}{'.jsonl' if jsonl else '.parquet'}", rows)
    return splits


def rows_file(text: str) -> Path:
    """Parse the path of --out. Raises ArgumentTypeError unless it ends in .parquet or .jsonl."""
    if Path(text).suffix not in (".parquet", ".jsonl"):
        raise argparse.ArgumentTypeError(f"the name must end in .parquet or .jsonl, found {text!r:.200}")
    return Path(text)


def whole(at_least: int) -> Callable[[str], int]:
    """Return a parser of integer arguments from `at_least` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            # refused below, by the same sentence
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
        # outside of the range, so refused below
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"give a share between 0 and 1, found {text!r:.60}")
    return value


def form_of(*places: str) -> Callable[[str], str]:
    """Return a parser of --prompt-form: a text that has these places, in braces, and no others."""

    def parse(form: str) -> str:
        try:
            # filled with plain text: this finds unknown names, attribute access and broken braces alike
            filled, other = (form.format(**dict.fromkeys(places, text)) for text in "xy")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise argparse.ArgumentTypeError(f"the places to fill are {_list(places)}, found {form!r}") from error
        if filled == other:
            raise argparse.ArgumentTypeError(f"{form!r} has no place to fill: write {{{places[0]}}} into it")
        return form

    return parse


def _list(places: tuple[str, ...]) -> str:
    *first, last = [f"{{{place}}}" for place in places]
    return f"{', '.join(first)} and {last}" if first else last
