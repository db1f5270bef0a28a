"""What the set-up decides, and that the files it reads agree."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("feynrl_install", ROOT / "tools" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "tools/install.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("gpus", "build", "why"),
    [
        (None, "cpu", "nvidia-smi is missing or fails"),
        ("No devices were found\n", "cpu", "nvidia-smi lists no GPU"),
        ("GPU 0: H100 (UUID: x)\nGPU 1: H100 (UUID: y)\n", "gpu", "nvidia-smi lists 2 GPU(s)"),
    ],
)
def test_the_build_follows_the_machine_and_says_why(
    installer: ModuleType, gpus: str | None, build: str, why: str
) -> None:
    assert installer.choose_build(gpus) == (build, why)


def test_a_change_of_any_input_means_another_install(installer: ModuleType, repository: Path) -> None:
    before = installer.fingerprint(repository, "cpu", newest=False)
    assert installer.fingerprint(repository, "cpu", newest=False) == before
    others = {installer.fingerprint(repository, "gpu", newest=False)}
    for name in ("pyproject.toml", "constraints.txt"):
        (repository / name).write_text((repository / name).read_text() + "\n# touched\n")
        others.add(installer.fingerprint(repository, "cpu", newest=False))
    assert len(others | {before}) == 4


def test_a_failed_install_leaves_no_stamp(repository: Path) -> None:
    """An environment that cannot install (its pip fails) must not count as ready the next time."""
    venv = repository / ".venv" / "bin"
    venv.mkdir(parents=True)
    python = venv / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *install*) exit 1;; esac\n')
    python.chmod(0o755)
    stamp = repository / ".venv" / "installed"
    stamp.write_text("of another constraints.txt")
    done = subprocess.run(
        [sys.executable, repository / "tools" / "install.py"], capture_output=True, text=True, env={"PATH": ""}
    )
    assert done.returncode == 1
    assert "this failed with exit code 1" in done.stderr
    assert not stamp.exists()


def test_an_environment_that_is_there_is_taken_at_once(installer: ModuleType, repository: Path) -> None:
    python = repository / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    (repository / ".venv" / "installed").write_text(installer.fingerprint(repository, "cpu", newest=False))
    done = subprocess.run(
        [sys.executable, repository / "tools" / "install.py"], capture_output=True, text=True, env={"PATH": ""}
    )
    assert done.stdout == "[install] .venv is up to date (cpu build: nvidia-smi is missing or fails)\n"


def test_the_cpu_build_of_torch_is_the_version_that_is_tested(installer: ModuleType) -> None:
    assert f"torch=={installer.tested_torch(ROOT)}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert installer.required_torch(["numpy", "torch==2.14.0 ; python_version > '3'"]) == "2.14.0"


def test_what_is_pinned_lies_within_what_is_declared() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines) if v}
    extras = PROJECT["optional-dependencies"]
    declared = [Requirement(r) for r in PROJECT["dependencies"] + extras["cpu"] + extras["test"] + extras["dev"]]
    outside = [str(r) for r in declared if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))]
    assert outside == []


def test_every_file_of_the_set_up_is_free_of_this_machine() -> None:
    for name in ("pyproject.toml", "constraints.txt", "Makefile", "tools/install.py", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "file://" not in text and str(ROOT) not in text, name
