"""vLLM executor for one rank on a CPU: the worker runs in EngineCore, vLLM's second process.

By default vLLM starts a third process, since it can set a worker's cores only at process start.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rollouts.engines.vllm_support.settings import CORES


class CoreExecutor(UniProcExecutor):
    """Executor pinned to the CPU cores in vLLM's environment variable."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cores = [int(core) for core in os.environ[CORES].split(",")]
        os.sched_setaffinity(0, cores)
        # OpenMP read its variables at process start. No parallel region has run yet, so it still accepts a new number.
        torch.set_num_threads(len(cores))
        super().__init__(*args, **kwargs)
