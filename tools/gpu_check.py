"""Run on one GPU everything that needs one, and print a table of what it measured: python -m tools.gpu_check

It needs torch, transformers, numpy and pydantic, on Python 3.11 or newer, and neither Ray, DeepSpeed, vLLM, peft nor
pytest; ten minutes and one GPU are enough. Its comparisons with a CPU are those of the tests marked `gpu`
(tools/gpu_numbers.py). Then the quickstart runs, with the local trainer and the engine hf. At last the speed and memory
of training are measured (tools/benchmarks/). Each check has a process of its own: one that fails, hangs or crashes
stops no other. Exit code 1 where one failed or did not run. Without a GPU the same checks run on the CPU; --small is
enough to see that they run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS: dict[str, tuple[str, str]] = {
    "attention": ("tools.gpu_numbers", "packed rows: torch's varlen_attn beside a CPU's kernel"),
    "gathering": ("tools.gpu_numbers", "what it costs to add gradients of a shared prompt up in float32"),
    "logp": ("tools.gpu_numbers", "log-probabilities of padded and packed rows"),
    "update": ("tools.gpu_numbers", "updates of the local trainer: whole, cut, shared prefixes"),
    "sync": ("tools.gpu_numbers", "weights to the engine hf, with proof"),
    "fingerprint": ("tools.gpu_numbers", "checksums of tensors on the device"),
    "quickstart": ("tools.gpu_runs", "the quickstart: supervised learning, then GRPO"),
    "throughput": ("tools.gpu_runs", "tokens per second and peak memory of training"),
    "head": ("tools.gpu_runs", "peak memory with the head in chunks"),
}
"""Name of each check -> module that has it as check_NAME, and what it looks at."""
# no more than these, so that the checks run on a machine where FeynRL is not installed
WANTED = ("torch", "transformers", "numpy", "pydantic")
WITHOUT = ("ray", "deepspeed", "vllm", "peft", "pytest")
LIMIT_S = 240.0
"""Longest time of one check."""
LOG_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check."""

    name: str
    state: str
    """ok, FAILED or not run."""
    found: str
    """What it measured, or why it failed."""
    seconds: float = 0.0
    peak_mib: float | None = None
    """Largest memory that torch had allocated on the GPU."""
    log: str = ""
    """End of what a failed check wrote."""


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.one:
        # the child process of run_alone: its outcome goes through a file, since anything may write to its output
        outcome = run_check(args.one, Path(args.folder), small=args.small)
        Path(args.folder, f"{args.one}.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        return 0
    if missing := [package for package in WANTED if find_spec(package) is None]:
        print(explain_missing(missing))
        return 2
    print(describe_machine(), flush=True)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gpu_check") as folder:
        for name in args.only or CHECKS:
            # a check that has begun is ended by this limit too, so the whole takes no longer than it says
            left = 60 * args.minutes - (time.monotonic() - began)
            home = Path(folder)
            if args.together:
                outcomes.append(run_check(name, home, small=args.small))
            else:
                outcomes.append(run_alone(name, home, small=args.small, limit_s=min(left, LIMIT_S)))
            print(f"{outcomes[-1].state:>8}  {name}: {outcomes[-1].found}", flush=True)
    print("\n" + write_table(outcomes))
    for outcome in outcomes:
        if outcome.log:
            print(f"\nthe end of what {outcome.name} wrote:\n{outcome.log}")
    return int(any(outcome.state != "ok" for outcome in outcomes))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK", help=f"some of {', '.join(CHECKS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no check begins (default 10)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, which prove only that the checks run")
    parser.add_argument(
        "--together", action="store_true", help="all checks in one process: quicker, but a crash ends them all"
    )
    parser.add_argument("--one", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def explain_missing(packages: Sequence[str]) -> str:
    """Return the sentence on packages that the checks need, with the commands that bring their wheels."""
    bounds, (major, minor), machine = read_bounds(), sys.version_info[:2], platform.machine()
    asked = " ".join(f"'{package}>={bounds[package]}'" for package in packages)
    # pip takes a platform to the letter, and packages name one of these two
    platforms = f"--platform manylinux2014_{machine} --platform manylinux_2_28_{machine}"
    download = f"python -m pip download --only-binary :all: --python-version {major}.{minor} {platforms} --dest wheels"
    return (
        f"gpu_check needs {' and '.join(packages)}, which this Python does not have: run `python -m pip install "
        f"{asked}`, or, where no package index is reached, bring the folder that `{download} {asked}` makes elsewhere, "
        f"and run `python -m pip install --no-index --find-links wheels {asked}`"
    )


def describe_machine() -> str:
    """Return the device and the versions, and which packages of a whole installation are not here."""
    import torch

    if torch.cuda.is_available():
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        gib = torch.cuda.mem_get_info()[1] / 2**30
        device = f"{name}, {gib:.0f} GiB, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    else:
        device = "no GPU: the checks run on the CPU, which says nothing about a GPU"
    versions = ", ".join(f"{package} {find_version(package)}" for package in WANTED)
    absent = [package for package in WITHOUT if find_spec(package) is None]
    old = [f"{p} is older than {least}" for p, least in read_bounds().items() if is_older(find_version(p), least)]
    versions += f" ({'; '.join(old)}, which FeynRL asks for: what fails may be due to that)" if old else ""
    lacks = f"\nnot installed, and not needed: {', '.join(absent)}" if absent else ""
    return f"{device}\nPython {platform.python_version()}, {versions}{lacks}\n"


def read_bounds() -> dict[str, str]:
    """Return the lowest version of each package that the checks need, by pyproject.toml."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return {name: least for name, _, least in (entry.partition(">=") for entry in listed) if name in WANTED}


def is_older(found: str, least: str) -> bool:
    """Compare two versions by their numbers; one that is missing is not older.

    >>> is_older("2.9.1+cu130", "2.13"), is_older("2.13.0", "2.13"), is_older("is missing", "2.13")
    (True, False, False)
    """
    # without the build label, whose digits (+cu130) are no part of the version
    a, b = ([int(n) for n in re.findall(r"\d+", text.partition("+")[0])] for text in (found, least))
    return bool(a) and a < b


def find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is missing"


def run_alone(name: str, folder: Path, *, small: bool, limit_s: float) -> Outcome:
    """Run a check in a process of its own, whose output is kept for the case that it fails."""
    if limit_s <= 0:
        return Outcome(name=name, state="not run", found="the time was over: give more with --minutes")
    written, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, "-m", "tools.gpu_check", "--one", name, "--folder", str(folder)]
    command += ["--small"] if small else []
    began, why = time.monotonic(), ""
    with log.open("w", encoding="utf-8") as out:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
            why = f"its process ended with exit code {code}"
        except subprocess.TimeoutExpired:
            why = f"it took more than {limit_s:g} seconds"
    # the file and not the exit code: a process may crash at exit after its check has passed
    if written.exists():
        return Outcome(**json.loads(written.read_text(encoding="utf-8")))
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    seconds = time.monotonic() - began
    return Outcome(name=name, state="FAILED", found=why, seconds=seconds, log="\n".join(lines[-LOG_LINES:]))


def run_check(name: str, folder: Path, *, small: bool) -> Outcome:
    """Run a check and return its outcome, whatever it raises."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # no check asks a model hub
    began = time.monotonic()
    try:
        import torch

        from tools.gpu_numbers import Bench

        check: Callable[[Bench], str] = getattr(import_module(CHECKS[name][0]), f"check_{name}")
        on_gpu = torch.cuda.is_available()
        found = check(Bench(device="cuda" if on_gpu else "cpu", folder=folder, small=small))
    except Exception as error:  # a border: whatever a GPU, a driver or a library raises is what the table is for
        said = f"{type(error).__name__}: {(str(error).splitlines() or ['nothing said'])[0]}"
        log = traceback.format_exc().splitlines()
        seconds = time.monotonic() - began
        return Outcome(name=name, state="FAILED", found=said, seconds=seconds, log="\n".join(log[-LOG_LINES:]))
    peak = (torch.cuda.max_memory_allocated() / 2**20 or None) if on_gpu else None  # none here: it was another process
    return Outcome(name=name, state="ok", found=found, seconds=time.monotonic() - began, peak_mib=peak)


def write_table(outcomes: list[Outcome]) -> str:
    """Return one line per check, and a last one that counts."""
    lines = [f"{'check':<12}{'result':<9}{'s':>6}{'MiB':>8}  what it looked at, and what it found"]
    for outcome in outcomes:
        mib = "-" if outcome.peak_mib is None else f"{outcome.peak_mib:.0f}"
        head = f"{outcome.name:<12}{outcome.state:<9}{outcome.seconds:>6.1f}{mib:>8}  "
        lines += [head + CHECKS[outcome.name][1], " " * len(head) + outcome.found]
    n = {state: sum(outcome.state == state for outcome in outcomes) for state in ("ok", "FAILED", "not run")}
    return "\n".join([*lines, f"\n{n['ok']} ok, {n['FAILED']} failed, {n['not run']} not run"])


if __name__ == "__main__":
    sys.exit(main())
