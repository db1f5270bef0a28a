"""Whatever carries them, engines get the trainer's weights or the run stops. Real Ray, ZeRO-3, the hf engine."""

import asyncio
import os
import re
import signal
import time
from dataclasses import replace

import pytest
import ray

from algs import find_algorithm
from configs.schema import RLConfig
from configs.sync_schema import PROBE_TOLERANCE
from core.cluster.capacity import Resources
from core.errors import ProcessDied, RunStopped, TransportFailed
from data_feeds.packing.batches import micro_batches
from driver.load_recipe import load_recipe
from driver.start.rollouts import build_worker, plan_rollouts
from driver.start.trainers import build_trainer, plan_trainer
from driver.start.weight_sync import make_weight_sync
from trainers.trainer import Trainer
from trainers.weight_sync.base import Probe
from trainers.weight_sync.publisher import RemoteWeightSync
from unit_tests.helpers.examples import some_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROBE = [5, 6, 7, 8]
SHORT_S, LONG_S = 5.0, 80.0
LOST = "model.layers.0.mlp.down_proj.weight"
"""In the middle of the stream: ranks have more to gather after it."""


def build_saboteur(place, plan):
    """A trainer that can be told what goes wrong, on its rank 0, with what it sends."""
    from trainers.weight_sync.broadcast import WeightSender
    from trainers.weight_sync.chunks import ChunkWriter

    send_bucket, store = WeightSender._send_bucket, ChunkWriter._store
    trainer = build_trainer(place, plan)
    open_broadcast = trainer.weight_source.open_broadcast
    faults: set[str] = set()

    def tell(now):
        faults.clear()
        faults.update(now)

    def broken(send, of, self, bucket):
        names = [name for name, _ in bucket]
        if of in faults and LOST in names:  # in the middle of the stream
            raise OSError("the cable is cut")
        send(self, [(n, t) for n, t in bucket if "drop" not in faults or n != LOST])

    def wrong_port(*args):
        port = open_broadcast(*args)
        return 1 if "port" in faults else port

    trainer.tell, trainer.weight_source.open_broadcast = tell, wrong_port
    WeightSender._send_bucket = lambda self, bucket: broken(send_bucket, "gloo", self, bucket)
    ChunkWriter._store = lambda self, bucket: broken(store, "disk" if self._folder else "direct", self, bucket)
    return trainer


def build_mortal(place, plan):
    """A rollout worker whose engine can be told to wait less long, and to die in its next sync."""
    worker = build_worker(place, plan)

    async def die(version, buckets):
        os.kill(os.getpid(), signal.SIGKILL)

    worker.hurry = lambda: setattr(worker.engine, "timeout_s", SHORT_S)
    worker.doom = lambda: setattr(worker.engine, "load_weights", die)
    return worker


class Saboteur:
    """The method that `build_saboteur` adds to a trainer."""

    def tell(self, faults): ...


class Mortal:
    """The methods that `build_mortal` adds to a rollout worker."""

    def hurry(self): ...
    def doom(self): ...


@pytest.fixture
def cluster(cluster):
    """The folder's cluster; what a test starts on it ends with the test."""
    groups = cluster.groups
    n_before = len(groups)
    yield cluster
    for actor in (actor for group in groups[n_before:] for actor in group.actors):
        ray.kill(actor)
    del groups[n_before:]


class Waiting:
    def __init__(self):
        self.released, self.came = asyncio.Event(), 0

    async def group(self):
        self.came += 1
        await self.released.wait()

    async def probe(self, groups):
        while self.came < groups:
            await asyncio.sleep(0.01)

    def hold(self):
        self.released.set()


def build_waiting(place):
    return Waiting()


def test_no_number_of_groups_under_way_keeps_a_sync_waiting(cluster):
    async def go() -> None:
        engines = await cluster.spawn("engine", 1, build_waiting, resources=Resources(threads=1), timeout_s=60.0)
        groups = [asyncio.create_task(engines.call_one(0, Waiting.group)) for _ in range(2500)]
        await engines.call_one(0, Waiting.probe, len(groups))
        assert re.fullmatch(r"engine 0 has been in group for \d+ s", (await engines.check_health(0))[1]), "said once"
        await engines.call_one(0, Waiting.hold)
        await asyncio.gather(*groups)

    asyncio.run(go())


def test_every_transport_brings_weights_and_a_failed_one_is_replaced_once(cluster, recipe, tmp_path):
    partitioned = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # small tensors, too
    common = {"backend": "ray", "trainer.ranks": 2, "trainer.zero_stage": 3, "trainer.deepspeed": partitioned}
    common |= {"rollout.num_engines": 2, "weight_sync.timeout_s": SHORT_S}
    shards = [[m] for m in micro_batches(some_groups(), "token", 60, ranks=2, padded=True)]
    said: list[str] = []
    facts: dict[str, str] = {}
    version = 0

    def cfg_of(**changes) -> RLConfig:
        return load_recipe(
            RLConfig, recipe(common | {"rollout.num_engines": 2, "weight_sync.timeout_s": 5.0} | changes), []
        ).cfg

    async def go() -> None:
        cfg = cfg_of(**{"weight_sync.timeout_s": LONG_S})  # the engines'
        plan = plan_trainer(cfg, find_algorithm(cfg.alg)[1](**cfg.alg))
        here = {"resources": Resources(threads=1), "timeout_s": 120}
        trainers, engines = await asyncio.gather(
            cluster.spawn("trainer", 2, build_saboteur, plan, **here),
            cluster.spawn("engine", 2, build_mortal, plan_rollouts(cfg), **here),
        )

        def sync_over(**changes) -> RemoteWeightSync:
            sync = make_weight_sync(
                cfg_of(**changes),
                trainers,
                engines,
                Probe(token_ids=PROBE, bound=PROBE_TOLERANCE["float32"]),
                rollouts=plan_rollouts(cfg_of(**changes)),
                say=said.append,
                facts=facts,
                folder=tmp_path,
            )
            assert isinstance(sync, RemoteWeightSync)
            sync.ends = replace(sync.ends, max_bytes=100_000)  # several buckets
            return sync

        async def publish(sync: RemoteWeightSync, *faults: str) -> str:
            """Publish a new step; return what carried its weights."""
            nonlocal version
            version += 1
            await trainers.scatter(Trainer.step, shards)
            await trainers.call_all(Saboteur.tell, faults)
            proof = await sync.publish_weights(version)
            assert proof["sync/probe_gap"] < 1e-3 and proof["sync/bytes"] > 500_000
            assert not (tmp_path / "weights").exists()
            return facts["transport"]

        for transport in ("gloo", "direct", "disk"):
            sync = sync_over(**{"weight_sync.transport": transport})
            assert [await publish(sync) for _ in range(2)] == [transport, transport]
            with pytest.raises(RunStopped, match=f"no values for 1 tensors, such as {LOST}") as stopped:
                await publish(sync, "drop")
            assert not isinstance(stopped.value, TransportFailed)
            named = sync_over(**{"weight_sync.transport": transport})
            with pytest.raises(
                TransportFailed, match=f"in the sync of .*trainer 0 .* over {transport}: the cable is cut"
            ):
                await publish(named, transport)
        with pytest.raises(TransportFailed, match="over gloo: the cable is cut"):
            await publish(sync_over(max_staleness=1), "gloo")
        assert not said

        began = time.monotonic()
        patient = sync_over(**{"weight_sync.timeout_s": LONG_S})
        assert await publish(patient, "gloo", "direct") == "disk"
        assert time.monotonic() - began < LONG_S / 2, "who waits for a broadcast that broke off is told at once"
        assert [re.search("transport is (.*)", s)[1] for s in said] == [
            "direct instead of gloo",
            "disk instead of direct",
        ]
        assert await publish(patient) == "disk" and len(said) == 2
        with pytest.raises(RunStopped, match="no values for 1 tensors"):
            await publish(sync_over(), "gloo", "drop")
        assert len(said) == 3 and facts["transport"] == "disk", "it was said, and then direct's bad news was final"

        await engines.call_all(Mortal.hurry)
        assert await publish(sync_over(), "port") == "direct"
        assert re.match("WARNING: in the sync of version .* over gloo: .*; from here on weight_sync.transport", said[3])

        await engines.call_one(1, Mortal.doom)
        with pytest.raises(
            ProcessDied, match=r"^in the sync of version \d+, engine 1 \(engine.receive_weights\): its process died"
        ):
            await publish(sync_over())

    asyncio.run(go())
