"""Pretend CUDA device: tensors that say cuda:0 and compute on the CPU.

    with pretend_cuda() as device:
        trainer = LocalTrainer(...)          # torch.cuda.is_available() is True
        trainer.step(...)
    device.syncs                             # line of the product -> how often the host waited for the device

Mixing devices raises what a GPU would raise, and every wait of the host is counted. Values are those of a CPU, so a
result can be compared with a CPU's to the bit. It does not have the storages, streams, kernels or memory of a GPU.

This is the only file that replaces parts of torch. torch believes that a tensor here is on the CPU, so that autograd
works without CUDA; Python code, the product's and torch's, is shown a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import linecache
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import __future__ as future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from core.patches import patched
from unit_tests.helpers.plain_attention import compute_varlen

ROOT = Path(__file__).resolve().parent.parent.parent
PRODUCT = tuple(
    f"{ROOT}/{name}/" for name in ["algs", "analysis", "core", "driver", "modeling", "rollouts", "trainers"]
)
MACHINERY = (__file__, *(f"{Path(torch.__file__).parent}/{name}.py" for name in ("_compile", "_dynamo/eval_frame")))
"""Files between an operation and `run`."""
CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
aten = torch.ops.aten

WAITING = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "bincount", "_unique2"),
        *("unique_dim", "unique_consecutive", "repeat_interleave", "histc"),
    )
)
"""Operations whose result, or its size, the host reads."""
INDEXING = frozenset(f"aten::{name}" for name in ("index", "index_put_", "index_put", "_index_put_impl_"))
COPYING = frozenset({"aten::copy_", "aten::_to_copy"})
TAKES_NO_SCALAR = frozenset(f"aten::{n}" for n in ("cat", "stack", "index_select", "gather", "mm", "bmm", "scatter"))
"""Kernels that refuse a number in a CPU tensor, which elementwise kernels take."""


@dataclass
class PretendDevice:
    """Counts of one use of the pretend device."""

    syncs: Counter[str] = field(default_factory=Counter)
    """Waits of the host for a result, by line of the product."""
    uploads: Counter[str] = field(default_factory=Counter)
    """Copies from the host to the device, by line of the product."""
    calls: int = 0
    """Operations on the device."""
    varlen_calls: int = 0
    """Calls of the attention kernel for variable lengths, forward and backward."""

    def clear(self) -> None:
        self.syncs.clear()
        self.uploads.clear()
        self.calls = self.varlen_calls = 0


_device = PretendDevice()


class CudaTensor(Tensor):
    """Tensor that says cuda:0, around a CPU tensor."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> CudaTensor:
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: Any = Tensor._make_wrapper_subclass(cls, held.size(), device="cpu", **shape)
        made.held = held
        return made

    device: Any = property(lambda self: CUDA)
    is_cuda: Any = property(lambda self: True)
    is_cpu: Any = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return aten._to_copy(self, device=CPU)

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            device, dtype = args[0].device, args[0].dtype
        else:
            told = {k: v for k, v in kwargs.items() if k in ("device", "dtype")}
            device, dtype, *_ = torch._C._nn._parse_to(*[a for a in args if not isinstance(a, bool)], **told)
        changes = {} if dtype is None or dtype == self.dtype else {"dtype": dtype}
        if device is not None and device.type == "cpu":
            changes["device"] = device
        return aten._to_copy(self, **changes) if changes or kwargs.get("copy") else self

    def tolist(self) -> Any:
        _device.syncs[find_line()] += 1
        return self.detach().held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first")

    __array__ = numpy

    def __reduce_ex__(self, protocol: Any) -> Any:  # torch.save
        return self.detach().held.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.detach().held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class PretendMode(TorchDispatchMode):
    """Send every operation of torch through `run`, also those that have no tensor of the device yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def find_line() -> str:
    """Return the innermost line of the product that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PRODUCT):
            return f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno} {linecache.getline(name, frame.f_lineno).strip()}"
        frame = frame.f_back
    return "elsewhere"


def is_torchs_own() -> bool:
    """Tell whether autograd itself called the operation: a formula of torch, and no Python code in a backward pass."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in MACHINERY:
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the held values. Its result is on the device where a GPU's would be."""
    name = func._schema.name
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, CudaTensor)]
    device = kwargs.get("device")
    on_device = bool(ours) if device is None else torch.device(device).type == "cuda"
    # formulas of autograd ask for the device that torch believes in
    if not on_device and (ours or not tensors) and is_torchs_own():
        on_device = True
    # softmax(dtype=...) changes the dtype inside, on the device that torch believes in; `to` names no layout
    if name == "aten::_to_copy" and ours and "layout" in kwargs:
        on_device = True
    if ours or on_device:
        _device.calls += 1
        check_devices(name, args, tensors)
        count_waits(name, args, ours, on_device=on_device)
    if name == "aten::_fused_sdp_choice" and ours:
        return 0  # the kernel that writes every step out, as for float32 on a CPU
    if name.startswith("torch_attn::"):
        return attend_varlen(func, args, kwargs)
    if name == "aten::_pin_memory":
        return args[0]
    known = kwargs | ({"device": CPU} if on_device and device is not None else {})
    known.pop("pin_memory", None)
    held = {id(hold(x)): x for x in tensors}
    given = tree_map(hold, args)
    out = func(*given, **tree_map(hold, known))
    if name == "aten::_to_copy" and out is given[0]:
        out = out.clone()
    if name == "aten::_local_scalar_dense":
        return out

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in held:  # in place
            return held[id(x)]
        return CudaTensor(x) if on_device else x

    return tree_map(wrap, out)


def hold(x: Any) -> Any:
    return x.held if isinstance(x, CudaTensor) else x


def check_devices(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Raise what a GPU raises for tensors of two devices."""
    theirs = [x for x in tensors if not isinstance(x, CudaTensor)]
    if name in COPYING or not theirs or len(theirs) == len(tensors):
        return
    if name in INDEXING:
        # a CPU index of a GPU's tensor is copied; the other way round there is no kernel
        if not isinstance(args[0], CudaTensor):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        values = args[2] if len(args) > 2 else None
        if isinstance(values, Tensor) and not isinstance(values, CudaTensor) and values.dim():
            raise RuntimeError(f"{name}: expected values to be on cuda:0, and they are on the cpu")
    # kernels read a number of the CPU, and do not write one
    elif name in TAKES_NO_SCALAR or any(x.dim() for x in theirs) or (name[-1] == "_" and args[0] is theirs[0]):
        shapes = [tuple(x.shape) for x in theirs]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} found cuda:0, and cpu {shapes}")


def count_waits(name: str, args: tuple[Any, ...], ours: list[CudaTensor], *, on_device: bool) -> None:
    indices = [i for i in args[1] if isinstance(i, Tensor)] if name in INDEXING else []
    by_mask = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
    if name == "aten::copy_":
        down, up = not isinstance(args[0], CudaTensor), not isinstance(args[1], CudaTensor)
    else:
        moved = name == "aten::_to_copy"
        down, up = moved and not on_device, moved and not ours
    if (ours and name in WAITING) or by_mask or (down and ours):
        _device.syncs[find_line()] += 1
    if (up and on_device) or any(not isinstance(i, CudaTensor) for i in indices):
        _device.uploads[find_line()] += 1


def attend_varlen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute torch's kernel for variable lengths, forward or backward, after checks of what a GPU's takes."""
    _device.varlen_calls += 1
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    halves = [given[name] for name in ("query", "key", "value")]
    ends = [given[name] for name in ("cu_seq_q", "cu_seq_k")]
    assert all(x.is_cuda and x.dtype == torch.bfloat16 and x.dim() == 3 and x.stride(-1) == 1 for x in halves)
    assert all(x.is_cuda and x.dtype == torch.int32 and x.is_contiguous() for x in ends)
    return tuple(map(CudaTensor, compute_varlen(tree_map(hold, given))))


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
// a guard of CUDA devices that does nothing, for a torch that was built without CUDA
struct Pretend final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Stream getStream(c10::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
static Pretend guard;
extern "C" void lend_guard() { static c10::impl::DeviceGuardImplRegistrar r(c10::DeviceType::CUDA, &guard); }
"""
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
LACK = "" if COMPILER or os.environ.get("FEYNRL_NEEDS_COMPILER") else "the pretend CUDA device needs a C++ compiler"
if torch.backends.cuda.is_built():
    LACK = "the pretend CUDA device is for a torch without CUDA; with one the tests marked gpu run"
needs_pretend_cuda = pytest.mark.skipif(bool(LACK), reason=LACK)


@cache
def lend_guard() -> None:
    """Give torch a guard of CUDA devices, which autograd asks for and a CPU build lacks."""
    library = ROOT / "build" / "pretend_cuda" / f"guard-{torch.__version__}.so"
    if not library.exists():
        compile_guard(library)
    ctypes.CDLL(str(library)).lend_guard()
    importlib.import_module("torch._dynamo")  # a dispatch mode imports it, and it wants torch.cuda's own functions


def compile_guard(library: Path) -> None:
    assert COMPILER, "FEYNRL_NEEDS_COMPILER is set, and there is no C++ compiler"
    library.parent.mkdir(parents=True, exist_ok=True)
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, made = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD, encoding="utf-8")
        flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-lc10"]
        subprocess.run([COMPILER, str(source), "-o", str(made), *flags], check=True, capture_output=True)
        made.replace(library)  # at once: another process of the tests may look for it


def _does_nothing(*_: Any, **__: Any) -> None: ...


REPLACED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("synchronize", "empty_cache", "ipc_collect", "set_rng_state", "_lazy_init"), _does_nothing),
    **{"reset_peak_memory_stats": _does_nothing, "is_initialized": lambda: False, "is_available": lambda: True},
    **{"memory_allocated": lambda *_: 0, "max_memory_allocated": lambda *_: 0, "current_device": lambda: 0},
    **{"device_count": lambda: 1, "get_device_capability": lambda of=CUDA: {"cuda": (9, 0)}[torch.device(of).type]},
    "get_device_name": lambda *_: "pretend",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=80 * 2**30, name="pretend", major=9, minor=0),
    "mem_get_info": lambda *_: (80 * 2**30, 80 * 2**30),
    "get_rng_state": lambda *_: torch.zeros(8, dtype=torch.uint8),
    "device": lambda *_: nullcontext(),
}
"""Functions of torch.cuda while the device is there."""
_group = torch._C._group_tensors_by_device_and_dtype


def group_tensors(lists: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
    """Return torch's groups for `_foreach_` operations, under the device that Python is shown."""
    found = _group(lists, with_indices).items()
    return {(next(x.device for x in own[0][0] if x is not None), dtype): own for (_, dtype), own in found}


SWITCHES: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (future.get_swap_module_params_on_conversion, future.set_swap_module_params_on_conversion),
    # torch.tensor(..., device="cuda") goes through the mode
    (torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors),
)
"""Settings of torch, read and written, that are on for wrapped tensors."""


@contextmanager
def pretend_cuda() -> Generator[PretendDevice]:
    """Let torch have one pretend CUDA device while the body runs."""
    global _device
    lend_guard()
    _device = PretendDevice()
    with ExitStack() as stack:
        stack.enter_context(patched(torch.cuda, **REPLACED))
        stack.enter_context(patched(torch._C, _group_tensors_by_device_and_dtype=group_tensors))
        for read, write in SWITCHES:
            stack.callback(write, read())
            write(True)
        stack.enter_context(PretendMode())
        yield _device
