"""Declared metrics: a unit of the list and a sentence each, and seconds for every phase that a log holds."""

from __future__ import annotations

from typing import get_args

import pytest

from core.metric import Metric, Unit
from core.metrics import METRICS, PHASE_MEANINGS, find_metric
from core.timing.phases import REST, STEP, Phase, time_metric

UNITS = {unit for kind in get_args(Unit) for unit in get_args(kind)}
LOGGERS = {metric.logged_by for metric in METRICS}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_has_a_known_unit_a_meaning_and_a_logger(metric: Metric):
    assert metric.unit in UNITS
    for text in (metric.meaning, metric.logged_by):
        assert text.strip() == text != "" and text not in UNITS and "\n" not in text
    assert metric.meaning not in LOGGERS and " " not in metric.name and find_metric(metric.name) == metric


def test_no_two_metrics_have_one_name():
    names = [metric.name for metric in METRICS]
    assert len({*names}) == len(names) > 100


def test_every_phase_of_a_step_has_its_seconds_in_the_log():
    assert {*Phase} - {*PHASE_MEANINGS} == {Phase.START, Phase.RESUME, Phase.SAVE, Phase.CLOSE}
    for phase in (*PHASE_MEANINGS, REST, STEP):
        found = find_metric(time_metric(phase))
        assert found is not None and found.unit == "seconds"
