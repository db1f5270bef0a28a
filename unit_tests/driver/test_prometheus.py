"""The Prometheus tracker: what a monitoring system reads while a run lasts."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from configs.tracking_schema import TrackingConfig
from core.errors import UserError
from core.metrics import METRICS
from driver.records.trackers import check_trackers
from driver.records.trackers.base import Outcome, TrackedRun
from driver.records.trackers.prometheus import Prometheus
from unit_tests.helpers.processes import find_free_port

DASHBOARD = Path(__file__).parent.parent.parent / "docs" / "how_to" / "grafana.json"


def read_endpoint(port: int) -> dict[str, dict[str, float]]:
    """Return the numbers by run and name."""
    answer = httpx.get(f"http://127.0.0.1:{port}/metrics")
    numbers: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            numbers.setdefault(sample.labels["run"], {})[sample.labels.get("metric", sample.name)] = sample.value
    return numbers


def start(port: int, folder: Path) -> Prometheus:
    settings = TrackingConfig(prometheus_port=port)
    tracker = Prometheus()
    tracker.start(
        TrackedRun(name='a "b"\n', folder=folder, config={}, facts={}, settings=settings, first_step=0, previous=None)
    )
    return tracker


def test_the_newest_numbers_are_read_and_the_port_is_free_again(tmp_path):
    port = find_free_port()
    for _ in range(2):  # the second needs the port of the first
        tracker = start(port, tmp_path)
        tracker.metrics(0, {"reward/mean": 0.25, "reward_mean": 1.0})
        tracker.metrics(3, {"reward/mean": float("nan")})
        numbers = read_endpoint(port)['a "b"\n']
        assert numbers.pop("reward/mean") != 0.25 and numbers == {"reward_mean": 1.0, "feynrl_step": 3.0}
        tracker.finish(Outcome(exit_reason="done", model=None))
        with pytest.raises(httpx.ConnectError):
            read_endpoint(port)


def test_a_port_that_is_taken_is_one_sentence_before_the_start():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"prometheus cannot listen on 127.0.0.1:{port}.*prometheus_port"):
            check_trackers(["prometheus"], TrackingConfig(prometheus_port=port))
    with pytest.raises(UserError, match=r"cannot listen on 192.0.2.1:.*or tracking.prometheus_host to an address"):
        check_trackers(["prometheus"], TrackingConfig(prometheus_port=port, prometheus_host="192.0.2.1"))


@pytest.mark.one_core
@pytest.mark.one_core
@pytest.mark.slow
def test_a_run_shows_its_numbers_while_it_lasts(recipe):
    port, seen = find_free_port(), list[dict[str, float]]()
    path = recipe({"steps": 6, "display": "quiet", "trackers": ["prometheus"], "tracking": {"prometheus_port": port}})
    running = subprocess.Popen(
        [sys.executable, "main_rl.py", "--config", path], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    while running.poll() is None:
        time.sleep(0.05)
        with suppress(httpx.TransportError):  # it has not begun, or has ended
            seen += read_endpoint(port).values()
    assert running.returncode == 0 and seen
    assert {"reward/mean", "train/grad_norm", "tokens_per_s", "feynrl_step"} <= seen[-1].keys()


def test_every_number_of_the_dashboard_is_one_that_runs_log():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [re.findall(r'metric="([^"]+)"', target["expr"]) for panel in panels for target in panel["targets"]]
    assert len(panels) == 9 and all(len(names) == 1 for names in asked)
    for [name] in asked:
        assert any(metric.matches(name.removeprefix("eval/")) for metric in METRICS), name
