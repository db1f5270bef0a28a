"""Weight syncs of deltas: engines hold the trainer's weights to the bit, and are sent less."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algs.sft import SFT
from core.cluster.ray_workers import Remote
from core.errors import ProofFailed, RunStopped, TransportFailed
from core.timing.clock import ActivityTimer
from core.timing.phases import TRAINER_ACTIVITIES
from data_feeds.packing.batches import micro_batches
from trainers.weight_sync.base import Sent
from trainers.weight_sync.delta import DeltaDecoder, DeltaEncoder
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.publisher import RemoteWeightSync
from trainers.weight_sync.source import WeightSource
from trainers.weight_sync.transports import SyncEndpoints, Transport
from unit_tests.helpers.engines import engine_of
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.runs import LUCK, file_of, metrics_of, program
from unit_tests.helpers.syncs import sync_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, chance: torch.Generator) -> Tensor:
    """Return any bits at all: infinities, nan and both zeros among them."""
    size = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(256, (size,), dtype=torch.uint8, generator=chance).view(dtype).reshape(shape)


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (1,), (0, 3), (7, 5), (300, 3), (70_000,)]),
    share=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_what_is_decoded_is_what_was_sent_to_the_bit(dtype, shape, share, seed):
    chance = torch.Generator().manual_seed(seed)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    weight = random_bits(shape, dtype, chance)
    for coding in ("whole", "changes", "changes"):
        changed = torch.rand(shape, generator=chance) < share
        weight = torch.where(changed, random_bits(shape, dtype, chance).float(), weight.float()).to(dtype)
        encoder.begin(coding)
        sent = encoder.encode([("=odd name", weight), ("b", weight)])
        [(first, got), (second, _)] = decoder.decode(sent)
        assert (first, second) == ("=odd name", "b")
        assert got.dtype == dtype and got.shape == weight.shape and bits(got) == bits(weight)
        assert all(coded.nbytes <= weight.nbytes for _, coded in sent), "a larger delta is not sent"


def test_few_changes_take_few_bytes_and_the_smaller_form_is_chosen():
    weight = torch.randn(1000, 100).bfloat16()
    encoder = DeltaEncoder()
    encoder.begin("whole")
    encoder.encode([("w", weight)])
    nudged, replaced = weight.clone(), weight.clone()
    nudged[::50] = (nudged[::50].view(torch.int16) + 1).view(torch.bfloat16)
    encoder.begin("changes")
    [(name, coded)] = encoder.encode([("w", nudged)])
    assert name == "^w" and coded.nbytes < 0.01 * weight.nbytes
    assert (encoder.changes.changed, encoder.changes.values, encoder.changes.by_xor) == (2000, 100_000, 1)
    replaced[::50] = 1.5
    encoder.begin("changes")
    [(name, coded)] = encoder.encode([("w", replaced)])
    assert name == "+w" and coded.nbytes < 0.01 * weight.nbytes and encoder.changes.by_xor == 0


def test_changes_that_arrive_on_a_gpu_are_decoded_there(cuda_device):
    """NCCL delivers on the device, and what is kept stays in the machine's memory."""
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    weight = torch.randn(40, 50).bfloat16()
    for coding in ("whole", "changes", "changes"):
        weight = weight.clone()
        weight[3] += 1
        encoder.begin(coding)
        [(_, got)] = decoder.decode([(name, coded.to("cuda")) for name, coded in encoder.encode([("w", weight)])])
        assert got.device.type == "cuda" and torch.equal(got.cpu(), weight)


def test_nothing_is_kept_or_renamed_without_deltas():
    encoder, bucket = DeltaEncoder(), [("w", torch.ones(3))]
    encoder.begin("plain")
    assert encoder.encode(bucket) is bucket
    [(name, got)] = DeltaDecoder().decode(bucket)
    assert name == "w" and got is bucket[0][1]


def test_changes_without_the_values_before_them_are_told():
    encoder = DeltaEncoder()
    for coding in ("whole", "changes"):
        encoder.begin(coding)
        sent = encoder.encode([("w", torch.ones(100))])
    with pytest.raises(RunStopped, match="changes of w came to an engine that has not received its values"):
        DeltaDecoder().decode(sent)


def test_an_engine_follows_a_trainer_by_chunks_of_changes(tiny_path):
    trainer = trainer_of(tiny_path, SFT(), dtype="bfloat16", lr=1e-4)
    engine = engine_of(tiny_path, dtype="bfloat16")
    source = WeightSource(trainer, ActivityTimer(*TRAINER_ACTIVITIES), is_sender=True)

    async def sync(version: int, coding: Any) -> Sent:
        await engine.pause()
        await engine.begin_chunks()
        source.begin_chunks(10_000, "whole", None, coding)
        while source.write_chunk():
            await engine.load_chunk(source.get_chunk())
        await engine.receive_weights(version)
        [loaded] = await engine.read_fingerprint()
        sent = source.summarize_chunks()
        assert loaded == sent.checksums == fingerprint(trainer.model.named_parameters())
        return sent

    whole = asyncio.run(sync(1, "whole"))
    assert whole.nbytes == sum(p.nbytes for p in trainer.model.parameters()) and not whole.changes.tensors
    for version in (2, 3):
        trainer.step([micro_batches(some_groups(2, 2), "token", 10_000)[0]])
        told = asyncio.run(sync(version, "changes"))
        assert 0 < told.changes.changed < 0.5 * told.changes.values and told.nbytes < 0.5 * whole.nbytes


class Engines:
    """Handles of engines whose proofs are told in advance."""

    def __init__(self, actors: list[str], loaded: list[dict[str, int]]) -> None:
        self.actors, self.loaded = actors, loaded
        self.ranks = range(len(actors))

    def __len__(self) -> int:
        return len(self.actors)

    def only(self, ranks: Any) -> Engines:
        found = Engines(self.actors, self.loaded)
        found.ranks = ranks
        return found

    async def call_all(self, method: Any, *args: Any) -> list[Any]:
        if method.__name__ == "read_fingerprint":
            seen = self.loaded.pop(0) if self.loaded else {"w": 1}
            return [[seen] for _ in self.ranks]
        return [[-1.0] for _ in self.ranks]


class Noted:
    """A transport that notes the coding of each sync, and fails where it is told to."""

    name = "gloo"

    def __init__(self) -> None:
        self.codings: list[str] = []
        self.fails = 0

    async def transfer(self, version: int, ends: SyncEndpoints) -> Sent:
        self.codings.append(ends.coding)
        if self.fails:
            self.fails -= 1
            raise TransportFailed("the cable is cut")
        return Sent(checksums={"w": 1}, nbytes=0)


def sync_over(transport: Noted, loaded: list[dict[str, int]], said: list[str], **more: int) -> RemoteWeightSync:
    engines, trainers = (cast(Remote[Any], Engines(*of)) for of in ((["a", "b"], loaded), (["t"], [])))
    transports = [cast(Transport, transport)]
    return sync_of(trainers, engines, transports, may_fall_back=False, say=said.append, **more)


def test_a_sync_is_not_coded_unless_it_is_told_to():
    transport = Noted()
    sync = sync_over(transport, [], [])

    async def go() -> None:
        for version in range(2):
            await sync.publish_weights(version)

    asyncio.run(go())
    assert transport.codings == ["plain", "plain"]


def test_all_weights_go_to_whoever_may_lack_the_last_ones():
    transport, said = Noted(), list[str]()
    sync = sync_over(transport, [], said, whole_every=3)

    async def go() -> None:
        for version in range(5):
            await sync.publish_weights(version)
        assert transport.codings == ["whole", "changes", "changes", "whole", "changes"], "every third is whole"
        transport.codings.clear()
        await sync.publish_weights(5, engines=[1])  # one has joined
        await sync.publish_weights(6)
        await sync.publish_weights(7)
        assert transport.codings == ["whole", "whole", "changes"]
        transport.codings.clear()
        transport.fails = 1
        with pytest.raises(TransportFailed):
            await sync.publish_weights(8)
        await sync.publish_weights(9)
        assert transport.codings == ["changes", "whole"]
        cast(Any, sync.engines).actors[0] = "restarted"
        transport.codings.clear()
        await sync.publish_weights(10)
        assert transport.codings == ["whole"]

    asyncio.run(go())
    assert not said


def test_after_changes_whose_proof_fails_all_weights_are_sent_once():
    transport, said = Noted(), list[str]()
    wrong = {"w": 2}
    sync = sync_over(transport, [{"w": 1}, wrong, {"w": 1}, wrong, wrong], said, whole_every=9)

    async def go() -> None:
        await sync.publish_weights(1)
        await sync.publish_weights(2)
        assert transport.codings == ["whole", "changes", "whole"]
        assert len(said) == 1 and "loaded other values of w" in said[0] and "sent once more" in said[0]
        with pytest.raises(ProofFailed, match="loaded other values of w"):
            await sync.publish_weights(3)

    asyncio.run(go())
    assert transport.codings[3:] == ["changes", "whole"]


def test_a_whole_proof_that_fails_ends_the_run_at_once():
    transport = Noted()
    with pytest.raises(ProofFailed):
        asyncio.run(sync_over(transport, [{"w": 2}], [], whole_every=9).publish_weights(1))
    assert transport.codings == ["whole"]


def test_deltas_are_refused_where_nothing_decodes_them(refused, tmp_path):
    refused({"weight_sync.delta": True, "placement": "colocate"}, "weight_sync.delta", "placement is colocate")
    (tmp_path / "mine.py").write_text(
        "from rollouts.engines.base import Capabilities, Engine\n"
        "class Mine(Engine):\n    capabilities = Capabilities(broadcast=True)\n"
        "    async def generate(self, token_ids, *, max_new_tokens, seed): ...\n"
        "    async def probe(self, token_ids): ...\n    async def pause(self): ...\n    async def close(self): ...\n"
    )
    engine = {"rollout.engine": str(tmp_path / "mine.py"), "backend": "ray"}
    refused({"weight_sync.delta": True, **engine}, "weight_sync.delta", "DeltaDecoder")


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "transport"),
    [
        ("vllm", "auto"),
        *(("hf", name) for name in ("auto", "direct", "disk")),
    ],
)
def test_a_run_sends_few_bytes_after_its_first_sync(engine, transport, recipe, tmp_path):
    path = recipe(
        {
            "backend": "ray",
            "steps": 4,
            "model.dtype": "bfloat16",
            "trainer.lr": 1e-5,
            "rollout.engine": engine,
            "reward.function": file_of(tmp_path / "luck.py", LUCK),
            "weight_sync.transport": transport,
            "weight_sync.delta": True,
            "weight_sync.whole_every": 3,
        }
    )
    done = program(path)
    assert done.returncode == 0, done.stderr
    found = metrics_of(next((tmp_path / "runs").iterdir()))
    sizes = [row["sync/bytes"] for row in found]
    # the first sync comes before the first step; then two of changes, one whole
    assert sizes[2] > 5 * max(sizes[0], sizes[1], sizes[3])
    assert "sync/changed" not in found[2] and all(0 < found[n]["sync/changed"] < 0.3 for n in (0, 1, 3))
