"""Who may import whom. The mathematics must run where no GPU library is installed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from algs import NOT_ALGORITHMS

ROOT = Path(__file__).parent.parent
ALLOWED = {"algs": {"torch", "pydantic", "core", "algs", "math", "collections"}}
BANNED = {
    "rewards": {"ray", "deepspeed", "vllm", "torch", "algs", "rollouts", "trainers"},
    "rollouts": {"ray", "deepspeed", "algs"},
    "trainers": {"ray", "vllm"},
    "data_feeds": {"ray", "deepspeed", "vllm", "rollouts", "trainers", "algs"},
    "core": {"deepspeed", "vllm"},
}
EXEMPT = {ROOT / "rewards" / "reward_model.py"}
"""A reward that is a model, and is read as in training."""
HOMES = {
    "ray": {"cluster.py"},
    "deepspeed": {"deepspeed.py"},
    "vllm": {"vllm_engine.py", "vllm_worker.py", "weight_sync.py"},
}


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def at_run_time(path: Path):
    """Imports outside `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("folder", BANNED)
def test_a_layer_imports_nothing_it_should_not(folder):
    for path in (ROOT / folder).glob("*.py"):
        if path not in EXEMPT:
            assert not set(at_run_time(path)) & BANNED[folder], path


def test_algorithms_import_torch_pydantic_and_types_only():
    for path in (ROOT / "algs").glob("*.py"):
        if path.stem not in ("__init__", "check", "check_data"):
            assert set(at_run_time(path)) <= ALLOWED["algs"] | {"__future__", "dataclasses", "typing"}, path


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_has_one_home(library):
    users = {
        p.name
        for folder in ("algs", "core", "rollouts", "rewards", "trainers", "data_feeds", "data_prep", "configs")
        for p in (ROOT / folder).glob("*.py")
        if library in imports(p)
    }
    assert users <= HOMES[library]


@pytest.mark.parametrize("program", ["main_rl.py", "main_sl.py"])
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
    for path in (ROOT / "algs").glob("*.py"):
        if path.stem.startswith("_") or path.stem in NOT_ALGORITHMS:
            continue
        text = path.read_text()
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        assert len(text.splitlines()) <= 150, path
        assert all(f.end_lineno - f.lineno < 40 for f in functions), path
