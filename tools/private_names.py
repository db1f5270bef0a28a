"""Private names of other libraries outside of the patch files: python -m tools.private_names

A name that begins with an underscore is its owner's business. Product, tools and data_prep use one of another library
only in `PATCH_FILES`, where each is listed with a reason. Found over the syntax tree, by name and by string:

    llm._core                           an attribute, unless it is self's, or the file itself defines it
    from ray._raylet import x           an import
    getattr(x, "_core"), "ray._raylet"  a string that is such a name, or a dotted path with one
    init(_temp_dir=...)                 an argument
    vars(x), x.__dict__, setattr(x, n)  of an object that is not ours: they reach every name
    torch.compile = ours                an assignment to something imported; a function of ours in place of a method
    from core.patches import patched    the helper that replaces attributes

A tree has no types: a private attribute is taken for ours where the same file defines the name. Exit code 1 where
something is found. unit_tests/tools/test_private_names.py runs the same check.
"""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.layers import LAYERS, ROOT, parse_file, tracked

PATCH_FILES = ("core/patches.py", "modeling/patches.py", "rollouts/engines/vllm_support/patches.py")
SKIPPED = frozenset({*PATCH_FILES, "tools/private_names.py"})
"""Files that name private parts: this one to say what they are."""
OURS = frozenset({*(layer.split("/")[0] for layer in LAYERS), "data_prep", "tools"})
"""First parts of the names of our modules."""
DOCUMENTED = frozenset(
    {
        *("os._exit", "sys._current_frames"),
        *("os.environ", "sys.argv", "sys.dont_write_bytecode", "sys.modules", "sys.path"),
    }
)
"""What Python's documentation says to call or to assign to."""
EXEMPT = {
    (
        "algs/check/instruments.py",
        "vars(section)",
    ): "settings of an algorithm, whose classes are ours or derive from ours",
    ("algs/check/instruments.py", "vars(twin)"): "the same",
    ("algs/check/instruments.py", "object.__setattr__(twin)"): "the same",
    ("rollouts/tools/env.py", "vars(base)"): "environments: ours, and the user's that derive from them",
    ("rollouts/tools/functions.py", "_is_tool"): "our own mark on a function of the user's",
    ("rollouts/tools/functions.py", "setattr(function)"): "the same",
    ("data_prep/script.py", "vars(parser.parse_args(argv))"): "argparse documents it",
    ("driver/records/trackers/wandb.py", "_netrc"): "the name of a file",
    ("rollouts/boxes/images.py", "tar.extraction_filter ="): "tarfile documents it",
    ("tools/benchmarks/learning_matrix.py", "run.log ="): "a run of ours",
    (
        "tools/benchmarks/trl_side_groups.py",
        "trl.trainer.grpo_trainer.shuffle_sequence_dict =",
    ): "a public function, taken away to explain a difference from TRL",
    ("tools/gpu_day/ranks.py", "setattr(own)"): "a public call of torch 2.13, for an image with an older one",
    ("tools/drawn_mutants/child/sitecustomize.py", "_thread"): "the standard library documents this module",
    ("tools/device_mistakes.py", "_like"): "the end of public names, such as zeros_like",
}
"""Finds that are none, by file and what is found, each with the reason."""
PRIVATE = re.compile(r"_(?!_)\w+")
"""A private name; `_` alone is none."""
PRIVATE_PATH = re.compile(r"(?:\w+\.)*_(?!_)\w+(?:\.\w+)*")
_TYPES = (types.FunctionType, types.ModuleType, types.CoroutineType)
STANDARD = frozenset(name for kind in (object, type, Exception, dict, *_TYPES) for name in dir(kind)) | frozenset(
    {
        *("__all__", "__annotations__", "__file__", "__main__", "__origin__", "__path__", "__version__", "__wrapped__"),
        *("__getattr__", "__set__"),  # object has neither
        *("_asdict", "_fields", "_make", "_replace"),  # of a named tuple
    }
)
"""Names with underscores that Python documents."""
BY_STRING = ("getattr", "hasattr", "setattr", "delattr")
REACH_ALL = ("setattr", "delattr", "vars", "object.__setattr__", "object.__delattr__")


@dataclass(slots=True)
class Names:
    """Names of one file."""

    foreign: dict[str, str] = field(default_factory=dict[str, str])
    """What an import of another library binds, with its dotted path."""
    ours: set[str] = field(default_factory=set[str])
    """What an import of this repository binds."""
    defined: set[str] = field(default_factory=set[str])
    """Private names that the file defines: functions, classes, variables, arguments, attributes of self."""
    functions: set[str] = field(default_factory=set[str])
    texts: set[int] = field(default_factory=set[int])
    """Ids of string nodes that name nothing: docstrings, and pieces of a longer text."""


def main() -> None:
    """Print every access to a private name."""
    found = find_all(ROOT)
    print(*(found or ["no private name of another library outside of the patch files"]), sep="\n")
    sys.exit(bool(found))


def find_all(root: Path) -> list[str]:
    """List the finds in product, tools and data_prep, as file:line: what."""
    files = [file for file in tracked(root) if file not in SKIPPED and not file.startswith("unit_tests/")]
    trees = {file: parse_file(root / file) for file in files}
    # of all files: an attribute that one class of ours defines may be used through self by a class that derives from it
    defined = {name for tree in trees.values() for name in read_names(tree).defined}
    found = [(file, line, what) for file, tree in trees.items() for line, what in find_in(tree, defined)]
    return [f"{file}:{line}: {what}" for file, line, what in found if (file, what) not in EXEMPT]


def find_in(tree: ast.Module, defined: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each access to a private name. defined: private names that any of our files defines."""
    names = read_names(tree)
    for node in ast.walk(tree):
        for what in _look_at(node, names, defined):
            yield getattr(node, "lineno", 0), what


def read_names(tree: ast.Module) -> Names:
    """Collect the imports and definitions of a file."""
    names = Names()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    bound = alias.asname or alias.name.split(".")[0]
                    _bind(names, bound, alias.name if alias.asname else bound)
            case ast.ImportFrom(module=module, names=aliases):
                for alias in aliases:
                    _bind(names, alias.asname or alias.name, f"{module}.{alias.name}")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.functions.add(name)
                names.defined.add(name)
            case ast.ClassDef(name=name) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.defined.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                names.defined.add(name)
            case ast.Subscript(value=ast.Attribute(attr="__dict__"), slice=ast.Constant(value=str(name))):
                names.defined.add(name)
            case ast.Expr(value=ast.Constant() as text):
                names.texts.add(id(text))
            case ast.JoinedStr(values=pieces):
                # a piece of an f-string is half a text, and no name
                names.texts.update(map(id, pieces))
            case _:
                pass
    names.defined = {name for name in names.defined if PRIVATE.fullmatch(name)}
    return names


def _bind(names: Names, bound: str, path: str) -> None:
    if path.split(".")[0] in OURS:
        names.ours.add(bound)
    elif path.split(".")[0] != "__future__":
        names.foreign[bound] = path


def _look_at(node: ast.AST, names: Names, defined: set[str]) -> Iterator[str]:
    """Yield the private accesses of a syntax node."""
    match node:
        case ast.Import() | ast.ImportFrom():
            yield from _look_at_import(node)
        case ast.Attribute(attr=attr, value=owner):
            if attr == "__dict__" and not _is_self(owner):
                yield ast.unparse(node)
            elif attr.startswith("_") and attr not in STANDARD and not _is_ours(owner, attr, names, defined):
                yield _path_of(node, names)
        case ast.Constant(value=str(text)) if id(node) not in names.texts and PRIVATE_PATH.fullmatch(text):
            if not all(part in defined for part in text.split(".") if PRIVATE.fullmatch(part)):
                yield text
        case ast.Call():
            yield from _look_at_call(node, names)
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _look_at_target(target, value, names)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
            yield from _look_at_target(target, None, names)
        case ast.Delete(targets=targets):
            for target in targets:
                yield from _look_at_target(target, None, names)
        case _:
            pass


def _look_at_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield private modules and names of another library, and our own helper that replaces attributes."""
    origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        parts = f"{origin}{alias.name}".split(".")
        # our own private modules may be imported: the rule is about other libraries
        is_private = parts[0] not in OURS and any(PRIVATE.fullmatch(part) for part in parts)
        if is_private or parts == ["core", "patches", "patched"]:
            yield ".".join(parts)


def _look_at_call(node: ast.Call, names: Names) -> Iterator[str]:
    """Yield private arguments, private names of another object, and calls that reach every name of one."""
    called, is_ours = ast.unparse(node.func), _root_of(node.func) in names.ours
    for name in (keyword.arg or "" for keyword in node.keywords):
        if PRIVATE.fullmatch(name) and name not in names.defined and not is_ours:
            yield f"{called}({name}=)"
    if not node.args or _is_self(node.args[0]) or _root_of(node.args[0]) in names.ours:
        return
    match node.args:
        case [owner, ast.Constant(value=str(name)), *_] if called in BY_STRING and PRIVATE.fullmatch(name):
            if name not in names.defined:
                yield f"{called}({ast.unparse(owner)}, {name})"
        case [owner, *_] if called in REACH_ALL:
            yield f"{called}({ast.unparse(owner)})"
        case _:
            pass


def _look_at_target(target: ast.expr, value: ast.expr | None, names: Names) -> Iterator[str]:
    """Yield assignments to names imported from another library, and functions that take the place of a method."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _look_at_target(element, None, names)
    elif isinstance(target, ast.Attribute | ast.Subscript):
        path = _path_of(target, names)
        if _root_of(target) in names.foreign and path not in DOCUMENTED:
            yield f"{path} ="
        elif isinstance(target, ast.Attribute):
            # a function that is assigned to another object's attribute replaces a method of that object
            is_method = _is_function(value, names) and not _is_self(target.value)
            if is_method or target.attr == "__class__":
                yield f"{ast.unparse(target)} ="


def _is_ours(owner: ast.expr, attr: str, names: Names, defined: set[str]) -> bool:
    """Return whether a private attribute belongs to our own code."""
    if _is_self(owner):
        return attr in defined
    root = _root_of(owner)
    if root in names.foreign:
        return f"{_path_of(owner, names)}.{attr}" in DOCUMENTED
    return attr in names.defined or (isinstance(owner, ast.Name) and root in names.ours)


def _is_self(owner: ast.expr) -> bool:
    match owner:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
        case _:
            return False


def _is_function(value: ast.expr | None, names: Names) -> bool:
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in names.functions)


def _root_of(node: ast.expr) -> str:
    """Return the name at the beginning of a chain of attributes and items; "" where there is none.

    >>> _root_of(ast.parse("a.b[0].c", mode="eval").body)
    'a'
    """
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _path_of(node: ast.expr, names: Names) -> str:
    """Return a chain of attributes with its first name as the import has it; of an item, the container's."""
    while isinstance(node, ast.Subscript):
        node = node.value
    text, root = ast.unparse(node), _root_of(node)
    return names.foreign.get(root, root) + text.removeprefix(root)


if __name__ == "__main__":
    main()
