"""Print the overrides with which the quickstart fits this machine: python -m tools.placement

On a machine with one GPU that is placement=colocate. Without GPUs, on several cores, it is rollout.num_engines=2: most
of vLLM's work for short samples is Python, of which a process runs one thread at a time. A sentence on stderr says so.
"""

from __future__ import annotations

import os
import sys

from core.gpus import find_gpus
from core.timing.deadlines import GPU_CHECK_TIMEOUT_S


def main() -> None:
    for override, reason in choose_overrides(*count_devices()).items():
        print(f"{reason} ({override})", file=sys.stderr)
        print(override)


def count_devices() -> tuple[int, int]:
    """Return the numbers of GPUs and of CPU cores."""
    return find_gpus(timeout_s=GPU_CHECK_TIMEOUT_S).count, len(os.sched_getaffinity(0))


def choose_overrides(gpus: int, cores: int) -> dict[str, str]:
    """Return the overrides, each with its reason. gpus, cores: their numbers."""
    if gpus == 1:
        return {"placement=colocate": "this machine has one GPU: trainer and engine use it in turns"}
    if not gpus and cores > 1:
        return {"rollout.num_engines=2": f"this machine has {cores} CPU cores and no GPU: two engines share the cores"}
    return {}


if __name__ == "__main__":
    main()
