"""Placement of a run's actors: one Ray placement group per role, created before any actor.

    trainers    one bundle per rank, packed: on as few machines as possible
    engines     one bundle per engine: all ranks of an engine on one machine

Without them Ray places each actor wherever it fits, and waits forever if it fits nowhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from core.cluster.capacity import SLOT, Machine, Role, choose_bundle, choose_resource, describe_missing, name_host
from core.errors import CallFailed, UserError
from core.patches import read_free_resources
from core.timing.deadlines import PLACEMENT_POLL_S, PLACEMENT_TIMEOUT_S, PROGRESS_EVERY_S

E = TypeVar("E", bound=Exception)


class WorkerSlots:
    """Slots of one role: the actor of rank i uses bundle i of a placement group."""

    def __init__(self, role: Role, bundle: dict[str, float]) -> None:
        from ray.util.placement_group import placement_group

        self.role, self.bundle = role, bundle
        # PACK is a preference, not a condition: ranks on few machines communicate faster, but more machines also work.
        self.group = placement_group([bundle] * role.n, strategy="PACK")
        self.hosts: dict[int, str] = {}
        """Name of each rank's machine, in a cluster of several machines; see `find_hosts`."""
        self.later: dict[int, Any] = {}
        """Placement groups of ranks that joined later, one each, which wait without a deadline."""

    def strategy_of(self, rank: int) -> Any:
        """Return the scheduling strategy that puts an actor into its slot."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if rank < self.role.n:
            return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)
        if rank not in self.later:
            # A placement group cannot grow, so each rank that joins later has its own.
            self.later[rank] = placement_group([self.bundle], strategy="PACK")
        return PlacementGroupSchedulingStrategy(self.later[rank], placement_group_bundle_index=0)

    def give_up(self, rank: int) -> None:
        """Free the slot of a rank that joined later."""
        from ray.util.placement_group import remove_placement_group

        if rank in self.later:
            remove_placement_group(self.later.pop(rank))

    def find_nodes(self) -> dict[int, str]:
        """Return the machine id of each rank; empty until all are placed."""
        found = dict(enumerate_nodes(self.group))
        return found | {rank: node for rank, group in self.later.items() for _, node in enumerate_nodes(group)}

    def explain_silence(self, rank: int, error: CallFailed) -> CallFailed:
        """Add the reason to the error if a rank's new process has no slot to start in."""
        if rank in self.find_nodes():
            return error
        return type(error)(error.what, "its machine is gone, and the cluster has no other place for it")

    def find_hosts(self) -> None:
        """Look up the name of each rank's machine, at the start and after an actor was moved."""
        # Of any resource: only the names are read here.
        machines = {machine.node_id: machine for machine in list_machines(SLOT)}
        self.hosts = {}
        if len(machines) > 1:
            nodes = self.find_nodes()
            self.hosts = {rank: machines[node].host for rank, node in nodes.items() if node in machines}

    def name_worker(self, rank: int) -> str:
        """Return a worker's name for messages, with the machine if there are several."""
        host = self.hosts.get(rank)
        return f"{self.role.name} {rank} on {host}" if host else f"{self.role.name} {rank}"

    def name_machine(self, rank: int, error: E) -> E:
        """Return a worker's error with the name of the machine if there are several."""
        host = self.hosts.get(rank)
        return type(error)(f"on {host}: {error}") if host else error


def enumerate_nodes(group: Any) -> list[tuple[int, str]]:
    """Return the number and machine id of every bundle of a placed group."""
    from ray.util import placement_group_table

    table: Any = placement_group_table(group)
    placed = table.get("bundles_to_node_id", {}) if table.get("state") == "CREATED" else {}
    return [(int(bundle), str(node)) for bundle, node in placed.items()]


class Reservation:
    """Slots for all roles of a run."""

    def __init__(self, roles: Sequence[Role]) -> None:
        """Request the largest bundles first, because they fit on the fewest machines."""
        totals = [machine.total for machine in list_machines(SLOT)]
        self.roles, has_slots = roles, any(totals)
        self.resource = choose_resource(roles, has_slots=has_slots)
        bundles = [(role, choose_bundle(role.resources, has_slots=has_slots)) for role in roles]
        bundles.sort(key=lambda pair: -sum(pair[1].values()))
        self.slots = {role.name: WorkerSlots(role, bundle) for role, bundle in bundles}

    async def wait(self, *, timeout_s: float, say: Callable[[str], None]) -> dict[str, WorkerSlots]:
        """Wait until every role has its slots. Raises UserError with the missing resources."""
        begin = time.monotonic()
        end, next_line = begin + min(timeout_s, PLACEMENT_TIMEOUT_S), begin + PROGRESS_EVERY_S
        for slots in self.slots.values():
            # in a thread, and in short waits: the event loop turns, and Ctrl-C ends the run
            while not await asyncio.to_thread(slots.group.wait, PLACEMENT_POLL_S):
                now = time.monotonic()
                if now > end:
                    raise UserError(self.describe_missing())
                if now > next_line:
                    say(f"waiting for machines: {self.describe_missing()}")
                    next_line = now + PROGRESS_EVERY_S
        for slots in self.slots.values():
            slots.find_hosts()
        return self.slots

    def describe_missing(self) -> str:
        """Count the resources that the cluster lacks. Resources reserved by this run count as free."""
        own: dict[str, float] = {}
        for slots in self.slots.values():
            for node in slots.find_nodes().values():
                own[node] = own.get(node, 0.0) + slots.bundle.get(self.resource, 0.0)
        return describe_missing(self.roles, list_machines(self.resource, own), resource=self.resource)


def list_machines(resource: str, own: dict[str, float] | None = None) -> list[Machine]:
    """List the alive machines of the cluster with their amount of a resource.

    own: amounts reserved by this run, by machine id.
    """
    import ray

    free = read_free_resources()
    return [
        Machine(
            node_id=node["NodeID"],
            host=name_host(node["NodeManagerHostname"], node["NodeManagerAddress"]),
            total=node["Resources"].get(resource, 0.0),
            free=free.get(node["NodeID"], {}).get(resource, 0.0) + (own or {}).get(node["NodeID"], 0.0),
        )
        # Machines that have left are listed too.
        for node in ray.nodes()
        if node["Alive"]
    ]
