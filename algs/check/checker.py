"""Run the obligations of an algorithm and report the results."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from algs import find_algorithm
from algs.base import Algorithm, PolicyGradient
from algs.check import fixtures
from algs.check.obligations import APPLICABLE, OBLIGATIONS
from algs.check.update import NotApplicable, ObligationFailed
from configs.load import apply_override, validate
from core.cli import Parser
from core.text.plain_text import print_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of an obligation."""

    letter: str
    title: str
    status: Literal["ok", "FAILED", "n/a"]
    detail: str
    """Evidence, failing numbers, or the reason why the obligation does not apply."""

    def __str__(self) -> str:
        return f"({self.letter}) {self.status:9} {self.title}: {self.detail}"


def check(what: str | type[Algorithm], settings: dict[str, Any] | None = None, *, letters: str = "") -> list[Result]:
    """Run every obligation that applies to an algorithm, under these hyper-parameters.

    what: name of a module of algs/, path of a file, or a class. letters: obligations to run; "": all. Raises UserError
    for an invalid name or setting.
    """
    alg: Algorithm = validate(what if isinstance(what, type) else find_class(what), settings or {}, prefix="")
    # a schedule would set a hyper-parameter again that an obligation varies
    alg = alg.model_copy(update={"schedules": {}})
    of_kind = APPLICABLE[fixtures.get_kind(alg)]
    applicable = [o for o in OBLIGATIONS if o[0] in of_kind and o[0] in (letters or of_kind)]
    return [run_obligation(alg, letter, title, obligation=obligation) for letter, title, obligation in applicable]


def find_class(name: str) -> type[Algorithm]:
    """Return the algorithm's class, by the name of a module of algs/ or the path of a file."""
    is_file = name.endswith(".py") or "/" in name
    return find_algorithm({"file" if is_file else "name": name})[1]


def run_obligation(alg: Algorithm, letter: str, title: str, *, obligation: Callable[[Algorithm], str]) -> Result:
    """Run an obligation; any exception of the algorithm is a failure."""
    make_result = partial(Result, letter=letter, title=title)
    try:
        return make_result(status="ok", detail=obligation(alg))
    except ObligationFailed as error:
        return make_result(status="FAILED", detail=str(error))
    except NotApplicable as error:
        return make_result(status="n/a", detail=str(error))
    except Exception as error:  # a border: this is the author's code, whatever it raises
        return make_result(status="FAILED", detail=f"{type(error).__name__}: {error} ({locate_error(error, alg)})")


def locate_error(error: Exception, alg: Algorithm) -> str:
    """Return the last executed line in the algorithm's own file, or in any file."""
    frames = traceback.extract_tb(error.__traceback__)
    # The author's own line says more than the line in torch that raised.
    own = [frame for frame in frames if frame.filename == sys.modules[type(alg).__module__].__file__]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def run(argv: list[str]) -> int:
    """Check the algorithm named on the command line, print the results and return the exit code."""
    parser = Parser("python -m algs.check", description="Proof obligations for an algorithm.")
    parser.add_argument("algorithm", metavar="FILE_OR_NAME", help="a file, or a module of algs/")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="hyper-parameters, such as clip_high=0.3")
    args = parser.parse_args(argv)
    settings: dict[str, Any] = {}
    for item in args.settings:
        apply_override(settings, item)
    began, cls = time.monotonic(), find_class(args.algorithm)
    results = check(cls, settings)
    kind = (
        "a policy gradient" if issubclass(cls, PolicyGradient) else "supervised, so (d) (f) (h) (j) to (l) do not apply"
    )
    for line in (f"{cls.__name__}, {kind}", *results):
        print_line(f"{line}", keep="\n")
    failed = [f"({r.letter})" for r in results if r.status == "FAILED"]
    verdict = f"{len(failed)} of {len(results)} FAILED: {' '.join(failed)}" if failed else "all obligations hold"
    print_line(f"{verdict} ({time.monotonic() - began:.1f} s)")
    return 1 if failed else 0
