"""Finds an algorithm by name (any module of this folder) or by path. There is no list to edit."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from core.loading import FileSpec, load_module, resolve

if TYPE_CHECKING:
    from algs.base import Algorithm

NOT_ALGORITHMS = ("base", "credit", "ops", "preference", "terms")


def find_algorithm(settings: dict[str, Any]) -> tuple[FileSpec, type[Algorithm]]:
    """The file that `alg.name` or `alg.file` means, and the one Algorithm defined in it."""
    name, path = settings.get("name"), settings.get("file")
    if bool(name) == bool(path):
        raise UserError("alg needs either a name (a module of algs/) or a file (a path), and not both")
    if path and not str(path).endswith(".py"):
        raise UserError(f"alg.file={path} is not a Python file: its name must end in .py")
    key = "alg.name" if name else "alg.file"
    spec = resolve(str(name or path), "algs", key=key, leave_out=NOT_ALGORITHMS)
    return spec, algorithm_of(spec)


def algorithm_of(spec: FileSpec) -> type[Algorithm]:
    """The one subclass of Algorithm that the file itself defines."""
    from algs.base import Algorithm, PolicyGradient

    module = load_module(spec)
    found = [
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if issubclass(c, Algorithm) and c.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(c.__name__ for c in found) or "none"
        raise UserError(f"{spec.path} must define exactly one subclass of algs.base.Algorithm, found {names}")
    [cls] = found
    samples = issubclass(cls, PolicyGradient)
    for name in ("arrange", "rows", "trains") if samples else ("keep",):
        if getattr(cls, name) is not getattr(Algorithm, name):
            what = "a PolicyGradient" if samples else "no PolicyGradient"
            raise UserError(f"{spec.path}: {cls.__name__} is {what}, and its {name} would never be read: delete it")
    return cls


def load_algorithm(spec: FileSpec, settings: dict[str, Any]) -> Algorithm:
    """The algorithm with its hyper-parameters, in this process; the file's hash is checked."""
    return algorithm_of(spec)(**settings)
