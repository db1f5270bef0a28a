"""Check what GPU runs use of vLLM, torch, DeepSpeed and NCCL, with the GPU builds and without a GPU: make gpu-contract

Installs constraints-gpu.txt into .venv-gpu, a folder of 9 GB beside .venv, and asks `pip check`. Then runs with it the
tests in TESTS, which need no GPU: core/gpu_contract.py lists what is expected. Run by hand when versions change, not
in CI. Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    from core.gpu_contract import Part

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-gpu"
NEEDED_GB = 12
TESTS = (
    *("unit_tests/tools/test_gpu_contract.py", "unit_tests/core/test_patches.py"),
    *("unit_tests/rollouts/test_vllm_transfers.py", "unit_tests/trainers/test_nccl_sync.py"),
)
RUNNER = ("pytest", "pytest-timeout", "pytest-xdist", "pluggy", "iniconfig", "execnet")
"""Packages of the set `test` that run the tests."""


def main() -> None:
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < NEEDED_GB and not FOLDER.is_dir():
        sys.exit(f"the GPU set needs {NEEDED_GB} GB of disk, and {ROOT} has {free_gb:.0f} GB free: make room there")
    began = time.monotonic()
    python = str(FOLDER / "bin" / "python")
    run(sys.executable, "-m", "venv", str(FOLDER))
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-cache-dir", *read_versions())
    run(python, "-m", "pip", "check")
    size_gb = sum(path.lstat().st_size for path in FOLDER.rglob("*")) / 1e9
    print(f"[gpu-contract] {FOLDER.name} is ready after {time.monotonic() - began:.0f} s: {size_gb:.1f} GB", flush=True)
    run(python, "-m", "pytest", "-q", "-rs", "-m", "slow or not slow", *TESTS)


def read_versions() -> list[str]:
    """Return what pip is to install: the sets run and standard, and what runs the tests."""
    of_runs, of_tests = (ROOT / "constraints-gpu.txt").read_text().split("# [test]")
    lines = [line for line in of_runs.splitlines() if line and not line.startswith("#")]
    return lines + [line for line in of_tests.splitlines() if line.partition("==")[0] in RUNNER]


def run(*command: str) -> None:
    if code := subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(code)


def find_faults(part: Part) -> list[str]:
    """Return a sentence for everything that an installed library lacks of a part."""
    try:
        found = resolve_name(part.target)
    except (ImportError, AttributeError) as error:
        return [f"{part.target} is gone: {error}"]
    faults = [f"{part.target} has no {name}" for name in part.attributes if not has_attribute(found, name)]
    if part.result:
        returned = get_type_hints(found)["return"]
        faults += [f"{part.target} returns {returned}, without {n}" for n in part.result if not hasattr(returned, n)]
    return faults if part.arguments == () else [*faults, *find_call_faults(part, found)]


def has_attribute(owner: Any, name: str) -> bool:
    """Tell whether a module or class has a name, also one that its methods assign to self."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    classes = [cls for cls in owner.__mro__ if cls.__module__ != "builtins"]
    return any(
        name in vars(cls).get("__annotations__", {}) or re.search(rf"\bself\.{name}\b", inspect.getsource(cls))
        for cls in classes
    )


def find_call_faults(part: Part, found: Any) -> list[str]:
    """Return why a call as this code makes it would fail, if it would."""
    of_class = isinstance(found, FunctionType) and "." in part.target.rpartition(":")[2]
    names = ("self", *part.arguments) if of_class else part.arguments
    first = part.by_position + of_class
    signature = inspect.signature(found)
    if tuple(signature.parameters)[:first] != names[:first]:
        return [f"{part.target} takes {signature}, and is called with {', '.join(names[:first])} by position"]
    try:
        signature.bind(*names[:first], **dict.fromkeys(names[first:]))
    except TypeError as error:
        return [f"{part.target} takes {signature}, and is called with {', '.join(names)}: {error}"]
    return []


if __name__ == "__main__":
    main()
