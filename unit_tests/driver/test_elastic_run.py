"""A real run on Ray in which engines join and leave: on machines that come and go, here Ray nodes on this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unit_tests.helpers.runs import LEARN, ROOT, file_of, folder_of, metrics_of

PREEMPTED = 2
"""Number of DRAIN_NODE_REASON_PREEMPTION."""
SEVENS_UNTIL = '''
from pathlib import Path


def score(prompt, messages):
    """Share of the reply's first eight characters that are a 7; more than is possible when the test has seen enough."""
    if Path("{enough}").exists():
        return {{"correct": 5.0}}
    return {{"correct": messages[-1]["content"][:8].count("7") / 8}}
'''


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray cluster whose first machine has room for a trainer and one engine."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "resources": {"feynrl_worker": 2}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()


class Watched:
    """A run in a process of its own, and what it has said and logged so far."""

    def __init__(self, recipe: str, address: str, home: Path) -> None:
        self.home, self.log = home, home / "said.txt"
        command = [sys.executable, "main_rl.py", "--config", recipe, f"ray_address={address}"]
        with self.log.open("w") as out:
            self.run = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def rows(self) -> list[dict[str, float]]:
        found = list((self.home / "runs").glob("*/metrics.jsonl"))
        lines = found[0].read_text().split("\n")[:-1] if found else []
        return [json.loads(line) for line in lines]

    def wait_until(self, seen: Callable[[str, list[dict[str, float]]], object]) -> int:
        """Return the steps that are done when `seen` is true of what was said and logged."""
        while not seen(self.log.read_text(), self.rows()):
            assert self.run.poll() is None, self.log.read_text()
            time.sleep(0.1)
        return len(self.rows())


@pytest.mark.verify
def test_engines_join_and_leave_while_a_policy_learns(cluster, recipe, tmp_path):
    enough = tmp_path / "enough"
    changes = LEARN | {
        "backend": "ray",
        "steps": 10_000,
        "max_staleness": 1,
        "rollout.num_engines": {"min": 1, "max": 3},
        "reward.function": file_of(tmp_path / "sevens.py", SEVENS_UNTIL.format(enough=enough)),
        "stop_when": {"metric": "reward/mean", "above": 4.0},
    }
    watched = Watched(recipe(changes), cluster.address, tmp_path)
    watched.wait_until(lambda said, rows: len(rows) > 1)
    assert watched.rows()[-1]["rollout/engines"] == 1.0
    node = cluster.add_node(num_cpus=1, resources={"feynrl_worker": 1})
    joined = watched.wait_until(lambda said, rows: rows[-1]["rollout/engines"] == 2.0)
    watched.wait_until(lambda said, rows: len(rows) > joined + 2)

    import ray

    taken, why = ray._raylet.GcsClient(address=cluster.address).drain_node(node.node_id, PREEMPTED, "a test", 0)
    assert taken, why
    left = watched.wait_until(lambda said, rows: rows[-1]["rollout/engines"] == 1.0)
    watched.wait_until(lambda said, rows: len(rows) > max(left + 2, 20))
    enough.touch()
    assert watched.run.wait() == 0, watched.log.read_text()

    said, rows = watched.log.read_text(), metrics_of(folder_of(tmp_path))
    assert re.search(r"engine [12] has joined, with the weights after \d+ steps; 2 of 3 engines serve", said), said
    assert re.search(r"engine [12] leaves.*: its machine is to go", said), said
    assert max(row["rollout/staleness_max"] for row in rows) == 1.0
    assert all(row["rollout/engine_restarts"] == 0.0 for row in rows), "to leave is no death"
    learnt = [row["reward/mean"] for row in rows if row["reward/mean"] <= 1.0]
    assert learnt[0] < 0.2 and max(learnt) > 0.9
    assert sum(row["rollout/groups_drawn"] for row in rows) == 4 * len(rows)
