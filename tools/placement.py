"""Print the override that lets a run of one trainer and one engine start on this machine: python -m tools.placement

On a machine with one GPU that is placement=colocate, and a sentence on stderr says so; elsewhere nothing.
"""

from __future__ import annotations

import sys

from core.gpus import find_gpus
from core.timing.deadlines import GPU_CHECK_TIMEOUT_S


def main() -> None:
    if find_gpus(timeout_s=GPU_CHECK_TIMEOUT_S).count == 1:
        print("this machine has one GPU: trainer and engine use it in turns (placement=colocate)", file=sys.stderr)
        print("placement=colocate")


if __name__ == "__main__":
    main()
