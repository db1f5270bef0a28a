"""Uses of private parts of other libraries, except those in modeling/ and vllm_support/patches.py.

A private part may be used for correctness or safety if the library has no public way, and never to save time. Other
files call a function of this file; tools/private_names.py reports a file that names a private part itself. `PATCHES`
lists every part with the tested version, and unit_tests/core/test_patches.py fails if one is gone. Heavy libraries are
imported inside the functions.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import shared_memory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor

NONE_FOUND = "none found"
RAY, TORCH, TRANSFORMERS, DEEPSPEED = "ray 2.60.0", "torch 2.13.0", "transformers 5.19.0", "deepspeed 0.19.8"
HUB, DATASETS, PYTHON = "huggingface-hub 2.4.0", "datasets 5.2.0", "python 3.11"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Private part of a library, which this code reads, replaces or overrides."""

    target: str
    """Dotted path of its definition."""
    reason: str
    """Why correctness or safety needs it."""
    tested: str
    """Library and tested version, as in constraints.txt."""
    upstream: str = NONE_FOUND
    """Issue or pull request about a public way."""


PATCHES = (
    Patch(
        target="ray._private.ray_constants.ENABLE_RAY_CLUSTER",
        reason="a private cluster must listen on the loopback address only: whoever reaches Ray can run code",
        tested=RAY,
        upstream="https://github.com/ray-project/ray/issues/18730",
    ),
    Patch(target="ray._raylet.AuthenticationTokenLoader", reason="Ray caches the token of a cluster", tested=RAY),
    Patch(target="ray._raylet.Config", reason="Ray caches whether it requires a token at all", tested=RAY),
    Patch(
        target="ray._raylet.GcsClient",
        reason="ray.init retries for minutes on an address that is no Ray cluster, and takes no deadline",
        tested=RAY,
    ),
    Patch(
        target="ray._private.worker._worker_logs_enabled",
        reason="the last line of a failed run is its error; Ray would print a paragraph for each dead actor after it",
        tested=RAY,
    ),
    Patch(
        target="ray._private.state.available_resources_per_node",
        reason="the error for a cluster that is too small lists the free resources of each machine",
        tested=RAY,
        upstream="https://github.com/ray-project/ray/issues/60134",
    ),
    Patch(
        target="ray._private.state.GlobalState.get_draining_nodes",
        reason="an engine must leave a machine before its preemption; ray.util.state needs a dashboard",
        tested=RAY,
    ),
    Patch(
        target="torch.distributed.distributed_c10d._world",
        reason="a library's own process groups need the run's deadline, or a dead rank hangs the others",
        tested=TORCH,
    ),
    Patch(
        target="torch.distributed.tensor.DTensor._spec",
        reason="the public `from_local` copies offloaded shards to the mesh's device, and a resume would fill the copy",
        tested=TORCH,
    ),
    Patch(
        target="torch._C._set_grad_enabled",
        reason="algs.check must distinguish torch.no_grad() from the inside of an autograd.Function",
        tested=TORCH,
    ),
    Patch(
        target="torch._dynamo.callback.callback_handler",
        reason="a model that is compiled again for each length is slower than without; only this counts it",
        tested=TORCH,
    ),
    Patch(
        target="transformers.configuration_utils.PreTrainedConfig._attn_implementation",
        reason="the attention kernel decides the layout of a batch; transformers has a public setter only",
        tested=TRANSFORMERS,
    ),
    Patch(
        target="transformers.modeling_utils.PreTrainedModel._no_split_modules",
        reason="FSDP2 shards block by block, and only this attribute names the classes of the blocks",
        tested=TRANSFORMERS,
    ),
    Patch(
        target="transformers.distributed.mixin.DistributedMixin.maybe_distribute_model",
        reason="a model is sharded before its weights are read, so that no rank holds all of it",
        tested=TRANSFORMERS,
    ),
    *(
        Patch(
            target=f"torch.cuda.memory.{name}",
            reason="a snapshot of a GPU's allocations explains an out-of-memory error; torch documents this name",
            tested=TORCH,
        )
        for name in ("_record_memory_history", "_dump_snapshot")
    ),
    Patch(
        target="deepspeed.ops.__compatible_ops__",
        reason="on a CPU DeepSpeed compiles its own all-reduce, and fails without a compiler; no setting selects gloo",
        tested=DEEPSPEED,
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/7625",
    ),
    Patch(
        target="deepspeed.utils.groups._get_zero_param_intra_parallel_group",
        reason="a second model must share the hpZeRO group of the first: DeepSpeed refuses to form it twice",
        tested=DEEPSPEED,
    ),
    *(
        Patch(
            target=f"deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.{name}",
            reason="ZeRO-3 copies float32 shards to the model after an update only, not when they were changed",
            tested=DEEPSPEED,
        )
        for name in ("_partition_all_parameters", "_reassign_or_swap_out_partitioned_parameters")
    ),
    Patch(
        target="huggingface_hub.constants.HF_HUB_OFFLINE",
        reason="after a failed connection every library must use its cache; the variable is read at import only",
        tested=HUB,
    ),
    Patch(target="datasets.config.HF_DATASETS_OFFLINE", reason="the same", tested=DATASETS),
    Patch(
        target="multiprocessing.shared_memory.SharedMemory",
        reason="vLLM names no segments, and only by name can a killed run's shared memory be found and removed",
        tested=PYTHON,
    ),
)


@contextmanager
def patched(owner: Any, **attributes: Any) -> Generator[None]:
    """Replace attributes of a module or class while the body runs."""
    # All are read before the first is replaced, so that a missing attribute changes nothing.
    usual = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in usual.items():
            setattr(owner, name, value)


# ---- Ray


@contextmanager
def quiet_ray() -> Generator[None]:
    """Suppress Ray's warnings and its messages about dead actors while the body runs."""
    loggers = [logging.getLogger(name) for name in ("ray", "ray._private.worker")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with patched(importlib.import_module("ray._private.worker"), _worker_logs_enabled=False):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def loopback_ray() -> AbstractContextManager[None]:
    """Return a context in which Ray starts a cluster on the loopback address, as it does on macOS."""
    return patched(importlib.import_module("ray._private.ray_constants"), ENABLE_RAY_CLUSTER=False)


def forget_ray_token() -> None:
    """Drop Ray's cached token and authentication mode, so that it reads the environment again."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def connect_to_ray_head(address: str) -> None:
    """Connect once to the Ray head at host:port. Raises Ray's error if there is none."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.GcsClient(address=address)


def read_free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each machine of the cluster, by node id."""
    state: Any = importlib.import_module("ray._private.state")
    return state.available_resources_per_node()


def list_draining_nodes() -> list[str]:
    """Return the node ids of machines that Ray will soon remove."""
    state: Any = importlib.import_module("ray._private.state")
    return [*state.state.get_draining_nodes()]


# ---- torch


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the deadline of every process group, including those that a library made with torch's default."""
    from torch.distributed import distributed_c10d

    groups: Any = distributed_c10d
    for group in groups._world.pg_map:
        group.set_timeout(timeout)


def make_shard_of(parameter: DTensor, held: Tensor) -> DTensor:
    """Return a DTensor with the placement of `parameter` and the local shard `held`, wherever that is; not a copy."""
    from torch.distributed.tensor import DTensor

    spec: Any = parameter._spec  # pyright: ignore[reportPrivateUsage]
    meta = spec.tensor_meta._replace(dtype=held.dtype)
    return DTensor(held, replace(spec, tensor_meta=meta), requires_grad=False)


def is_grad_switch(function: Any) -> bool:
    """Return True for the function behind torch.no_grad() and its like, as a TorchFunctionMode receives it."""
    return getattr(function, "__name__", "") == "_set_grad_enabled"


def watch_compilation(on_start: Callable[[Any], None], on_end: Callable[[Any], None]) -> None:
    """Call functions before and after each compilation of torch.compile."""
    dynamo: Any = importlib.import_module("torch._dynamo.callback")
    dynamo.callback_handler.register_start_callback(on_start)
    dynamo.callback_handler.register_end_callback(on_end)


# ---- transformers


def read_attention(config: Any) -> str:
    """Return the name of the attention kernel in a model's config."""
    return config._attn_implementation


def list_block_classes(module: nn.Module) -> set[str]:
    """Return the class names of modules that transformers never splits between devices."""
    return set(getattr(module, "_no_split_modules", None) or ())


def make_sharded_class(model_class: type, shard: Callable[[nn.Module], None]) -> Any:
    """Return a subclass whose `from_pretrained` shards the empty model before it reads the weights.

    `from_pretrained` must get a `distributed_config`; otherwise transformers skips the sharding. FSDP2's class of a
    sharded model is not in a module of transformers, which would take it for custom code: it would leave out modules
    without tensors of their own, and a buffer that such a module fills would stay empty memory (Falcon-H1).
    """
    written: Any = model_class

    def distribute(_cls: Any, model: nn.Module, *_: Any) -> nn.Module:
        shard(model)
        return model

    own = {
        "maybe_distribute_model": classmethod(distribute),
        "is_custom_code": classmethod(lambda _cls: written.is_custom_code()),
        "__module__": model_class.__module__,
    }
    return type(model_class.__name__, (model_class,), own)


def keep_memory_history(is_on: bool) -> None:
    """Begin or end to record the allocations of the GPU."""
    memory: Any = importlib.import_module("torch.cuda.memory")
    memory._record_memory_history(enabled="all" if is_on else None)


def write_memory_history(file: str) -> None:
    """Write the recorded allocations for https://docs.pytorch.org/memory_viz."""
    memory: Any = importlib.import_module("torch.cuda.memory")
    memory._dump_snapshot(file)


# ---- DeepSpeed


def reduce_with_gloo() -> None:
    """Prevent DeepSpeed from compiling its own all-reduce on a CPU."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def find_hpzero_group() -> Any:
    """Return the process group of hpZeRO, or None if no model has formed it."""
    from deepspeed.utils import groups

    return groups._get_zero_param_intra_parallel_group()  # pyright: ignore[reportPrivateUsage]


def show_partitioned_weights(optimizer: Any) -> None:
    """Copy the float32 shards of a ZeRO-3 optimizer to its model."""
    optimizer._partition_all_parameters()  # nothing gathered stays, which has the old values
    for number in range(len(optimizer.fp16_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    optimizer.invalidate_secondary_tensor()


# ---- huggingface_hub


def forget_hub() -> None:
    """Disable the hub for libraries that are already imported."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    # If datasets is not imported yet, it will read HF_HUB_OFFLINE from the environment itself.
    if (config := sys.modules.get("datasets.config")) is not None:
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]


# ---- Python


def begin_shared_memory_names(prefix: str) -> None:
    """Prefix the names of shared memory that this process creates without a name."""
    usual: Any = shared_memory.SharedMemory

    class Named(usual):
        def __init__(self, name: str | None = None, create: bool = False, size: int = 0, **more: Any) -> None:
            if create and name is None:
                name = f"{prefix}{secrets.token_hex(8)}"
            super().__init__(name, create, size, **more)

    Named.__module__, Named.__qualname__ = usual.__module__, usual.__qualname__  # as pickle will look for it
    shared_memory.SharedMemory = Named  # pyright: ignore[reportAttributeAccessIssue]
