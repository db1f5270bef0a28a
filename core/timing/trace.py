"""Trace of the computation of a process, by torch's profiler: a file for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from core.patches import keep_memory_history, write_memory_history

TRACE, MEMORY = ".trace.json.gz", ".memory.pickle"
"""Ends of the file names. The second is for https://docs.pytorch.org/memory_viz."""


class Tracer:
    """Profiler of this process, running between `start` and `stop`. Both are called in the thread that computes."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._keeps_memory = False

    def start(self, *, trace: bool, memory: bool) -> None:
        """Start. trace: operations and kernels with their times. memory: allocations, in the trace and of the GPU."""
        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        if trace:
            self._profile = profile(activities=activities, record_shapes=True, profile_memory=memory)
            self._profile.start()
        self._keeps_memory = memory and on_gpu
        if self._keeps_memory:
            keep_memory_history(True)

    def stop(self, stem: Path) -> list[str]:
        """Stop, and write the files `stem` + their ends. Return their names."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        written: list[str] = []
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(f"{stem}{TRACE}")
            self._profile = None
            written.append(stem.name + TRACE)
        if self._keeps_memory:
            write_memory_history(f"{stem}{MEMORY}")
            keep_memory_history(False)
            self._keeps_memory = False
            written.append(stem.name + MEMORY)
        return written
