"""Which tests run a line, of a small repository: lines of functions, of the import and of killed children."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.drawn_mutants.lines import HERE, record
from tools.mutants import ROOT

pytestmark = pytest.mark.slow
PRODUCT = """LIMIT = 3

def far(x):
    return x > LIMIT

def child():
    return "never"

def short_child():
    return "once"
"""
TESTS = """import subprocess, sys, time
from core.product import far

def test_far():
    assert far(4)

def test_import():
    assert far

def test_child():
    code = "import core.product, time; core.product.child(); print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline()
    time.sleep(2)
    process.kill()
    process.wait()

def test_short_child():
    subprocess.run([sys.executable, "-c", "import core.product; core.product.short_child()"], check=True)
"""


def test_the_tests_of_a_line_are_recorded_once(tmp_path: Path):
    root = tmp_path / "root"
    shutil.copytree(ROOT / HERE, root / HERE)
    for name, text in {"core/product.py": PRODUCT, "unit_tests/core/test_product.py": TESTS}.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    (root / "core/__init__.py").write_text("")  # else an installed package of that name comes first
    (root / "conftest.py").write_text("")
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    verify\n    gpu\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)

    found = record(root, tmp_path / "kept", "fast")
    mine = "unit_tests/core/test_product.py::test_"
    assert found.find_tests("core/product.py", 4, 60.0) == [f"{mine}far"]
    assert found.find_tests("core/product.py", 7, 60.0) == [f"{mine}child"]
    assert found.find_tests("core/product.py", 10, 60.0) == [f"{mine}short_child"]
    assert {*found.find_tests("core/product.py", 1, 60.0)} >= {f"{mine}far", f"{mine}child"}
    assert len(found.find_tests("core/product.py", 1, 0.0)) == 1
    made = (found.folder / "tests.xml").stat().st_mtime_ns
    assert record(root, tmp_path / "kept", "fast").folder == found.folder
    assert (found.folder / "tests.xml").stat().st_mtime_ns == made
