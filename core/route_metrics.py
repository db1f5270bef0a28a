"""Metrics of the routers of a mixture of experts, part of the registry in core/metrics.py."""

from __future__ import annotations

from core.metric import Metric, Unit

_DECLARED: tuple[tuple[str, Unit, str], ...] = (
    ("missing_routes", "fraction", "input tokens without recorded experts in some block"),
    ("changed_choices", "fraction", "recorded choices for which the trainer's router chooses other experts"),
    ("changed_tokens", "fraction", "tokens with such a choice in some block, of those with a complete record"),
    ("load_max", "", "tokens of the busiest expert of a block, in units of the mean; of the worst block"),
    ("unused_experts", "fraction", "experts that no token of the step uses"),
    ("router_entropy", "fraction", "mean entropy of the routers' distributions, relative to log(experts)"),
)
ROUTE_METRICS = [
    Metric(name=f"train/moe/{name}", unit=unit, meaning=meaning, logged_by="RL with rollout.router_replay")
    for name, unit, meaning in _DECLARED
]
