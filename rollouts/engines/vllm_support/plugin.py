"""Register our weight transfer engines in every process of vLLM."""

from __future__ import annotations

import multiprocessing
import os
import time
from threading import Thread
from typing import Any

import torch

from core.cluster.scratch import name_shared_memory
from core.timing.deadlines import PARENT_POLL_S

SOON_MS = 20
LOOK_AGAIN_SOON_MS = 1
LOOK_AGAIN_MS = 20


def register() -> None:
    """Register the engines; vLLM calls this in each of its processes, maybe more than once.

    The entry point group is vllm.general_plugins.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    _end_with_parent()
    name_shared_memory()
    if not torch.cuda.is_available():
        _wait_without_spinning()
    transports = {
        **{"feynrl_gloo": "GlooTransfer", "feynrl_local": "LocalTransfer"},
        **{"feynrl_nccl": "NcclTransfer", "feynrl_ipc": "IpcTransfer"},
    }
    for name, cls in transports.items():
        if name not in Factory._registry:  # it refuses a second registration
            Factory.register_engine(name, "rollouts.engines.vllm_support.worker", cls)


def _wait_without_spinning() -> None:
    """Let vLLM's processes sleep while they wait for each other.

    For a second after every message they ask again and again, which takes a core from those that compute.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.wait = _sleep_until_notified


def _sleep_until_notified(self: Any, timeout_ms: int | None = None) -> None:
    """Sleep until the writer notifies the reader `self` or `timeout_ms` are over, and never for long.

    Of two notifications within a millisecond ZeroMQ may drop the second, because the socket's queue holds one. A
    reader that slept without a limit then would not see its message before vLLM looks again, 5 s later.
    """
    soon = time.monotonic() < self.last_read + SOON_MS / 1000
    longest_ms = LOOK_AGAIN_SOON_MS if soon else LOOK_AGAIN_MS
    events = dict(self.poller.poll(longest_ms if timeout_ms is None else min(longest_ms, timeout_ms)))
    if self.local_notify_socket in events:
        self.local_notify_socket.recv(copy=False)


def _end_with_parent() -> None:
    """End a process that vLLM started when its parent is gone; it would survive a kill of the parent."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid)


def end_with(parent: int) -> None:
    """End this process when it is no longer a child of `parent`."""

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    Thread(target=watch_parent, daemon=True, name="end with parent").start()
