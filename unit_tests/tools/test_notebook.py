"""The notebook of the tutorial holds the outputs of a whole execution, and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tools.notebook import NOTEBOOK
from unit_tests.helpers.other_packages import ROOT, install_beside


def list_code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_holds_the_outputs_of_one_execution():
    cells = list_code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(outputs) >= len(cells) - 2
    assert [output for output in outputs if output["output_type"] == "error"] == []
    # a reader's paths are others
    assert str(ROOT) not in json.dumps(outputs) and "/tmp/" not in json.dumps(outputs)


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_the_notebook_runs_from_top_to_bottom():
    beside = [str(install_beside(package)) for package in ("nbclient", "ipykernel")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *beside])}
    subprocess.run([sys.executable, "-m", "tools.notebook"], cwd=ROOT, env=env, check=True)
