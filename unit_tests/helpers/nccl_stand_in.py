"""Stand-in for vLLM's PyNcclCommunicator, between threads: core/gpu_contract.py lists what is used of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import count
from threading import Condition
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from trainers.weight_sync.nccl import NcclReceiver, NcclSender


class Network:
    """Connection of all members that may form groups. A port is a group."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.stores: dict[int, HashStore] = {}
        self.joined: dict[int, set[int]] = {}
        self.tensors: dict[tuple[int, int], Tensor] = {}
        self.taken: dict[tuple[int, int], int] = {}
        self.made: list[Communicator] = []

    def connect(self, master_address: str, master_port: int, rank: int, world_size: int, device: Any) -> Communicator:
        """Wait for all members, for ever, as NCCL does."""
        port, members = master_port, world_size
        with self.changed:
            store = self.stores.setdefault(port, HashStore())
            self.joined.setdefault(port, set()).add(rank)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.joined[port]) == members)
            self.made.append(Communicator(self, Group(store, rank), port, rank, members))
            return self.made[-1]


class Group:
    """Stand-in for vLLM's StatelessProcessGroup."""

    def __init__(self, store: HashStore, rank: int) -> None:
        self.store, self.rank, self.rounds = store, rank, count()

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        key = f"from/{src}/{next(self.rounds)}"
        if self.rank == src:
            self.store.set(key, pickle.dumps(obj))
        return pickle.loads(self.store.get(key))


class Communicator:
    """Stand-in for PyNcclCommunicator on a CPU. `broadcast` waits for all members for ever, or for `destroy`."""

    disabled = False
    device = torch.device("cpu")

    def __init__(self, network: Network, group: Group, port: int, rank: int, members: int) -> None:
        self.network, self.group, self.port, self.rank, self.members = network, group, port, rank, members
        self.rounds, self.destroyed = count(), 0

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        assert stream is not None and tensor.is_contiguous()
        key, network = (self.port, next(self.rounds)), self.network
        with network.changed:
            if self.rank == src:
                network.tensors[key] = tensor
            network.taken[key] = network.taken.get(key, 0) + 1
            network.changed.notify_all()
            network.changed.wait_for(lambda: self.destroyed or network.taken[key] == self.members)
            if not self.destroyed and self.rank != src:
                tensor.copy_(network.tensors[key])

    def destroy(self) -> None:
        with self.network.changed:
            self.destroyed += 1
            self.network.changed.notify_all()


def members_of(network: Network) -> tuple[type[NcclSender], type[NcclReceiver]]:
    """Return the sender's and the receiver's class, connected by `network`."""

    class Sender(NcclSender):
        def load_connect(self) -> Callable[..., Any]:
            return network.connect

    class Receiver(NcclReceiver):
        def load_connect(self) -> Callable[..., Any]:
            return network.connect

    return Sender, Receiver
