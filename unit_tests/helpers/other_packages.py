"""Packages that are in no install set, for the tests that run them: installed below build/, beside what is pinned."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]


def install_beside(package: str) -> Path:
    """Install a package, and of what it needs only what this environment lacks; return the folder.

    The environment stays as it is. Fails where the package needs another version of something that is pinned, so that
    it could not be installed beside our own.
    """
    folder = ROOT / "build" / "packages" / package
    whole = folder / "installed"
    if not whole.is_file():
        pinned = ["--constraint", str(ROOT / "constraints.txt")]
        report = json.loads(run([*PIP, "--dry-run", "--report", "-", *pinned, package]))
        lacking = ["{name}=={version}".format(**one["metadata"]) for one in report["install"]]
        folder.mkdir(parents=True, exist_ok=True)
        if lacking:
            run([*PIP, "--no-deps", "--upgrade", "--target", str(folder), *lacking])
        whole.write_text("\n".join(lacking))
    return folder


def install_by_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package by the line of docs/how_to/environments_of_others.md. The test and its children can import it.

    A user has it in the environment itself. Here PYTHONPATH names its folder, as it reaches the actors of Ray too.
    """
    folder = ROOT / "build" / "packages" / name
    if not (whole := folder / "installed").is_file():
        page = (ROOT / "docs/how_to/environments_of_others.md").read_text(encoding="utf-8")
        [wanted] = re.findall(rf"^\.venv/bin/pip install (.*\b{name}\b.*)$", page, re.MULTILINE)
        folder.mkdir(parents=True, exist_ok=True)
        run([*PIP, "--upgrade", "--target", str(folder), *shlex.split(wanted)])
        whole.touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)])))
    monkeypatch.syspath_prepend(folder)


def install_program(package: str, version: str, program: str) -> Path:
    """Install a package of npm and return its program."""
    folder = ROOT / "build" / "npm" / package
    found = folder / "node_modules" / ".bin" / program
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{package}@{version}"])
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
