"""The layers of the code and the imports between them: python -m tools.layers

Prints every layer with the layers that it imports, and every broken rule: an import that runs up, a circle of files, a
file or a function that is too long, a heavy library outside its home. Exit code 1 where a rule is broken.
unit_tests/tools/test_layers.py runs the same checks.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    *("core", "configs", "modeling", "data_feeds", "algs", "trainers/weight_sync", "trainers", "rewards", "rollouts"),
    *("driver", "main_rl", "main_sl", "main_eval", "analysis", "feynrl"),
)
"""From the ground up: a file imports from its own layer and from those before it. The longest prefix counts."""
PROGRAMS = ("main_rl.py", "main_sl.py", "main_eval.py")
"""Beginnings of the hot path: no file that they reach by imports is in analysis/."""
HOMES = {
    "ray": ("core/cluster/",),
    "deepspeed": ("trainers/deepspeed.py", "core/patches.py"),
    "vllm": ("rollouts/engines/", "data_feeds/chat/vllm_parsing.py"),
}
"""The only files, or folders, that import a heavy library."""
OPTIONAL = {
    "analysis": ("analysis/",),
    "agents": ("rollouts/agents/",),
    "tools": ("rollouts/tools/",),
    "environments": ("rollouts/envs/", "rollouts/boxes/"),
    "images": ("data_feeds/images/", "modeling/images/", "driver/checks/explain_images.py"),
    "trackers": ("driver/records/trackers/",),
    "sandbox": ("rewards/sandbox/",),
    "judges": ("rewards/judging/", "rollouts/judges/"),
    "launchers": ("tools/launch/",),
    "suites": ("driver/evaluation/suites/",),
}
"""Optional parts: any of them may be taken out of a clone, whole, and recipes that do not name it run as before."""
KEPT = (
    *(f"rollouts/envs/{name}.py" for name in ("__init__", "base", "check_env", "single_turn")),
    *(f"driver/records/trackers/{name}.py" for name in ("__init__", "base", "feeder", "hub", "jsonl")),
)
"""Files in the folders of optional parts that every run needs."""
PLUG_INS = (
    *("rewards/code.py", "rewards/code_tests.py", "rewards/judge.py", "rewards/rubric.py"),
    *("rollouts/envs/", "rollouts/boxes/"),
)
"""Files that are imported by their name in a recipe only, or by such a file, so they may need optional parts."""
LINES_OF_FILE, LINES_OF_FUNCTION = 350, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """Function or method of the product."""

    place: str
    """File and line."""
    name: str
    lines: int


def main() -> None:
    """Print the report."""
    files = product_files(ROOT)
    graph = {file: imports_of(ROOT, file) for file in files}
    for layer in LAYERS:
        below = {layer_of(other) for file in files if layer_of(file) == layer for other in graph[file]} - {layer}
        print(f"{layer:<24} -> {', '.join(sorted(below, key=LAYERS.index)) or '(nothing)'}")
    functions = [function for file in files for function in functions_of(ROOT, file)]
    print(f"\n{sum(len(v) for v in graph.values())} imports between {len(files)} files")
    broken = [
        *(f"an import runs up: {a} -> {b}" for a, b in arrows_up(graph)),
        *(f"a circle: {' -> '.join(circle)}" for circle in circles(graph)),
        *(f"{file} has {n} lines" for file, n in long_files(ROOT)),
        *(f"{f.place} {f.name} has {f.lines} lines" for f in functions if f.lines > LINES_OF_FUNCTION),
        *(f"{file} imports {library}" for library, file in strangers(ROOT, files)),
        *(f"the hot path imports {file}" for file in reach(graph, PROGRAMS) if layer_of(file) == "analysis"),
        *(f"{a} imports {b}, which is optional, when it is imported itself" for a, b in needed_parts(ROOT, files)),
    ]
    print(*(broken or ["no import runs up, no circles, no file or function is too long"]), sep="\n")
    sys.exit(bool(broken))


def product_files(root: Path) -> list[str]:
    """List the Python files of the layers, as paths from the root."""
    return [file for file in tracked(root) if layer_of(file) in LAYERS]


def tracked(root: Path) -> list[str]:
    # also files that are new and not yet added, or a rule would be broken unseen until the commit
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    return sorted({file for file in listed if (root / file).is_file()})


def layer_of(file: str) -> str:
    """
    >>> layer_of("rollouts/engines/hf.py"), layer_of("trainers/weight_sync/base.py"), layer_of("tools/docs.py")
    ('rollouts', 'trainers/weight_sync', 'tools')
    """
    path = file.removesuffix(".py") + "/"
    # the longest: trainers/weight_sync is a layer of its own inside trainers
    return max((layer for layer in LAYERS if path.startswith(f"{layer}/")), key=len, default=file.split("/")[0])


def part_of(file: str) -> str | None:
    """Return the optional part that a file is of; None for one that every run may need.

    >>> part_of("rollouts/envs/reach.py"), part_of("rollouts/envs/base.py"), part_of("core/errors.py")
    ('environments', None, None)
    """
    return None if file in KEPT else next((part for part, paths in OPTIONAL.items() if file.startswith(paths)), None)


def needed_parts(root: Path, files: list[str]) -> list[tuple[str, str]]:
    """List (file, imported file) where a file cannot be imported without an optional part that it is not of."""
    return [
        (file, other)
        for file in files
        if not file.startswith(PLUG_INS) or file in KEPT
        for other in sorted(find_files(root, imported_at_once(parse_file(root / file))))
        if part_of(other) not in (None, part_of(file))
    ]


def imported_at_once(tree: ast.AST) -> Iterator[str]:
    """Yield every module that is imported with the file itself: not in a function, and not for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        # such an import never runs, so a missing part does no harm
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not is_for_types:
            yield from modules_of(node)
            yield from imported_at_once(node)


def imports_of(root: Path, file: str) -> set[str]:
    """List the files of the product that `file` imports anywhere, inside functions and for type checkers too."""
    return find_files(root, imported_modules(root / file)) - {file}


def find_files(root: Path, modules: Iterable[str]) -> set[str]:
    """Return the files of the product that modules are in."""
    found: set[str] = set()
    for module in modules:
        path = module.replace(".", "/")
        if layer_of(path) in LAYERS:
            found |= {name for name in (f"{path}.py", f"{path}/__init__.py") if (root / name).is_file()}
    return found


@cache
def parse_file(path: Path) -> ast.Module:
    """Parse a file, once: every rule looks at all of them."""
    return ast.parse(path.read_text())


def imported_modules(path: Path) -> Iterator[str]:
    """Yield every module that an import statement may mean: `from a import b` may mean a and a.b."""
    for node in ast.walk(parse_file(path)):
        yield from modules_of(node)


def modules_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows_up(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """List imports of a file in a layer above."""
    height = {layer: i for i, layer in enumerate(LAYERS)}
    return sorted((a, b) for a, others in graph.items() for b in others if height[layer_of(b)] > height[layer_of(a)])


def reach(graph: dict[str, set[str]], begin: Sequence[str]) -> list[str]:
    """List the files that some files import, directly or by others, and these files themselves."""
    found, new = set[str](), {*begin}
    while new:
        found |= new
        new = {other for file in new for other in graph[file]} - found
    return sorted(found)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """List circles of imports that share no file, each once, closed by its first file."""
    rest = {file: set(others) for file, others in graph.items()}
    found: list[list[str]] = []
    while True:
        try:
            TopologicalSorter(rest).prepare()
        except CycleError as error:
            # the sorter names one circle, as imported -> importing; the next try is made without its files
            circle: list[str] = error.args[1][:0:-1]
            first = circle.index(min(circle))
            found.append([*circle[first:], *circle[:first], circle[first]])
            rest = {file: others - {*circle} for file, others in rest.items() if file not in circle}
        else:
            return sorted(found)


def long_files(root: Path) -> list[tuple[str, int]]:
    """List files, benchmarks and tools included, of more than LINES_OF_FILE lines."""
    lengths = [(f, len((root / f).read_text().splitlines())) for f in tracked(root) if layer_of(f) != "unit_tests"]
    return [(file, n) for file, n in lengths if n > LINES_OF_FILE]


def strangers(root: Path, files: list[str]) -> list[tuple[str, str]]:
    """List (library, file) where a heavy library is imported outside its home."""
    imported = {file: {module.split(".")[0] for module in imported_modules(root / file)} for file in files}
    return [
        (library, file)
        for file in files
        for library, homes in HOMES.items()
        if library in imported[file] and not file.startswith(homes)
    ]


def functions_of(root: Path, file: str) -> Iterator[Function]:
    for node in ast.walk(parse_file(root / file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield Function(place=f"{file}:{node.lineno}", name=node.name, lines=node.end_lineno - node.lineno + 1)


if __name__ == "__main__":
    main()
