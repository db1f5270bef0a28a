"""Compute the GPUs and CPUs a run needs, and report which are missing. Does not import ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOT = "feynrl_worker"
"""Resource of a machine without GPUs, set by `ray start --resources`: number of ranks it may run."""
GPU, CPU = "GPU", "CPU"
CPU_SHARE = 0.001
"""CPU share requested per rank if ranks are not counted; more than 0, so that machines with --num-cpus=0 get none."""
NAMES = {GPU: "GPU", SLOT: f"{SLOT} slot", CPU: "CPU"}
FIX = (
    "start Ray on more machines, wait until other jobs end, or lower trainer.ranks, rollout.num_engines or "
    "rollout.tensor_parallel_size"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Part of a machine that one worker needs."""

    gpus: int = 0
    threads: int | None = None
    """CPU threads of the worker's tensor library; None: its machine's cores divided by the machine's GPUs."""
    ranks: int = 1
    """Ranks in the worker: 1, or the ranks of a tensor-parallel engine, all on one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Group of equal actors that a run starts."""

    name: str
    n: int
    resources: Resources
    needs_run_folder: bool = True
    """True if the actors read or write the run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine of a cluster, with the amount of one resource."""

    node_id: str
    host: str
    """Name and address for messages."""
    total: float
    free: float


def name_host(name: str, address: str) -> str:
    """
    >>> name_host("node7", "10.0.0.7"), name_host("10.0.0.7", "10.0.0.7")
    ('node7 (10.0.0.7)', '10.0.0.7')
    """
    return address if name in ("", address) else f"{name} ({address})"


def choose_resource(roles: Sequence[Role], *, has_slots: bool) -> str:
    """Return the resource that limits the number of actors per machine. has_slots: some machine declares SLOT."""
    if any(role.resources.gpus for role in roles):
        return GPU
    return SLOT if has_slots else CPU


def choose_bundle(resources: Resources, *, has_slots: bool) -> dict[str, float]:
    """Return the resources that one actor requests.

    >>> choose_bundle(Resources(gpus=2), has_slots=True), choose_bundle(Resources(ranks=2), has_slots=True)
    ({'GPU': 2}, {'feynrl_worker': 2})
    """
    if resources.gpus:
        return {GPU: resources.gpus}
    return {SLOT: resources.ranks} if has_slots else {CPU: CPU_SHARE}


def describe_missing(roles: Sequence[Role], machines: Sequence[Machine], *, resource: str) -> str:
    """Describe requested, available and missing resources, with the fix.

    >>> roles = [Role(name="engine", n=2, resources=Resources(gpus=4))]
    >>> machines = [Machine(node_id="a", host="10.0.0.1", total=8, free=4)]
    >>> describe_missing(roles, machines, resource="GPU").partition(", and ")[0]
    'asked for 2 x engine with 4 GPUs each'
    """
    bundles = [(role, choose_bundle(role.resources, has_slots=resource == SLOT)) for role in roles]
    each = {role.name: bundle.get(resource, 0.0) for role, bundle in bundles}
    wanted, free = sum(role.n * each[role.name] for role in roles), sum(machine.free for machine in machines)
    asked = " and ".join(f"{role.n} x {role.name} with {_count(each[role.name], resource)} each" for role in roles)
    listed = ", ".join(f"{machine.host}: {machine.free:g} of {machine.total:g}" for machine in machines)
    there = f"{len(machines)} machine{'s' * (len(machines) != 1)} with {_count(free, resource, free=True)} ({listed})"
    if wanted > free:
        missing = f"{_count(wanted - free, resource)} {'is' if wanted - free == 1 else 'are'} missing"
    else:
        # Enough in total may still not fit, because the ranks of an actor must be on one machine.
        largest = max(each.values())
        missing = f"no machine has {_count(largest, resource, free=True)} for one of them, which cannot be split"
    return f"asked for {asked}, and the cluster has {there}: {missing}; {FIX}"


def _count(n: float, resource: str, *, free: bool = False) -> str:
    return f"{n:g} {'free ' * free}{NAMES[resource]}{'s' * (n != 1)}"
