"""Kinds of reward functions: `score` of a sample or `score_group` of its siblings, plain or `async`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core.errors import UserError
from core.loading import FileSpec
from core.text.text_files import read_bytes

NAMES = ("score", "score_group")


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """Kind of a reward function."""

    is_async: bool = False
    """True for `async def`: many calls are in flight in one process."""
    is_group: bool = False
    """True for `score_group`, which gets the conversations of all live siblings at once."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return NAMES[self.is_group]


def find_kind(spec: FileSpec) -> Kind:
    """Read the kind of a reward from its source, which is not run. Raises UserError for two functions.

    A file whose functions are not defined by `def` at its top level counts as a plain `score`; `load_reward` checks it.
    """
    try:
        tree = ast.parse(read_bytes(Path(spec.path), spec.path))
    except (SyntaxError, ValueError):  # load_reward says so, with the line
        return Kind()
    found = {node.name: isinstance(node, ast.AsyncFunctionDef) for node in _list_functions(tree)}
    if len(found) > 1:
        raise UserError(f"{spec.path} defines both score and score_group: keep one of them")
    return next((Kind(is_async, name == NAMES[1]) for name, is_async in found.items()), Kind())


def _list_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in NAMES:
            yield node
