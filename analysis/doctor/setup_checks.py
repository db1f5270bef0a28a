"""Machine checks: causes of late failures, or of numbers that differ from the tests."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import tempfile
import tomllib
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from analysis.doctor.environment_packages import check_environments
from analysis.doctor.findings import Finding, Level, Say, attempt, show_all
from configs.schema import RLConfig, RunConfig
from core.cluster.addresses import find_interface, list_interfaces, listen_at
from core.errors import UserError
from core.timing.deadlines import ADDRESS_CHECK_TIMEOUT_S
from driver.checks.explain import estimate_memory
from driver.checks.explain_layout import measure_rows
from driver.checks.memory_estimate import GIB, MemoryEstimate, find_gpu_gib, find_machine_gib
from driver.load_recipe import Loaded
from driver.start.devices import check_devices, count_gpus, find_cpu_cache_gib, uses_gpus

ROOT = Path(__file__).resolve().parent.parent.parent
CORE = ("torch", "transformers", "numpy", "pydantic", "pyarrow", "datasets", "peft", "ray", "deepspeed", "vllm")
"""Packages with versions that affect numbers or formats."""
ONLY_ON_RAY = ("ray", "deepspeed")
TIGHT = 0.8
"""Share of memory or disk above which there is a warning."""
BYTES_PER_TOKEN = 6
"""Bytes of a sample file per sampled token."""
TEMPORARY_GIB = 1.0
"""Room that Ray's session, logs and sockets want in the temporary folder."""
SHARED_GIB = 0.25
"""Room that queues and Ray's object store want in shared memory besides the weights."""
LOOPBACK = "127.0.0.1"


def check_setup(loaded: Loaded[Any], say: Say) -> list[Finding]:
    """Run all machine checks and print a line for each; return the findings."""
    return show_all(_look(loaded), say)


def _look(loaded: Loaded[Any]) -> Iterator[Finding]:
    cfg: RunConfig = loaded.cfg
    yield check_python(platform.python_version(), read_required_python())
    yield from check_packages(read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8")), list_wanted(cfg))
    if isinstance(cfg, RLConfig):
        yield from check_environments(cfg.rollout.agent)
    yield attempt("devices", partial(describe_devices, cfg))
    yield attempt("rows", partial(measure_rows, cfg))
    try:
        estimate = estimate_memory(loaded)
    except UserError as error:
        yield Finding(check="memory", level="warning", found=f"unknown, and so is the disk space: {error}")
    else:
        yield check_memory(cfg, estimate, total_gib=find_memory_gib(cfg))
        yield check_disk(cfg, estimate)
    yield check_temporary(Path(tempfile.gettempdir()))
    yield check_shared_memory(cfg, Path("/dev/shm"))
    yield attempt("network", partial(describe_network, cfg))


def read_required_python() -> str:
    """Return the versions of Python that pyproject.toml declares."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]


def check_python(running: str, required: str) -> Finding:
    """
    >>> check_python("3.10.4", ">=3.11,<3.14").level
    'error'
    """
    from packaging.specifiers import SpecifierSet

    if running in SpecifierSet(required):
        return Finding(check="python", level="ok", found=running)
    found = f"{running}, and FeynRL wants {required}: make a new .venv with such a Python (make install)"
    return Finding(check="python", level="error", found=found)


def read_pins(text: str) -> dict[str, str]:
    """Return the versions of constraints.txt.

    >>> read_pins("# [run] a set\\ntorch==2.13.0\\n")
    {'torch': '2.13.0'}
    """
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def list_wanted(cfg: RunConfig) -> list[str]:
    """Return the core packages that this recipe imports."""
    engine = cfg.rollout.engine if isinstance(cfg, RLConfig) else ""
    unused = (*(() if cfg.backend == "ray" else ONLY_ON_RAY), *(() if engine.startswith("vllm") else ("vllm",)))
    return [name for name in CORE if name not in unused]


def check_packages(pins: dict[str, str], wanted: list[str]) -> Iterator[Finding]:
    """Yield a finding for each package that is missing or has an untested version, or else a single one."""
    same: list[str] = []
    for name in wanted:
        installed, pinned = find_version(name), pins.get(name) or pins.get(f"{name}-cpu", "")
        if installed is None:
            yield Finding(check="packages", level="error", found=f"{name} is not installed: run make install")
        # a build label such as +cpu does not make it another version
        elif installed.partition("+")[0] != pinned.partition("+")[0]:
            found = (
                f"{name} is {installed}, and {pinned or 'no version'} was tested (constraints.txt): run make install"
            )
            yield Finding(check="packages", level="warning", found=found)
        else:
            same.append(f"{name} {installed}")
    if len(same) == len(wanted):
        yield Finding(check="packages", level="ok", found=f"as in constraints.txt: {', '.join(same)}")


def find_version(name: str) -> str | None:
    """Return the version of an installed package; vLLM has a build of another name for CPUs."""
    for one in (name, f"{name}-cpu"):
        try:
            return version(one)
        except PackageNotFoundError:
            continue
    return None


def describe_devices(cfg: RunConfig) -> str:
    """Describe the devices of this machine and the ranks of the recipe. Raises UserError for too many ranks."""
    if lacking := check_devices(cfg):
        raise UserError(lacking)
    engines = cfg.rollout.least_engines * cfg.rollout.tensor_parallel_size if isinstance(cfg, RLConfig) else 0
    takes = "one process" if cfg.backend == "local" else f"{cfg.trainer.ranks} trainer and {engines} engine ranks"
    return f"{count_gpus()} GPUs and {os.cpu_count()} CPU cores, for {takes}"


def find_memory_gib(cfg: RunConfig) -> float:
    """Return the memory of a GPU, or on a CPU the memory of the machine."""
    return (find_gpu_gib() if uses_gpus(cfg) else None) or find_machine_gib()


def check_memory(cfg: RunConfig, estimate: MemoryEstimate, *, total_gib: float) -> Finding:
    """Compare the memory of the model's states with that of a GPU, or on a CPU with that of the machine."""
    per_engine, n_engines = 0.0, 0
    if isinstance(cfg, RLConfig):
        vllm_on_cpu = cfg.rollout.engine.startswith("vllm") and not uses_gpus(cfg)
        cache = find_cpu_cache_gib(cfg.rollout) if vllm_on_cpu else 0.0
        per_engine, n_engines = (
            estimate.per_engine + cache,
            cfg.rollout.least_engines * cfg.rollout.tensor_parallel_size,
        )
    if uses_gpus(cfg) and cfg.backend == "ray":
        wanted, where = max(0.0 if cfg.trainer.offload else estimate.per_rank, per_engine), "a GPU"
    else:
        wanted, where = cfg.trainer.ranks * estimate.per_rank + n_engines * per_engine, "this machine"
    found = f"about {wanted:.2f} GiB without activations, and {where} has {total_gib:.1f} GiB"
    level: Level = "ok"
    if wanted > TIGHT * total_gib:
        level = "error" if wanted > total_gib else "warning"
        found += ": take a smaller model, model.lora, model.dtype=bfloat16 or a higher trainer.zero_stage"
    return Finding(check="memory", level=level, found=found)


def check_disk(cfg: RunConfig, estimate: MemoryEstimate) -> Finding:
    """Compare the disk space of checkpoints, models and samples with the free space in run_dir."""
    kept = cfg.checkpoint.keep + 2 if cfg.checkpoint.every else 0  # the best one, and one that is being written
    models = 1 + (cfg.save_to is not None) + (cfg.checkpoint.best is not None)
    samples = 0.0
    if isinstance(cfg, RLConfig):
        tokens = cfg.steps * cfg.groups_per_step * cfg.group_size * cfg.longest_sample
        samples = tokens * BYTES_PER_TOKEN / GIB
    parts = {"checkpoints": kept * estimate.checkpoint, "models": models * estimate.saved, "samples": samples}
    described = ", ".join(f"{name} {gib:.2f}" for name, gib in parts.items())
    # run_dir itself is made by the run, and a file system is asked at a folder that exists
    home = find_existing(Path(cfg.run_dir))
    if not os.access(home, os.W_OK | os.X_OK):
        found = f"run_dir={cfg.run_dir}: {home} cannot be written to: name another folder"
        return Finding(check="disk", level="error", found=found)
    free = shutil.disk_usage(home).free / GIB
    found = f"up to {sum(parts.values()):.2f} GiB in run_dir ({described}), and {free:.1f} GiB are free"
    level: Level = "ok"
    if sum(parts.values()) > TIGHT * free:
        level = "error" if sum(parts.values()) > free else "warning"
        found += ": make room, name another run_dir, or lower checkpoint.keep"
    return Finding(check="disk", level=level, found=found)


def find_existing(path: Path) -> Path:
    """Return the path, or the nearest parent folder that exists."""
    whole = path.expanduser().absolute()
    return next(one for one in (whole, *whole.parents) if one.exists())


def check_temporary(folder: Path) -> Finding:
    """Check the free space of the temporary folder, for sockets and logs of Ray and the engines."""
    free = shutil.disk_usage(folder).free / GIB
    if free >= TEMPORARY_GIB:
        return Finding(check="temporary", level="ok", found=f"{free:.1f} GiB are free in {folder}")
    found = f"{free:.2f} GiB are free in {folder}, where {TEMPORARY_GIB:g} are wanted: make room, or set TMPDIR"
    return Finding(check="temporary", level="warning" if free > TEMPORARY_GIB / 4 else "error", found=found)


def check_shared_memory(cfg: RunConfig, folder: Path) -> Finding:
    """Check the free shared memory, for Ray's object store and vLLM's processes."""
    if cfg.backend == "local":
        return Finding(check="shared memory", level="ok", found="not used by one process")
    if not folder.is_dir():
        found = f"{folder} is not there: mount one (in a container --shm-size), Ray and NCCL use it"
        return Finding(check="shared memory", level="error", found=found)
    wanted = SHARED_GIB
    if isinstance(cfg, RLConfig):
        wanted += 2 * cfg.weight_sync.bucket_mib / 1024
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.1f} GiB are free in {folder}, and about {wanted:.2f} are wanted"
    if free >= wanted:
        return Finding(check="shared memory", level="ok", found=found)
    return Finding(check="shared memory", level="warning", found=f"{found}: enlarge it, in a container with --shm-size")


def describe_network(cfg: RunConfig) -> str:
    """Connect to a port of this process over the loopback address. Raises UserError if that fails."""
    if cfg.ray_address is not None:
        from core.cluster.private_ray import check_is_ray

        check_is_ray(cfg.ray_address)
        return f"a Ray cluster answers at {cfg.ray_address}"
    if (interface := find_interface(LOOPBACK, list_interfaces())) is None:
        raise UserError(f"no network interface has the address {LOOPBACK}: bring it up (ip link set lo up)")
    try:
        with listen_at(LOOPBACK) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection((LOOPBACK, port), timeout=ADDRESS_CHECK_TIMEOUT_S):
                pass
    except OSError as error:
        raise UserError(
            f"a port of {LOOPBACK} cannot be opened or reached ({error.strerror or error}), and the processes of a run "
            "meet there: look at the firewall, and at `ulimit -n`"
        ) from error
    return f"{interface} loops back; port {port} was free"
