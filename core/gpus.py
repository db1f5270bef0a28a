"""NVIDIA GPUs of this machine.

CUDA's own library lists the devices: it is what torch asks, and a container without nvidia-smi has it too. nvidia-smi
names the driver, and the GPUs that CUDA cannot use. Standard library only, because the installer asks as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY = "libcuda.so.1"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""Numbers of CUDA's device attributes."""
PCI, KFD = Path("/sys/bus/pci/devices"), Path("/dev/kfd")
"""Devices of the machine as the kernel lists them; device of AMD's driver."""
CONTEXT_GIB = 0.5
"""Memory that a CUDA context takes itself, at most."""
GIB = 2**30
NO_DEVICE = 100
FIXES = {
    46: "end the process that has the GPU for itself, or set its compute mode to Default (nvidia-smi -c 0)",
    NO_DEVICE: "let CUDA_VISIBLE_DEVICES name GPUs that are there, and start a container with its GPUs",
    802: "start nvidia-fabricmanager",
    803: "restart the machine, so that its driver and CUDA's library are of one version",
    804: "take cuda-compat out of LD_LIBRARY_PATH, or update the driver",
}
"""Fixes of CUDA's error codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """GPU that CUDA shows to this process."""

    name: str
    capability: tuple[int, int]
    total_gib: float
    used_gib: float
    """Memory in use by other processes."""

    def describe(self) -> str:
        memory = f"{self.total_gib:.1f} GiB" + (f" ({self.used_gib:.1f} in use)" if self.used_gib >= 1 else "")
        return f"{self.name}, {memory}, compute capability {dotted(self.capability)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs of this machine."""

    devices: tuple[Gpu, ...] = ()
    listed: int = 0
    """Number of GPUs by nvidia-smi, which needs no working CUDA."""
    driver: str = ""
    """Version of the driver; "" if nvidia-smi does not say it."""
    cuda: tuple[int, int] | None = None
    """Newest CUDA that the driver supports; None if CUDA does not answer."""
    failure: str = ""
    """Failure of CUDA with its fix; "" if it works, or if there are no GPUs."""
    smi_failure: str = ""
    """First line of an nvidia-smi that fails."""

    @property
    def count(self) -> int:
        return len(self.devices) or self.listed

    def describe(self) -> str:
        """Describe devices and driver in one line."""
        devices = [f"GPU {i} {gpu.describe()}" for i, gpu in enumerate(self.devices)]
        return "; ".join([*devices, f"driver {self.describe_driver()}"])

    def describe_driver(self) -> str:
        cuda = f" (CUDA {dotted(self.cuda)} at most)" if self.cuda else ""
        return f"{self.driver or 'of unknown version'}{cuda}"


def find_gpus(*, timeout_s: float) -> Gpus:
    """Return the GPUs that this process may use; an empty CUDA_VISIBLE_DEVICES hides all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return Gpus()
    return ask_machine(timeout_s)


# A second run of one process would see the memory that the first still holds.
@cache
def ask_machine(timeout_s: float) -> Gpus:
    listed, driver, smi_failure = _ask_nvidia_smi(timeout_s)
    seen = _ask_cuda(timeout_s) if _has_library() else {}
    if "error" in seen and not listed and seen["code"] == NO_DEVICE:  # the library of an image
        seen = {}
    failure = ""
    if listed and not _has_library():
        failure = (
            f"nvidia-smi lists {listed} GPU(s), and CUDA's library {LIBRARY} cannot be loaded: start the container "
            "with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install the driver's libraries"
        )
    elif "error" in seen:
        fix = FIXES.get(seen["code"], "see whether nvidia-smi works, and restart the container or the machine")
        failure = f"the GPUs cannot be used, because CUDA fails with {seen['error']}: {fix}"
    return Gpus(
        devices=tuple(Gpu(**one | {"capability": tuple(one["capability"])}) for one in seen.get("devices", ())),
        listed=listed,
        driver=driver,
        cuda=divmod(seen["cuda"] // 10, 100) if "cuda" in seen else None,
        failure=failure,
        smi_failure=smi_failure,
    )


def describe_unused_hardware() -> str:
    """Return a clause about GPUs that no driver makes usable here; "" if there are none."""
    found = ""
    for folder in PCI.glob("*"):
        vendor, kind = ((folder / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        # a container sees the bus of its host
        if vendor == "0x10de" and kind.startswith("0x03"):
            found = "; the PCI bus has an NVIDIA GPU: install its driver, or start this container with the GPU"
    return found + "; AMD GPUs are not supported" * KFD.exists()


def _ask_nvidia_smi(timeout_s: float) -> tuple[int, str, str]:
    """Return number of GPUs, driver, and the reason if nvidia-smi fails."""
    if not (path := shutil.which("nvidia-smi")):
        return 0, "", "nvidia-smi is missing"
    command = [path, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return 0, "", f"nvidia-smi gives no answer within {timeout_s:g} s"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode or not lines:
        return 0, "", f"nvidia-smi fails{': ' + lines[0] if lines else ''}"
    # without a GPU it says so, and the exit code is 0
    return (len(lines), lines[0], "") if lines[0][0].isdigit() else (0, "", "nvidia-smi lists no GPU")


def _has_library() -> bool:
    try:
        ctypes.CDLL(LIBRARY)  # loading it starts nothing
    except OSError:
        return False
    return True


def _ask_cuda(timeout_s: float) -> dict[str, Any]:
    """Return the answer of `list_devices` in a process of its own: CUDA may hang, and breaks later forks."""
    # -I: the folder core/ must not come before the standard library
    try:
        done = subprocess.run([sys.executable, "-I", __file__], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:g} s", "code": -1}
    if done.returncode:
        return {"error": f"exit code {done.returncode} of a process that asks it", "code": -1}
    return json.loads(done.stdout)


class CudaError(Exception):
    """Failed call of CUDA's library: name and code."""


def list_devices() -> dict[str, Any]:
    """Return CUDA's version and devices; with the name and code of the first error if a device cannot be used."""
    cuda = ctypes.CDLL(LIBRARY)

    def call(name: str, *args: Any) -> None:
        if code := getattr(cuda, name)(*args):
            said = ctypes.c_char_p()
            cuda.cuGetErrorName(code, ctypes.byref(said))
            raise CudaError(f"{(said.value or b'an error').decode()} ({code})", code)

    def ask_int(name: str, *args: Any) -> int:
        answer = ctypes.c_int()
        call(name, ctypes.byref(answer), *args)
        return answer.value

    def describe(index: int) -> dict[str, Any]:
        device, name, context = ask_int("cuDeviceGet", index), ctypes.create_string_buffer(100), ctypes.c_void_p()
        call("cuDeviceGetName", name, 100, device)
        # the context is the proof that the device can be used
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxPushCurrent_v2", context)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return {
            "name": name.value.decode(),
            "capability": [ask_int("cuDeviceGetAttribute", n, device) for n in (CAPABILITY_MAJOR, CAPABILITY_MINOR)],
            "total_gib": total.value / GIB,
            "used_gib": max(0.0, (total.value - free.value) / GIB - CONTEXT_GIB),
        }

    answer: dict[str, Any] = {}
    try:
        answer["cuda"] = ask_int("cuDriverGetVersion")  # before cuInit, which a broken device fails
        call("cuInit", 0)
        if not (count := ask_int("cuDeviceGetCount")):
            raise CudaError("no device", NO_DEVICE)
        answer["devices"] = [describe(i) for i in range(count)]
    except CudaError as error:
        answer["error"], answer["code"] = error.args
    return answer


def dotted(numbers: tuple[int, int]) -> str:
    """
    >>> dotted((13, 0))
    '13.0'
    """
    return ".".join(map(str, numbers))


if __name__ == "__main__":
    print(json.dumps(list_devices()))
