"""Metrics of weight syncs (`trainers/weight_sync/`), part of the registry in core/metrics.py."""

from __future__ import annotations

from core.metric import Metric, Unit

SYNC_METRICS: list[Metric] = []


def _declare(name: str, unit: Unit, meaning: str, logged_by: str = "RL") -> str:
    SYNC_METRICS.append(Metric(name=name, unit=unit, meaning=meaning, logged_by=logged_by))
    return name


SYNC_PROBE_GAP = _declare(
    "sync/probe_gap",
    "nats",
    "mean absolute difference of trainer and engine on the probe prompt after a weight sync, the worst engine's",
)
SYNC_BYTES = _declare(
    "sync/bytes",
    "bytes",
    "tensors that one engine was sent: all weights, with weight_sync.lora: adapter its own, with weight_sync.delta "
    "what changed, compressed",
)
_DELTA = "RL with weight_sync.delta"
SYNC_CHANGED = _declare("sync/changed", "fraction", "weights that changed since the last sync", _DELTA)
SYNC_BY_XOR = _declare(
    "sync/by_xor", "fraction", "tensors whose changes were smaller as old XOR new than as new values", _DELTA
)
