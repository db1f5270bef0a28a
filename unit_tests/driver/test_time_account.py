"""Every device's seconds add up, and the sentence at the end names who held the run up."""

import asyncio
import json

import pytest

from core.errors import RunStopped
from core.timing.clock import ActivityTimer, Clock
from driver.records.engine_timers import EngineTimers
from driver.records.time_account import TimeBreakdown, explain_engine, explain_trainer, name_bottleneck
from rollouts.scheduling.availability import EngineAvailability
from unit_tests.helpers.runs import SEVENS, file_of, folder_of, program


def test_a_device_is_idle_for_a_reason_that_the_driver_knows():
    driver = {"all": 10.0, "rest": 0.1, "wait_for_data": 3.0, "logp": 1.0, "train": 4.5, "sync": 1.4}
    trainer = explain_trainer({"train": 4.0, "logp": 0.9, "sync": 1.0, "idle": 4.1}, driver)
    assert sum(trainer.values()) == pytest.approx(10.0)
    assert trainer["wait_for_data"] == 3.0 and trainer["rest"] == 0.1 and trainer["driver"] == pytest.approx(1.0)
    engine = explain_engine({"generate": 6.0, "sync": 1.0, "idle": 2.95}, driver)
    assert engine["wait_for_trainer"] == 2.95 and engine["rest"] == pytest.approx(0.05)
    unasked = explain_trainer({"train": 4.0, "idle": 6.0}, {"all": 10.0, "rest": 0.0})
    assert unasked == {"train": 4.0, "wait_for_data": 0.0, "evaluate": 0.0, "driver": 6.0, "rest": 0.0}


@pytest.mark.parametrize(
    ("trainer_waits", "engine_waits", "sync", "driver", "may_overlap", "says"),
    [
        (6, 1, 1, 1, False, "generation is the bottleneck"),
        (1, 6, 1, 1, False, "training is the bottleneck"),
        (4, 5, 1, 2, True, "max_staleness=1 lets them work at the same time"),
        (4, 5, 1, 2, False, "training is the bottleneck"),
        (0, 0, 8, 8, False, "weight sync is the bottleneck (80%"),
        (0.5, 0.5, 0, 0, False, "neither side"),
        (0.3, 0.2, 1.3, 4.7, False, "driver's own work is the bottleneck (36%"),
    ],
)
def test_the_bottleneck_is_named(trainer_waits, engine_waits, sync, driver, may_overlap, says):
    """A driver's seconds include those in which it waits for the engines' part of a sync."""
    train = 10.0 - trainer_waits - driver - 0.2
    devices = {
        "trainer 0": {"train": train, "sync": 0.2, "wait_for_data": trainer_waits, "driver": driver},
        "engine 0": {"generate": 10.0 - engine_waits - sync, "sync": sync, "wait_for_trainer": engine_waits},
    }
    assert says in name_bottleneck(devices, may_overlap=may_overlap)


def test_a_slow_environment_is_the_bottleneck_where_engines_wait_for_it():
    trainer = {"train": 3.0, "sync": 0.1, "wait_for_data": 6.9, "driver": 0.0}
    engine = {"generate": 2.0, "environment": 6.0, "sync": 0.1, "wait_for_trainer": 1.9}
    said = name_bottleneck({"trainer 0": trainer, "engine 0": engine}, may_overlap=False)
    assert said.startswith("the environment is the bottleneck") and "60% of the engines' time" in said
    busy = engine | {"generate": 6.0, "environment": 2.0}
    assert "generation is the bottleneck" in name_bottleneck(
        {"trainer 0": trainer, "engine 0": busy}, may_overlap=False
    )


def test_slow_rewards_are_the_bottleneck_where_engines_wait_for_them():
    trainer = {"train": 3.0, "sync": 0.1, "wait_for_data": 6.9, "driver": 0.0}
    engine = {"generate": 1.0, "environment": 0.5, "reward": 5.5, "sync": 0.1, "wait_for_trainer": 2.9}
    said = name_bottleneck({"trainer 0": trainer, "engine 0": engine}, may_overlap=True)
    assert said.startswith("the rewards are the bottleneck") and "55% of the engines' time" in said
    assert "reward.workers" in said and "max_staleness" not in said
    busy = engine | {"generate": 5.5, "reward": 1.0}
    assert "max_staleness=1" in name_bottleneck({"trainer 0": trainer, "engine 0": busy}, may_overlap=True)


@pytest.mark.verify
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_runs_seconds_are_accounted_for(recipe, tmp_path, max_staleness):
    sevens = file_of(tmp_path / "sevens.py", SEVENS)
    steps = 6
    changes = {"backend": "ray", "steps": steps, "max_staleness": max_staleness, "reward.function": sevens}
    sizes = {"groups_per_step": 16, "group_size": 8, "updates_per_step": 2}
    done = program(recipe(changes | sizes))
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder_of(tmp_path) / "summary.json").read_text())
    # a hundredth, and a few milliseconds a step: these steps are short
    assert summary["seconds"]["rest"] <= 0.01 * summary["seconds"]["all"] + 0.005 * steps, summary["seconds"]
    devices = summary["devices"]
    assert set(devices) == {"trainer 0", "engine 0"}
    whole = sum(devices["trainer 0"].values())
    assert sum(devices["engine 0"].values()) == pytest.approx(whole)
    for device, seconds in devices.items():
        assert abs(seconds["rest"]) <= 0.01 * whole + 0.005 * steps, (device, seconds)
        assert all(value >= 0 for name, value in seconds.items() if name != "rest"), (device, seconds)
    assert devices["engine 0"]["generate"] > 0 and devices["engine 0"]["sync"] > 0
    assert devices["trainer 0"]["logp"] > 0 and devices["trainer 0"]["train"] > 0
    assert "bottleneck" in summary["bottleneck"] or "waits for the other" in summary["bottleneck"]
    assert summary["bottleneck"] in done.stdout.replace("\n", " ") and "engines: sync" in done.stdout


class Asked:
    """Trainers or engines whose timer is read."""

    def __init__(self, kind: str):
        self.kind, self.times, self.broken = kind, 0, False

    def __len__(self) -> int:
        return 1

    def attribute(self, name: str) -> "Asked":
        assert name == "timer"
        return self

    async def call_all(self, method: object) -> list[dict[str, float]]:
        return [await self.call_one(0, method)]

    async def call_one(self, rank: int, method: object) -> dict[str, float]:
        assert method is ActivityTimer.read_seconds
        self.times += 1
        if self.broken:
            raise RunStopped(f"{self.kind} 0 is gone")
        return {"busy": 2.0 * self.times, "idle": 1.0 * self.times}


def test_engines_are_asked_ahead_and_once_and_the_lap_tells_it():
    async def body() -> None:
        trainers, engines = Asked("trainer"), Asked("engine")
        timers = EngineTimers(engines, EngineAvailability(1))
        account = await TimeBreakdown.start(Clock(), trainers=trainers, engines=timers)
        account.prefetch_engine_timers()
        account.prefetch_trainer_timers()
        for _ in range(3):  # turns of the loop, none of which waits for anything
            await asyncio.sleep(0)
        assert (engines.times, trainers.times) == (2, 2)
        numbers = await account.start_lap()
        assert (engines.times, trainers.times) == (2, 2), "not once more"
        assert (numbers["time/engines/busy_s"], numbers["time/engines/idle_fraction"]) == (2, 1 / 3)
        engines.broken = True
        account.prefetch_engine_timers()
        with pytest.raises(RunStopped, match="engine 0 is gone"):
            await account.start_lap()

    asyncio.run(body())
