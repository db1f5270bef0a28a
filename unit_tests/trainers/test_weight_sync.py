"""The stream of weights over gloo, between threads, and what `verify` says of it. No engine here."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from configs.schema import RLConfig
from core.cluster.ray_workers import Remote
from core.errors import RunStopped, TransportFailed, UserError
from core.types.weights import Bucket, split_into_buckets
from driver.load_recipe import load_recipe
from driver.start.devices import check_devices
from driver.start.rollouts import plan_rollouts
from trainers.weight_sync.base import Sent
from trainers.weight_sync.broadcast import WeightReceiver, WeightSender
from trainers.weight_sync.chunks import ChunkWriter, read_chunk
from trainers.weight_sync.fingerprint import fingerprint, verify_sync
from trainers.weight_sync.store import read_manifest
from trainers.weight_sync.transports import SyncEndpoints, Transport
from unit_tests.helpers.syncs import sync_of

TIMEOUT_S = 20.0
WEIGHTS = {
    "matrix": torch.randn(48, 64).bfloat16(),
    "short": torch.randn(3).bfloat16(),  # six bytes, after which no float32 may begin
    "odd": torch.randn(3, 5, 7),
    "scalar": torch.tensor(2.5),
    "transposed": torch.randn(16, 8).t(),
    "empty": torch.empty(0, 4),
}


def nbytes(named: tuple[str, Tensor]) -> int:
    return named[1].nbytes


def exchange(weights: dict[str, Tensor], *, receivers: int, rounds: int) -> tuple[dict[str, int], list[list[Bucket]]]:
    """Send `rounds` times; what the sender says of the last one, and what each receiver got in it."""
    sender = WeightSender(timeout_s=TIMEOUT_S)
    port = sender.open()

    def receive(rank: int) -> list[Bucket]:
        receiver = WeightReceiver(address="127.0.0.1", port=port, rank=rank, members=receivers + 1, timeout_s=TIMEOUT_S)
        return [list(receiver.receive()) for _ in range(rounds)][-1]

    def send() -> dict[str, int]:
        sender.join(members=receivers + 1)
        return [sender.send(split_into_buckets(weights.items(), nbytes, 1024)) for _ in range(rounds)][-1]

    with ThreadPoolExecutor() as pool:
        got = [pool.submit(receive, rank + 1) for rank in range(receivers)]
        return pool.submit(send).result(), [future.result() for future in got]


def test_every_receiver_gets_every_tensor_bit_for_bit() -> None:
    sent, received = exchange(WEIGHTS, receivers=2, rounds=2)
    assert sent == fingerprint(WEIGHTS.items())
    for buckets in received:
        got = dict(pair for bucket in buckets for pair in bucket)
        assert got.keys() == WEIGHTS.keys()
        for name, tensor in got.items():
            assert tensor.dtype == WEIGHTS[name].dtype
            assert torch.equal(tensor, WEIGHTS[name])


@pytest.mark.parametrize("on_disk", [False, True])
def test_chunks_bring_every_tensor_and_their_list_is_written_last(tmp_path: Path, on_disk: bool) -> None:
    def stream(buckets: list[Bucket]) -> Generator[Bucket]:
        yield from buckets

    buckets = list(split_into_buckets(WEIGHTS.items(), nbytes, 512))
    assert len(buckets) > 2
    writer = ChunkWriter(stream(buckets), writes=True, folder=str(tmp_path) if on_disk else None)
    got: dict[str, Tensor] = {}
    while writer.write_chunk():
        got |= dict(read_chunk(writer.chunk))
        assert not (tmp_path / "manifest.json").exists()
    assert got.keys() == WEIGHTS.keys() and all(torch.equal(got[name], WEIGHTS[name]) for name in got)
    if on_disk:
        again = [pair for chunk in read_manifest(str(tmp_path)) for pair in read_chunk(chunk)]
        assert fingerprint(again) == fingerprint(WEIGHTS.items())
    sent = writer.summarize()
    assert sent.checksums == fingerprint(WEIGHTS.items())
    assert sent.nbytes == sum(map(nbytes, WEIGHTS.items()))
    with pytest.raises(TransportFailed):
        read_chunk(b"no tensors")
    idle = ChunkWriter(stream(buckets), writes=False, folder=None)
    assert [idle.write_chunk() for _ in range(len(buckets) + 1)] == [True] * len(buckets) + [False]
    assert idle.summarize() == Sent(checksums={}, nbytes=0)


def test_buckets_are_bounded_and_a_larger_tensor_travels_alone() -> None:
    named = [("a", torch.zeros(60)), ("b", torch.zeros(40)), ("big", torch.zeros(1000)), ("c", torch.zeros(1))]
    # 240 and 160 bytes fill 400 exactly, 4000 do not fit anywhere.
    buckets = [[name for name, _ in bucket] for bucket in split_into_buckets(named, nbytes, 400)]
    assert buckets == [["a", "b"], ["big"], ["c"]]


def test_a_member_who_does_not_come_is_an_error_in_time() -> None:
    sender = WeightSender(timeout_s=1.0)
    sender.open()
    with pytest.raises(TransportFailed, match=r"did not get through over gloo: .*(?i:timed? ?out|wait timeout)"):
        sender.join(members=2)


def test_only_vllm_hears_nccl_and_only_on_gpus(recipe) -> None:
    def answer(**changes: object) -> bool:
        cfg = load_recipe(RLConfig, recipe({"backend": "ray", **changes}), []).cfg
        transports = plan_rollouts(cfg).transports
        assert transports[1:] == ("direct", "disk")
        return transports[0] == "nccl"

    assert not answer(device="cuda")  # the recipe's engine is hf
    assert answer(**{"rollout.engine": "vllm"}) == torch.cuda.is_available()
    assert answer(**{"rollout.engine": "vllm", "device": "cuda"}), "a driver without GPUs, on a cluster that has some"


WITHOUT_CHUNKS = """
from rollouts.engines.base import Capabilities, Engine

class Mine(Engine):
    capabilities = Capabilities(broadcast=True)
    async def generate(self, token_ids, *, max_new_tokens, seed): ...
    async def probe(self, token_ids): ...
    async def pause(self): ...
    async def close(self): ...
"""


def test_a_transport_that_cannot_be_is_refused(recipe, tmp_path) -> None:
    def cfg_of(**changes: object) -> RLConfig:
        return load_recipe(RLConfig, recipe({"backend": "ray", **changes}), []).cfg

    with pytest.raises(UserError, match=r"backend: local hands weights over .* set weight_sync.transport to auto"):
        cfg_of(backend="local", **{"weight_sync.transport": "gloo"})
    with pytest.raises(UserError, match=r"rollout.engine=hf takes no weights over NCCL"):
        cfg_of(**{"weight_sync.transport": "nccl"})
    over_nccl = cfg_of(**{"weight_sync.transport": "nccl", "rollout.engine": "vllm"})
    if not torch.cuda.is_available():
        assert "weight_sync.transport is nccl, and trainers and engines get no GPUs" in (check_devices(over_nccl) or "")
    engine = tmp_path / "engine.py"
    engine.write_text(WITHOUT_CHUNKS)
    without = plan_rollouts(cfg_of(**{"rollout.engine": str(engine)}))
    assert without.transports == ("gloo",), "nothing it could fall back to"
    alone = tmp_path / "alone.py"
    alone.write_text(WITHOUT_CHUNKS.replace("broadcast=True", "broadcast=False"))
    with pytest.raises(UserError, match=r"runs in the driver's process only: set backend to local"):
        cfg_of(**{"rollout.engine": str(alone)})
    with pytest.raises(UserError, match=r"takes no weights in chunks: add begin_chunks and load_chunk"):
        cfg_of(**{"rollout.engine": str(engine), "weight_sync.transport": "disk"})
    assert plan_rollouts(cfg_of()).transports == ("gloo", "direct", "disk")


SENT = fingerprint(WEIGHTS.items())


def check(loaded: Sequence[Sequence[dict[str, int]]], probe_logp: Sequence[Sequence[float]] = ()) -> float:
    return verify_sync(SENT, loaded, expected_logp=[-1.0, -2.0], probe_logp=probe_logp, bound=0.01)


@pytest.mark.parametrize("off", [-1.5, float("nan")])
def test_a_probe_that_disagrees_stops_the_run(off: float) -> None:
    with pytest.raises(RunStopped, match=r"engine 1 .* log-probabilities of the probe"):
        check([[SENT], [SENT]], [[-1.0, -2.0], [off, -2.0]])


class Recorder:
    """Workers that note what is called and what has returned."""

    ranks, actors = (0,), ("engine",)

    def __init__(self, notes: list[str], answers: dict[str, Any]) -> None:
        self.notes, self.answers = notes, answers

    def __len__(self) -> int:
        return 1

    def only(self, ranks: Sequence[int]) -> Recorder:
        assert list(ranks) == [0]
        return self

    async def call_all(self, method: Any, *args: Any) -> list[Any]:
        self.notes.append(f"{method.__name__} called")
        await asyncio.sleep(0.01)
        self.notes.append(f"{method.__name__} done")
        return [self.answers.get(method.__name__)]


class Noted:
    """A transport that notes its name, and is cut where its name is among those."""

    def __init__(self, name: str, notes: list[str], cut: Sequence[str] = ()) -> None:
        self.name, self.notes, self.cut = name, notes, cut

    async def transfer(self, version: int, ends: SyncEndpoints) -> Sent:
        self.notes.append(self.name)
        if self.name in self.cut:
            raise TransportFailed(f"{self.name} is cut")
        return Sent(checksums={}, nbytes=0)


def sync_noted(notes: list[str], *names: str, cut: Sequence[str] = (), may_fall_back: bool = True, say=print):
    """Return a sync whose calls are noted in their order, with transports of these names."""
    trainers = cast(Remote, Recorder(notes, {"probe": [-1.0]}))
    engines = cast(Remote, Recorder(notes, {"read_fingerprint": [{}], "probe": [-1.0]}))
    transports = [cast(Transport, Noted(name, notes, cut)) for name in names]
    return sync_of(trainers, engines, transports, may_fall_back=may_fall_back, say=say)


def test_nothing_is_sent_before_the_engines_are_held() -> None:
    """A drain takes as long as the longest completion, and the members of a broadcast do not wait for that."""
    notes: list[str] = []
    asyncio.run(sync_noted(notes, "gloo").publish_weights(3))
    assert [note for note in notes if not note.startswith(("begin", "end"))][:3] == [
        "pause called",
        "pause done",
        "gloo",
    ]


def test_engines_are_held_again_before_another_transport_is_tried() -> None:
    """The first may have failed when one of them had all its weights, and went on."""
    notes: list[str] = []
    asyncio.run(sync_noted(notes, "gloo", "direct", cut=["gloo"]).publish_weights(3))
    steps = [note for note in notes if note in ("gloo", "direct", "pause done")]
    assert steps == ["pause done", "gloo", "pause done", "direct"]


@pytest.mark.parametrize("may_fall_back", [True, False])
def test_a_transport_is_replaced_only_where_the_run_is_synchronous(may_fall_back: bool) -> None:
    notes: list[str] = []
    warnings: list[str] = []
    names = ("gloo", "direct", "disk")
    sync = sync_noted(notes, *names, cut=names[:2], may_fall_back=may_fall_back, say=warnings.append)
    if may_fall_back:
        asyncio.run(sync.publish_weights(3))
        asyncio.run(sync.publish_weights(4))
        tried = [note for note in notes if note in names]
        assert tried == ["gloo", "direct", "disk", "disk"], "for the rest of the run"
        assert [warning.rpartition("; ")[2] for warning in warnings] == [
            "from here on weight_sync.transport is direct instead of gloo",
            "from here on weight_sync.transport is disk instead of direct",
        ]
        assert warnings[0].startswith("WARNING: in the sync of version 3, gloo is cut")
        assert sync.facts == {"transport": "disk"}
    else:
        with pytest.raises(TransportFailed, match="in the sync of version 3, gloo is cut"):
            asyncio.run(sync.publish_weights(3))
        assert [note for note in notes if note in names] == ["gloo"] and warnings == []
