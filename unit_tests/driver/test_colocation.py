"""Trainers and engines on one device: what leaves comes back to the bit, and nothing happens out of its turn."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import main_rl
from algs.ppo import PPO
from algs.terms import KL
from configs.schema import RLConfig
from core.errors import CallFailed, ProcessDied, RunStopped, UserError
from core.timing.clock import ActivityTimer, Clock
from core.timing.phases import Activity
from core.types.samples import Group
from data_feeds.packing.batches import micro_batches
from driver.checks.explain import estimate_memory
from driver.checks.memory_estimate import CUDA_GIB, GRAPHS_GIB
from driver.checks.shared_memory import Need, plan_colocation, refuse_tight
from driver.load_recipe import load_recipe
from driver.records.time_account import describe_colocation_cost
from driver.rl.colocation import Colocation, ColocationState
from driver.start.rollouts import choose_transports
from rollouts.engines.base import Engine, EngineLacks
from rollouts.engines.sleeping import Sleeper
from rollouts.scheduling.generation import Generation
from rollouts.worker import RolloutWorker
from trainers.local import LocalTrainer
from trainers.offload.offloaded_trainer import OffloadedTrainer
from trainers.offload.storages import HostBlocks, find_storages, find_tensors
from trainers.trainer import Trainer
from trainers.weight_sync.transports import HandleTransport, SyncEndpoints
from unit_tests.helpers.engines import PROMPTS, engine_of, several
from unit_tests.helpers.examples import a_changed, columns_of, is_running, run_here, some_groups
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.runs import OF_TEST, ROOT, SEVENS, file_of, folder_of, list_started, metrics_of, numbers_of

COLOCATED = {"placement": "colocate"}


def ppo_of(path: str) -> LocalTrainer:
    """Return a trainer with everything that can leave: a value model and a reference of its own."""
    torch.manual_seed(0)
    return trainer_of(path, PPO(kl=KL(coef=0.1)), dtype="bfloat16", optimizer="adamw", lr=1e-2)


def complete_groups() -> list[Group]:
    """Return groups with every column that PPO with a reference trains on."""
    columns = dict.fromkeys(("values", "returns", "ref_logp"), 0.1)
    return [
        [a_changed(s, columns={name: [value] * len(s.action_mask) for name, value in columns.items()}) for s in g]
        for g in some_groups()
    ]


def bytes_on_device(trainer: Trainer) -> int:
    models = trainer.policy, trainer.critic, trainer.frozen
    return sum(storage.nbytes() for storage in find_storages(models, device="cpu"))


# The trainer's half ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_what_leaves_is_freed_and_comes_back_to_the_bit(tiny_path):
    update = [micro_batches(complete_groups(), "token", 60)[0]]
    stays, leaves = ppo_of(tiny_path), ppo_of(tiny_path)
    away = OffloadedTrainer(leaves)
    for _ in range(2):
        stays.step(update)
        leaves.step(update)
        before = bytes_on_device(leaves)
        exported = {name: t.clone() for bucket in leaves.export_weights(2**20) for name, t in bucket}
        states = away.offload_states()
        there = sum(t.nbytes for t in (*leaves.model.parameters(), *leaves.model.buffers()))
        assert bytes_on_device(leaves) == there, "the weights of the policy, which are sent now"
        sent = {name: t for bucket in leaves.export_weights(2**20) for name, t in bucket}
        assert all(torch.equal(sent[name], exported[name]) for name in exported)
        leaves.probe([5, 6, 7])
        weights = away.offload_weights()
        assert bytes_on_device(leaves) == 0 and states + weights == before
        # bfloat16 weights twice, float32 master weights and two moments of AdamW twice, and the reference
        n = sum(p.numel() for p in leaves.model.parameters())
        assert before == pytest.approx(n * (2 * (2 + 4 + 8) + 2), rel=0.1)
        away.reload_states()
        assert bytes_on_device(leaves) == before
    assert torch.equal(stays.flatten_weights(), leaves.flatten_weights())
    assert leaves.timer.read_seconds()[Activity.OFFLOAD] > 0 and leaves.timer.read_seconds()[Activity.RELOAD] > 0


@pytest.mark.usefixtures("one_thread")
def test_a_trainer_that_is_away_does_nothing(tiny_path, tmp_path):
    trainer = ppo_of(tiny_path)
    away = OffloadedTrainer(trainer)
    [micro] = micro_batches(complete_groups(), "token", 10_000)
    calls = {
        "step": lambda: trainer.step([[*micro]]),
        "prox_logp": lambda: columns_of(trainer, [*micro], "prox_logp"),
        "values": lambda: columns_of(trainer, [*micro], "values"),
        "ref_logp": lambda: columns_of(trainer, [*micro], "ref_logp"),
        "save_state": lambda: trainer.save_state(tmp_path),
        "value model": lambda: trainer.save_model(tmp_path / "value_model", "value"),
        "leave twice": away.offload_states,
        "return early": away.reload_states,
    }
    sending = {"export": lambda: [*trainer.export_weights(100)], "probe": lambda: trainer.probe([5, 6, 7])}
    away.offload_states()
    for name in calls.keys() - {"prox_logp"}:  # which needs no more than the weights
        with pytest.raises(RunStopped, match=r"^trainer 0"):
            calls[name]()
    for call in sending.values():
        call()
    away.offload_weights()
    del calls["return early"]
    for call in (calls | sending).values():
        with pytest.raises(RunStopped, match=r"^trainer 0") as refused:
            call()
        assert "\n" not in str(refused.value)
    away.reload_states()
    trainer.step([[*micro]])


def test_tensors_are_found_wherever_they_are_held_and_code_is_not_followed():
    class Holder:
        __slots__ = ("kept",)

    def hook():
        return inside_code

    inside_code, holder, shared = torch.ones(3), Holder(), torch.zeros(8)
    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    holder.kept = {"a": [(leaf,)], "b": {shared[:4]: shared[4:]}, "hook": hook, "self": holder}
    found = [*find_tensors(holder)]
    assert {id(leaf), id(leaf.grad)} < {id(t) for t in found} and inside_code.data_ptr() not in {
        t.data_ptr() for t in found
    }
    assert sorted(s.nbytes() for s in find_storages(holder, device="cpu")) == [8, 8, 32], "two views are one storage"
    assert find_storages(holder, device="meta") == []
    assert len(find_storages(holder, device="cpu:0")) == 3, "the same device, as a tensor would not name it"


def test_copies_on_the_host_fill_blocks_of_a_size_that_pinned_memory_has():
    """A copy of 40 MiB of its own would pin 64 MiB."""
    sources = [torch.full((40 << 20,), i, dtype=torch.uint8) for i in range(3)]
    host = HostBlocks(120 << 20, pinned=False)
    copies = [host.copy(source) for source in sources]
    assert all(torch.equal(torch.cat(pieces), source) for pieces, source in zip(copies, sources, strict=True))
    blocks = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for c in copies for piece in c}
    assert sorted(blocks.values()) == [56 << 20, 64 << 20]


# The engine's half -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["offload", "discard"])
@pytest.mark.usefixtures("one_thread")
def test_an_engine_sleeps_and_wakes_in_order_and_samples_as_before(tiny_path, mode):
    trainer = trainer_of(tiny_path, PPO(), dtype="bfloat16")
    engine = engine_of(tiny_path, sleep=mode)
    engine.model.to(torch.bfloat16)  # the float32 weights are a file in memory, which cannot be freed

    def weights():
        return trainer.export_weights(2**20)

    async def go() -> None:
        await engine.load_weights(1, weights())
        before = await several(engine, PROMPTS, range(4))
        asking = asyncio.create_task(several(engine, PROMPTS, range(4)))
        for _ in range(4):
            await asyncio.sleep(0)
        with pytest.raises(RunStopped, match=r"had \d requests"):
            await engine.sleep()
        await asking
        with pytest.raises(RunStopped, match="was to wake its weights while it was awake"):
            await engine.wake("weights")
        await engine.sleep()
        assert find_storages(engine.model, device="cpu") == []
        for call, says in (
            (engine.generate([5], max_new_tokens=1, seed=0), "was to sample while it was asleep"),
            (engine.probe([5, 6]), "was to sample while it was asleep"),
            (engine.load_weights(2, weights()), "was sent weights while it was asleep: wake its weights first"),
            (engine.wake("kv_cache"), "was to wake its kv_cache while it was asleep"),
            (engine.sleep(), "was to sleep while it was asleep"),
        ):
            with pytest.raises(RunStopped, match=f"^an engine {says}"):
                await call
        await engine.wake("weights")
        with pytest.raises(RunStopped, match="was to sample while it was awake only with its weights"):
            await engine.generate([5], max_new_tokens=1, seed=0)
        if mode == "discard":
            for parameter in engine.model.parameters():
                parameter.data.fill_(torch.nan)  # whatever that memory holds
            await engine.load_weights(1, weights())
        await engine.wake("kv_cache")
        assert await several(engine, PROMPTS, range(4)) == before

    asyncio.run(go())


def test_an_engine_that_does_not_sleep_is_refused_before_the_start(recipe, tmp_path):
    text = (
        "from dataclasses import replace\nfrom rollouts.engines.hf import HfEngine\n"
        "class Awake(HfEngine):\n    capabilities = replace(HfEngine.capabilities, sleep=False)\n"
    )
    path = recipe(COLOCATED | {"rollout.engine": file_of(tmp_path / "awake.py", text)})
    with pytest.raises(UserError, match=r"^placement is colocate, and rollout\.engine=.* does not sleep"):
        load_recipe(RLConfig, path, [])
    for call in (Engine.sleep(cast(Any, None)), Engine.wake(cast(Any, None), "weights")):
        with pytest.raises(EngineLacks):
            asyncio.run(call)


def test_a_worker_sleeps_when_the_groups_have_ended_that_nobody_waits_for():
    class Counting:
        sleeper = Sleeper()

        async def sleep(self) -> None:
            self.sleeper.fall_asleep(running=len(worker.groups))

    worker = RolloutWorker.__new__(RolloutWorker)
    worker.engine, worker.timer = cast(Engine, Counting()), ActivityTimer()

    async def go() -> None:
        group = asyncio.get_running_loop().create_future()
        worker.groups = [group]
        sleeping = asyncio.create_task(worker.sleep())
        await asyncio.sleep(0.01)
        assert not sleeping.done()
        group.add_done_callback(worker.groups.remove)
        group.set_result(None)
        await sleeping

    asyncio.run(go())
    assert worker.timer.read_seconds()[Activity.SLEEP] >= 0


# The driver's turns ------------------------------------------------------------------------------------------


@dataclass
class Everyone:
    """Trainers, engines and weight sync: notes what is called, and fails where it is told to."""

    notes: list[str] = field(default_factory=list)
    fails: dict[str, Exception] = field(default_factory=dict)

    async def call_all(self, method: Any, **settings: str) -> list[Any]:
        return await self.note(" ".join([method.__name__, *settings.values()]))

    async def deliver_weights(self, version: int) -> Any:
        return await self.note(f"deliver {version}")

    async def prove_weights(self, delivery: Any) -> Any:
        return await self.note("prove") or {"sync/probe_gap": 0.0}

    async def note(self, call: str) -> Any:
        if call in self.fails:
            raise self.fails[call]
        self.notes.append(call)


ARROWS = [
    *("sleep", "reload_states", "offload_states", "wake weights", "deliver 3"),
    *("offload_weights", "wake kv_cache", "prove"),
]


def turns_of(everyone: Everyone) -> Colocation:
    one = cast(Any, everyone)
    return Colocation(trainers=one, engines=one, sleepers=one, weights=one, clock=Clock())


def test_a_step_goes_once_around_and_the_clock_sees_every_arrow():
    turns = turns_of(everyone := Everyone())
    asyncio.run(turns.give_to_trainers())
    assert turns.turn is ColocationState.TRAINING
    assert asyncio.run(turns.give_to_engines(3)) == {"sync/probe_gap": 0.0}
    assert turns.turn is ColocationState.GENERATING and everyone.notes == ARROWS
    assert turns.clock.get_totals().keys() == {"sleep", "reload", "offload", "wake", "sync", "rest", "all"}


def test_whose_turn_it_is_not_gets_nothing():
    turns = turns_of(everyone := Everyone())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RunStopped, match="expected 'training' before switching to 'optimizer away'"):
            asyncio.run(turns.give_to_engines(3))
        asyncio.run(turns.give_to_trainers())
        with pytest.raises(RunStopped, match="state 'training'; expected 'generating' before"):
            asyncio.run(turns.give_to_trainers())
        gc.collect()
    assert everyone.notes == ["sleep", "reload_states"]
    assert told == [], "a user would read of a coroutine that was never awaited"


@pytest.mark.parametrize("arrow", ARROWS)
@pytest.mark.parametrize("error", [ProcessDied("engine 0: its process died", worker=("engine", 0)), CallFailed("late")])
def test_a_failure_on_any_arrow_names_both_turns_and_leaves_the_turn(arrow, error):
    turns = turns_of(Everyone(fails={arrow: error}))
    before = ColocationState([*ColocationState][ARROWS.index(arrow)])

    async def go() -> None:
        await turns.give_to_trainers()
        await turns.give_to_engines(3)

    with pytest.raises(type(error), match=f"^between '{before}' and '.*', {error}$") as failed:
        asyncio.run(go())
    assert turns.turn is before and getattr(failed.value, "worker", None) == getattr(error, "worker", None)


def test_no_group_starts_while_the_engines_are_held():
    begun: list[int] = []

    class Slow(Generation):
        async def _generate_into_buffer(self, ticket: int) -> None:
            begun.append(ticket)
            await asyncio.sleep(0.01)

    class Endless:
        ticket = 0

        async def reserve_ticket(self) -> int:
            await asyncio.sleep(0)
            self.ticket += 1
            return self.ticket

    async def go() -> None:
        none: Any = None
        generation = Slow(
            cast(Any, [None]),
            draw_prompt=none,
            accept_group=none,
            buffer=cast(Any, Endless()),
            group_size=1,
            timeout_s=9,
        )
        async with generation.running_in_background():
            await asyncio.sleep(0.005)
            async with generation.held():
                n = len(begun)
                assert not [task for task in generation.tasks if not task.done()]
                await asyncio.sleep(0.02)
                assert len(begun) == n > 0
            await asyncio.sleep(0.005)
            assert len(begun) > n

    asyncio.run(go())


def test_the_last_line_says_who_had_the_device():
    devices = {
        "trainer 0": {"train": 4.0, "logp": 1.0, "offload": 0.5, "reload": 0.5, "wait_for_data": 4.0},
        "engine 0": {"generate": 3.0, "reward": 0.5, "sync": 0.5, "sleep": 0.25, "wake": 0.75, "wait_for_trainer": 5.0},
    }
    assert describe_colocation_cost(devices) == (
        "one device for both: 50% of the time for training, 35% for generation, 5% for weight sync, 20% to change hands"
    )


def test_every_engine_gets_the_handles_of_the_ranks_on_its_gpus():
    """Four trainer ranks, two engines of two ranks each, two chunks."""
    loaded: list[tuple[int, list[Any]]] = []

    class Ranks:
        ranks = range(2)
        chunks = iter([True, True, False])

        def start_all(self, method: Any, *args: Any) -> list[Any]:
            return [self.answer(method.__name__)]

        async def answer(self, name: str) -> Any:
            return next(self.chunks) if name == "write_chunk" else None

        async def call_all(self, method: Any) -> list[bytes]:
            return [pickle.dumps(f"of rank {rank}") for rank in range(4)]

        async def call_one(self, rank: int, method: Any) -> Any:
            return "summary"

        async def start_one(self, rank: int, method: Any, chunk: bytes) -> None:
            loaded.append((rank, [pickle.loads(own) for own in pickle.loads(chunk)]))

    all_ranks: Any = Ranks()
    ends = SyncEndpoints(
        **dict.fromkeys(("trainers", "sources", "engines", "engine_timers"), all_ranks),
        **{"ranks_per_engine": 2, "max_bytes": 1, "scope": "whole", "timeout_s": 1.0},
    )
    assert asyncio.run(HandleTransport("ipc").transfer(1, ends)) == "summary"
    assert loaded == 2 * [(0, ["of rank 0", "of rank 1"]), (1, ["of rank 2", "of rank 3"])]


# Settings and memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_staleness": 1}, "nothing can generate while the trainer trains: set max_staleness=1 to 0"),
        ({"backend": "ray", "rollout.num_engines": 2}, "2 engine ranks .* cannot share the devices of 1 trainer ranks"),
        ({"backend": "ray", "ray_address": "a:1"}, "one machine: leave ray_address out"),
        ({"backend": "ray", "weight_sync.transport": "nccl"}, "NCCL refuses two processes on one GPU"),
        (
            {"backend": "ray", "trainer.strategy": "fsdp2", "trainer.offload": True},
            "which moves the trainer's state itself: set trainer.offload to false",
        ),
        (
            {
                "rollout.sleep_mode": "discard",
                "model.lora": {},
                "weight_sync.lora": "adapter",
                "rollout.engine": "vllm",
            },
            "would never send the other weights again: set rollout.sleep_mode to offload",
        ),
    ],
)
def test_settings_that_do_not_go_with_one_device_are_refused(recipe, changes, says):
    with pytest.raises(UserError, match=f"placement is colocate, .*{says}.*, or placement to separate$"):
        load_recipe(RLConfig, recipe(COLOCATED | changes), [])
    load_recipe(RLConfig, recipe(COLOCATED), [])


def test_weights_go_by_handles_of_the_same_gpu_and_on_a_cpu_as_ever(recipe):
    from rollouts.engines.hf import HfEngine
    from rollouts.engines.vllm import VllmEngine

    cfg = load_recipe(RLConfig, recipe(COLOCATED | {"backend": "ray"}), []).cfg
    assert choose_transports(cfg, VllmEngine.capabilities) == ("gloo", "direct", "disk")
    on_gpu = cfg.model_copy(update={"device": "cuda"})
    assert choose_transports(on_gpu, VllmEngine.capabilities) == ("ipc",)
    assert choose_transports(on_gpu, HfEngine.capabilities)[0] == "gloo"
    apart = on_gpu.model_copy(update={"placement": "separate"})
    assert choose_transports(apart, VllmEngine.capabilities)[0] == "nccl"


def test_memory_is_planned_for_every_turn_and_refused_in_numbers(recipe):
    changes = COLOCATED | {"backend": "ray", "rollout.engine": "vllm", "rollout.kv_cache_gib": 2.0}
    loaded = load_recipe(RLConfig, recipe(changes), [])
    cfg, estimate = loaded.cfg, estimate_memory(loaded)
    [whole] = plan_colocation(cfg, estimate, gpu_gib=None, machine_gib=24.0)
    assert whole.total == pytest.approx(estimate.per_rank + 2 * estimate.per_engine + 2.0)
    refuse_tight([whole])
    [tight] = plan_colocation(cfg, estimate, gpu_gib=None, machine_gib=1.5)
    with pytest.raises(UserError) as refused:
        refuse_tight([tight])
    assert str(refused.value).startswith("placement is colocate, and everything together takes 2.00 GiB (trainers 0.00")
    assert "caches 2.00) of the 1.50 GiB of this machine, without activations: take a smaller" in str(refused.value)

    on_gpu = cfg.model_copy(update={"device": "cuda"})
    needs = plan_colocation(on_gpu, estimate, gpu_gib=80.0, machine_gib=24.0)
    assert [need.when for need in needs] == [
        *("training", "sending the weights", "generating", "what is away from the GPUs"),
    ]
    assert estimate.buckets == pytest.approx(5e8 * 4 / 2**30), "DeepSpeed's default, in float32"
    stays = 2 * CUDA_GIB + GRAPHS_GIB  # contexts of both, and graphs of the engine
    assert needs[0].total == pytest.approx(estimate.per_rank + estimate.buckets + stays)
    assert needs[1].total == pytest.approx(estimate.weights + estimate.per_engine + 2 * 64 / 1024 + stays)
    assert needs[2].there == pytest.approx(0.85 * 80) and needs[3].total == pytest.approx(
        estimate.per_rank + estimate.buckets + estimate.per_engine
    )
    dropped = plan_colocation(
        on_gpu.model_copy(update={"rollout": on_gpu.rollout.model_copy(update={"sleep_mode": "discard"})}),
        estimate,
        gpu_gib=80.0,
        machine_gib=24,
    )
    assert dropped[3].total == pytest.approx(estimate.per_rank + estimate.buckets)
    for i, need in enumerate(needs):
        small = [*needs[:i], Need(when=need.when, parts=need.parts, place=need.place, there=need.total / 2), *needs[i:]]
        with pytest.raises(UserError, match=f"^placement is colocate, and {need.when} takes"):
            refuse_tight(small)
        refuse_tight([Need(when=need.when, parts=need.parts, place=need.place, there=need.total)])


@pytest.mark.parametrize(
    ("changes", "nbytes"),
    [
        ({"trainer.zero_stage": 1}, 5e8 * 4),
        ({"trainer.zero_stage": 2}, 5e8 * 2),
        ({"trainer.zero_stage": 2, "trainer.deepspeed": {"zero_optimization": {"overlap_comm": True}}}, 5e8 * 4),
        ({"trainer.zero_stage": 3, "trainer.deepspeed": {"zero_optimization": {"reduce_bucket_size": 1000}}}, 2000),
        ({"trainer.zero_stage": 3, "trainer.deepspeed": {"zero_optimization": {"contiguous_gradients": False}}}, 0),
        ({"trainer.strategy": "fsdp2"}, 0),
    ],
)
def test_buckets_of_deepspeed_are_counted_as_it_allocates_them(recipe, changes, nbytes):
    loaded = load_recipe(RLConfig, recipe({"backend": "ray", "model.dtype": "bfloat16"} | changes), [])
    assert estimate_memory(loaded).buckets * 2**30 == pytest.approx(nbytes)


def test_a_run_that_does_not_fit_is_not_started(refused):
    changes = COLOCATED | {"backend": "ray", "rollout.engine": "vllm", "rollout.kv_cache_gib": 1e6}
    refused(changes, "error: placement is colocate, and everything together takes 1000000")


# Whole runs --------------------------------------------------------------------------------------------------


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


SAME = {"steps": 3, "updates_per_step": 2, "eval_every": 2, "checkpoint.every": 2, "trainer.lr": 1e-2}


@pytest.mark.slow
@pytest.mark.usual
@pytest.mark.usefixtures("one_thread")
def test_a_run_on_one_device_is_the_run_on_two_to_the_bit(recipe, tmp_path, sums):
    """With checkpoints and evaluations between the steps; and resumed from the run on two devices."""
    held_out = {"data.eval": str(sums / "eval.parquet"), "data.eval_rows": 3}
    sevens = {"reward.function": file_of(tmp_path / "sevens.py", SEVENS), "alg": {"name": "grpo", "kl": {"coef": 0.1}}}
    path = recipe(SAME | held_out | sevens)
    for overrides in (["name=apart"], ["name=shared", "placement=colocate", "rollout.sleep_mode=discard"]):
        assert run_here(main_rl, "--config", path, *overrides) == (0, "")
    apart, shared = folder_of(tmp_path, "apart"), folder_of(tmp_path, "shared")
    assert numbers_of(shared) == numbers_of(apart) and len(numbers_of(shared)) == 3
    mine, others = weights_of(shared), weights_of(apart)
    assert mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)
    summary = json.loads((shared / "summary.json").read_text())
    assert summary["bottleneck"].startswith("one device for both: ") and summary["exit_reason"] == "done"
    for row in metrics_of(shared):
        assert all(row[f"time/{phase}_s"] > 0 for phase in ("sleep", "reload", "offload", "wake", "sync"))
        assert all(row[f"time/{who}_s"] > 0 for who in ("trainers/offload", "trainers/reload", "engines/wake"))
        phases = [v for k, v in row.items() if k.startswith("time/") and k.count("/") == 1 and k != "time/step_s"]
        assert sum(phases) == pytest.approx(row["time/step_s"], rel=1e-6)
    assert not any("offload" in name for row in metrics_of(apart) for name in row)
    resumed = [f"resume={apart / 'checkpoints/step_00002'}", "name=resumed", "placement=colocate"]
    assert run_here(main_rl, "--config", path, *resumed) == (0, "")
    assert [r["train/loss"] for r in numbers_of(folder_of(tmp_path, "resumed"))] == [numbers_of(apart)[2]["train/loss"]]


STRIKES = '''
"""GRPO and an engine that do something to their process on one arrow of the device's turns."""
import os, signal, time
from functools import wraps
from pathlib import Path
from algs.grpo import GRPO
from rollouts.engines.hf import HfEngine
from trainers.offload.offloaded_trainer import OffloadedTrainer

HERE = Path(__file__).parent

def strike(arrow):
    wanted, after, kind = (HERE / "order").read_text().split("/")
    with (HERE / "seen").open("a") as seen:
        seen.write(arrow + "\\n")
    if arrow == wanted and (HERE / "seen").read_text().split("\\n").count(arrow) > int(after):
        (HERE / "struck").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL) if kind == "death" else time.sleep(600)

def before(owner, name, arrow):
    call = getattr(owner, name)
    setattr(owner, name, wraps(call)(lambda *args, **kwargs: (strike(arrow), call(*args, **kwargs))[1]))
'''
MY_TRAINER = """
for name in ("offload_states", "offload_weights", "reload_states"):
    before(OffloadedTrainer, name, name)

class Mine(GRPO):
    pass
"""
MY_ENGINE = """
class Mine(HfEngine):
    async def sleep(self):
        strike("sleep")
        await super().sleep()

    async def wake(self, part):
        strike("wake_" + part)
        await super().wake(part)

    async def receive_weights(self, version):
        strike("deliver")
        await super().receive_weights(version)

    async def probe(self, *args, **kwargs):
        strike("prove")
        return await super().probe(*args, **kwargs)
"""
STRUCK = [
    "sleep",
    "reload_states",
    "offload_states",
    "wake_weights",
    "deliver",
    "offload_weights",
    "wake_kv_cache",
    "prove",
]
SAID = {
    "death": r"stopped: between '.*' and '.*', .*(engine|trainer) 0 \(.*\): its process died",
    "timeout": r"stopped: between '.*' and '.*', .*(engine|trainer) 0 \(.*\) did not answer within .* seconds",
}
OF_TRAINER = ("reload_states", "offload_states", "offload_weights")


def strike(recipe: Any, tmp_path: Path, arrow: str, kind: str) -> None:
    """Run, and let one arrow of the second step fail; see that one sentence says so and nothing is left running."""
    mine = (
        file_of(tmp_path / "my_trainer.py", STRIKES + MY_TRAINER),
        file_of(tmp_path / "my_engine.py", STRIKES + MY_ENGINE),
    )
    # a trainer leaves once more at the start
    (tmp_path / "order").write_text(f"{arrow}/{2 if arrow in OF_TRAINER else 1}/{kind}")
    path = recipe(
        COLOCATED
        | {"backend": "ray", "alg": {"file": mine[0]}, "rollout.engine": mine[1], "steps": 4, "timeout_s": 60.0}
        | {"weight_sync.timeout_s": 3.0, "reward.function": file_of(tmp_path / "sevens.py", SEVENS)}
    )
    command = [sys.executable, "main_rl.py", "--config", path]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    env = os.environ | {"OMP_NUM_THREADS": "1", OF_TEST: str(tmp_path)}
    run = subprocess.Popen(command, **how, env=env, start_new_session=True)
    if kind == "interrupt":
        while not (tmp_path / "struck").exists() and run.poll() is None:
            time.sleep(0.2)
        run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=300)
    assert (tmp_path / "struck").exists(), (out, err)
    said = [line for line in err.splitlines() if line.strip()]
    if kind == "interrupt":
        assert run.returncode == 130 and not [line for line in said if "Traceback" in line], (arrow, err)
    else:
        assert run.returncode == 1 and len(said) == 1, (arrow, err)
        assert re.match(SAID[kind], said[0]), (arrow, said[0])
    left = {pid for pid in list_started(tmp_path) if is_running(pid)}
    assert not left, (arrow, left)


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["death", "timeout", "interrupt"])
@pytest.mark.parametrize("arrow", STRUCK)
def test_whatever_fails_in_whichever_turn_ends_the_run_with_one_sentence(recipe, tmp_path, arrow, kind):
    strike(recipe, tmp_path, arrow, kind)


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_two_ray_ranks_on_one_device_each_equal_the_run_on_two_to_the_bit(recipe, tmp_path):
    """One group in a step: with more, their timing decides which of them an engine samples in one batch."""
    changes = {"backend": "ray", "steps": 6, "groups_per_step": 1, "group_size": 8, "trainer.lr": 1e-2}
    path = recipe(changes | {"reward.function": file_of(tmp_path / "sevens.py", SEVENS), "checkpoint.every": 3})
    for overrides in (["name=apart"], ["name=shared", "placement=colocate"]):
        assert subprocess.run([sys.executable, "main_rl.py", "--config", path, *overrides], cwd=ROOT).returncode == 0
    apart, shared = folder_of(tmp_path, "apart"), folder_of(tmp_path, "shared")
    assert numbers_of(shared) == numbers_of(apart)
    mine, others = weights_of(shared), weights_of(apart)
    assert all(torch.equal(mine[name], others[name]) for name in others)


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_the_quickstart_is_mastered_on_one_device(tmp_path, engine):
    """On the model that make quickstart has warmed up."""
    if not (ROOT / "models/quickstart_sft").is_dir():
        subprocess.run(["make", "quickstart"], cwd=ROOT, check=True)
    how = ["placement=colocate", f"rollout.engine={engine}", f"run_dir={tmp_path / 'runs'}"]
    command = [sys.executable, "main_rl.py", "--config", "configs/quickstart.yaml", *how]
    subprocess.run(command, cwd=ROOT, check=True)
    summary = json.loads((folder_of(tmp_path, "quickstart") / "summary.json").read_text())
    assert summary["after"]["reward/correct"] >= 0.9
    assert summary["bottleneck"].startswith("one device for both")
