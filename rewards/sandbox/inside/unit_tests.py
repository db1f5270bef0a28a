"""Unit tests of untrusted code: python3 unit_tests.py < {"code": ..., "tests": [...], "setup": ..., "nonce": ...}

Two processes. The judge runs the tests. The candidate, forked before the tests are read, runs the code. In the tests, a
name of the code is a proxy. A call sends the arguments to the candidate. Plain values return, and are compared here.
Code that exits, patches the interpreter, prints anything or defines an `__eq__` that always agrees affects only its own
values. Other objects stay with the candidate, and the judge has a reference.

Prints a line after each test: the nonce, and JSON of "ran", "passed", and "unsuited" (reasons why tests cannot be
judged).
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # a run takes 40 ms, and every import is some of it
    from typing import Any, BinaryIO

PR_SET_DUMPABLE = 4
LONGEST_LINE = 4 * 2**20
LONGEST_REASON = 200
WRITERS: dict[type, Any] = {
    bool: lambda value: value,  # before int, of which it is a subclass
    int: hex,  # decimal has a limit of digits
    float: float.hex,
    complex: lambda value: [float.hex(value.real), float.hex(value.imag)],
    str: str.__str__,
    bytes: bytes.hex,
    type(None): lambda value: value,
}
READERS: dict[str, Any] = {
    "bool": bool,
    "int": lambda value: int(value, 16),
    "float": float.fromhex,
    "complex": lambda value: complex(*map(float.fromhex, value)),
    "str": str,
    "bytes": bytes.fromhex,
    "NoneType": lambda value: None,
}
SEVERAL = (tuple, list, set, frozenset)


class Unsuited(Exception):
    """Value of a test that cannot be sent, such as a function."""


class Gone(BaseException):
    """End of the candidate. Not an Exception, so that no test catches it."""


def encode(value: Any, refer: Any) -> Any:
    """Encode a value for JSON. `refer` encodes objects that are no plain values."""
    for kind, write in WRITERS.items():
        if isinstance(value, kind):
            return [kind.__name__, write(value)]
    for kind in SEVERAL:
        if isinstance(value, kind):
            # the builtin's own __iter__: a subclass of the code could have another
            return [kind.__name__, [encode(each, refer) for each in kind.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[encode(k, refer), encode(v, refer)] for k, v in dict.items(value)]]
    return ["ref", refer(value)]


def decode(told: Any, find: Any) -> Any:
    """Decode a value. `find` returns the object of a reference."""
    name, value = told
    if name == "ref":
        return find(value)
    if name == "dict":
        return {decode(k, find): decode(v, find) for k, v in value}
    for kind in SEVERAL:
        if name == kind.__name__:
            return kind([decode(each, find) for each in value])
    return READERS[name](value)


# ---------------------------------------------------------------------------------------------------- the candidate


def be_candidate(calls: BinaryIO, answers: BinaryIO) -> None:
    """Run the code, then serve calls."""
    # the code must not reach the judge's output
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nothing, handle)
    names: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins}
    kept: list[Any] = []

    def refer(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def work(told: dict[str, Any]) -> Any:
        if told["do"] == "load":
            exec(compile(told["code"], "solution.py", "exec"), names)
            return sorted(name for name in names if isinstance(name, str) and not name.startswith("__"))
        arguments = decode(told["arguments"], kept.__getitem__)
        named = decode(told["named"], kept.__getitem__)
        return DEEDS[told["do"]](names, *arguments, **named)

    for line in calls:
        try:
            answer = {"value": encode(work(json.loads(line)), refer)}
        except Exception as error:
            answer = {"error": type(error).__name__, "said": f"{error}"[:LONGEST_REASON]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


DEEDS: dict[str, Any] = {
    "name": lambda names, name: names[name],
    "call": lambda names, thing, *arguments, **named: thing(*arguments, **named),
    "get": lambda names, thing, name: getattr(thing, name),
    "equal": lambda names, a, b: bool(a == b),
    "less": lambda names, a, b: bool(a < b),
    "length": lambda names, thing: len(thing),
    "item": lambda names, thing, key: thing[key],
    "iterate": lambda names, thing: iter(thing),
    "next": lambda names, thing: next(thing),
    "text": lambda names, thing: str(thing),
    "repr": lambda names, thing: repr(thing),
    "true": lambda names, thing: bool(thing),
}


# -------------------------------------------------------------------------------------------------------- the judge


class Candidate:
    """The candidate process, as the judge uses it."""

    def __init__(self, pid: int, calls: BinaryIO, answers: BinaryIO) -> None:
        self.gone = False
        self._pid, self._calls, self._answers = pid, calls, answers

    def tell(self, **what: Any) -> Any:
        """Send a request. Return the response, or raise the code's exception."""
        try:
            if self.gone:
                raise Gone
            self._calls.write(json.dumps(what).encode() + b"\n")
            self._calls.flush()
            # bounded, since the code can write a line that never ends
            line = self._answers.readline(LONGEST_LINE)
            if not line.endswith(b"\n"):
                raise Gone
            answer = json.loads(line)
            if "error" not in answer:
                return decode(answer["value"], lambda number: StandIn(self, number))
            name, said = str(answer["error"]), str(answer.get("said", ""))
        except (OSError, ValueError, TypeError, LookupError, RecursionError, MemoryError):
            self.gone = True
            raise Gone from None
        except Gone:
            self.gone = True
            raise
        raise _make_error(name, said)

    def do(self, deed: str, *arguments: Any, **named: Any) -> Any:
        return self.tell(do=deed, arguments=encode(arguments, _number_of), named=encode(named, _number_of))

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def begin_candidate() -> Candidate:
    """Fork the candidate, which has only two pipes. The tests have not been read yet."""
    calls_out, calls_in = os.pipe()
    answers_out, answers_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(calls_in)
        os.close(answers_out)
        try:
            be_candidate(os.fdopen(calls_out, "rb"), os.fdopen(answers_in, "wb"))
        finally:
            # the child must never return into the judge's code
            os._exit(0)
    os.close(calls_out)
    os.close(answers_in)
    return Candidate(pid, os.fdopen(calls_in, "wb"), os.fdopen(answers_out, "rb"))


class StandIn:
    """Proxy of an object in the candidate."""

    def __init__(self, candidate: Candidate, number: Any) -> None:
        self.__dict__["_it"] = (candidate, int(number))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._it[0].do("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._it[0].do("get", self, name)

    def __eq__(self, other: object) -> bool:
        # the code's own __eq__ compares only its own objects: against a 3 it could always agree
        return isinstance(other, StandIn) and self._it[0].do("equal", self, other) is True

    def __lt__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self._it[0].do("less", self, other) is True

    def __hash__(self) -> int:
        return hash(self._it[1])

    def __len__(self) -> int:
        return self._it[0].do("length", self)

    def __getitem__(self, key: Any) -> Any:
        return self._it[0].do("item", self, key)

    def __contains__(self, key: Any) -> bool:
        return any(key == value for value in self)  # not the code's __contains__, which could always agree

    def __iter__(self) -> Any:
        steps = self._it[0].do("iterate", self)
        if not isinstance(steps, StandIn):
            yield from steps
            return
        while True:
            try:
                value = self._it[0].do("next", steps)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        return self._it[0].do("next", self)

    def __str__(self) -> str:
        return str(self._it[0].do("text", self))

    def __repr__(self) -> str:
        return str(self._it[0].do("repr", self))

    def __bool__(self) -> bool:
        return self._it[0].do("true", self) is True


def _make_error(name: str, said: str) -> Exception:
    """Return the builtin exception of a name, or a RuntimeError for the code's own exceptions."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(said)
        except TypeError:  # it takes other arguments
            pass
    return RuntimeError(f"{name}: {said}")


def _number_of(value: Any) -> int:
    if not isinstance(value, StandIn):
        raise Unsuited(f"a {type(value).__name__} cannot be passed to the code under test")
    return value._it[1]


def be_judge() -> None:
    """Run the tests of standard input, and print the results."""
    candidate = begin_candidate()
    given = json.load(sys.stdin)
    own = os.path.realpath(os.path.dirname(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != own]  # there the code can write a heapq.py
    # the candidate runs as the same user, so it may send signals to the judge
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: None)
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # the candidate, of the same user, must not read this memory
    # a test may print what the code returned, which must not fill the output
    results, nothing = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_WRONLY)
    for handle in (1, 2):
        os.dup2(nothing, handle)
    sources = [given["setup"], *given["tests"]]
    ran, unsuited = False, find_missing(sources)
    try:
        there = candidate.tell(do="load", code=given["code"])
        names = prepare_names(candidate, there, sources)
        ran = True
        starts = run_test(candidate, given["setup"], names, unsuited)
    except (Gone, Exception):
        names, starts = {}, False
    for test in given["tests"]:
        passed = starts and run_test(candidate, test, names, unsuited)
        told = {"ran": ran, "passed": passed, "unsuited": unsuited[:1]}
        print(given["nonce"] + json.dumps(told), file=results, flush=True)
    candidate.end()
    os._exit(0)


def find_missing(sources: list[str]) -> list[str]:
    """Return why the tests cannot be judged: imports of modules that this Python has not, outside of `try`."""
    import ast
    from importlib.util import find_spec

    imported: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(source) for source in sources]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
        elif not isinstance(node, ast.Try):  # it may have another way
            waiting += ast.iter_child_nodes(node)
    missing = sorted(name for name in imported if name not in sys.modules and find_spec(name) is None)
    return [f"there is no module {name} in the sandbox" for name in missing]


def prepare_names(candidate: Candidate, there: Any, sources: list[str]) -> dict[str, Any]:
    """Return the names of the code that the tests use. Builtins and standard modules are never the code's."""
    import ast
    import importlib

    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    used = {node.id for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    for name in sorted(used & {str(name) for name in there}):
        if name in sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
        elif not hasattr(builtins, name):
            names[name] = candidate.do("name", name)
    return names


def run_test(candidate: Candidate, source: str, names: dict[str, Any], unsuited: list[str]) -> bool:
    """Tell whether a test passes. unsuited: gets the reason if it cannot be judged."""
    try:
        exec(compile(source, "tests.py", "exec"), names)
    except Unsuited as error:
        unsuited.append(str(error))
        return False
    except BaseException:
        return False
    return not candidate.gone


if __name__ == "__main__":
    be_judge()
