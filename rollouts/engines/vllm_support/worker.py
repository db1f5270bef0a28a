"""Implementation of vLLM's weight-transfer API, in the process of each rank of vLLM.

vLLM reloads layer by layer (`initialize_layerwise_reload`). Tensors wait until their layer is complete. The model's
weight loaders write them into new parameters, which are then packed for the kernels. On a CPU this empties the
parameters, so checksums are computed while the loaders write.

An adapter is loaded by vLLM's LoRA manager, from memory, under a fixed id.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from core.errors import TransportFailed
from core.timing.trace import Tracer
from core.types.arrays import Ids
from core.types.weights import Bucket
from rollouts.engines.vllm_support.experts import find_unpacked, name_for_loader, repack_experts
from rollouts.engines.vllm_support.kept_processor import take_kept
from rollouts.engines.vllm_support.load_trace import LoadTrace
from rollouts.engines.vllm_support.patches import allow_next_update, find_adapters, forget_half_loaded, name_loaders
from rollouts.engines.vllm_support.settings import ADAPTER_ID
from trainers.weight_sync.broadcast import WeightReceiver
from trainers.weight_sync.chunks import Chunk, read_chunk
from trainers.weight_sync.delta import DeltaDecoder
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.ipc import open_handles
from trainers.weight_sync.nccl import NcclReceiver

SMALL_BYTES = 2**20
"""Largest tensor that is kept until the end of an update, in case that vLLM's loader loses it."""


class VerifiedTransfer(WeightTransferEngine[Any, Any]):
    """Layerwise reload with a record of loaded weights, for every transport."""

    consumed: dict[str, int]
    """Checksums of the weights loaded by the last finished update, by name."""
    untouched: list[str]
    """Model parameters that the last update did not write."""

    def start_weight_update(self) -> None:
        self.consumed, self.untouched = {}, []
        if not forget_half_loaded(self.model):  # else some parameters are placeholders, and nothing is tied
            self._tied = _tied_parameters(self.model)
        repack_experts(self.model)
        name_loaders(self.model)
        initialize_layerwise_reload(self.model)
        self._trace, self._small = LoadTrace(), []
        self._untouched = {name for name, _ in self.model.named_parameters() if name not in self._tied}

    def load(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._trace.expect(bucket)
            # copies, because the bucket's memory is that of all its tensors
            self._small += [(name, t.clone()) for name, t in bucket if t.nbytes <= SMALL_BYTES]
            with self._trace:
                # load_weights returns the names of the parameters that it wrote
                self._untouched -= self.model.load_weights(iter(name_for_loader(self.model, bucket)))

    def finish_weight_update(self) -> None:
        with self._trace:  # padded layers are written only here
            finalize_layerwise_reload(self.model, self.model_config)
        for name in self._tied:
            # the reload skips it, and on a CPU the layer would keep the packed copy of its old weights
            layer = self.model.get_submodule(name.rpartition(".")[0])
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)
        self._load_lost()
        self.consumed, self.untouched = self._trace.consumed(), sorted(self._untouched)
        self.untouched += [name for name in find_unpacked(self.model) if name not in self.untouched]
        del self._trace, self._small

    def _load_lost(self) -> None:
        """Load small tensors again that were lost: written without a weight loader, into placeholders."""
        taken, own = self._trace.consumed(), dict(self.model.named_parameters())
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        for name, tensor in self._small:
            [own_name] = [name] if mapper is None else mapper.apply_list([name]) or [name]
            # others are parts of a fused or packed parameter, and their loss is told by the missing checksum
            if name not in taken and own_name in own and own[own_name].shape == tensor.shape:
                self._trace.expect([(name, tensor)])
                with self._trace:
                    self.model.load_weights(iter([(name, tensor)]))

    def buckets(self, update_info: Any) -> Iterable[Bucket]:
        """Return the buckets of one call: the whole stream, or one chunk."""
        raise NotImplementedError

    def receive_weights(self, update_info: Any) -> None:
        self.load(self.buckets(update_info))

    def start_adapter(self) -> None:
        self.consumed, self.untouched = {}, []
        self.adapter: dict[str, Tensor] = {}

    def receive_adapter(self, update_info: Any) -> None:
        """Copy the adapter's tensors, and record their checksums."""
        for bucket in self.buckets(update_info):
            self.adapter |= {name: tensor.clone() for name, tensor in bucket}
            self.consumed |= fingerprint((name, self.adapter[name]) for name, _ in bucket)

    def shutdown(self) -> None:
        pass


def _tied_parameters(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters that alias an earlier parameter, such as a tied lm_head weight."""
    seen: set[int] = set()
    return [
        name
        # by default, named_parameters() leaves aliases out
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in seen or seen.add(id(parameter))
    ]


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Address of the trainer, and the ranks of this engine's workers in its group."""

    address: str
    port: int
    first_rank: int
    members: int
    timeout_s: float


@dataclass
class WeightUpdate(WeightTransferUpdateInfo):
    """Weights of an update: a chunk, or the buckets of a trainer in this process. Neither: they are streamed."""

    chunk: Chunk | None = None
    encoded: str | None = None
    """A chunk of bytes in base64, as it came by HTTP."""
    buckets: Iterable[Bucket] | None = None


class StreamedTransfer(VerifiedTransfer):
    """Transfer from a joined stream, in chunks, or by reference from a trainer in this process."""

    init_info_cls = JoinInfo
    update_info_cls = WeightUpdate

    @cached_property
    def decoder(self) -> DeltaDecoder:
        return DeltaDecoder()

    def buckets(self, update_info: WeightUpdate) -> Iterable[Bucket]:
        if update_info.buckets is not None:
            return update_info.buckets
        chunk = update_info.chunk if update_info.encoded is None else b64decode(update_info.encoded)
        received = self.stream() if chunk is None else [read_chunk(chunk)]
        return map(self.decoder.decode, received)

    def stream(self) -> Iterable[Bucket]:
        raise NotImplementedError


class JoinedTransfer(StreamedTransfer):
    """Transfer from the group that trainer rank 0 and the workers of all engines form."""

    receiver_class: type[WeightReceiver] | type[NcclReceiver]
    _receiver: WeightReceiver | NcclReceiver | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self.shutdown()  # of the group before this one
        self._receiver = self.receiver_class(
            address=init_info.address,
            port=init_info.port,
            rank=init_info.first_rank + self.parallel_config.rank,
            members=init_info.members,
            timeout_s=init_info.timeout_s,
        )

    def stream(self) -> Iterable[Bucket]:
        assert self._receiver is not None, "a worker joins before it receives"
        return self._receiver.receive()

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.leave()
        self._receiver = None


class GlooTransfer(JoinedTransfer):
    """Transfer over gloo and TCP; see trainers/weight_sync/broadcast.py."""

    receiver_class = WeightReceiver


class NcclTransfer(JoinedTransfer):
    """Transfer over NCCL; see trainers/weight_sync/nccl.py. Never run yet."""

    receiver_class = NcclReceiver


class IpcTransfer(StreamedTransfer):
    """Transfer through CUDA IPC handles of this GPU's memory, in chunks, with checksums of loaded weights. It ran
    on one GPU.

    vLLM's own engine "ipc" reads the same handles, but does not verify the load.
    """

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Do nothing: handles come in chunks, so there is no group to join."""

    def buckets(self, update_info: WeightUpdate) -> Iterable[Bucket]:
        assert isinstance(update_info.chunk, bytes), "handles come in chunks"
        return [open_handles(update_info.chunk, self.device.index)]


def install_adapter(manager: Any, tensors: dict[str, Tensor], config: dict[str, Any]) -> list[str]:
    """Replace the adapter in the LoRA manager of a vLLM worker.

    config: PEFT's configuration of the adapter. Return the adapter's layers that the model lacks.
    """
    helper = PEFTHelper.from_dict(config)
    helper.validate_legal(manager.lora_config)
    models = find_adapters(manager)
    mapper = getattr(models.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    # vLLM fuses layers such as q, k and v; a part of a fused layer is not missing
    fused = {part for parts in models.packed_modules.values() for part in parts}
    lost = sorted(adapter.loras.keys() - models.modules.keys() - fused)
    # vLLM ignores an adapter whose id it already has
    manager.remove_adapter(ADAPTER_ID)
    models.add_adapter(adapter)
    models.activate_adapter(ADAPTER_ID)
    return lost


class WorkerMethods:
    """Methods mixed into vLLM's worker, callable by the engine on every rank."""

    weight_transfer_engine: VerifiedTransfer
    model_runner: Any
    rank: int
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]

    def feynrl_join(self, init_info: dict[str, Any]) -> str:
        """Join the sender's group. Return the transport's error message, or "", since vLLM drops the exception."""
        return _catch_transport_error(self.init_weight_transfer_engine, init_info)

    def feynrl_begin(self, adapter: bool) -> None:
        if adapter:
            return self.weight_transfer_engine.start_adapter()
        allow_next_update(self)
        self.start_weight_update()

    def feynrl_load_part(self, adapter: bool, update_info: dict[str, Any]) -> str:
        """Load a part of an update. Return the transport's error message, or ""."""
        if not adapter:
            return _catch_transport_error(self.update_weights, update_info)
        transfer = self.weight_transfer_engine
        return _catch_transport_error(transfer.receive_adapter, transfer.parse_update_info(update_info))

    def feynrl_load_adapter(self, config: dict[str, Any]) -> list[str]:
        return install_adapter(self.model_runner.lora_manager, self.weight_transfer_engine.adapter, config)

    def feynrl_consumed(self) -> dict[str, int]:
        return self.weight_transfer_engine.consumed

    def feynrl_untouched(self) -> list[str]:
        return self.weight_transfer_engine.untouched

    def feynrl_start_trace(self, trace: bool, memory: bool) -> None:
        self.feynrl_tracer = Tracer()
        self.feynrl_tracer.start(trace=trace, memory=memory)

    def feynrl_stop_trace(self, stem: str) -> list[str]:
        return self.feynrl_tracer.stop(Path(f"{stem}-{self.rank}"))

    def feynrl_take_kept(self, key: str, forget: list[str]) -> list[Ids]:
        return take_kept(key, forget)


def _catch_transport_error(call: Callable[[Any], None], argument: Any) -> str:
    try:
        call(argument)
    except TransportFailed as failed:
        return str(failed)
    return ""
