"""Check at the start that a run logs the metric of `stop_when` or `checkpoint.best`."""

from __future__ import annotations

from dataclasses import replace

from algs.base import Algorithm
from algs.by_source import BySource
from configs.rollout_schema import name_function
from configs.schema import RLConfig, RunConfig
from core import metrics as names
from core.errors import UserError, find_closest, quote, suggest_name
from core.loading import FileSpec
from core.metrics import Metric
from driver.evaluation.estimators import choose_ks


def check_metric_names(cfg: RunConfig, alg: Algorithm, spec: FileSpec) -> None:
    """Raise UserError, with the closest name, for a metric that no step of this run can log.

    spec: file of the algorithm, since a loss of the user's may log anything as train/...
    """
    asked = {
        "stop_when.metric": None if cfg.stop_when is None else cfg.stop_when.metric,
        "checkpoint.best": cfg.checkpoint.best,
    }
    for key, name in asked.items():
        if name is None:
            continue
        metrics = list_metrics(cfg, alg)
        known = sorted(metric.name for metric in metrics)
        free = () if spec.in_package else (names.TRAIN,)
        may_be_chosen = name.startswith(free) or any(metric.matches(name) for metric in metrics)
        close = find_closest(name, known)
        if name not in known and (not may_be_chosen or (close is not None and is_misspelt(name, close))):
            hint = suggest_name(name, known) or "; docs/reference/metrics.md lists the metrics"
            raise UserError(f"{key}={quote(name)}: this run logs no such metric{hint}")


def list_metrics(cfg: RunConfig, alg: Algorithm) -> list[Metric]:
    """List the metrics of this kind of run and algorithm, with the placeholders that the recipe decides filled in."""
    kind = names.RL if isinstance(cfg, RLConfig) else names.SL
    # The metrics of an algorithm are those of the class that it extends, too, and of the algorithms that it mixes.
    mixed = [type(part) for part in alg.algorithms.values()] if isinstance(alg, BySource) else []
    own = {cls.__module__.rpartition(".")[2] for one in (type(alg), *mixed) for cls in one.__mro__}
    return [
        replace(metric, name=name)
        for metric in names.METRICS
        if metric.logged_by == names.ALL
        or metric.logged_by.startswith(kind)
        or not own.isdisjoint(metric.logged_by.split(", "))
        for name in _fill(metric.name, cfg)
    ]


def _fill(name: str, cfg: RunConfig) -> list[str]:
    """Replace a name's placeholder by the recipe's value, and keep it if only the run can say."""
    sources = cfg.data.list_sources("train")
    mixed = [source.log_name for source in sources] if len(sources) > 1 else []
    if "<source>" in name:
        return [name.replace("<source>", source) for source in mixed]
    if not isinstance(cfg, RLConfig):
        return [name]
    if "<k>" in name:
        return [name.replace("<k>", str(k)) for k in choose_ks(cfg.eval_samples) if cfg.eval_samples > 1]
    if "<part>" in name:
        # Kept, too: a function may return more parts than the recipe weighs.
        parts = [
            "mean",
            "std",
            *cfg.reward.weights,
            *mixed,
            *(f"{name_function(f)}.correct" for f in cfg.reward.function_names),
        ]
        return [name, *(name.replace("<part>", part) for part in parts)]
    return [name]


def is_misspelt(name: str, meant: str) -> bool:
    """Tell whether a name is another with letters swapped, or with one letter too many or too few.

    >>> is_misspelt("reward/maen", "reward/mean"), is_misspelt("reward/corect", "reward/correct")
    (True, True)
    >>> is_misspelt("reward/score2", "reward/score1")
    False
    """
    if len(name) == len(meant):
        return sorted(name) == sorted(meant)
    shorter, longer = sorted((name, meant), key=len)
    return any(shorter == longer[:i] + longer[i + 1 :] for i in range(len(longer)))
