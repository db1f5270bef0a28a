"""List of what only GPU runs use of vLLM, torch, DeepSpeed and NCCL.

No test on a CPU calls them, so `PARTS` lists each with what this code expects of it, and the code imports them by
`load_part`. unit_tests/tools/test_gpu_contract.py checks the list against the CPU builds, and `make gpu-contract`
against the GPU builds, on a machine without a GPU. Libraries are imported when a part is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Function, class or module of a library, with what this code uses of it."""

    target: str
    """module, or module:name."""
    arguments: tuple[str, ...] = ()
    """Arguments that this code passes."""
    by_position: int = 0
    """Number of leading arguments that are passed by position; the others are passed by name."""
    attributes: tuple[str, ...] = ()
    """Attributes, methods and fields that this code uses."""
    result: tuple[str, ...] = ()
    """Attributes of the returned object that this code reads; its class is known to the GPU build only."""
    gpu_build_only: bool = False
    """True for a part that the CPU build lacks."""


_WEIGHT_TRANSFER = "vllm.distributed.weight_transfer"
_COMMUNICATORS = "vllm.distributed.device_communicators"
PARTS = (
    # ---- weights over NCCL: trainers/weight_sync/nccl.py
    Part(
        target=f"{_WEIGHT_TRANSFER}.nccl_common:stateless_init_process_group",
        arguments=("master_address", "master_port", "rank", "world_size", "device"),
    ),
    Part(
        target=f"{_COMMUNICATORS}.pynccl:PyNcclCommunicator",
        attributes=("broadcast", "destroy", "device", "disabled", "group"),
    ),
    Part(target=f"{_COMMUNICATORS}.pynccl:PyNcclCommunicator.broadcast", arguments=("tensor", "src", "stream")),
    Part(target=f"{_COMMUNICATORS}.pynccl:PyNcclCommunicator.destroy"),
    Part(
        target=f"{_COMMUNICATORS}.pynccl_wrapper:NCCLLibrary",
        attributes=("ncclBroadcast", "ncclCommAbort", "ncclCommInitRank"),
    ),
    Part(target="vllm.distributed.utils:StatelessProcessGroup", attributes=("store",)),
    Part(target="vllm.distributed.utils:StatelessProcessGroup.broadcast_obj", arguments=("obj", "src"), by_position=1),
    Part(target="torch.distributed:Store", attributes=("set_timeout",)),
    # ---- weights by handles of memory: trainers/weight_sync/ipc.py
    Part(target="torch.multiprocessing.reductions:reduce_tensor", arguments=("tensor",), by_position=1),
    Part(
        target="torch.multiprocessing.reductions:rebuild_cuda_tensor",
        arguments=(
            *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype"),
            *("storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad"),
            *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
        ),
        by_position=15,
    ),
    # ---- vLLM's engine on a GPU: rollouts/engines/vllm.py
    Part(
        target="vllm.engine.arg_utils:EngineArgs",
        arguments=(
            *("enable_sleep_mode", "gpu_memory_utilization", "kv_cache_memory_bytes", "tensor_parallel_size"),
            *("return_sampling_mask", "enable_return_routed_experts"),
        ),
    ),
    # ---- kept sets of top-p, top-k and min-p, and routes: rollouts/engines/vllm_support/kept_sets.py, routes.py
    Part(target="vllm.outputs:CompletionOutput", attributes=("sampling_mask", "routed_experts")),
    Part(target="vllm.outputs:SamplingMask", attributes=("token_ids",)),
    Part(target="vllm.sampling_params:SamplingParams", attributes=("top_p", "top_k", "min_p")),
    Part(target="vllm.v1.engine.llm_engine:LLMEngine.sleep", arguments=("level", "mode"), by_position=2),
    Part(target="vllm.v1.engine.llm_engine:LLMEngine.wake_up", arguments=("tags",), by_position=1),
    Part(
        target="vllm.v1.worker.gpu_worker:Worker",
        attributes=(
            *("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"),
            *("weight_transfer_engine", "model_runner"),
        ),
    ),
    # GPUs run vLLM's second runner: adapters are loaded by its manager, and masks hold a number of tokens
    Part(target="vllm.v1.worker.gpu.model_runner:GPUModelRunner", attributes=("lora_manager",), gpu_build_only=True),
    Part(
        target="vllm.v1.worker.gpu.sample.logit_bias",
        attributes=("MAX_NUM_ALLOWED_TOKEN_IDS", "MAX_NUM_LOGIT_BIAS_TOKENS"),
        gpu_build_only=True,
    ),
    # ---- attention: modeling/attention_varlen.py
    Part(
        target="torch.nn.attention.varlen:varlen_attn",
        arguments=(
            *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
            *("scale", "window_size", "enable_gqa"),
        ),
        by_position=7,
    ),
    # ---- devices
    Part(
        target="torch.cuda",
        attributes=(
            *("is_available", "device_count", "current_device", "set_device", "synchronize", "current_stream"),
            *("get_device_name", "get_device_capability", "get_device_properties", "mem_get_info"),
            *("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache", "ipc_collect"),
            *("get_rng_state", "set_rng_state", "is_initialized", "init", "memory_reserved", "set_sync_debug_mode"),
        ),
    ),
    Part(
        target="torch.cuda:get_device_properties",
        arguments=("device",),
        by_position=1,
        result=("total_memory", "uuid"),
        gpu_build_only=True,
    ),
    # ---- groups of trainer ranks: trainers/distributed.py
    Part(target="torch.distributed:ProcessGroupNCCL", gpu_build_only=True),
    Part(target="deepspeed.accelerator.cuda_accelerator:CUDA_Accelerator", attributes=("communication_backend_name",)),
)
_TARGETS = {part.target.rpartition(":")[2]: part.target for part in PARTS}


def load_part(name: str) -> Any:
    """Import a listed part by the last name of its target."""
    return resolve_name(_TARGETS[name])
