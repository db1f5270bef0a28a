"""A private Ray cluster starts what a run uses: core/cluster/private_ray.py."""

from __future__ import annotations

import psutil
import pytest

from core.cluster.ray_workers import Cluster
from unit_tests.helpers.examples import command_of

pytestmark = pytest.mark.slow


def test_a_private_cluster_has_no_autoscaler_no_dashboard_and_no_log_monitor() -> None:
    before = {process.pid for process in psutil.Process().children()}
    cluster = Cluster(None)
    try:
        began = {process.pid for process in psutil.Process().children()} - before
        commands = [command_of(pid) or "" for pid in began]
    finally:
        cluster.close()
    of_ray = [command for command in commands if "/ray/" in command]
    assert any("gcs_server" in command for command in of_ray) and any("raylet" in command for command in of_ray)
    assert not [command for command in of_ray if any(name in command for name in ("monitor.py", "dashboard.py"))]
