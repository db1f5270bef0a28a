"""A machine with GPUs, pretended by an nvidia-smi on PATH and a CUDA library on LD_LIBRARY_PATH.

Only the answers are pretended: the code that asks is the real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* FAKE_CUDA is "version init;name|major|minor|total GiB|free GiB|error;..."; a version of 0 never answers */
static int version, broken, devices, current;
static char name[16][99];
static double number[16][5];

__attribute__((constructor)) static void read_devices(void) {
    char *text = strdup(getenv("FAKE_CUDA")), *one = strtok(text, ";");
    sscanf(one, "%d %d", &version, &broken);
    for (; (one = strtok(NULL, ";")); devices++) {
        double *n = number[devices];
        sscanf(one, "%98[^|]|%lf|%lf|%lf|%lf|%lf", name[devices], n, n + 1, n + 2, n + 3, n + 4);
    }
}
int cuDriverGetVersion(int *found) { if (!version) sleep(600); *found = version; return 0; }
int cuInit(unsigned flags) { return broken; }
int cuDeviceGetCount(int *n) { *n = devices; return 0; }
int cuDeviceGet(int *device, int i) { *device = i; return 0; }
int cuDeviceGetName(char *said, int length, int i) { strcpy(said, name[i]); return 0; }
int cuDeviceGetAttribute(int *found, int which, int i) {
    if (which != 75 && which != 76) return 1;
    *found = number[i][which - 75]; return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int i) { *context = (char *)0 + i + 1; return number[i][4]; }
int cuCtxPushCurrent_v2(void *context) { current = (char *)context - (char *)0 - 1; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *total = number[current][2] * (1 << 30); *free = number[current][3] * (1 << 30); return 0;
}
int cuGetErrorName(int code, const char **said) {
    *said = code == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : "CUDA_ERROR"; return 0;
}
"""
COMPILER = shutil.which("gcc") or shutil.which("clang")
H100 = "NVIDIA H100|9|0|80|80|0"


def compile_cuda(folder: Path) -> Path:
    """Write a CUDA library into a folder; each process reads its answers from FAKE_CUDA."""
    assert COMPILER is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda.c").write_text(SOURCE)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder


def write_nvidia_smi(folder: Path, body: str) -> None:
    """Write an nvidia-smi. body: what the shell runs, such as `echo 580.95.05`, one line per GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)


def pretend(folder: Path, *, cuda: Path | None, answers: str, nvidia_smi: str | None, path: str = "") -> dict[str, str]:
    """Return the environment variables of a process on such a machine.

    cuda: folder of `compile_cuda`; None without the library. answers: FAKE_CUDA. path: rest of PATH.
    """
    if nvidia_smi is not None:
        write_nvidia_smi(folder, nvidia_smi)
    where = os.pathsep.join(filter(None, (str(folder), path)))
    return {"PATH": where} | ({} if cuda is None else {"LD_LIBRARY_PATH": str(cuda), "FAKE_CUDA": answers})
