"""Python files that a user's plug-ins import from their own folders, found without running them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from core.loading import FileSpec

ROOT = Path(__file__).parents[1]
"""Folder of FeynRL."""


def list_imported_files(specs: Iterable[FileSpec]) -> list[Path]:
    """List the files below the folders of the user's plug-ins that these import, directly or not."""
    files = {Path(spec.path) for spec in specs if not spec.in_package}
    folders, found, waiting = {file.parent for file in files}, set[Path](), [*files]
    while waiting:
        for path in _list_imports(waiting.pop()):
            is_own = any(path.is_relative_to(folder) for folder in folders) and not _is_installed(path)
            if is_own and path not in found | files:
                found.add(path)
                waiting.append(path)
    return sorted(found)


def _list_imports(file: Path) -> Iterator[Path]:
    """Yield the files that a file's import statements may read, those inside functions too."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a file that no run has imported yet
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _find_files(None, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if node.level else None
            for alias in node.names:
                yield from _find_files(base, [*(node.module or "").split("."), alias.name])


def _find_files(base: Path | None, names: list[str]) -> Iterator[Path]:
    """Yield the files of a module and the packages around it. base: folder of a relative import."""
    names = [name for name in names if name]
    for folder in _find_bases(names[0]) if base is None else [base]:
        for n in range(1, len(names) + 1):
            path = folder.joinpath(*names[:n])
            yield from (p for p in (path.with_name(f"{path.name}.py"), path / "__init__.py") if p.is_file())


def _find_bases(name: str) -> list[Path]:
    """Return the folders from which a top-level module is imported; none if it is no Python file."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        return []
    if spec is None:
        return []
    if spec.origin is None:  # a folder without __init__.py, which may have parts in several places
        return [Path(place).parent for place in spec.submodule_search_locations or ()]
    origin = Path(spec.origin)
    if origin.suffix != ".py":
        return []
    return [origin.parents[1] if origin.name == "__init__.py" else origin.parent]


def _is_installed(path: Path) -> bool:
    """Tell whether a file is FeynRL's own, or a package's."""
    if "site-packages" in path.parts or path.is_relative_to(sys.base_prefix):
        return True
    if not path.is_relative_to(ROOT):
        return False
    top = ROOT / path.relative_to(ROOT).parts[0]
    return (top / "__init__.py").is_file() or top.name in ("feynrl.py", "setup.py") or top.name.startswith("main_")
