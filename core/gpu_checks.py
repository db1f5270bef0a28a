"""Checks of what would keep an install or a run from using this machine's GPUs: one sentence each, with the fix.

Standard library only, because the installer asks as well.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from core.gpus import Gpus, dotted

HALF = 0.5
LEAST_DRIVERS = {12: "525", 13: "580"}
"""Oldest driver that runs a major version of CUDA."""
LEAST_CAPABILITY = (7, 5)
"""Oldest compute capability that the wheels for CUDA 13 have kernels for (Turing)."""
BFLOAT16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
"""Oldest compute capability with kernels of vLLM for fp8 with a scale per channel (Ada)."""
INT8_CAPABILITY_BOUND = (10, 0)
"""Oldest compute capability without kernels of vLLM for int8 (Blackwell)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Use of the GPUs that an install or a run intends."""

    cuda: str | None
    """CUDA of torch's build, such as 13.0; None for the CPU's build."""
    rocm: bool = False
    """True if torch is built for AMD GPUs."""
    bfloat16: bool = False
    triton: bool = False
    """True if Triton compiles kernels: those of vLLM."""
    ranks: int = 1
    """Number of ranks that want a GPU each."""
    engine_share: float | None = None
    """rollout.gpu_memory_utilization of vLLM engines; None without vLLM."""
    colocate: bool = False
    quantization: str | None = None
    """rollout.quantization of vLLM engines."""


def find_failure(gpus: Gpus, use: Use) -> str:
    return gpus.failure


def find_old_driver(gpus: Gpus, use: Use) -> str:
    """Report a driver that is older than the CUDA of torch's build."""
    if use.cuda is None or not gpus.count:
        return ""
    wanted = int(use.cuda.partition(".")[0])
    least = LEAST_DRIVERS.get(wanted, "a newer one")
    if gpus.cuda is not None:
        # CUDA's own word: with cuda-compat an old driver runs a newer CUDA
        is_old = gpus.cuda[0] < wanted
    else:
        is_old = bool(gpus.driver) and least.isdigit() and int(gpus.driver.partition(".")[0]) < int(least)
    supports = f" supports CUDA {dotted(gpus.cuda)} at most" if gpus.cuda else " is too old"
    driver = f"the NVIDIA driver {gpus.driver}".rstrip()
    return f"{driver}{supports}, and torch is built for CUDA {use.cuda}: install driver {least} or newer" * is_old


def find_old_gpu(gpus: Gpus, use: Use) -> str:
    """Report a GPU that the wheels have no kernels for."""
    what, fix = "torch is built for", "take another GPU, and leave this one out with CUDA_VISIBLE_DEVICES"
    return _find_incapable(gpus, LEAST_CAPABILITY, what, fix) if use.cuda else ""


def find_missing_bfloat16(gpus: Gpus, use: Use) -> str:
    return _find_incapable(gpus, BFLOAT16_CAPABILITY, "bfloat16 needs", "set model.dtype=float32") * use.bfloat16


def find_missing_kernels(gpus: Gpus, use: Use) -> str:
    """Report a GPU without vLLM's kernels for rollout.quantization."""
    if use.quantization == "fp8":
        fix = "set rollout.quantization=int8, or leave it out"
        return _find_incapable(gpus, FP8_CAPABILITY, "vLLM's kernels for fp8 need", fix)
    for i, gpu in enumerate(gpus.devices):
        if use.quantization == "int8" and gpu.capability >= INT8_CAPABILITY_BOUND:
            return (
                f"GPU {i} ({gpu.name}) has compute capability {dotted(gpu.capability)}, and vLLM's kernels for int8 "
                f"need less than {dotted(INT8_CAPABILITY_BOUND)}: set rollout.quantization=fp8, or leave it out"
            )
    return ""


def _find_incapable(gpus: Gpus, least: tuple[int, int], what: str, fix: str) -> str:
    for i, gpu in enumerate(gpus.devices):
        if gpu.capability < least:
            has = f"GPU {i} ({gpu.name}) has compute capability {dotted(gpu.capability)}"
            return f"{has}, and {what} {dotted(least)} or more: {fix}"
    return ""


def find_other_build(gpus: Gpus, use: Use) -> str:
    if use.rocm:
        return "torch is built for AMD GPUs (ROCm), which FeynRL does not support: run make install"
    if use.cuda is None and gpus.count:
        return (
            f"this machine has {gpus.count} GPU(s), and the installed torch is built for the CPU: run make install, or "
            "set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    return ""


def find_missing_compiler(gpus: Gpus, use: Use) -> str:
    """Report a missing C compiler or Python.h: Triton compiles a part of its launcher on every machine."""
    if use.cuda is None or not use.triton:
        return ""
    # Triton's own order: CC, then gcc, then clang
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return (
            "Triton compiles kernels while a run starts, and there is no C compiler: install gcc (on Debian and Ubuntu "
            "apt-get install gcc), or set CC"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        package = "python{}.{}-dev".format(*sys.version_info)
        return (
            "Triton compiles kernels while a run starts, and this Python has no Python.h: install its headers (on "
            f"Debian and Ubuntu apt-get install {package})"
        )
    return ""


def find_untried_host(gpus: Gpus, use: Use) -> str:
    if (machine := platform.machine()) == "x86_64":
        return ""
    return f"this host is {machine}, and the versions for the GPU were tried on x86_64 only"


def find_slices(gpus: Gpus, use: Use) -> str:
    """Report MIG slices if ranks would have to communicate across them."""
    for i, gpu in enumerate(gpus.devices):
        if " MIG " in gpu.name and use.ranks > 1:
            return (
                f"GPU {i} ({gpu.name}) is a slice of a GPU, a process sees one slice at most, and {use.ranks} ranks "
                "cannot communicate across slices: turn MIG off (nvidia-smi -mig 0), or run on one slice with "
                "placement=colocate"
            )
    return ""


def find_full_gpu(gpus: Gpus, use: Use) -> str:
    """Report a GPU without enough free memory for an engine, or half full of other processes."""
    for i, gpu in enumerate(gpus.devices):
        left = gpu.total_gib * (HALF if use.engine_share is None else 1 - use.engine_share)
        if gpu.used_gib > left:
            lower = "" if use.engine_share is None else ", or lower rollout.gpu_memory_utilization"
            return (
                f"GPU {i} ({gpu.name}) has {gpu.used_gib:.1f} of {gpu.total_gib:.1f} GiB in use by other processes, "
                f"and this run leaves them {left:.1f} GiB: end them, choose other GPUs with CUDA_VISIBLE_DEVICES{lower}"
            )
    return ""


def find_expandable_segments(gpus: Gpus, use: Use) -> str:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if use.colocate and "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            return (
                f"placement is colocate, and {name} sets expandable_segments, whose memory no other process can open "
                f"and vLLM cannot release: take it out of {name}"
            )
    return ""


@dataclass(frozen=True, slots=True)
class Check:
    """Check of the GPUs: a function that returns one sentence, "" if nothing is wrong."""

    find: Callable[[Gpus, Use], str]
    install: Literal["ignores", "warns", "stops"] = "ignores"
    """Effect of the sentence on an install."""
    run: bool = True
    """True if it ends a run."""


CHECKS = (
    Check(find_failure, install="stops"),
    Check(find_old_driver, install="stops"),
    Check(find_old_gpu, install="stops"),
    Check(find_other_build),
    Check(find_missing_bfloat16),
    Check(find_missing_kernels),
    Check(find_missing_compiler, install="warns"),
    Check(find_untried_host, install="warns", run=False),
    Check(find_slices),
    Check(find_full_gpu),
    Check(find_expandable_segments),
)
"""All checks, the most general first."""


def refuse_run(gpus: Gpus, use: Use) -> str:
    """Return the sentence that ends a run before its start; "" if nothing is wrong."""
    return next(filter(None, (check.find(gpus, use) for check in CHECKS if check.run)), "")
