"""A weight sync between processes, whose handles and transports a test gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.cluster.ray_workers import Remote
from trainers.weight_sync.base import Probe
from trainers.weight_sync.publisher import RemoteWeightSync
from trainers.weight_sync.transports import SyncEndpoints, Transport


def sync_of(
    trainers: Remote[Any],
    engines: Remote[Any],
    transports: list[Transport],
    *,
    may_fall_back: bool,
    say: Callable[[str], Any],
    **more: Any,
) -> RemoteWeightSync:
    """more: other fields of the sync."""
    return RemoteWeightSync(
        ends=SyncEndpoints(
            trainers=trainers,
            sources=trainers,
            engines=engines,
            engine_timers=engines,
            ranks_per_engine=1,
            max_bytes=1,
            scope="whole",
            timeout_s=1.0,
        ),
        engines=engines,
        probe=Probe(token_ids=[1, 2], bound=0.1),
        transports=transports,
        may_fall_back=may_fall_back,
        say=say,
        facts={},
        **more,
    )
