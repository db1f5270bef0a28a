"""What keeps a GPU from being used is one sentence before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from core import gpu_checks
from core.gpu_checks import Use, refuse_run
from core.gpus import Gpu, Gpus
from unit_tests.helpers.fake_gpus import COMPILER, H100, compile_cuda, pretend

ROOT = Path(__file__).parent.parent.parent
ASK = (
    "import json; from dataclasses import asdict; from core.gpus import find_gpus;"
    "print(json.dumps(asdict(find_gpus(timeout_s={}))))"
)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="a CUDA library is compiled for it")
V100, T4, A100, B200 = (
    Gpu(name=name, capability=capability, total_gib=40.0, used_gib=0.0)
    for name, capability in (
        *(("Tesla V100", (7, 0)), ("Tesla T4", (7, 5))),
        *(("NVIDIA A100", (8, 0)), ("NVIDIA B200", (10, 0))),
    )
)
FINE = Gpus(devices=(A100, A100), listed=2, driver="580.95.05", cuda=(13, 0))
RUN = Use(cuda="13.0", bfloat16=True, triton=True, ranks=2, engine_share=0.85)


@pytest.fixture(autouse=True)
def what_triton_needs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = tmp_path_factory.mktemp("include")
    (headers / "Python.h").touch()
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(gpu_checks.sysconfig, "get_path", lambda name: str(headers))


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_cuda(tmp_path_factory.mktemp("cuda"))


def ask(
    folder: Path,
    *,
    cuda: Path | None,
    answers: str = "",
    nvidia_smi: str | None = None,
    timeout_s: float = 20.0,
    **env: str,
) -> Gpus:
    """What a process on such a machine finds. A CUDA that never answers is waited for for a second."""
    pretended = pretend(folder, cuda=cuda, answers=answers, nvidia_smi=nvidia_smi) | env
    command = [sys.executable, "-c", ASK.format(1 if answers.startswith("0") else timeout_s)]
    said = subprocess.run(command, cwd=ROOT, env=pretended, capture_output=True, text=True, check=True)
    found = json.loads(said.stdout)
    found["devices"] = tuple(Gpu(**one | {"capability": tuple(one["capability"])}) for one in found["devices"])
    return Gpus(**found | {"cuda": found["cuda"] and tuple(found["cuda"])})


@needs_compiler
def test_cuda_lists_the_devices_and_nvidia_smi_names_the_driver(tmp_path: Path, cuda: Path) -> None:
    answers = f"13000 0;{H100};NVIDIA A100|8|0|40|9.5|0"
    found = ask(tmp_path, cuda=cuda, answers=answers, nvidia_smi="echo 580.95.05; echo 580.95.05")
    assert [(gpu.name, gpu.capability, gpu.used_gib) for gpu in found.devices] == [
        ("NVIDIA H100", (9, 0), 0.0),
        ("NVIDIA A100", (8, 0), 30.0),  # 40 GiB - 9.5 free - 0.5 of the context that asks
    ]
    assert (found.driver, found.cuda, found.failure) == ("580.95.05", (13, 0), "")
    assert found.describe().startswith("GPU 0 NVIDIA H100, 80.0 GiB, compute capability 9.0; GPU 1 NVIDIA A100, 40.0")
    assert found.describe().endswith("; driver 580.95.05 (CUDA 13.0 at most)")


@needs_compiler
def test_a_container_without_nvidia_smi_has_its_gpus(tmp_path: Path, cuda: Path) -> None:
    found = ask(tmp_path, cuda=cuda, answers=f"13000 0;{H100}")
    assert (found.count, found.driver, found.smi_failure) == (1, "", "nvidia-smi is missing")
    hidden = ask(tmp_path, cuda=cuda, answers=f"13000 0;{H100}", nvidia_smi="echo 580", CUDA_VISIBLE_DEVICES="")
    assert hidden == Gpus()


@needs_compiler
@pytest.mark.parametrize(
    ("answers", "nvidia_smi", "failure"),
    [
        ("13000 802", "echo 580.1", "CUDA fails with CUDA_ERROR_SYSTEM_NOT_READY (802): start nvidia-fabricmanager"),
        (f"13000 0;{H100[:-1]}46", None, "CUDA fails with CUDA_ERROR (46): end the process that has the GPU for"),
        ("13000 999", None, "CUDA fails with CUDA_ERROR (999): see whether nvidia-smi works, and restart"),
        (
            "13000 100",
            "echo 580.1",
            "CUDA fails with CUDA_ERROR (100): let CUDA_VISIBLE_DEVICES name GPUs that are there",
        ),
        ("13000 0", "echo 580.1", "CUDA fails with no device: let CUDA_VISIBLE_DEVICES"),
        ("13000 100", None, ""),  # the library of an image, on a machine without a GPU
        (f"0 0;{H100}", None, "CUDA fails with no answer within 1 s: see whether"),
        # a name that is no text
        ("13000 0;\udcff|9|0|80|80|0", None, "CUDA fails with exit code 1 of a process that asks it: see whether"),
    ],
)
def test_a_device_that_cannot_be_used_is_a_sentence(
    tmp_path: Path, cuda: Path, answers: str, nvidia_smi: str | None, failure: str
) -> None:
    found = ask(tmp_path, cuda=cuda, answers=answers, nvidia_smi=nvidia_smi)
    assert (failure in found.failure) if failure else (found.failure == "" and found.count == 0)
    assert refuse_run(found, RUN) == found.failure


def test_without_cudas_library_the_gpus_of_nvidia_smi_cannot_be_used(tmp_path: Path) -> None:
    found = ask(tmp_path, cuda=None, nvidia_smi="echo 580.95.05")
    assert (found.count, found.driver) == (1, "580.95.05")
    assert "libcuda.so.1 cannot be loaded: start the container with NVIDIA_DRIVER_CAPABILITIES" in found.failure
    assert ask(tmp_path / "none", cuda=None).smi_failure == "nvidia-smi is missing"
    assert ask(tmp_path / "empty", cuda=None, nvidia_smi="echo No devices were found").count == 0


@pytest.mark.parametrize(
    ("nvidia_smi", "failure"),
    [
        ("exec /bin/sleep 600", "nvidia-smi gives no answer within 0.1 s"),
        ("exit 9", "nvidia-smi fails"),
        ("echo; echo couldn\\'t communicate; echo more >&2; exit 9", "nvidia-smi fails: couldn't communicate"),
    ],
)
def test_an_nvidia_smi_that_fails_is_told_in_its_words(tmp_path: Path, nvidia_smi: str, failure: str) -> None:
    timeout_s = 0.1 if "sleep" in nvidia_smi else 20.0
    found = ask(tmp_path, cuda=None, nvidia_smi=nvidia_smi, timeout_s=timeout_s)
    assert found == Gpus(smi_failure=failure)


OLD = replace(FINE, driver="535.104.05", cuda=(12, 2))


@pytest.mark.parametrize(
    ("found", "use", "sentence"),
    [
        (FINE, RUN, ""),
        (Gpus(), replace(RUN, cuda=None), ""),
        (
            OLD,
            RUN,
            "the NVIDIA driver 535.104.05 supports CUDA 12.2 at most, and torch is built for CUDA 13.0: install driver "
            "580 or newer",
        ),
        (replace(OLD, cuda=(13, 0)), RUN, ""),  # cuda-compat
        (replace(OLD, cuda=None), RUN, "the NVIDIA driver 535.104.05 is too old, and torch is built for CUDA 13.0"),
        (OLD, replace(RUN, cuda="12.9"), ""),
        (
            replace(FINE, devices=(A100, V100)),
            RUN,
            "GPU 1 (Tesla V100) has compute capability 7.0, and torch is built for 7.5 or more: take another GPU",
        ),
        (
            replace(FINE, devices=(T4,)),
            RUN,
            "GPU 0 (Tesla T4) has compute capability 7.5, and bfloat16 needs 8.0 or more: set model.dtype=float32",
        ),
        (replace(FINE, devices=(T4,)), replace(RUN, bfloat16=False), ""),
        (
            FINE,
            replace(RUN, quantization="fp8"),
            "GPU 0 (NVIDIA A100) has compute capability 8.0, and vLLM's kernels for fp8 need 8.9 or more: set rollout.",
        ),
        (
            replace(FINE, devices=(A100, B200)),
            replace(RUN, quantization="int8"),
            "GPU 1 (NVIDIA B200) has compute capability 10.0, and vLLM's kernels for int8 need less than 10.0: set rol",
        ),
        (replace(FINE, devices=(B200,)), replace(RUN, quantization="fp8"), ""),
        (FINE, replace(RUN, quantization="int8"), ""),
        (FINE, replace(RUN, cuda=None), "this machine has 2 GPU(s), and the installed torch is built for the CPU: run"),
        (Gpus(), replace(RUN, cuda=None, rocm=True), "torch is built for AMD GPUs (ROCm)"),
        (
            replace(FINE, devices=(A100, replace(A100, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb"))),
            RUN,
            "GPU 1 (NVIDIA A100-SXM4-40GB MIG 1g.5gb) is a slice of a GPU, a process sees one slice at most, and 2",
        ),
        (replace(FINE, devices=(replace(A100, name="A100 MIG 1g.5gb"),)), replace(RUN, ranks=1), ""),
        # 40 GiB x (1 - 0.85) = 6
        (replace(FINE, devices=(replace(A100, used_gib=5.9),)), RUN, ""),
        (
            replace(FINE, devices=(replace(A100, used_gib=6.1),)),
            RUN,
            "GPU 0 (NVIDIA A100) has 6.1 of 40.0 GiB in use by other processes, and this run leaves them 6.0 GiB: end "
            "them, choose other GPUs with CUDA_VISIBLE_DEVICES, or lower rollout.gpu_memory_utilization",
        ),
        (replace(FINE, devices=(replace(A100, used_gib=19.0),)), replace(RUN, engine_share=None), ""),
        (replace(FINE, devices=(replace(A100, used_gib=21.0),)), replace(RUN, engine_share=None), "leaves them 20.0"),
    ],
)
def test_what_a_run_cannot_use_is_a_sentence_with_its_fix(found: Gpus, use: Use, sentence: str) -> None:
    said = refuse_run(found, use)
    assert sentence in said if sentence else said == ""


def test_triton_needs_a_compiler_and_pythons_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no C compiler: install gcc" in refuse_run(FINE, RUN)
    assert refuse_run(FINE, replace(RUN, triton=False)) == ""  # the engine hf
    assert refuse_run(Gpus(), replace(RUN, cuda=None)) == ""  # no kernel is compiled for a CPU
    monkeypatch.setenv("CC", "tcc")
    assert refuse_run(FINE, RUN) == ""
    monkeypatch.setattr(gpu_checks.sysconfig, "get_path", lambda name: str(tmp_path))
    assert (
        f"no Python.h: install its headers (on Debian and Ubuntu apt-get install python3.{sys.version_info[1]}-dev)"
        in (refuse_run(FINE, RUN))
    )


def test_expandable_segments_are_refused_where_devices_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    assert refuse_run(FINE, RUN) == ""
    assert "take it out of PYTORCH_CUDA_ALLOC_CONF" in refuse_run(FINE, replace(RUN, colocate=True))


def test_another_host_than_the_tested_is_told_by_the_installer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks.platform, "machine", lambda: "aarch64")
    assert "this host is aarch64" in gpu_checks.find_untried_host(FINE, RUN)
    told = [check.install for check in gpu_checks.CHECKS if "tried on x86_64 only" in check.find(FINE, RUN)]
    assert told == ["warns"] and refuse_run(FINE, RUN) == ""
