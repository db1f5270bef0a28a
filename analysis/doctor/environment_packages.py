"""Packages of environments and harnesses that other people wrote, with the versions that are installed.

They do not install beside ours. pip then falls silently to an ancient version, which imports and has another interface.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from analysis.doctor.findings import Finding
from configs.agent_schema import AgentConfig
from core.timing.deadlines import IMPORT_TIMEOUT_S

OLDEST = {
    "verifiers": "0.4",
    "openai-agents": "0.20",
    "langgraph": "1.0",
    "smolagents": "1.20",
    "mini-swe-agent": "2.0",
    "reasoning-gym": "0.1.20",
    "gymnasium": "1.0",
    "textarena": "0.7",
}
"""Packages, and the oldest version with the interface that our pages use."""
PAGE = "docs/how_to/environments_of_others.md"
LIST = """
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def check_environments(agent: AgentConfig | None) -> Iterator[Finding]:
    """Yield the packages of this environment, and of the Python that an agent's command names."""
    yield from judge_versions("here", list_versions(sys.executable))
    if agent is None or not agent.command or not Path(agent.command[0]).name.startswith("python"):
        return
    python = agent.command[0]
    try:
        found = list_versions(python)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield Finding(check="environments", level="warning", found=f"{python} cannot be asked: {error}")
    else:
        yield from judge_versions(python, found)


def list_versions(python: str) -> dict[str, str]:
    """Return the installed packages of an interpreter by name. Raises OSError, ValueError and SubprocessError."""
    command = [python, "-c", LIST, *OLDEST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=True)
    return json.loads(done.stdout)


def judge_versions(where: str, found: dict[str, str]) -> Iterator[Finding]:
    """Yield a warning for each package that is too old, and one line with the others.

    >>> [finding.level for finding in judge_versions("here", {"verifiers": "0.1.10", "langgraph": "1.2.24"})]
    ['warning', 'ok']
    """
    from packaging.version import Version

    old = [name for name, version in found.items() if Version(version) < Version(OLDEST[name])]
    for name in old:
        what = f"{where}: {name} {found[name]} is older than {OLDEST[name]}: pip fell to it, for a newer one does not"
        yield Finding(check="environments", level="warning", found=f"{what} fit here; make it its own venv ({PAGE})")
    if fine := [f"{name} {version}" for name, version in found.items() if name not in old]:
        yield Finding(check="environments", level="ok", found=f"{where}: {', '.join(fine)}")
