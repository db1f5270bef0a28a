"""vLLM's executor for one rank on a CPU: its worker computes in EngineCore, vLLM's second process.

vLLM itself starts a third process for it, because it can choose a worker's cores only at its birth.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rollouts.engines.vllm_support.settings import CORES


class CoreExecutor(UniProcExecutor):
    """Executor whose process computes on the cores that the environment names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cores = [int(core) for core in os.environ[CORES].split(",")]
        os.sched_setaffinity(0, cores)
        # OpenMP read its variables at the birth of the process. No parallel region has run yet, so it still obeys.
        torch.set_num_threads(len(cores))
        super().__init__(*args, **kwargs)
