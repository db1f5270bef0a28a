"""Run docs/tutorial/quickstart.ipynb from top to bottom and write its outputs: python -m tools.notebook --write

It runs in a folder of its own that looks like the clone, with models, data and runs of its own. nbclient and ipykernel
must be importable; `make verify` installs them below build/ and runs this without --write.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.layers import ROOT

NOTEBOOK = ROOT / "docs" / "tutorial" / "quickstart.ipynb"
OWN = {"models", "data", "runs", ".git"}
"""Folders of the clone that the notebook makes for itself."""


def run_notebook(notebook: Any, folder: Path) -> None:
    """Execute a notebook in a folder. Raises nbclient's CellExecutionError for a cell that fails."""
    from nbclient import NotebookClient

    for path in ROOT.iterdir():
        if path.name not in OWN:
            (folder / path.name).symlink_to(path)
    # `!python` of a cell is this Python, and the modules are those of the folder, so that paths begin there
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    # times of execution would change in every run
    client = NotebookClient(notebook, timeout=900, record_timing=False, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            hide_folder(output, folder)


def hide_folder(output: Any, folder: Path) -> None:
    """Make paths of the folder and of the clone relative, in place."""
    output.update(json.loads(json.dumps(output).replace(f"{folder}/", "").replace(f"{ROOT}/", "")))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.notebook", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep the outputs in the notebook")
    args = parser.parse_args(argv)
    import nbformat

    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        run_notebook(notebook, Path(folder))
    if args.write:
        nbformat.write(notebook, NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
