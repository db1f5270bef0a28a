"""Run the obligations of an algorithm and report each result."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from algs import find_algorithm
from algs.base import Algorithm, PolicyGradient
from algs.check import fixtures as exhibit
from algs.check.obligations import ASKED, OBLIGATIONS, NotAsked
from algs.check.update import Broken
from configs.load import override, validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    letter: str
    title: str
    status: Literal["ok", "FAILED", "not asked"]
    said: str
    """What was shown, which numbers failed, or why it is not asked."""

    def __str__(self) -> str:
        return f"({self.letter}) {self.status:9} {self.title}: {self.said}"


def check(what: str | type[Algorithm], settings: dict[str, Any] | None = None) -> list[Result]:
    """The obligations of an algorithm, by its name, its file or its class, under these hyper-parameters."""
    alg: Algorithm = validate(what if isinstance(what, type) else found(what), settings or {}, prefix="")
    asked = [o for o in OBLIGATIONS if o[0] in ASKED[exhibit.kind_of(alg)]]
    return [examined(alg, letter, title, obligation=holds) for letter, title, holds in asked]


def found(name: str) -> type[Algorithm]:
    is_file = name.endswith(".py") or "/" in name
    return find_algorithm({"file" if is_file else "name": name})[1]


def examined(alg: Algorithm, letter: str, title: str, *, obligation: Callable[[Algorithm], str]) -> Result:
    told = partial(Result, letter=letter, title=title)
    try:
        return told(status="ok", said=obligation(alg))
    except Broken as error:
        return told(status="FAILED", said=str(error))
    except NotAsked as error:
        return told(status="not asked", said=str(error))
    except Exception as error:  # a border: this is the author's code, whatever it raises
        return told(status="FAILED", said=f"{type(error).__name__}: {error} ({place_of(error, alg)})")


def place_of(error: Exception, alg: Algorithm) -> str:
    """The last line that ran in the algorithm's own file, or at all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == sys.modules[type(alg).__module__].__file__]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m algs.check", description="Proof obligations for an algorithm.")
    parser.add_argument("algorithm", metavar="FILE_OR_NAME", help="a file, or a module of algs/")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="hyper-parameters, such as clip_high=0.3")
    args = parser.parse_args(argv)
    settings: dict[str, Any] = {}
    for item in args.settings:
        override(settings, item)
    began, cls = time.monotonic(), found(args.algorithm)
    results = check(cls, settings)
    alone = "" if issubclass(cls, PolicyGradient) else "supervised, so (d) (f) (h) are not asked"
    print(f"{cls.__name__}, {alone or 'a policy gradient'}", *results, sep="\n")
    failed = [f"({r.letter})" for r in results if r.status == "FAILED"]
    verdict = f"{len(failed)} of {len(results)} FAILED: {' '.join(failed)}" if failed else "all that is asked holds"
    print(f"{verdict} ({time.monotonic() - began:.1f} s)")
    return 1 if failed else 0
