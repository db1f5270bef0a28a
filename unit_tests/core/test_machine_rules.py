"""GPUs, addresses, deadlines and workers, whole: the sentence of each refusal, and tables of what is found."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core import gpu_checks, gpus
from core.cluster.actor import divide_cores
from core.cluster.ray_address import parse_address
from core.cluster.workers import Local, copy_to_groups, first_of_groups
from core.errors import RunStopped
from core.gpu_checks import Use, refuse_run
from core.gpus import Gpu, Gpus
from core.tasks import run_to_end, start_task
from core.timing.limit_blocking import LimitBlocking
from core.timing.progress import Progress
from core.timing.timeouts import probe_with_timeout
from unit_tests.helpers.fake_gpus import COMPILER, H100, compile_cuda, pretend
from unit_tests.helpers.sentences import tell

T4, A100, B200 = (
    Gpu(name=name, capability=capability, total_gib=40.0, used_gib=0.0)
    for name, capability in (("T4", (7, 5)), ("A100", (8, 0)), ("B200", (10, 0)))
)
OLD = replace(A100, name="V100", capability=(7, 4))
FINE = Gpus(devices=(A100, A100), listed=2, driver="580.95.05", cuda=(13, 0))
RUN = Use(cuda="13.0", ranks=2)


def has(*devices: Gpu) -> Gpus:
    return replace(FINE, devices=devices)


LEAVE_OUT = "take another GPU, and leave this one out with CUDA_VISIBLE_DEVICES"
TOO_OLD = "is too old, and torch is built for CUDA"
MIG = replace(A100, name="A100 MIG 1g")
USED = replace(A100, used_gib=20.1)
OF_OTHERS = "GPU 1 (A100) has 20.1 of 40.0 GiB in use by other processes, and this run leaves them "
SENTENCES: list[tuple[Gpus, Use, str]] = [
    (FINE, RUN, ""),
    (replace(FINE, failure="it hangs"), RUN, "it hangs"),
    (
        replace(FINE, driver="535.1", cuda=(12, 2)),
        RUN,
        "the NVIDIA driver 535.1 supports CUDA 12.2 at most, and torch is built for CUDA 13.0: install driver 580 or "
        "newer",
    ),
    (
        replace(FINE, driver="579.9", cuda=None),
        RUN,
        f"the NVIDIA driver 579.9 {TOO_OLD} 13.0: install driver 580 or newer",
    ),
    (
        replace(FINE, driver="524", cuda=None),
        replace(RUN, cuda="12.9"),
        f"the NVIDIA driver 524 {TOO_OLD} 12.9: install driver 525 or newer",
    ),
    (replace(FINE, driver="580.0", cuda=None), RUN, ""),
    (replace(FINE, driver="", cuda=None), RUN, ""),
    (
        replace(FINE, driver="", cuda=(13, 9)),
        replace(RUN, cuda="14.0"),
        "the NVIDIA driver supports CUDA 13.9 at most, "
        "and torch is built for CUDA 14.0: install driver a newer one or newer",
    ),
    (Gpus(cuda=(12, 0)), RUN, ""),
    (has(A100, OLD), RUN, f"GPU 1 (V100) has compute capability 7.4, and torch is built for 7.5 or more: {LEAVE_OUT}"),
    (has(T4, T4), RUN, ""),
    (
        has(A100, T4),
        replace(RUN, bfloat16=True),
        "GPU 1 (T4) has compute capability 7.5, and bfloat16 needs 8.0 or more: set model.dtype=float32",
    ),
    (has(A100, A100), replace(RUN, bfloat16=True), ""),
    (
        has(B200, A100),
        replace(RUN, quantization="fp8"),
        "GPU 1 (A100) has compute capability 8.0, and vLLM's kernels for fp8 need 8.9 or more: set "
        "rollout.quantization=int8, or leave it out",
    ),
    (
        has(A100, B200),
        replace(RUN, quantization="int8"),
        "GPU 1 (B200) has compute capability 10.0, and vLLM's kernels for int8 need less than 10.0: set "
        "rollout.quantization=fp8, or leave it out",
    ),
    (has(B200), replace(RUN, quantization="other"), ""),
    (
        FINE,
        Use(cuda=None),
        "this machine has 2 GPU(s), and the installed torch is built for the CPU: run make install, or set "
        "CUDA_VISIBLE_DEVICES= (empty) to run on the CPU",
    ),
    (Gpus(), Use(cuda=None), ""),
    (
        FINE,
        replace(RUN, rocm=True),
        "torch is built for AMD GPUs (ROCm), which FeynRL does not support: run make install",
    ),
    (
        has(A100, MIG),
        RUN,
        "GPU 1 (A100 MIG 1g) is a slice of a GPU, a process sees one slice at most, and 2 ranks cannot communicate "
        "across slices: turn MIG off (nvidia-smi -mig 0), or run on one slice with placement=colocate",
    ),
    (has(MIG), replace(RUN, ranks=1), ""),
    (has(A100, USED), RUN, f"{OF_OTHERS}20.0 GiB: end them, choose other GPUs with CUDA_VISIBLE_DEVICES"),
    (has(A100, replace(USED, used_gib=20.0)), RUN, ""),
    (
        has(A100, USED),
        replace(RUN, engine_share=0.75),
        f"{OF_OTHERS}10.0 GiB: end them, choose other GPUs with CUDA_VISIBLE_DEVICES, or lower "
        "rollout.gpu_memory_utilization",
    ),
]


@pytest.mark.parametrize(("found", "use", "sentence"), SENTENCES, ids=[one[2][:60] for one in SENTENCES])
def test_gpus_that_a_run_cannot_use_are_one_sentence(found, use, sentence):
    assert refuse_run(found, use) == sentence


def test_what_surrounds_a_gpu_is_checked_too(monkeypatch, tmp_path):
    starts = "Triton compiles kernels while a run starts, and "
    with_triton, shared = replace(RUN, triton=True), replace(RUN, colocate=True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    no_compiler = f"{starts}there is no C compiler: install gcc (on Debian and Ubuntu apt-get install gcc), or set CC"
    assert [refuse_run(FINE, use) for use in (with_triton, RUN)] == [no_compiler, ""]
    for name in ("gcc", "clang"):
        (tmp_path / name).touch(mode=0o755)
        monkeypatch.setattr(gpu_checks.sysconfig, "get_path", lambda kind: str(tmp_path / kind))
        (tmp_path / "include").mkdir(exist_ok=True)
        (tmp_path / "include" / "Python.h").touch()
        assert refuse_run(FINE, with_triton) == ""
        (tmp_path / "include" / "Python.h").unlink()
        assert refuse_run(FINE, with_triton) == (
            f"{starts}this Python has no Python.h: install its headers (on Debian and Ubuntu apt-get install "
            "python{}.{}-dev)".format(*gpu_checks.sys.version_info)
        )
        (tmp_path / name).unlink()
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "a:1, Expandable_segments: True")
        said = (
            f"placement is colocate, and {name} sets expandable_segments, whose memory no other process can open and "
            f"vLLM cannot release: take it out of {name}"
        )
        assert [refuse_run(FINE, use) for use in (shared, RUN)] == [said, ""]
        monkeypatch.setenv(name, "expandable_segments:False")
        assert refuse_run(FINE, shared) == ""
    assert [(check.find.__name__, check.install, check.run) for check in gpu_checks.CHECKS if not check.run] == [
        ("find_untried_host", "warns", False)
    ]
    stops = [check.find.__name__ for check in gpu_checks.CHECKS if check.install == "stops"]
    assert stops == ["find_failure", "find_old_driver", "find_old_gpu"]


def test_gpus_are_described_in_one_line(monkeypatch, tmp_path):
    some = replace(FINE, devices=(A100, replace(USED, used_gib=1.0), replace(USED, used_gib=0.99)))
    a100 = "A100, 40.0 GiB, compute capability 8.0"
    assert some.describe() == (
        f"GPU 0 {a100}; GPU 1 A100, 40.0 GiB (1.0 in use), compute capability 8.0; GPU 2 {a100}; driver 580.95.05 "
        "(CUDA 13.0 at most)"
    )
    assert Gpus(listed=3).describe() == "driver of unknown version" and Gpus(listed=3).count == 3
    monkeypatch.setattr(gpus, "PCI", tmp_path / "pci")
    monkeypatch.setattr(gpus, "KFD", tmp_path / "kfd")
    found: list[str] = []
    for vendor, kind in (("0x10de", "0x040300"), ("0x8086", "0x030000"), ("0x10de", "0x030200")):
        (folder := tmp_path / "pci" / f"{vendor}{kind}").mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
        found.append(gpus.describe_unused_hardware())
    (tmp_path / "kfd").touch()
    nvidia = "; the PCI bus has an NVIDIA GPU: install its driver, or start this container with the GPU"
    assert [*found, gpus.describe_unused_hardware()] == ["", "", nvidia, f"{nvidia}; AMD GPUs are not supported"]
    nodes = [{"NodeID": "a", "Resources": {"GPU": 4.0}}, {"NodeID": "b", "Resources": {}}]
    assert [divide_cores(nodes, here, cores=n) for here, n in (("a", 10), ("a", 3), ("b", 10))] == [2, 1, 10]


@pytest.mark.skipif(COMPILER is None, reason="a CUDA library is compiled for it")
def test_the_newest_cuda_of_a_driver_is_told_also_if_it_fails(tmp_path, monkeypatch):
    # any library that is there: the process that asks loads the pretended one
    monkeypatch.setattr(gpus, "LIBRARY", "libc.so.6")
    cuda = compile_cuda(tmp_path / "cuda")
    for driver, found, failed in (
        ("13000 0", (13, 0), False),
        ("12090 0", (12, 9), False),
        ("11080 802", (11, 8), True),
    ):
        said = pretend(tmp_path, cuda=cuda, answers=f"{driver};{H100}", nvidia_smi="echo 580.1")
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        machine = gpus.ask_machine.__wrapped__(20.0)
        assert (machine.cuda, machine.driver, machine.listed, bool(machine.failure)) == (found, "580.1", 1, failed)
        assert [gpu.name for gpu in machine.devices] == ([] if failed else ["NVIDIA H100"])
    monkeypatch.setattr(gpus, "LIBRARY", "none.so")
    assert gpus.ask_machine.__wrapped__(20.0).cuda is None


FIX = "give the host:port of a cluster that runs (usually port 6379), or leave the key unset"


def test_an_address_of_ray_is_host_and_port():
    fine = {"a:1": ("a", 1), "10.0.0.1:65535": ("10.0.0.1", 65535), "[fe80::1]:6379": ("fe80::1", 6379)}
    assert {address: parse_address(address) for address in fine} == fine
    for address in ("a", ":1", "::1:6379", "a b:1", "a\x1b:1", "a:", "a:x", "a:\u0661", "[]:1"):
        assert tell(lambda one=address: parse_address(one)) == (
            f"ray_address={address!r} is not of the form host:port: {FIX}"
        )
    for port in ("0", "65536", "9" * 5000):
        assert tell(lambda one=port: parse_address(f"a:{one}")) == (
            f"ray_address={f'a:{port}'!r:.200}: the port must be between 1 and 65535: {FIX}"
        )
    assert tell(lambda: parse_address("ray://a:1")) == (
        f"ray_address='ray://a:1' is an address of Ray Client, which is not supported: {FIX}"
    )


class Worker:
    """Worker with a method of each kind."""

    def __init__(self) -> None:
        self.part = self

    def add(self, a: int, b: int = 0) -> int:
        return a + b

    async def add_later(self, a: int, b: int = 0) -> int:
        return a + b


def test_a_worker_of_this_process_is_called_as_others_are():
    workers = Local(Worker())

    async def call() -> list[Any]:
        return [
            await workers.call_one(0, Worker.add, 1, b=2),
            await workers.call_one(0, Worker.add_later, 1, 3),
            await workers.call_all(Worker.add_later, 1, b=4),
            await workers.scatter(Worker.add, [5], b=1),
            await workers.attribute("part.part").call_one(0, Worker.add, 7),
            await workers.check_health(0),
        ]

    assert asyncio.run(call()) == [3, 4, [5], [6], 7, (True, "runs in this process")]
    assert len(workers) == 1 and workers.with_deadline(1.0, key="x") is workers
    with pytest.raises(ValueError, match="too many values"):
        asyncio.run(workers.scatter(Worker.add, [5, 6]))
    assert copy_to_groups([1, 2], 6) == [1, 1, 1, 2, 2, 2] and first_of_groups([1, 1, 1, 2, 2, 2], 2) == [1, 2]
    for shards, n in (([1, 2], 3), ([1, 2, 3], 2)):
        assert tell(lambda a=shards, b=n: copy_to_groups(a, b), ValueError) == (
            f"{len(shards)} shards are not for groups of the same size of {n} workers"
        )


def test_code_that_blocks_the_loop_is_stopped_with_its_line():
    async def spin() -> None:
        await asyncio.sleep(0)
        while True:
            pass

    line = spin.__code__.co_firstlineno + 2
    limited: dict[str, Any] = {"who": "Env.step", "seconds": 0.01, "key": "rollout.block_s"}

    async def limit(call: Any, **changes: Any) -> Any:
        return await LimitBlocking(call, **limited | changes)

    said = tell(lambda: asyncio.run(limit(spin())), RunStopped)
    assert said in {
        f"Env.step blocked the process for rollout.block_s=0.01 seconds without an await ({Path(__file__).name}, line "
        f"{number}); await slow calls, or run them by asyncio.to_thread"
        for number in (line, line + 1)
    }

    async def waits() -> str:
        try:
            await asyncio.wait_for(asyncio.sleep(9), 0.001)
        except TimeoutError:
            return "its own timeout reaches it"
        return "not"

    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert asyncio.run(limit(waits(), seconds=30.0)) == "its own timeout reaches it"
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before
    outcome: list[str] = []
    thread = threading.Thread(target=lambda: outcome.append(asyncio.run(limit(waits(), seconds=30.0))))
    thread.start()
    thread.join()
    assert outcome == ["its own timeout reaches it"]


def test_work_goes_on_to_the_end_though_its_caller_is_cancelled():
    done: list[str] = []

    async def work(error: str = "") -> int:
        await asyncio.sleep(0.01)
        done.append("work")
        if error:
            raise ValueError(error)
        return 3

    async def cancel(error: str) -> str:
        task = start_task(run_to_end(work(error)))
        await asyncio.sleep(0)
        task.cancel()
        try:
            return str(await task)
        except asyncio.CancelledError:
            return "cancelled"
        except ValueError as raised:
            return str(raised)

    assert [asyncio.run(cancel(error)) for error in ("", "it broke")] == ["cancelled", "it broke"]
    assert asyncio.run(run_to_end(work())) == 3 and done == ["work"] * 3


def test_a_probe_says_why_it_failed_or_that_nothing_came(monkeypatch, capsys):
    def fail() -> str:
        raise OSError("no route\nmore")

    asks: list[Any] = [lambda: None, lambda: "status 500", fail]
    assert [probe_with_timeout(ask, timeout_s=9.0, silence="silent") for ask in asks] == ["", "status 500", "no route"]
    held = threading.Event()
    assert probe_with_timeout(lambda: str(held.wait(9.0)), timeout_s=0.01, silence="silent") == "silent"
    held.set()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress("data.train", 100_000)
    for seconds, n in ((9.9, 1), (10.0, 30_000), (19.9, 40_000), (20.0, 50_000)):
        now[0] = seconds
        progress.show(n)
    assert capsys.readouterr().err == (
        "data.train: 30,000 of 100,000 rows read\ndata.train: 50,000 of 100,000 rows read\n"
    )
