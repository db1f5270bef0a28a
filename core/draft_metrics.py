"""Metrics of speculative decoding, part of the registry in core/metrics.py."""

from __future__ import annotations

from core.metric import Metric

_BY = "RL with rollout.vllm.speculative_config"
ROLLOUT_DRAFTED, ROLLOUT_ACCEPTED = "rollout/drafted", "rollout/accepted"
DRAFT_METRICS = [
    Metric(name=ROLLOUT_DRAFTED, unit="tokens", meaning="tokens that speculative decoding drafted", logged_by=_BY),
    Metric(name=ROLLOUT_ACCEPTED, unit="fraction", meaning="drafted tokens that were accepted", logged_by=_BY),
]
