"""List of the rows of a GPU day, and how a row runs: in this process, or alone in a child process with a deadline.

Standard library only until a row runs: the packages that it needs may be missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tools.gpu_day.bench import Bench

ROOT = Path(__file__).resolve().parent.parent.parent
State = Literal["ok", "failed", "not run"]
Numbers = dict[str, float | str]
"""Measurements of a row, by name and unit."""
LOG_LINES = 25
TIME_OVER = "the time was over: give more with --minutes"
TITLES = {"deepspeed": "DeepSpeed", "ray": "Ray", "vllm": "vLLM"}
"""Names of packages in reasons."""
DEEPSPEED = ("deepspeed", "hjson", "einops", "msgpack", "psutil")
"""DeepSpeed and the packages that it imports; its sources alone may have been brought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Check of a GPU day."""

    name: str
    check: str
    """module:function below tools.gpu_day. It takes a Bench and `given`, and returns Numbers."""
    about: str
    given: Mapping[str, str] = field(default_factory=dict[str, str])
    needs: tuple[str, ...] = ()
    """Packages besides torch, transformers, numpy and pydantic; the first that is missing is the reason."""
    gpus: int = 1
    """Least number of GPUs. A rehearsal needs none."""
    pretend: bool = False
    """True to rehearse on the pretend CUDA device (unit_tests/helpers/pretend_cuda.py)."""
    limit_s: float = 90.0
    """Longest time of the row."""


def rank_row(way: str, *needs: str) -> Row:
    about = f"one rank of {way} beside the local trainer: updates, leave and return, resume"
    return Row(name=way, check="ranks:check_rank", given={"way": way}, needs=needs, about=about)


ROWS = (
    Row(
        name="attention",
        check="attention:check_attention",
        pretend=True,
        about="packed rows, forward and backward, with windows and shared prompts: torch's varlen_attn beside a CPU",
    ),
    Row(
        name="gathering",
        check="attention:check_gathering",
        pretend=True,
        about="cost of adding up in float32 the gradients of a prompt that 64 replies share",
    ),
    Row(name="logp", check="updates:check_logp", pretend=True, about="log-probabilities of padded and packed rows"),
    Row(
        name="update",
        check="updates:check_update",
        pretend=True,
        about="updates of the local trainer: whole, cut, shared prefixes",
    ),
    rank_row("zero 1", *DEEPSPEED),
    rank_row("zero 2", *DEEPSPEED),
    rank_row("zero 3", *DEEPSPEED),
    rank_row("fsdp2"),
    rank_row("fsdp2 offload"),
    Row(
        name="waits",
        check="speeds:check_waits",
        pretend=True,
        about="how often the host waits for the device in a step of one update",
    ),
    Row(
        name="checksum",
        check="speeds:check_checksum",
        pretend=True,
        about="checksums of weights: equal to a CPU's, and their time",
    ),
    Row(
        name="sync",
        check="speeds:check_sync",
        pretend=True,
        about="weights to the engine hf in this process, with proof, and their time",
    ),
    Row(name="ipc", check="ipc:check_ipc", about="weights to another process on the same GPU by handles"),
    Row(
        name="throughput",
        check="speeds:check_throughput",
        limit_s=150.0,
        about="training of Qwen3-0.6B's shape at 16k packed tokens: speed, and memory beside --explain",
    ),
    Row(
        name="tests",
        check="runs:check_tests",
        needs=("pytest", "pytest_timeout", "psutil", "PIL"),
        about="pytest -m gpu",
    ),
    Row(
        name="engine",
        check="vllm:check_engine",
        needs=("vllm",),
        limit_s=180.0,
        about="vLLM in this process: start, sampling, sleep, wake, weights with proof",
    ),
    Row(
        name="colocate",
        check="vllm:check_colocate",
        needs=("vllm", "ray", "deepspeed"),
        limit_s=240.0,
        about="the quickstart on Ray with placement: colocate; weights go by handles, with proof",
    ),
    Row(
        name="nccl",
        check="vllm:check_nccl",
        needs=("vllm", "ray", "deepspeed"),
        gpus=2,
        limit_s=150.0,
        about="steps on Ray with a GPU each for trainer and engine; weights go over NCCL, with proof",
    ),
    Row(name="head", check="runs:check_head", about="peak memory with the head's logits at once and in chunks"),
    Row(
        name="quickstart",
        check="runs:check_quickstart",
        limit_s=240.0,
        about="the quickstart with the local trainer and the engine hf: supervised learning, then GRPO",
    ),
)
"""In order of worth: a day that is too short lacks the last ones."""
BY_NAME = {row.name: row for row in ROWS}


class CheckFailed(AssertionError):
    """Number beyond its bound. The message says which."""


class NotRun(Exception):
    """Row that this machine cannot run. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one row."""

    name: str
    state: State
    numbers: Numbers = field(default_factory=dict[str, float | str])
    reason: str = ""
    """Why it failed or did not run."""
    seconds: float = 0.0
    peak_mib: float | None = None
    """Largest memory that torch had allocated on the GPU, in the row's own process."""
    log: str = ""
    """End of a failed row's output."""


def run_alone(row: Row, folder: Path, *, rehearse: bool, limit_s: float) -> Outcome:
    """Run a row in a child process, whose output is kept for the case that it fails."""
    if limit_s <= 0:
        return Outcome(name=row.name, state="not run", reason=TIME_OVER)
    if missing := find_missing(row):
        return Outcome(name=row.name, state="not run", reason=missing)
    written, log = folder / f"{row.name}.json", folder / f"{row.name}.log"
    command = [sys.executable, "-m", "tools.gpu_check", "--one", row.name, "--folder", str(folder)]
    command += ["--rehearse"] if rehearse else []
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        why = end_in_time(command, out, limit_s)
    # the file and not the exit code: a process may crash at exit after its check has passed
    if written.exists():
        return Outcome(**json.loads(written.read_text(encoding="utf-8")))
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    seconds = time.monotonic() - began
    return Outcome(name=row.name, state="failed", reason=why, seconds=seconds, log="\n".join(lines[-LOG_LINES:]))


def find_missing(row: Row) -> str:
    """Return why the packages of this Python do not suffice for a row; "" if they do."""
    missing = next((package for package in row.needs if find_spec(package) is None), None)
    return "" if missing is None else f"no {TITLES.get(missing, missing)}"


def end_in_time(command: list[str], out: Any, limit_s: float) -> str:
    """Run a command in a process group of its own, and end the group at the limit. Return how it ended."""
    child = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return f"its process ended with exit code {child.wait(limit_s)}"
    except subprocess.TimeoutExpired:
        return f"it took more than {limit_s:.3g} seconds"
    finally:
        # what the row itself has started holds memory of the GPU
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def run_row(row: Row, folder: Path, *, rehearse: bool) -> Outcome:
    """Run a row in this process and return its outcome, whatever it raises."""
    from core.errors import first_line

    os.environ["HF_HUB_OFFLINE"] = "1"  # no row asks a model hub
    began = time.monotonic()
    try:
        with make_bench(row, folder, rehearse=rehearse) as bench:
            check: Callable[..., Numbers] = resolve_name(f"tools.gpu_day.{row.check}")
            numbers = check(bench, **row.given)
            peak_mib = bench.measure_peak_mib()
    except NotRun as error:
        return Outcome(name=row.name, state="not run", reason=str(error), seconds=time.monotonic() - began)
    except Exception as error:  # a border: whatever a GPU, a driver or a library raises is what the table is for
        said = f"{type(error).__name__}: {first_line(error)}"
        log = "\n".join(traceback.format_exc().splitlines()[-LOG_LINES:])
        return Outcome(name=row.name, state="failed", reason=said, seconds=time.monotonic() - began, log=log)
    seconds = time.monotonic() - began
    return Outcome(name=row.name, state="ok", numbers=numbers, seconds=seconds, peak_mib=peak_mib)


def write_outcome(outcome: Outcome, folder: Path) -> None:
    """Write a row's outcome for `run_alone`: anything may write to a child's output."""
    unfinished = folder / f"{outcome.name}.part"
    unfinished.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    unfinished.replace(folder / f"{outcome.name}.json")


@contextmanager
def make_bench(row: Row, folder: Path, *, rehearse: bool) -> Generator[Bench]:
    """Yield the place where a row runs. Raises NotRun without its GPUs."""
    import torch

    from tools.gpu_day.bench import Bench, pretend_if_possible

    if not rehearse and torch.cuda.device_count() < row.gpus:
        n = torch.cuda.device_count()
        raise NotRun("no GPU" if n == 0 else f"it needs {row.gpus} GPUs, and {n} is here")
    with pretend_if_possible(rehearse and row.pretend) as pretend:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        yield Bench(device=device, folder=folder, small=rehearse, pretend=pretend)
