"""Machines of a run: places for all its actors, and what their first call must find there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.cluster.capacity import Role
from core.cluster.machine_check import MachineCheck
from driver.context import RunContext


async def claim_machines(context: RunContext, roles: Sequence[Role], models: Mapping[str, str]) -> None:
    """Reserve a place for every actor before one is started; in a user's cluster let them be compared with this one.

    models: model paths by the key that names them. Raises UserError where the cluster has no room.
    """
    cluster = context.cluster
    if cluster is None:
        return
    if not cluster.is_private:  # else all is on this machine, in this environment
        cluster.check = MachineCheck.begin(context.folder.path, models)
    await cluster.reserve(roles, timeout_s=context.cfg.timeout_s, say=context.console.say)
    placed = {slots.name_worker(rank): host for slots in cluster.slots.values() for rank, host in slots.hosts.items()}
    if placed:
        context.facts["machines"] = placed
