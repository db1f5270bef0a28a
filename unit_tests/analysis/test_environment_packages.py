"""The doctor's line on packages of environments, which pip silently installs in ancient versions."""

from __future__ import annotations

from analysis.doctor.environment_packages import check_environments, judge_versions
from configs.agent_schema import AgentConfig


def test_an_ancient_version_is_a_warning_with_the_way_out():
    old, fine = judge_versions("here", {"openai-agents": "0.0.7", "smolagents": "1.26.0"})
    assert old.level == "warning" and "openai-agents 0.0.7 is older than 0.20" in old.found and "own venv" in old.found
    assert (fine.level, fine.found) == ("ok", "here: smolagents 1.26.0")


def test_the_python_of_a_command_is_asked_too(tmp_path):
    (tmp_path / "python3").write_text('#!/bin/sh\necho \'{"verifiers": "0.4.0"}\'\n')
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    asked = [*check_environments(AgentConfig(command=[str(tmp_path / "python3"), "agent.py"]))][-1]
    assert (asked.level, asked.found) == ("ok", f"{tmp_path}/python3: verifiers 0.4.0")
    broken = [*check_environments(AgentConfig(command=[str(tmp_path / "python"), "agent.py"]))][-1]
    assert broken.level == "warning" and "cannot be asked" in broken.found
    here = [*check_environments(AgentConfig(command=["sh"]))]
    assert all(finding.found.startswith("here: ") for finding in here)
