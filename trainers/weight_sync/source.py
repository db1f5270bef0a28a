"""Trainer-side source of a weight sync between processes. Every rank of a distributed trainer has a source."""

from __future__ import annotations

from dataclasses import replace

from core.errors import TransportFailed
from core.timing.clock import ActivityTimer
from core.timing.phases import Activity
from core.types.weights import ExportScope
from trainers.weight_sync.base import Chunk, ExportsWeights, Sent
from trainers.weight_sync.broadcast import WeightSender
from trainers.weight_sync.chunks import ChunkWriter
from trainers.weight_sync.delta import Coding, DeltaEncoder
from trainers.weight_sync.ipc import HandleWriter
from trainers.weight_sync.nccl import NcclSender


class WeightSource:
    """Exporter and sender of a rank. All ranks are called, except for `open_broadcast` and `wait_for_members`."""

    def __init__(self, trainer: ExportsWeights, timer: ActivityTimer, *, is_sender: bool):
        self.trainer, self.timer, self.is_sender = trainer, timer, is_sender
        self.encoder = DeltaEncoder()

    def open_broadcast(self, address: str, timeout_s: float, over_nccl: bool) -> int:
        """Leave the last group, and listen for engines at `address`, on rank 0; return the port."""
        if hasattr(self, "sender"):
            self.sender.leave()
        self.sender = (NcclSender if over_nccl else WeightSender)(timeout_s=timeout_s)
        return self.sender.open(address)

    def wait_for_members(self, members: int) -> None:
        """Return when every rank of every engine has joined; on rank 0."""
        self.sender.join(members=members)

    def broadcast_weights(self, max_bytes: int, scope: ExportScope, coding: Coding) -> Sent | None:
        """Broadcast the tensors to the engines; rank 0 returns the record of the sync."""
        self.encoder.begin(coding)
        with self.timer.measure(Activity.SYNC):
            stream = self.trainer.export_weights(max_bytes, scope)
            if not self.is_sender:
                for _ in stream:  # gathering a sharded parameter needs every rank
                    pass
                return None
            try:
                checksums = self.sender.send(stream, self.encoder.encode)
            except TransportFailed:
                for _ in stream:  # the other ranks gather to the end, and this rank must take part
                    pass
                raise
            return Sent(checksums=checksums, nbytes=self.sender.sent_bytes, changes=self.encoder.changes)

    def begin_chunks(self, max_bytes: int, scope: ExportScope, folder: str | None, coding: Coding) -> None:
        """Begin a sync in chunks; see trainers/weight_sync/chunks.py."""
        self.encoder.begin(coding)
        stream = self.trainer.export_weights(max_bytes, scope)
        self.writer = ChunkWriter(stream, writes=self.is_sender, folder=folder, encode=self.encoder.encode)

    def begin_handles(self, max_bytes: int, scope: ExportScope) -> None:
        """Begin a sync in chunks of handles, which every rank writes; see trainers/weight_sync/ipc.py."""
        self.writer = HandleWriter(self.trainer.export_weights(max_bytes, scope), writes=True, folder=None)

    def write_chunk(self) -> bool:
        """Make the next chunk; return False at the end."""
        with self.timer.measure(Activity.SYNC):
            return self.writer.write_chunk()

    def get_chunk(self) -> Chunk:
        """Return the last chunk; on rank 0, or of handles on every rank."""
        return self.writer.chunk

    def abort_chunks(self) -> None:
        """End the sync early."""
        self.writer.close()

    def summarize_chunks(self) -> Sent:
        """Return the record of the sync, on rank 0."""
        return replace(self.writer.summarize(), changes=self.encoder.changes)
