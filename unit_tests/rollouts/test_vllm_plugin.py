"""What our plugin changes in vLLM's processes."""

from __future__ import annotations

import time
from queue import Queue
from threading import Thread

import pytest

from rollouts.engines.vllm_support import plugin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_reader_that_sleeps_misses_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages within a millisecond: ZeroMQ drops the second notification in about half of the cases."""
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setattr(shm_broadcast.SpinCondition, "wait", plugin._sleep_until_notified)
    monkeypatch.setattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", 3_600_000)  # no second chance
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    read: Queue[int] = Queue()

    def read_all() -> None:
        reader.wait_until_ready()
        for _ in range(400):
            read.put(reader.dequeue())

    Thread(target=read_all, daemon=True).start()
    writer.wait_until_ready()
    for i in range(0, 400, 2):
        writer.enqueue(i)
        time.sleep(i * 2e-6)
        writer.enqueue(i + 1)
        assert [read.get(timeout=10), read.get(timeout=10)] == [i, i + 1]
