"""Environments of Python for harnesses, made by the lines of docs/how_to/environments_of_others.md."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from unit_tests.helpers.runs import ROOT

PAGE = ROOT / "docs/how_to/environments_of_others.md"


def make_environment(name: str) -> Path:
    """Run the page's line that makes an environment, below build/. Return its Python."""
    folder = ROOT / "build" / "environments" / name
    if not (folder / "whole").is_file():
        # the first such line; a second one installs the user's own tasks
        wanted = re.findall(rf"venv-{name}/bin/pip install (.*)", PAGE.read_text(encoding="utf-8"))[0]
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin/pip"), "install", "-q", *shlex.split(wanted)], check=True)
        (folder / "whole").touch()
    return folder / "bin/python"
