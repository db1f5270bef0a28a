"""A judge that takes turns with trainers and engines on the same devices (placement: colocate)."""

from __future__ import annotations

import asyncio
import json
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.rollout_schema import RewardConfig, RolloutConfig
from configs.schema import RLConfig
from core.cluster.ray_workers import Remote
from core.cluster.workers import Local
from core.errors import ProcessDied
from core.timing.clock import Clock
from core.types.samples import Group, Prompt
from data_prep import tiny_model
from driver.checks.explain import estimate_memory
from driver.checks.explain_devices import place_processes
from driver.checks.shared_memory import describe_turns, estimate_judge_gib, plan_colocation
from driver.load_recipe import load_recipe
from driver.rl.colocation import Colocation, ColocationState
from driver.start.devices import count_judge_ranks
from driver.start.judges import Judges, check_judge, plan_judge, plan_judge_roles
from rollouts.judges.worker import JudgeWorker
from rollouts.scheduling.generation import GroupRequests
from rollouts.scheduling.judge_turns import JudgeTurns
from rollouts.worker import RolloutWorker
from unit_tests.helpers.episodes import Scripted, Tool, Words
from unit_tests.helpers.runs import evaluations_of, metrics_of, samples_of
from unit_tests.helpers.sentences import tell

COLOCATED = {"placement": "colocate"}
YES_NO = {"engine": "hf", "temperature": 0, "allowed_tokens": ["y", "n"]}
REWARD = {
    **{"function": "judge", "weights": {"score": 1.0}, "timeout_s": 130, "max_failed_fraction": 0.0},
    "settings": {"outage_s": 60, "timeout_s": 60, "max_tokens": 8, "parse_retries": 0, "verdict": "probability"},
}


@pytest.fixture(scope="module")
def judge_path(tmp_path_factory) -> str:
    """A tiny model with positions for a judge's prompt."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model.make(folder, max_length=5000)
    return str(folder)


class Devices:
    """Notes whose turn it is."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def begin_judging(self) -> None:
        await self.note("judge")

    async def end_judging(self) -> None:
        await self.note("none")

    async def resume_engines(self) -> None:
        if self.notes[-1:] == ["none"]:
            await self.note("engines")

    async def note(self, text: str) -> None:
        await asyncio.sleep(0.001)
        self.notes.append(text)


def test_groups_are_played_together_and_judged_together():
    """The third begins in the judge's turn, and waits for the end of it."""
    turns = JudgeTurns(devices := Devices())

    async def make(name: str, seconds: float) -> None:
        async with turns.playing():
            await asyncio.sleep(seconds)
            devices.notes.append(f"{name} played")
        async with turns.judging():
            devices.notes.append(f"{name} asked")
            await asyncio.sleep(seconds)
            devices.notes.append(f"{name} scored")

    async def go() -> None:
        groups = [asyncio.create_task(make(name, seconds)) for name, seconds in (("a", 0.01), ("b", 0.02))]
        while "judge" not in devices.notes:
            await asyncio.sleep(0.001)
        await asyncio.gather(*groups, make("c", 0.01))

    asyncio.run(go())
    notes = devices.notes
    assert notes[:3] == ["a played", "b played", "judge"] and sorted(notes[3:5]) == ["a asked", "b asked"]
    second = ["none", "engines", "c played", "judge", "c asked", "c scored", "none"]
    assert notes[5:] == ["a scored", "b scored", *second]


@pytest.mark.parametrize("moment", ["as the episodes are done", "while it waits for those of others"])
def test_an_engine_keeps_no_episodes_of_a_group_that_is_given_up(moment):
    """As when an evaluation ends early."""
    rewards: Any = None  # never reached
    engine: Any = Scripted([5])
    rollout = RolloutConfig(max_new_tokens=4)
    groups: list[asyncio.Task[Group]] = []

    class Worker(RolloutWorker):
        async def play_group(self, *asked: Any) -> bool:
            is_played = await super().play_group(*asked)
            asyncio.get_running_loop().call_later(0.0 if moment.startswith("as") else 0.1, groups[0].cancel)
            return is_played

    worker = Worker(
        engine, Words(), lambda _: Tool(), rewards, reward=RewardConfig(function="x"), rollout=rollout, seed=0
    )
    turns = JudgeTurns(Devices())
    requests = GroupRequests(Local(worker), timeout_s=50.0, turns=turns)

    async def go() -> None:
        async with turns.playing():
            prompt = Prompt(id="p", messages=[{"role": "user", "content": "1"}])
            groups.append(asyncio.create_task(requests.generate_group(0, prompt, 1)))
            with pytest.raises(asyncio.CancelledError):
                await groups[0]
            async with asyncio.timeout(20):
                while worker.played:
                    await asyncio.sleep(0.001)

    asyncio.run(go())


class Everyone:
    """Trainers, engines and judge that note what is called."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def call_all(self, method: Any, **settings: str) -> None:
        self.notes.append(" ".join([method.__name__, *settings.values()]))

    async def sleep(self) -> None:
        self.notes.append("judge sleeps")

    async def wake(self) -> None:
        self.notes.append("judge wakes")


def test_the_device_goes_from_engines_to_judge_and_to_engines_or_trainers():
    one = cast(Any, everyone := Everyone())
    devices = Colocation(trainers=one, engines=one, sleepers=one, weights=one, clock=Clock(), judges=one)

    async def go() -> None:
        await devices.resume_engines()
        await devices.begin_judging()
        await devices.end_judging()
        await devices.resume_engines()
        await devices.begin_judging()
        await devices.end_judging()
        await devices.give_to_trainers()

    asyncio.run(go())
    turn = ["sleep", "judge wakes", "judge sleeps"]
    assert everyone.notes == [*turn, "wake weights", "wake kv_cache", *turn, "reload_states"]
    assert devices.turn is ColocationState.TRAINING


@pytest.mark.parametrize("call", ["sleep", "judge wakes", "judge sleeps", "wake weights", "wake kv_cache"])
def test_a_group_cancelled_in_a_switch_leaves_the_device_in_a_known_state(call):
    """As those that run when stop_when ends a run, before the last evaluation and the last save."""

    class Cancelling(Everyone):
        async def call_all(self, method: Any, **settings: str) -> None:
            await super().call_all(method, **settings)
            await self.cancel_group()

        async def sleep(self) -> None:
            await super().sleep()
            await self.cancel_group()

        async def wake(self) -> None:
            await super().wake()
            await self.cancel_group()

        async def cancel_group(self) -> None:
            if self.notes[-1] == call and group is not None:
                group.cancel()
            await asyncio.sleep(0)

    group: asyncio.Task[None] | None = None
    one = cast(Any, Cancelling())
    devices = Colocation(trainers=one, engines=one, sleepers=one, weights=one, clock=Clock(), judges=one)
    turns = JudgeTurns(devices)

    async def make() -> None:
        async with turns.playing():
            pass
        async with turns.judging():
            pass

    async def make_twice() -> None:
        await make()
        await make()

    async def go() -> None:
        nonlocal group
        group = asyncio.create_task(make_twice())
        with pytest.raises(asyncio.CancelledError):
            await group
        group = None
        await asyncio.wait_for(make(), 5)
        await devices.give_to_trainers()

    asyncio.run(go())
    for parts in (["sleep", "wake weights", "wake kv_cache"], ["judge wakes", "judge sleeps"]):
        calls = [note for note in one.notes if note in parts]
        assert calls == list(islice(cycle(parts), len(calls)))
    assert devices.turn is ColocationState.TRAINING


def test_a_judge_that_dies_while_others_have_the_device_ends_the_run():
    class Dead:
        def __len__(self) -> int:
            return 1

        async def call_one(self, rank: int, method: Any, *args: Any) -> None:
            if method is JudgeWorker.stay:
                raise ProcessDied("judge 0: its process died", worker=("judge", 0))

    judges = Judges(cast(Any, Dead()), print, 3, [("127.0.0.1", 0)])
    failures: list[Exception] = []

    async def go() -> None:
        await judges.sleep()
        await judges.watch(failures.append)

    asyncio.run(go())
    assert str(failures[0]) == "judge 0: its process died, while others had the device of the judge"


def test_a_judge_that_dies_at_the_end_of_its_turn_is_replaced_once():
    """Both the call to sleep and the watch notice the death."""

    class Dying(Remote[Any]):
        def __init__(self) -> None:
            self.restarted, self.died, self.asleep = 0, asyncio.Event(), False

        def __len__(self) -> int:
            return 1

        async def call_one(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
            if method is JudgeWorker.listen:
                return "http://127.0.0.1:9", 9
            if self.restarted:
                self.asleep = method is JudgeWorker.sleep or self.asleep
                return await asyncio.sleep(0.001)
            if method is JudgeWorker.sleep:
                self.died.set()
            await self.died.wait()
            raise ProcessDied("judge 0: its process died", worker=("judge", 0))

        async def restart(self, rank: int) -> None:
            await asyncio.sleep(0.001)
            self.restarted += 1

        async def find_free_address(self, rank: int) -> tuple[str, int]:
            return "127.0.0.1", 0

    async def go() -> None:
        workers, said, failures = Dying(), list[str](), list[Exception]()
        judges = Judges(workers, said.append, 3, [("127.0.0.1", 0)])
        watching = asyncio.create_task(judges.watch(failures.append))
        await asyncio.sleep(0)
        await judges.sleep()
        await asyncio.sleep(0.01)
        watching.cancel()
        assert workers.asleep and not judges.is_awake and workers.restarted == 1 and not failures
        assert said[-1] == "judge 0 is back"

    asyncio.run(go())


def test_what_does_not_go_with_turns_is_refused(refused, judge_path, tmp_path):
    judge = {"model": judge_path, **YES_NO}
    told = {"reward": REWARD, "judge": judge}
    refused(
        told | {"judge": judge | {"placement": "colocate"}}, "judge.placement is colocate, and trainers and engines"
    )
    told |= COLOCATED
    refused(
        told | {"rollout.sleep_mode": "discard"}, "placement is colocate, and engines that sample again", "to offload"
    )
    two = {"judge": judge | {"num_engines": 2}, "backend": "ray"}
    refused(
        told | two, "2 ranks of the judge cannot share the devices of 1 trainer ranks", "or judge.placement to separate"
    )
    (tmp_path / "awake.py").write_text(
        "from dataclasses import replace\nfrom rollouts.engines.hf import HfEngine\n"
        "class Awake(HfEngine):\n    capabilities = replace(HfEngine.capabilities, sleep=False)\n"
    )
    awake = {"judge": judge | {"engine": str(tmp_path / "awake.py")}}
    refused(told | awake, "does not sleep while others have the device: set judge.engine to vllm")


def test_a_judge_in_turns_has_no_device_of_its_own_and_is_in_the_plan(recipe, judge_path, tmp_path):
    changes = COLOCATED | {"reward": REWARD, "judge": {"model": judge_path, **YES_NO}, "backend": "ray"}
    loaded = load_recipe(RLConfig, recipe(changes), [])
    cfg, estimate = loaded.cfg, estimate_memory(loaded)
    [role] = plan_judge_roles(cfg, Path("runs"))
    assert count_judge_ranks(cfg) == role.resources.gpus == 0 and plan_judge(cfg).engine.sleep == "offload"
    places = dict(place_processes(cfg, gpus=8))
    assert places["judge 0"] == places["engine 0"] == places["trainer 0"] == (0, [0])
    (_, order), *_ = describe_turns(cfg, estimate)
    assert order == "the engines play all episodes of a step; the judge scores them; the trainers train"
    on_gpu = cfg.model_copy(update={"device": "cuda"})
    needs = {need.when: need for need in plan_colocation(on_gpu, estimate, gpu_gib=80.0, machine_gib=24.0)}
    weights = estimate_judge_gib(cfg)
    assert needs["judging"].parts["weights of the judge"] == weights > 0
    assert needs["what is away from the GPUs"].parts["weights of the judge"] == weights
    apart = recipe(changes | {"judge": {"model": judge_path, **YES_NO, "placement": "separate"}})
    cfg = load_recipe(RLConfig, apart, []).cfg
    assert count_judge_ranks(cfg) == 1 and plan_judge(cfg).engine.sleep is None
    later = load_recipe(RLConfig, recipe(changes | {"judge": {"model": str(tmp_path), **YES_NO}}), []).cfg
    turns, (shared, why) = describe_turns(later, estimate)
    assert turns == ("turns", order) and shared == "shared in turns"
    assert why.startswith(f"unknown: judge.model: {tmp_path / 'config.json'} cannot be read as a model config (")


def test_what_the_engine_of_a_judge_cannot_do_is_refused(recipe, judge_path, tmp_path):
    (plain := tmp_path / "plain.py").write_text(
        "from dataclasses import replace\nfrom rollouts.engines.hf import HfEngine\n"
        "class Plain(HfEngine):\n    capabilities = replace(HfEngine.capabilities, allowed_tokens=False)\n"
    )
    changes = {"reward": REWARD, "backend": "ray"}
    for more, sentence in (
        (
            {"tensor_parallel_size": 2},
            "judge.engine=hf has no tensor parallelism: set judge.tensor_parallel_size to 1",
        ),
        (
            {"engine": str(plain)},
            f"judge.allowed_tokens is set, and judge.engine={plain} samples from all tokens: leave it out",
        ),
    ):
        cfg = load_recipe(RLConfig, recipe(changes | {"judge": {"model": judge_path, **YES_NO, **more}}), []).cfg
        asks: Any = [SimpleNamespace(may_ask_judge=True)]
        assert tell(lambda cfg=cfg, asks=asks: check_judge(cfg, asks)) == sentence


NOTING = """
from pathlib import Path
from rollouts.engines.{module} import {base}

class Mine({base}):
    def note(self, what):
        with Path({log!r}).open("a") as log:
            log.write({who!r} + " " + what + "\\n")

    async def generate(self, *args, **kwargs):
        self.note("samples")
        return await super().generate(*args, **kwargs)

    async def sleep(self):
        await super().sleep()
        self.note("sleeps")

    async def wake(self, part):
        self.note("wakes")
        await super().wake(part)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "module", "base"),
    [
        pytest.param("local", "hf", "HfEngine", marks=pytest.mark.slow),
        pytest.param("ray", "vllm", "VllmEngine", marks=pytest.mark.verify),
    ],
)
def test_a_judge_in_turns_gives_the_rewards_of_one_beside_the_engines(
    trained, judge_path, tmp_path, sums, backend, module, base
):
    """With evaluations, after which the engines wake with the weights that they had, and checkpoints."""
    engines = {}
    for who in ("policy", "judge"):
        engines[who] = tmp_path / f"{who}.py"
        engines[who].write_text(NOTING.format(log=str(tmp_path / "log"), who=who, module=module, base=base))
    held_out = {"data.eval": str(sums / "eval.parquet"), "data.eval_rows": 2, "eval_every": 1}
    changes = {"reward": REWARD, "judge": {"model": judge_path, **YES_NO, "engine": str(engines["judge"])}}
    changes |= held_out | {"rollout.engine": str(engines["policy"]), "steps": 2, "checkpoint.every": 1}
    changes |= {"backend": backend, "rollout.kv_cache_gib": 0.5}
    apart = trained(changes, "name=apart", name="apart")
    (tmp_path / "log").unlink()
    shared = trained(changes, "name=shared", "placement=colocate", name="shared")
    for step in range(2):
        of_apart, of_shared = samples_of(apart, step), samples_of(shared, step)
        assert all(row["reward"] is not None for row in of_shared)
        if backend == "ray":  # where timing decides what an engine computes in one batch
            continue
        assert [row["completion"] for row in of_shared] == [row["completion"] for row in of_apart]
        assert [row["reward"] for row in of_shared] == pytest.approx([row["reward"] for row in of_apart], abs=1e-4)
    assert evaluations_of(shared).keys() == evaluations_of(apart).keys()
    assert all(line["judge/calls"] > 0 for line in metrics_of(shared))
    awake = {"policy", "judge"}
    for line in (tmp_path / "log").read_text().splitlines():
        who, what = line.split()
        awake = awake - {who} if what == "sleeps" else awake | {who}
        assert what != "samples" or awake == {who}, "both have the device"
    summary = json.loads((shared / "summary.json").read_text())
    assert summary["bottleneck"].startswith("one device for both: ")
