"""A process dies or stops: the run ends in time, with one sentence that names it, and leaves nothing running."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time

import pytest

from core.cluster.capacity import Resources
from core.cluster.ray_workers import Cluster
from core.errors import CallFailed, ProcessDied
from data_feeds.packing.batches import micro_batches
from driver.start.trainers import build_trainer
from trainers.trainer import Trainer
from unit_tests.helpers.examples import is_running, some_groups
from unit_tests.helpers.ray_trainers import plan_of
from unit_tests.helpers.runs import ROOT, descendants, file_of, folder_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STRIKES = '''
"""GRPO whose second rank does to itself, in a loss, what the file `order` says."""
import os, pathlib, signal, time
from algs.grpo import GRPO

class Strikes(GRPO):
    def loss(self, policy, tokens):
        order = pathlib.Path(__file__).with_name("order").read_text()
        if order and os.environ["RANK"] == "1":
            time.sleep(8) if order == "sleep" else os.kill(os.getpid(), getattr(signal, order))
        return super().loss(policy, tokens)
'''
COLLECTIVE_S = 3.0


class Observed:
    """Methods that `build_observed` adds to a trainer."""

    def pid(self): ...
    def deadlines_s(self): ...


def build_observed(place, plan):
    """A trainer that also tells its process, and the deadlines of its process groups."""
    from torch.distributed import distributed_c10d

    trainer = build_trainer(place, plan)
    groups = list(distributed_c10d._world.pg_map)
    trainer.pid = os.getpid
    trainer.deadlines_s = lambda: [
        group._get_backend(group._device_types[0]).options._timeout.total_seconds() for group in groups
    ]
    return trainer


@pytest.mark.verify
def test_a_sleeping_or_stopped_rank_is_named_and_not_the_one_that_noticed(tiny_path, tmp_path):
    order = tmp_path / "order"
    order.write_text("")
    alg = {"file": file_of(tmp_path / "strikes.py", STRIKES)}
    shards = [[m] for m in micro_batches(some_groups(), "token", 60, ranks=2, padded=True)]
    plan = plan_of(tiny_path, alg=alg, zero_stage=1, ranks=2, timeout_s=COLLECTIVE_S)
    cluster = Cluster(None)

    async def go() -> list[int]:
        trainers = await cluster.spawn(
            "trainer", 2, build_observed, plan, resources=Resources(threads=1), timeout_s=120
        )
        deadlines_s = await trainers.call_one(0, Observed.deadlines_s)
        assert len(deadlines_s) > 1 and set(deadlines_s) == {COLLECTIVE_S}, "those that DeepSpeed made, too"
        await trainers.scatter(Trainer.step, shards)

        order.write_text("sleep")
        with pytest.raises(CallFailed) as failed:
            await trainers.scatter(Trainer.step, shards)
        assert re.match(r"trainer 0 \(step\) failed: Timed out waiting 3000ms", str(failed.value)), failed.value
        assert re.search(r"trainer 1 has been in step for \d s \(at strikes.py:10\)", str(failed.value)), failed.value
        pids = await trainers.call_all(Observed.pid)  # it is awake again

        order.write_text("SIGSTOP")
        with pytest.raises(ProcessDied, match=r"^trainer 1 \(step\): its process gives no sign of life"):
            await trainers.with_deadline(5.0, key="timeout_s").scatter(Trainer.step, shards)
        return pids

    try:
        pids = asyncio.run(go())
    finally:
        cluster.close()
    assert not any(is_running(pid) for pid in pids), "not even the stopped one"


def test_a_process_ray_ends_for_lack_of_memory_is_named_with_the_reason(monkeypatch):
    """Ray's memory monitor ends what runs as long as more than the threshold is used."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    cluster = Cluster(None)
    try:
        with pytest.raises(ProcessDied, match=r"^trainer 0 \(\w+\): Ray ended its process because the machine"):
            asyncio.run(cluster.spawn("trainer", 1, Sleeps, resources=Resources(threads=1), timeout_s=60))
    finally:
        cluster.close()


class Sleeps:
    """Worker that takes long to build."""

    def __init__(self, place):
        time.sleep(60)


STOPS = """
import os, signal
from rollouts.engines.hf import HfEngine

class Engine(HfEngine):
    async def load_weights(self, version, buckets):
        def until_struck():
            for bucket in buckets:
                if version == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                yield bucket
        await super().load_weights(version, until_struck())
"""
STOPS_GENERATING = """
import os, signal
from rollouts.engines.hf import HfEngine

class Engine(HfEngine):
    async def generate(self, token_ids, **settings):
        os.kill(os.getpid(), signal.SIGSTOP)
        return await super().generate(token_ids, **settings)
"""
LOSES_VLLM = """
import dataclasses, os, signal, psutil
from rollouts.engines.vllm import VllmEngine

class Engine(VllmEngine):
    def __init__(self, config):
        super().__init__(dataclasses.replace(config, max_model_len=64, kv_cache_gib=0.1))

    async def receive_weights(self, version):
        if version == 1:
            [worker, _] = [p for p in psutil.Process().children() if "VLLM::Worker" in " ".join(p.cmdline())]
            worker.kill()
        await super().receive_weights(version)
"""
DIES_IN_BROADCAST = """
import os, signal
from algs.grpo import GRPO
from trainers.weight_sync.broadcast import WeightSender

ship, sent = WeightSender._send_bucket, []

def until_struck(self, bucket):
    ship(self, bucket)
    sent.append(bucket)
    if len(sent) == 2:  # of version 1; the end of the stream is not sent
        os.kill(os.getpid(), signal.SIGKILL)

WeightSender._send_bucket = until_struck

class Mine(GRPO):
    pass
"""
SYNC_S = 4.0
CASES = {
    "a trainer rank dies": (
        {"trainer.ranks": 2, "trainer.zero_stage": 3},
        r"trainer 1 \(step\): its process died; its log is in logs/ of the run folder .*",
    ),
    "a trainer rank dies in the broadcast": (
        {"alg.file": DIES_IN_BROADCAST},
        r"in the sync of version 1, trainer 0 \(weight_source.broadcast_weights\): its process died; its log is in .*",
    ),
    "an engine stops": (
        {"rollout.engine": STOPS, "weight_sync.timeout_s": SYNC_S},
        r"in the sync of version 1, engine 0 \(engine.receive_weights\): its process gives no sign of life: .*",
    ),
    "an engine stops while it generates": (
        {"rollout.engine": STOPS_GENERATING, "rollout.timeout_s": SYNC_S},
        r"engine 0 \(generate_group\): its process gives no sign of life: .*",
    ),
    "vLLM dies": (
        {"rollout.engine": LOSES_VLLM, "rollout.tensor_parallel_size": 2},
        r"in the sync of version 1, engine 0 \(engine.receive_weights\): a process of vLLM died; .*",
    ),
}


LONGER = [pytest.param(case, marks=pytest.mark.verify) for case in CASES if case != "a trainer rank dies"]


@pytest.mark.parametrize("case", ["a trainer rank dies", *LONGER])
def test_a_run_ends_in_time_with_one_sentence_that_names_the_culprit(recipe, tmp_path, case):
    changes, says = CASES[case]
    if "rollout.engine" in changes:
        changes = changes | {"rollout.engine": file_of(tmp_path / "engine.py", changes["rollout.engine"])}
    if "alg.file" in changes:
        changes = {"alg": {"file": file_of(tmp_path / "mine.py", changes["alg.file"])}}
    if "trainer.ranks" in changes:
        (tmp_path / "order").write_text("SIGKILL")
        changes = changes | {"alg": {"file": file_of(tmp_path / "strikes.py", STRIKES)}}
    recipe_path = recipe(changes | {"backend": "ray", "steps": 1, "rollout.restarts": 0})
    run = subprocess.Popen(
        [sys.executable, "main_rl.py", "--config", recipe_path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    below: set[int] = set()
    try:
        while run.poll() is None:
            below |= descendants(run.pid)
            time.sleep(0.5)
    finally:
        run.kill()  # where the test failed
    out, err = run.communicate()
    assert run.returncode == 1
    assert re.fullmatch(f"stopped: {says}\n", err), err
    assert len(out.splitlines()) <= 2, out  # the run folder, and the head of the table
    summary = json.loads((folder_of(tmp_path) / "summary.json").read_text())
    assert re.fullmatch(f"stopped: {says}", summary["exit_reason"])
    assert not wait_until_gone(below, seconds=5)


def wait_until_gone(pids: set[int], *, seconds: float) -> set[int]:
    """Those that run even after so long."""
    until = time.monotonic() + seconds
    while (alive := {pid for pid in pids if is_running(pid)}) and time.monotonic() < until:
        time.sleep(0.1)
    return alive
