"""Plug-ins by name or path: one rule finds algorithms, rewards, environments and engines.

A plug-in is a module of its package, or any Python file. It offers the only class it defines below the package's base
class (`Algorithm`, `Env`, `Engine`), or a function of the documented name (`score` of a reward).

    spec = resolve("grpo", "algs", offers=...)                  a module of the package
    spec = resolve("/any/folder/my_loss.py", "algs", offers=...)     a file, in any folder
    module = load_module(spec)                                  here or in another process, from the same bytes

A class loaded by path cannot be unpickled in another process. So the FileSpec is sent too: each process loads the file
itself, and refuses it if the bytes differ from the driver's. `reduce_by_file` pickles an object this way.

Some folders are optional: a clone may lack them. No other file imports one at import time; the function that needs it
does, in `needs_part`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from core.errors import UserError, name_error, quote, suggest_name
from core.text.text_files import read_bytes
from core.timing.deadlines import IMPORT_TIMEOUT_S
from core.timing.import_guard import ImportTooSlow, limit_import

T = TypeVar("T")
LOADED: dict[str, FileSpec] = {}
"""Files loaded by this process, by module name."""
OPTIONAL_PARTS = (
    *("analysis", "data_feeds.images", "driver.evaluation.suites", "modeling.images", "rewards.sandbox"),
    *("rewards.judging", "rollouts.agents", "rollouts.judges", "rollouts.tools"),
)
"""Packages that a clone may lack. tools/layers.py has the files of every optional part."""


class PartMissing(UserError):
    """Error of a recipe that needs an optional part which this clone lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpec:
    """Picklable reference to a source file."""

    module: str
    """Module name: "algs.grpo", or the file's stem and the start of the hash."""
    path: str
    """Absolute path of the source file."""
    sha256: str
    """Hash of the file's bytes at resolution."""
    in_package: bool
    """True for a module of FeynRL, found under another path on another machine."""


def resolve(name_or_path: str, package: str, *, offers: Callable[[ModuleType], bool], key: str = "") -> FileSpec:
    """Find the code that a configuration names, without running a file. Raises UserError if there is none.

    A name that ends in .py or contains a slash is a file; any other is a module of `package`.
    offers: tells whether a module is a plug-in. key: configuration key for errors.
    """
    if name_or_path.endswith(".py") or "/" in name_or_path:
        return _resolve_file(name_or_path, key)
    spec = _spec_in_package(package, name_or_path)
    # A package also has modules that are no plug-ins, such as helpers.
    if spec is None or not offers(_load_plugin(spec, key)):
        names = list_plugins(package, offers)
        raise UserError(
            f"{_key_prefix(key)}there is no {name_or_path!r:.200} in {package.replace('.', '/')}/"
            f"{suggest_name(name_or_path, names)}; it has {', '.join(names) or 'none'}, and a file of your own is "
            "named by its path (my_file.py)"
        )
    return spec


def list_plugins(package: str, offers: Callable[[ModuleType], bool]) -> list[str]:
    """List the plug-ins of a package by name."""
    names = sorted(p.stem for p in _package_folder(package).glob("*.py") if not p.stem.startswith("_"))
    specs = [(name, _spec_in_package(package, name)) for name in names]
    return [name for name, spec in specs if spec is not None and _is_offered(spec, offers)]


def classes_below(module: ModuleType, base: type[T]) -> list[type[T]]:
    """Return the concrete subclasses of `base` that `module` itself defines."""
    members: list[Any] = [c for _, c in inspect.getmembers(module, inspect.isclass)]
    # A plug-in may import the class that it extends; only classes of its own count.
    found = [c for c in members if c.__module__ == module.__name__]
    return [c for c in found if base in c.__mro__ and c is not base and not inspect.isabstract(c)]


def load_class(spec: FileSpec, base: type[T], *, key: str) -> type[T]:
    """Load the only subclass of `base` in a file. Raises UserError for none or several."""
    found = classes_below(_load_plugin(spec, key), base)
    if len(found) != 1:
        names = ", ".join(c.__name__ for c in found) or "none"
        raise UserError(
            f"{key}: {spec.path} must define exactly one subclass of {base.__module__}.{base.__name__}, found {names}"
        )
    return found[0]


@contextmanager
def needs_part(key: str, *, otherwise: str = "leave the key out") -> Generator[None]:
    """Import an optional part in the body. Raises PartMissing, which names the folder, if this clone lacks the part.

    key: recipe key that needs the part. otherwise: alternative to restoring the folder.

        with needs_part("rollout.agent"):
            from rollouts.agents.task import AgentPlan
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (lacking := _name_missing_part(error)) is None:
            raise
        raise PartMissing(f"{key} needs {lacking}, which this clone lacks: restore it, or {otherwise}") from error


def _name_missing_part(error: BaseException) -> str | None:
    """Return the folder of the optional part that failed to import; None for another module or error."""
    lacking = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    is_optional = any(f"{lacking}.".startswith(f"{part}.") for part in OPTIONAL_PARTS)
    return lacking.replace(".", "/") if is_optional else None


def _load_plugin(spec: FileSpec, key: str) -> ModuleType:
    """Load a plug-in's module. Raises PartMissing, which names the key, if an optional part is missing."""
    name = spec.module.rpartition(".")[2] if spec.in_package else spec.path
    with needs_part(f"{key}={name}" if key else name, otherwise="name another"):
        return load_module(spec)


def _is_offered(spec: FileSpec, offers: Callable[[ModuleType], bool]) -> bool:
    try:
        return offers(_load_plugin(spec, ""))
    except PartMissing:
        return False


def _spec_in_package(package: str, name: str) -> FileSpec | None:
    path = _package_folder(package) / f"{name}.py"
    if not name.isidentifier() or name.startswith("_") or not os.path.isfile(path):
        return None
    return FileSpec(module=f"{package}.{name}", path=str(path), sha256=hash_file(path), in_package=True)


def load_module(spec: FileSpec) -> ModuleType:
    """Import the file of `spec`; a second call returns the same module.

    Raises UserError if the file is missing, has changed since `resolve`, or cannot be imported in time. Raises
    ModuleNotFoundError if it imports an optional part that this clone lacks.
    """
    path = _own_copy(spec) if spec.in_package else Path(spec.path)
    if not os.path.isfile(path):
        raise UserError(f"{path} is missing on this machine; every machine of a run must see the same files")
    # Two versions of a loss on two ranks would train without an error, and wrongly.
    if (found := hash_file(path)) != spec.sha256:
        raise UserError(
            f"{path} is not the file this run began with (sha256 {found[:12]}, expected {spec.sha256[:12]});"
            " do not change it during the run, and keep it the same on every machine"
        )
    # Also for a module that other code has imported: `reduce_by_file` needs the file of every plug-in.
    LOADED[spec.module] = spec
    if spec.module in sys.modules:
        return sys.modules[spec.module]
    try:
        with limit_import(path):
            return importlib.import_module(spec.module) if spec.in_package else _import_file(spec.module, path)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a border: this is the user's code, whatever it raises
        if _name_missing_part(error) is not None:  # the caller knows the key
            raise
        raise UserError(f"{_locate_error(error, path)} cannot be imported: {_explain(error)}") from error


def reduce_by_file(value: object, state: Any) -> Any:
    """Return a pickle reduction that loads the user's file of the object's class before `state`.

    In the receiving process, `load_module` checks the file before pickle looks up any class of `state` in it.
    """
    cls = type(value)
    spec = LOADED.get(cls.__module__)
    return (make_empty, (cls,), state) if spec is None else (load_empty, (spec, cls.__qualname__), state)


def load_empty(spec: FileSpec, qualname: str) -> Any:
    return make_empty(attrgetter(qualname)(load_module(spec)))


def make_empty(cls: type[T]) -> T:
    """Create an instance without attributes, which pickle sets."""
    return cls.__new__(cls)


def hash_file(path: Path) -> str:
    return hashlib.sha256(read_bytes(path, str(path))).hexdigest()


def _resolve_file(name: str, key: str) -> FileSpec:
    path = Path(name).expanduser().absolute()
    if not os.path.isfile(path):  # unlike path.is_file, False for a name that is too long
        siblings = [p.name for p in path.parent.glob("*.py")] if os.path.isdir(path.parent) else []
        raise UserError(f"{_key_prefix(key)}there is no file {quote(path)}{suggest_name(path.name, siblings)}")
    if path.suffix != ".py":
        raise UserError(f"{_key_prefix(key)}{quote(path)} is not a Python file; its name must end in .py")
    digest = hash_file(path)
    # The hash keeps two files of one name apart in sys.modules, and two versions of one file.
    return FileSpec(module=f"{path.stem}_{digest[:12]}", path=str(path), sha256=digest, in_package=False)


def _package_folder(package: str) -> Path:
    return Path(next(iter(importlib.import_module(package).__path__)))


def _own_copy(spec: FileSpec) -> Path:
    package, _, name = spec.module.rpartition(".")
    return _package_folder(package) / f"{name}.py"


def _import_file(name: str, path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # before it runs: dataclasses and pydantic look their module up
    try:
        found.loader.exec_module(module)
    except BaseException:
        # A second call must not find a module that has run only in part.
        del sys.modules[name]
        raise
    return module


def _explain(error: BaseException) -> str:
    match error:
        case ImportTooSlow():
            return f"it has not ended after {IMPORT_TIMEOUT_S:g} s; is there an endless loop?"
        case SystemExit():
            return (
                "it ends the program (sys.exit); put what should only run as a program under "
                '`if __name__ == "__main__":`'
            )
        case _:
            return name_error(error)


def _locate_error(error: BaseException, path: Path) -> str:
    """Return file and line of the user's code that failed to import, as far as known."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}, line {error.lineno},"
    # The last of these frames is the innermost: nearest to the error, and still the user's code.
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}," if lines else str(path)


def _key_prefix(key: str) -> str:
    return f"{key}: " if key else ""
