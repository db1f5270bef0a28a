"""Write constraints.txt from what is installed: each version once, under the first set that needs it.

    .venv/bin/python tools/lock.py            show it
    .venv/bin/python tools/lock.py --write    write it

tools/install.py installs the lines of a set as they stand, and nobody works out dependencies again. So the file must
hold all of them: this command follows what every package asks for, on each Python that pyproject.toml allows. To move
to other versions: `make newest`, and when its tests pass, run this with .venv-newest/bin/python.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tomllib
from collections.abc import Collection, Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
HEAD = """\
# The versions that are tested together, on Python 3.11 and a CPU. Made by tools/lock.py, which tells how.
"""
SETS = {
    "run": "what a run may import: make quickstart",
    "standard": "make install adds this: trackers, and what vLLM's server wants",
    "test": "make test adds this",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write constraints.txt")
    text, wrong = lock(tomllib.loads((ROOT / "pyproject.toml").read_text()), Installed())
    if wrong:
        sys.exit("what is installed here does not fit together:\n" + "\n".join(wrong))
    if parser.parse_args().write:
        (ROOT / "constraints.txt").write_text(text)
    else:
        print(text, end="")


def lock(pyproject: dict[str, Any], installed: Installed) -> tuple[str, list[str]]:
    """Return the text of constraints.txt, and what does not fit together."""
    project, ours = pyproject["project"], pyproject["tool"]["feynrl"]
    extras = project["optional-dependencies"]
    # never: of no use on a CPU. later: only a larger set needs them
    never, later = set(ours["never"]), set(ours["later"])
    # setuptools too: the link to the clone is made without asking a package index
    run = [*pyproject["build-system"]["requires"], *project["dependencies"], *extras["cpu"]]
    standard = [*run, *extras["trackers"]]
    beside = ("tensorboard", "lm-eval", "gymnasium", "quantization", "test", "dev")
    test = [*standard, *(one for name in beside for one in extras[name])]
    found = {
        "run": installed.closure(run, without=never | later),
        "standard": installed.closure(standard, without=never),
        "test": installed.closure(test, without=never)
        | installed.closure(ours["alone"], without=(), dependencies=False),
    }
    text, written = HEAD, set[str]()
    for name, meaning in SETS.items():
        names = sorted(found[name] - written)
        written |= found[name]
        text += f"\n# [{name}] {meaning}\n" + "".join(f"{one}=={installed.version(one)}\n" for one in names)
    return text, sorted(installed.wrong)


class Installed:
    """Installed packages with their requirements."""

    def __init__(self) -> None:
        # not all of sys.path: setuptools, once imported, adds the copies that it carries to it
        here = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        self._all = {canonicalize_name(one.metadata["Name"]): one for one in distributions(path=here)}
        self.wrong: set[str] = set()

    def version(self, name: str) -> str:
        """Say the version without a build's label (2.13.0, not 2.13.0+cpu)."""
        return Version(self._all[canonicalize_name(name)].version).public

    def closure(self, roots: Iterable[str], *, without: Collection[str], dependencies: bool = True) -> set[str]:
        """Return all requirements of the roots on every Python; missing and unfit packages go into `wrong`."""
        seen: set[tuple[str, str]] = set()
        todo = [(python, Requirement(root), "pyproject.toml") for root in roots for python in PYTHONS]
        while todo:
            python, wanted, who = todo.pop()
            name = canonicalize_name(wanted.name)
            if name in without:
                continue
            if name not in self._all:
                self.wrong.add(f"{who} asks for {wanted} (Python {python}), which is not installed")
                continue
            # prereleases too: what is installed is what was tested
            if not wanted.specifier.contains(self._all[name].version, prereleases=True):
                self.wrong.add(f"{who} asks for {wanted} (Python {python}), and {self.version(name)} is installed")
            for extra in ("", *sorted(wanted.extras)):
                # by Python and extra, because each asks for other packages; packages may also ask for each other in a
                # circle
                if (key := (python, f"{name}[{extra}]")) not in seen:
                    seen.add(key)
                    todo += self._asks(name, python, extra) if dependencies else []
        return {key.partition("[")[0] for _, key in seen}

    def _asks(self, name: str, python: str, extra: str) -> list[tuple[str, Requirement, str]]:
        # the platform is this machine's, and only the Python is varied
        machine = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
        all_of_them = [Requirement(line) for line in self._all[canonicalize_name(name)].requires or []]
        return [(python, one, name) for one in all_of_them if one.marker is None or one.marker.evaluate(machine)]


if __name__ == "__main__":
    main()
