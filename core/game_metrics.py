"""Metrics of games against an opponent, part of the registry in core/metrics.py."""

from __future__ import annotations

from core.metric import Metric

_BY = "RL with rollout.opponent"
ROLLOUT_WON, ROLLOUT_DRAWN, ROLLOUT_OPPONENT = "rollout/won", "rollout/drawn", "rollout/opponent_version"
_VERSION = "training steps of the opponent's weights, mean over the games"
_OF = "games with a result (Env.result_of)"
GAME_METRICS = [
    Metric(name=ROLLOUT_WON, unit="fraction", meaning=f"{_OF} that the policy's side won", logged_by=_BY),
    Metric(name=ROLLOUT_DRAWN, unit="fraction", meaning=f"{_OF} that were drawn", logged_by=_BY),
    Metric(name=ROLLOUT_OPPONENT, unit="steps", meaning=_VERSION, logged_by="RL with rollout.opponent: policy"),
]
