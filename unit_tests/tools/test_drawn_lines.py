"""Which tests run a line, of a small repository: lines of functions, of the import, of killed children and of forks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.drawn_mutants.lines import HERE
from tools.mutants import ROOT

pytestmark = pytest.mark.slow
PRODUCT = """LIMIT = 3

def far(x):
    return x > LIMIT

def child():
    return "never"

def short_child():
    return "once"

def fork():
    return "never"

def count_threads(threading):
    return threading.active_count()
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

def test_fork():
    code = "import os, core.product; p = os.fork(); p or core.product.fork(); p or os._exit(0); os.waitpid(p, 0)"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_threads():
    code = "import core.product, threading; assert core.product.count_threads(threading) == 1"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
OTHER = """import multiprocessing
import pytest

def test_other():
    pass

@pytest.mark.slow
def test_slow():
    assert multiprocessing.parent_process() is None, "engines end with it"
"""
ASK = """import json, sys
from pathlib import Path
from tools.drawn_mutants.lines import record

root, kept = map(Path, sys.argv[1:])
found = record(root, kept, "fast", jobs=2, modules={"core/product.py"})
made = {folder: (folder / "tests.xml").stat().st_mtime_ns for folder in found.folders}
again = record(root, kept, "fast", jobs=1, folders={"core"})
lines = [found.find_tests("core/product.py", line, 60.0) for line in (4, 7, 10, 13, 16)]
at_import = [found.find_tests("core/product.py", 1, budget_s) for budget_s in (60.0, 0.0)]
slow = record(root, kept, "slow", jobs=1, folders={""})
anew = sum((folder / "tests.xml").stat().st_mtime_ns != at for folder, at in made.items())
of_slow = [[*slow.seconds], [*slow.failed]]
print(json.dumps([lines, *at_import, [len(found.folders), len(again.folders), anew], of_slow]))
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

    (root / "unit_tests/core/test_other.py").write_text(OTHER)
    # in a process that has not imported anything of the repository, as the tool
    told = subprocess.run(
        [sys.executable, "-c", ASK, root, tmp_path / "kept"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines, at_import, short_of_time, files, slow = json.loads(told.stdout.splitlines()[-1])
    mine = "unit_tests/core/test_product.py::test_"
    assert lines == [[f"{mine}far"], [f"{mine}child"], [f"{mine}short_child"], [f"{mine}fork"], [f"{mine}threads"]]
    assert {*at_import} >= {f"{mine}far", f"{mine}child"}
    assert len(short_of_time) == 1
    assert files == [1, 2, 0]
    assert slow == [["unit_tests/core/test_other.py::test_slow"], []]
