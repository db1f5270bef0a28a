"""Metrics of judges (`rewards/judging/`), part of the registry in core/metrics.py."""

from __future__ import annotations

from core.metric import Metric, Unit

JUDGE_METRICS: list[Metric] = []


def _declare(name: str, unit: Unit, meaning: str, logged_by: str = "RL with a judge") -> str:
    JUDGE_METRICS.append(Metric(name=name, unit=unit, meaning=meaning, logged_by=logged_by))
    return name


JUDGE_CALLS = _declare("judge/calls", "calls", "requests that judges answered, for all groups drawn for the step")
JUDGE_CACHED = _declare("judge/cached_fraction", "fraction", "verdicts that cost no request")
JUDGE_UNREADABLE = _declare(
    "judge/unreadable_fraction", "fraction", "answers without a readable verdict, which were asked for again"
)
JUDGE_UNANSWERED = _declare(
    "judge/unanswered", "calls", "verdicts that no request brought: refused, or during an outage of the server"
)
JUDGE_RETRIES = _declare("judge/retries", "calls", "requests that were repeated, because the server took none")
JUDGE_TOKENS_IN = _declare("judge/tokens_in", "tokens", "tokens of the requests, as the server counts them")
JUDGE_TOKENS_OUT = _declare("judge/tokens_out", "tokens", "tokens of the answers, as the server counts them")
JUDGE_SECONDS_P50 = _declare("judge/seconds_p50", "seconds", "seconds of a verdict, retries included, median")
JUDGE_SECONDS_P95 = _declare("judge/seconds_p95", "seconds", "the same, 95th percentile")
JUDGE_AGREEMENT = _declare(
    "judge/agreement", "fraction", "votes equal to the most frequent vote on their reply; with votes above 1"
)
JUDGE_ANCHOR_ERROR = _declare(
    "judge/anchor_error",
    "fraction",
    "distance of the verdicts on anchors from their known scores, over the width of the scale; when anchors are graded",
)
JUDGE_SPENT_CALLS = _declare(
    "judge/spent_calls", "calls", "answered requests so far, those of evaluations and of resumed runs included"
)
JUDGE_SPENT_TOKENS = _declare("judge/spent_tokens", "tokens", "tokens of these requests and answers")

SECOND = "second_reward/{}"
"""Metrics of eval_reward, without the prefix eval/."""
_SECOND = "RL with eval_reward"
_declare("eval/second_reward/<part>", "", "mean of a part of eval_reward, or mean: of its weighted sum", _SECOND)
SECOND_MEAN = SECOND.format("mean")
SECOND_CORR = SECOND.format("corr")
_declare(
    "eval/second_reward/corr",
    "",
    "correlation of reward and eval_reward over samples; absent without a spread",
    _SECOND,
)
SECOND_FAILED = SECOND.format("failed")
_declare("eval/second_reward/failed", "samples", "samples of data.eval that eval_reward failed", _SECOND)
