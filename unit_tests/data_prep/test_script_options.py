"""The command lines of data_prep/: every script runs by its name, and explains each option."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

import data_prep

SCRIPTS = sorted(
    path
    for path in Path(data_prep.__file__).parent.glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_it_makes_and_what_each_option_is(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(f"usage: python -m data_prep.{path.stem} [-h] ")
    usage, about, *parts = said.split("\n\n")
    summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    # without white space: the help breaks long lines, also at a hyphen
    assert summary and "".join(about.split()) == "".join(summary.split()) and "options:" in said
    entries = re.findall(r"^  \S.*(?:\n {4,}.*)*", "\n".join(parts), re.MULTILINE)
    # two spaces or a line break come before the explanation
    assert [entry for entry in entries if not re.search(r"\S\s{2,}\S", entry)] == []
    assert len(entries) > usage.count("[--")


def test_there_are_scripts_to_look_at():
    assert {"arithmetic", "tiny_model", "xlam"} <= {path.stem for path in SCRIPTS}
