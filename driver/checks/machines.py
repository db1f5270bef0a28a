"""Reserve machines for a run's actors, and request the comparison with the driver's machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.cluster.capacity import Role
from core.cluster.machine_check import MachineCheck
from driver.context import RunContext
from driver.start.devices import plan_gpu_use, uses_gpus


async def claim_machines(context: RunContext, roles: Sequence[Role], models: Mapping[str, str]) -> None:
    """Reserve a slot for every actor before the first starts; on a user's cluster, request machine checks.

    models: model paths by configuration key. Raises UserError if the cluster is too small.
    """
    cluster = context.cluster
    if cluster is None:
        return
    if not cluster.is_private:  # else all is on this machine, in this environment
        gpu_use = plan_gpu_use(context.cfg) if uses_gpus(context.cfg) else None
        cluster.check = MachineCheck.begin(context.folder.path, models, gpu_use=gpu_use)
    await cluster.reserve(roles, timeout_s=context.cfg.timeout_s, say=context.console.say)
    # Empty on a single machine, where `find_hosts` names none.
    placed = {slots.name_worker(rank): host for slots in cluster.slots.values() for rank, host in slots.hosts.items()}
    if placed:
        context.facts["machines"] = placed
