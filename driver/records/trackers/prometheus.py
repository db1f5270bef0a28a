"""Prometheus tracker: an endpoint of the driver with the newest numbers, for a monitoring system that polls.

    feynrl_metric{run="addition", metric="reward/mean"} 0.93
    feynrl_step{run="addition"} 12

The number of a metric stays until the next one replaces it. The endpoint ends with the run.
"""

from __future__ import annotations

import socket
from typing import Any, ClassVar

from configs.tracking_schema import TrackingConfig
from driver.records.trackers.base import Identity, Outcome, TrackedRun, Tracker


class Prometheus(Tracker):
    """HTTP server in a thread of the driver; it answers every path with all metrics as text."""

    packages: ClassVar = ("prometheus_client",)
    install: ClassVar = "run `.venv/bin/pip install -c constraints.txt prometheus-client`"

    @classmethod
    def refuse(cls, settings: TrackingConfig) -> str | None:
        host, port = settings.prometheus_host, settings.prometheus_port
        try:
            with socket.create_server((host, port)):
                return None
        except OSError as error:
            return (
                f"prometheus cannot listen on {host}:{port} ({error.strerror}): set tracking.prometheus_port to a free "
                "port, or tracking.prometheus_host to an address of this machine"
            )

    def start(self, run: TrackedRun) -> Identity | None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        registry = CollectorRegistry()  # without the metrics of the Python process
        self.run = run.name
        self.numbers: Any = Gauge("feynrl_metric", "a number of metrics.jsonl", ["run", "metric"], registry=registry)
        self.step: Any = Gauge("feynrl_step", "step of the newest number", ["run"], registry=registry)
        host, port = run.settings.prometheus_host, run.settings.prometheus_port
        self.server, self.thread = start_http_server(port, host, registry=registry)
        return None

    def metrics(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.numbers.labels(self.run, name).set(value)
        self.step.labels(self.run).set(step)

    def finish(self, outcome: Outcome) -> None:
        self.abandon()

    def abandon(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
