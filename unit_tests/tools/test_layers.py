"""Who may import whom. The mathematics must run where no GPU library is installed."""

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from algs import list_algorithms
from core.timing import deadlines
from tools import layers

ROOT = Path(__file__).parent.parent.parent
LIGHT = {"numpy", "torch", "pydantic", "core", "algs", "math", "collections", "__future__", "dataclasses", "types"}
LIGHT |= {"typing"}
"""What the mathematics may import. It must run where no GPU library is installed."""
FILES = layers.product_files(ROOT)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {file: layers.imports_of(ROOT, file) for file in FILES}


def test_every_import_goes_down(graph):
    assert layers.arrows_up(graph) == []


def test_the_hot_path_imports_nothing_of_analysis(graph):
    hot = layers.reach(graph, layers.PROGRAMS)
    assert {"driver/rl/run.py", "trainers/trainer.py", "algs/base.py", "rollouts/worker.py"} < {*hot}
    assert [file for file in hot if layers.layer_of(file) == "analysis"] == []
    assert layers.reach({"a": {"b"}, "b": {"analysis"}, "analysis": set(), "c": set()}, ["a"]) == ["a", "analysis", "b"]


def test_one_file_loads_analysis_by_name():
    by_name = {
        file
        for file in FILES
        if layers.layer_of(file) not in ("analysis", "feynrl")
        for node in ast.walk(layers.parse_file(ROOT / file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"analysis(\.\w+)+", node.value)
    }
    assert by_name == {"driver/start/observers.py"}


def test_there_are_no_circles(graph):
    assert layers.circles(graph) == []


def test_no_test_imports_another_test():
    files = [path for path in (ROOT / "unit_tests").rglob("*.py") if path.parent.name != "__pycache__"]
    imported = [(str(path.relative_to(ROOT)), module) for path in files for module in layers.imported_modules(path)]
    assert ("unit_tests/tools/test_layers.py", "tools.layers") in imported
    assert [(file, module) for file, module in imported if ".test_" in module] == []


def test_a_heavy_library_has_one_home():
    assert layers.strangers(ROOT, FILES) == []


def test_a_file_is_imported_without_the_optional_parts_that_it_is_not_of():
    assert layers.needed_parts(ROOT, FILES) == []


def test_an_import_of_an_optional_part_is_found_unless_it_is_in_a_function(tmp_path):
    (tmp_path / "rollouts/agents").mkdir(parents=True)
    (tmp_path / "rollouts/agents/task.py").write_text("")
    (tmp_path / "core").mkdir()
    for name, text in {
        "at_once": "try:\n    from rollouts.agents.task import Task\nfinally:\n    pass\n",
        "in_class": "class A:\n    import rollouts.agents.task\n",
        "in_function": "class A:\n    def f(self):\n        from rollouts.agents import task\n",
        "for_types": "if TYPE_CHECKING:\n    from rollouts.agents import task\n",
    }.items():
        (tmp_path / f"core/{name}.py").write_text(text)
    files = [f"core/{name}.py" for name in ("at_once", "in_class", "in_function", "for_types")]
    task = "rollouts/agents/task.py"
    assert layers.needed_parts(tmp_path, [*files, task]) == [(files[0], task), (files[1], task)]


def test_files_and_functions_are_short():
    assert layers.long_files(ROOT) == []
    functions = [f for file in FILES for f in layers.functions_of(ROOT, file)]
    assert [(f.place, f.name) for f in functions if f.lines > layers.LINES_OF_FUNCTION] == []


def test_names_of_tests_are_short():
    files = [file for file in layers.tracked(ROOT) if file.startswith("unit_tests/")]
    tests = [f for file in files for f in layers.functions_of(ROOT, file) if f.name.startswith("test_")]
    assert "test_names_of_tests_are_short" in {test.name for test in tests}
    assert [(test.place, test.name) for test in tests if len(test.name) > 70] == []


@pytest.mark.parametrize(
    ("edges", "circles"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [["b", "c", "b"]]),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}, [["a", "b", "a"], ["c", "d", "c"]]),
    ],
)
def test_circles_are_found(edges, circles):
    assert layers.circles(edges) == circles


def test_an_import_that_runs_up_is_found():
    assert layers.arrows_up(
        {"core/types/samples.py": {"driver/context.py"}, "driver/context.py": {"core/types/samples.py"}}
    ) == [("core/types/samples.py", "driver/context.py")]


def at_run_time(path: Path):
    """Yield the packages imported outside `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def test_algorithms_import_numpy_torch_pydantic_and_types_only():
    for path in (ROOT / "algs").glob("*.py"):
        if path.stem != "__init__":
            assert set(at_run_time(path)) <= LIGHT, path


def test_a_reward_process_imports_no_heavy_library():
    """Every reward worker starts a fresh interpreter; a reward that is a model is the one exception."""
    for path in (ROOT / "rewards").glob("*.py"):
        if path.stem != "reward_model":
            heavy = {"torch", "transformers", "ray", "vllm", "deepspeed", "modeling", "trainers", "algs"}
            assert not set(at_run_time(path)) & heavy, path


@pytest.mark.parametrize("program", ["main_rl.py", "main_sl.py", "main_eval.py"])
def test_help_imports_no_heavy_module(program):
    code = (
        f"import sys, runpy; sys.argv = [{program!r}, '--help']\n"
        f"try: runpy.run_path({program!r}, run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'vllm', 'deepspeed', 'pydantic') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert "--config" in out


def test_an_algorithm_is_one_short_file():
    for name in list_algorithms():
        path = ROOT / "algs" / f"{name}.py"
        text = path.read_text()
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        assert len(text.splitlines()) <= 150, path
        assert all(f.end_lineno - f.lineno < 40 for f in functions), path


def test_a_deadline_is_a_key_or_stands_in_the_table():
    """A number of seconds that is assigned to a name anywhere else decides a wait that no document shows."""
    elsewhere = [
        (file, target.id)
        for file in FILES
        if file != "core/timing/deadlines.py"
        for node in layers.parse_file(ROOT / file).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("_S")
    ]
    assert elsewhere == []
    names = {name for name in vars(deadlines) if name.endswith("_S")}
    texts = [(ROOT / file).read_text() for file in FILES if "deadlines" not in file]
    used = {name for name in names if any(name in text for text in texts)}
    assert used == names, "a constant that nothing waits for"


def test_the_processes_of_a_run_are_called_by_methods_and_not_by_strings():
    """`workers.call_all("save")` would hide the call from type checker and editor."""
    calls = {"call_one", "call_all", "scatter", "start_one", "start_all", "submit"}
    by_string = [
        (file, node.lineno)
        for file in FILES
        for node in ast.walk(layers.parse_file(ROOT / file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in calls
        if any(isinstance(arg, ast.Constant) and isinstance(arg.value, str) for arg in node.args[:2])
    ]
    assert by_string == []


def modules_with_examples() -> list[str]:
    files = [*FILES, *(str(p.relative_to(ROOT)) for p in (ROOT / "tools").glob("*.py"))]
    return [file.removesuffix(".py").replace("/", ".") for file in files if ">>> " in (ROOT / file).read_text()]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_in_docstrings_hold(name):
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted and not done.failed
