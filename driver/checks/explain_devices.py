"""--explain on GPUs: the devices of this machine, and a device for every process of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from configs.eval_schema import EvalConfig
from configs.schema import RLConfig, RunConfig
from core.gpus import find_gpus
from core.timing.deadlines import GPU_CHECK_TIMEOUT_S
from driver.start.devices import count_gpus, count_judge_ranks, judge_takes_turns, shares_devices, uses_gpus
from driver.start.judges import JUDGE_GROUP
from rollouts.scheduling.availability import ENGINE_GROUP

USUAL_GPUS = 8
"""GPUs of a machine in plans for machines that this process does not see."""
Place = tuple[int, list[int]]
"""Number of a machine, and its GPUs."""


def describe_gpus() -> list[tuple[str, str]]:
    """Describe the driver and the GPUs of this machine; empty without GPUs."""
    found = find_gpus(timeout_s=GPU_CHECK_TIMEOUT_S)
    if not found.count:
        return []
    devices = [(f"GPU {i}", gpu.describe()) for i, gpu in enumerate(found.devices)]
    return [("NVIDIA driver", found.describe_driver()), *devices]


def describe_processes(cfg: RunConfig | EvalConfig) -> list[tuple[str, str]]:
    """Name every process of a run on Ray with its GPUs; empty on a CPU.

    The places follow the order in which Ray is asked. On a cluster Ray may number machines and GPUs otherwise.
    """
    if cfg.backend == "local" or not uses_gpus(cfg):
        return []
    gpus = count_gpus() or USUAL_GPUS
    rows = [("the driver", "this machine, no GPU" if cfg.ray_address is None else "where it was started, no GPU")]
    for name, place in place_processes(cfg, gpus=gpus):
        where = f"no room on machines of {gpus} GPUs" if place is None else name_place(place)
        if name.startswith(ENGINE_GROUP) and isinstance(cfg, RLConfig | EvalConfig):
            where += f", and {cfg.reward.workers} processes of rewards on its CPU cores"
        rows.append((name, where))
    return rows


def name_place(place: Place) -> str:
    """
    >>> name_place((0, [3])), name_place((1, [0, 1]))
    ('machine 1, GPU 3', 'machine 2, GPUs 0, 1')
    """
    machine, gpus = place
    return f"machine {machine + 1}, GPU{'s' * (len(gpus) > 1)} {', '.join(map(str, gpus))}"


def place_processes(cfg: RunConfig | EvalConfig, *, gpus: int) -> Iterator[tuple[str, Place | None]]:
    """Yield every trainer rank and engine with its place, None without room. gpus: of each machine.

    As core/cluster/placement.py asks Ray: the largest processes first, on as few machines as possible.
    """
    rollout = cfg.rollout if isinstance(cfg, RLConfig | EvalConfig) else None
    trainers = 0 if isinstance(cfg, EvalConfig) else cfg.trainer.ranks
    engines, each = (rollout.least_engines, rollout.tensor_parallel_size) if rollout else (0, 1)
    roles = [("trainer", trainers, 1)]
    if not shares_devices(cfg):
        roles.append((ENGINE_GROUP, engines, each))
    judge = cfg.judge if isinstance(cfg, RLConfig) else None
    if judge is not None and count_judge_ranks(cfg):
        roles.append((JUDGE_GROUP, judge.num_engines, judge.tensor_parallel_size))
    roles.sort(key=lambda role: -role[2])
    asked = [(f"{name} {i}", size) for name, n, size in roles for i in range(n)]
    found = _pack([size for _, size in asked], gpus, several=cfg.ray_address is not None)
    places = {name: place for (name, _), place in zip(asked, found, strict=True)}
    yield from sorted(places.items(), key=lambda item: item[0].startswith(ENGINE_GROUP))
    shared = [(ENGINE_GROUP, engines, each)] if shares_devices(cfg) else []
    if judge is not None and judge_takes_turns(cfg):
        shared.append((JUDGE_GROUP, judge.num_engines, judge.tensor_parallel_size))
    for name, n, size in shared:
        for i in range(n):
            of_ranks = [places[f"trainer {rank}"] for rank in range(i * size, (i + 1) * size)]
            on = [place for place in of_ranks if place is not None]
            yield f"{name} {i}", (on[0][0], [gpu for _, own in on for gpu in own]) if on else None


def _pack(sizes: Sequence[int], gpus: int, *, several: bool) -> list[Place | None]:
    """Return the place of each process, all its GPUs on one machine. several: there are more machines than one."""
    used = [0]
    places: list[Place | None] = []
    for size in sizes:
        machine = next((i for i, n in enumerate(used) if n + size <= gpus), None)
        if machine is None and several and size <= gpus:
            used.append(0)
            machine = len(used) - 1
        if machine is None:
            places.append(None)
            continue
        places.append((machine, [*range(used[machine], used[machine] + size)]))
        used[machine] += size
    return places
