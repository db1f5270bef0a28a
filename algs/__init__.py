"""Find an algorithm by name (a module of this folder) or by path. There is no list to edit."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from core.errors import UserError, quote
from core.loading import FileSpec, classes_below, list_plugins, load_class, resolve

if TYPE_CHECKING:
    from algs.base import Algorithm


def find_algorithm(settings: dict[str, Any]) -> tuple[FileSpec, type[Algorithm]]:
    """Return the file of `alg.name` or `alg.file`, or the module by_source, and the only Algorithm defined in it."""
    name, path = settings.get("name"), settings.get("file")
    if not name and not path and "by_source" in settings:
        name = "by_source"
    if bool(name) == bool(path):
        raise UserError("alg needs either a name (a module of algs/) or a file (a path), and not both")
    for key, given in (("name", name), ("file", path)):
        if given and not isinstance(given, str):
            raise UserError(f"alg.{key}={given!r:.200} must be text")
    if path and not path.endswith(".py"):
        raise UserError(f"alg.file={quote(path)} is not a Python file: its name must end in .py")
    spec = resolve(str(name or path), "algs", offers=is_algorithm, key="alg.name" if name else "alg.file")
    return spec, load_algorithm_class(spec)


def list_algorithms() -> list[str]:
    """List the names of all algorithms of this folder."""
    return list_plugins("algs", is_algorithm)


def is_algorithm(module: ModuleType) -> bool:
    """Tell whether a module defines a single Algorithm with a loss."""
    from algs.base import Algorithm

    found = classes_below(module, Algorithm)
    return len(found) == 1 and (found[0].loss is not Algorithm.loss or found[0].value_loss is not Algorithm.value_loss)


def load_algorithm_class(spec: FileSpec) -> type[Algorithm]:
    """Return the only subclass of Algorithm that the file defines."""
    from algs.base import Algorithm, PolicyGradient

    cls = load_class(spec, Algorithm, key="alg")
    samples = issubclass(cls, PolicyGradient)
    # The framework never calls these for this kind of algorithm: an override would silently have no effect.
    for name in ("prepare_groups", "rows", "model_kind") if samples else ("accept_group",):
        if getattr(cls, name) is not getattr(Algorithm, name):
            what = "a PolicyGradient" if samples else "no PolicyGradient"
            raise UserError(f"{spec.path}: {cls.__name__} is {what}, and its {name} would never be read: delete it")
    return cls


def load_algorithm(spec: FileSpec, settings: dict[str, Any]) -> Algorithm:
    """Create the algorithm with its hyper-parameters in this process; the file's hash is checked."""
    return load_algorithm_class(spec)(**settings)


def load_nested(settings: dict[str, Any], key: str) -> Algorithm:
    """Create an algorithm that another one holds under `alg.key`, of a module of this folder."""
    # imported here, as in algs.check: the mathematics needs no configuration
    from configs.load import validate

    spec, cls = find_algorithm(settings)
    if not spec.in_package:
        raise UserError(f"alg.{key}.file: only modules of algs/ may be mixed: set a name instead")
    return validate(cls, settings, prefix=f"alg.{key}.")
