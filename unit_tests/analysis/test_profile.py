"""Traces of trainers and engines: files that a viewer reads, in a run that is the same with them and without."""

import asyncio
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.profile.observer import Profiler, TrainerTracer
from configs.profile_schema import ProfileConfig
from configs.schema import RLConfig
from core.errors import UserError
from core.timing.trace import Tracer
from driver.load_recipe import load_recipe
from driver.start.observers import plan_observers
from rollouts.worker import RolloutWorker


def read_operations(file: Path) -> set[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "cpu_op"}


def read_numbers(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in ("reward/mean", "train/loss", "train/grad_norm")]


def test_named_steps_leave_traces_and_the_run_is_the_same(trained, one_thread):
    without = trained({"steps": 3, "name": "without"}, name="without")
    folder = trained({"steps": 3, "name": "with", "profile": {"steps": [1, 2], "memory": True}}, name="with")
    assert read_numbers(folder) == read_numbers(without) and not (without / "profile").exists()
    names = {file.name for file in (folder / "profile").iterdir()}
    assert names == {f"step-{step}-{who}-0.trace.json.gz" for step in (1, 2) for who in ("trainer", "engine")}
    of_trainer = read_operations(folder / "profile" / "step-1-trainer-0.trace.json.gz")
    of_engine = read_operations(folder / "profile" / "step-1-engine-0.trace.json.gz")
    assert any("Backward" in name for name in of_trainer) and not any("Backward" in name for name in of_engine)
    assert "aten::linear" in of_engine


class Calls:
    """Trainers and engines that record what they are told, and name a file each."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def __len__(self) -> int:
        return 2

    def attribute(self, name: str) -> "Calls":
        assert name == "observers.profile"
        return self

    async def call_all(self, method, *args) -> list[list[str] | None]:
        self.told.append((method.__name__, *args))
        return [["a"], ["b"]] if method is TrainerTracer.end else [None, None]

    async def call_one(self, rank: int, method, *args) -> list[str] | None:
        self.told.append((method.__name__, rank, *args))
        return [f"engine-{rank}"] if method is RolloutWorker.stop_trace else None


def test_engines_are_traced_from_a_steps_updates_to_the_next_ones(tmp_path):
    trainers, engines, said = Calls(), Calls(), list[str]()
    cfg = ProfileConfig(steps=[1], memory=True)
    context = SimpleNamespace(
        engines=engines,
        availability=None,
        console=SimpleNamespace(say=said.append),
        folder=SimpleNamespace(path=tmp_path),
    )
    loaded = SimpleNamespace(cfg=SimpleNamespace(profile=cfg))
    profiler = Profiler(SimpleNamespace(loaded=loaded, context=context, trainers=trainers))
    lines: list[int] = []

    async def go() -> None:
        for step in range(4):
            async with profiler.around_updates(SimpleNamespace(step=step)):
                lines.append(len(said))
        await profiler.finish()

    asyncio.run(go())
    files = tmp_path / "profile"
    assert trainers.told == [("begin", cfg), ("end", files, 1)]
    assert engines.told == [
        *(("start_trace", rank, True, True) for rank in (0, 1)),
        *(("stop_trace", rank, files / f"step-1-engine-{rank}") for rank in (0, 1)),
    ]
    assert said == [f"wrote a, b to {files}", f"wrote engine-0, engine-1 to {files}"]
    assert lines == [0, 0, 2, 2], "the engines' files are written before the next updates"


def test_a_tracer_without_a_trace_writes_nothing_on_a_cpu(tmp_path):
    tracer = Tracer()
    tracer.start(trace=False, memory=True)
    assert tracer.stop(tmp_path / "a") == []


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"steps": [0, 7]}, "profile.steps has 7, and the run makes steps 0 to 1"),
        ({"steps": [0], "trace": False}, "profile: steps are named, and neither trace nor memory is on"),
        ({"steps": [-1]}, "greater than or equal to 0"),
    ],
)
def test_what_would_write_nothing_is_refused(recipe, profile, said):
    with pytest.raises(UserError, match=said):
        plan_observers(load_recipe(RLConfig, recipe({"steps": 2, "profile": profile}), []))


@pytest.mark.verify
def test_vllm_and_two_ranks_are_traced(trained):
    changes = {"backend": "ray", "rollout.engine": "vllm", "trainer.ranks": 2, "rollout.kv_cache_gib": 0.1}
    folder = trained(changes | {"steps": 2, "profile": {"steps": [0]}})
    names = {file.name.partition(".")[0] for file in (folder / "profile").iterdir()}
    assert names == {"step-0-trainer-0", "step-0-trainer-1", "step-0-engine-0-0"}
    of_engine = read_operations(folder / "profile" / "step-0-engine-0-0.trace.json.gz")
    assert any("attention" in name for name in of_engine)
