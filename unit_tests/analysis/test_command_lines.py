"""The command lines of reports, the doctor, replays and agents' hosts say what they do, and what each option is."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from analysis.capture import replay
from analysis.doctor import __main__ as doctor
from analysis.report import __main__ as report
from rollouts.agents import host

PROGRAMS: dict[str, Callable[[list[str]], Any]] = {
    "doctor": doctor.parse_args,
    "report": lambda _: report.main(),
    "replay": replay.main,
    "host": host.read_options,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_does_and_what_each_option_is(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[name](["--help"])
    usage, about, *parts = capsys.readouterr().out.split("\n\n")
    assert ended.value.code == 0 and usage.startswith("usage: ")
    assert about.strip() and not re.match(r"(positional arguments|options):", about)
    entries = re.findall(r"^  \S.*(?:\n {4,}.*)*", "\n".join(parts), re.MULTILINE)
    # two spaces or a line break come before the explanation
    unexplained = [entry for entry in entries if not re.search(r"\S\s{2,}\S", entry)]
    assert unexplained == [] and len(entries) > usage.count("[--")


def test_the_doctor_and_a_host_have_these_defaults(capsys):
    found = vars(doctor.parse_args(["run"]))
    assert found == {
        **{"target": "run", "overrides": [], "setup": False, "json": False, "sequences": 32, "tokens": 64},
        **{"bound": None, "knob": []},
    }
    usual = {"file": None, "serve": None, "listen": "127.0.0.1", "port": 9000, "insecure": False, "most": 32}
    assert vars(host.read_options([])) == usual | {"command": []}
    asked = ["--file", "a.py", "--serve", "--listen", "::1", "--port", "7", "--insecure", "--most", "2"]
    given = {"file": "a.py", "serve": True, "listen": "::1", "port": 7, "insecure": True, "most": 2}
    assert vars(host.read_options([*asked, "--", "sh", "-c", "x"])) == given | {"command": ["sh", "-c", "x"]}
    for wrong in (["--sequences", "3"], ["--tokens", "1"], ["--bound", "0"], ["--bound", "nan"]):
        with pytest.raises(SystemExit):
            doctor.parse_args(["run", *wrong])
        assert "--sequences must be 4 or more, --tokens 2 or more, and --bound above 0" in capsys.readouterr().err
    least = doctor.parse_args(["run", "a=1", "--sequences", "4", "--tokens", "2", "--bound", "0.5", "--knob", "b=2"])
    assert (least.sequences, least.tokens, least.bound, least.overrides, least.knob) == (4, 2, 0.5, ["a=1"], ["b=2"])
