"""The build backend: `pip install --editable .` links to this clone; a wheel or an sdist is refused in one sentence.

The folders here are called `core`, `configs`, `data_feeds`, ...; a wheel of them would take those names in the
environment of whoever installs it. What an installation is for is the entry point by which vLLM's processes find us.
A link needs no list of packages and no setuptools, so that pip downloads nothing to make it.
Interface: https://peps.python.org/pep-0660/
"""

from __future__ import annotations

import base64
import hashlib
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
REFUSED = (
    "FeynRL is used from its clone and builds no package, because its folders (core, configs, rewards, ...) would take"
    " those names in your environment: git clone it, say `make install` there, and start main_rl.py from there."
)


def get_requires_for_build_wheel(settings: dict[str, Any] | None = None) -> NoReturn:
    """Refuse, at the first question that pip asks."""
    sys.exit(REFUSED)


def build_wheel(folder: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> NoReturn:
    """Refuse: whoever asks nothing before ends up here."""
    sys.exit(REFUSED)


def get_requires_for_build_sdist(settings: dict[str, Any] | None = None) -> NoReturn:
    """Refuse: from an sdist one could only build a wheel."""
    sys.exit(REFUSED)


def build_sdist(folder: str, settings: dict[str, Any] | None = None) -> NoReturn:
    """Refuse: whoever asks nothing before ends up here."""
    sys.exit(REFUSED)


def build_editable(folder: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """Write a wheel that holds a path to this clone, the entry points, and what the clone needs; return its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stem = f"{project['name']}-{project['version']}"
    info = f"{stem}.dist-info"
    files = {
        f"{project['name']}.pth": f"{ROOT}\n",
        f"{info}/METADATA": describe(project),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: in_place\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points(project),
    }
    record = [f"{name},sha256={digest(text)},{len(text.encode())}\n" for name, text in files.items()]
    files[f"{info}/RECORD"] = "".join(record) + f"{info}/RECORD,,\n"
    wheel = f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder) / wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def describe(project: dict[str, Any]) -> str:
    """Put the project's table into the core metadata that pip reads."""
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Summary: {project['description']}", f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {wanted}" for wanted in project["dependencies"]]
    for extra, requirements in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}"]
        lines += [f"Requires-Dist: {only_with(extra, wanted)}" for wanted in requirements]
    return "\n".join(lines) + "\n"


def only_with(extra: str, requirement: str) -> str:
    """
    >>> only_with("gpu", "vllm>=0.32")
    'vllm>=0.32; extra == "gpu"'
    >>> only_with("cpu", "six; python_version > '3.11'")
    'six; (python_version > \\'3.11\\') and extra == "cpu"'
    """
    name, _, marker = (part.strip() for part in requirement.partition(";"))
    return f'{name}; ({marker}) and extra == "{extra}"' if marker else f'{name}; extra == "{extra}"'


def entry_points(project: dict[str, Any]) -> str:
    """Write the entry points in the form of an ini file."""
    sections = [
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())])
        for group, entries in project.get("entry-points", {}).items()
    ]
    return "\n\n".join(sections) + "\n"


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
