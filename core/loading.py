"""Code by name or by path: algorithms, rewards, environments and engines are all found here.

    spec = resolve("grpo", "algs")               a module of the package
    spec = resolve("/any/where/my_loss.py", "algs")    a file, wherever it lies
    module = load_module(spec)                   here, or in another process, from the same bytes

A class loaded by path does not unpickle elsewhere, so what travels is the FileSpec: each process loads the
file itself, and refuses when the bytes are not those the driver saw.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpec:
    """Which code was meant. Small and picklable."""

    module: str
    """The name it is imported under: "algs.grpo", or for a file its stem and the start of its hash."""
    path: str
    """Absolute path of the source file."""
    sha256: str
    """Of the file's bytes, when it was resolved."""
    in_package: bool
    """True for a module of ours: another machine may keep it under another path."""


def resolve(name_or_path: str, package: str, *, key: str = "", leave_out: Collection[str] = ()) -> FileSpec:
    """Find the code that a configuration names, without running it.

    What ends in .py or holds a slash is a file; anything else is a module of `package`. `key` is the
    configuration key to name in an error, `leave_out` the package's modules that are not on offer.
    """
    if name_or_path.endswith(".py") or "/" in name_or_path:
        return _resolve_file(name_or_path, key)
    home = _home(package)
    names = sorted(p.stem for p in home.glob("*.py") if not p.stem.startswith("_") and p.stem not in leave_out)
    if name_or_path not in names:
        raise UserError(
            f"{_at(key)}there is no {name_or_path!r} in {package}/{_near(name_or_path, names)};"
            f" it has {', '.join(names) or 'none'}, and a file of your own is named by its path (my_file.py)"
        )
    path = home / f"{name_or_path}.py"
    return FileSpec(module=f"{package}.{name_or_path}", path=str(path), sha256=sha256_of(path), in_package=True)


def load_module(spec: FileSpec) -> ModuleType:
    """Import what `spec` names; a second call returns the same module.

    Raises UserError when the file is gone, is not the one that was resolved, or cannot be imported.
    """
    path = _own_copy(spec) if spec.in_package else Path(spec.path)
    if not path.is_file():
        raise UserError(f"{path} is missing on this machine; every machine of a run must see the same files")
    if (found := sha256_of(path)) != spec.sha256:
        raise UserError(
            f"{path} is not the file this run began with (sha256 {found[:12]}, expected {spec.sha256[:12]});"
            " leave it alone while the run lasts, and keep it the same on every machine"
        )
    if spec.module in sys.modules:
        return sys.modules[spec.module]
    try:
        return importlib.import_module(spec.module) if spec.in_package else _import_file(spec.module, path)
    except UserError:
        raise
    except Exception as error:  # a border: this is the user's code, whatever it raises
        raise UserError(f"{_where(error, path)} cannot be imported: {type(error).__name__}: {error}") from error


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _resolve_file(name: str, key: str) -> FileSpec:
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(f"{_at(key)}there is no file {path}{_near(path.name, siblings)}")
    if path.suffix != ".py":
        raise UserError(f"{_at(key)}{path} is not a Python file; its name must end in .py")
    digest = sha256_of(path)
    return FileSpec(module=f"{path.stem}_{digest[:12]}", path=str(path), sha256=digest, in_package=False)


def _home(package: str) -> Path:
    return Path(next(iter(importlib.import_module(package).__path__)))


def _own_copy(spec: FileSpec) -> Path:
    package, _, name = spec.module.rpartition(".")
    return _home(package) / f"{name}.py"


def _import_file(name: str, path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # before it runs: dataclasses and pydantic look their module up
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _where(error: Exception, path: Path) -> str:
    """The place in the user's file where the import failed, as far as it is known."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno},"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}," if lines else str(path)


def _at(key: str) -> str:
    return f"{key}: " if key else ""


def _near(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
