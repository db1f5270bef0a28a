"""Run on one GPU everything that needs one, and print a table of the measurements: python -m tools.gpu_check

    python -m tools.gpu_check                    a GPU day: at most ten minutes on one GPU
    python -m tools.gpu_check --rehearse         the same rows on this CPU, in tiny sizes
    python -m tools.gpu_check --only "zero 3"    some rows; tools/gpu_day/rows.py lists them all

Each row runs in a child process with a deadline of its own: one that fails, hangs or crashes stops no other. It prints
`ok`, `failed: REASON` or `not run: REASON`, with its numbers. The table is written to --out, too: gpu_day.json, and
gpu_day.md for docs/results.md. Exit code 1 where a row failed, or where the time was over.

The clone is all that travels (5 MB). Python 3.11 or newer with torch, transformers, numpy and pydantic is enough; an
image of torch lacks pydantic, and a sentence names the wheels to bring. Rows that need more read "not run: no vLLM".
For the rows of ZeRO bring DeepSpeed's sources (2 MB), which need no build, and the packages that they import:

    python -m pip download --no-deps --no-binary deepspeed --dest wheels deepspeed==0.19.8 hjson einops
    python -m pip install --no-index wheels/*.whl                        # there: whatever "not run: no hjson" names
    tar xf wheels/deepspeed-0.19.8.tar.gz -C wheels
    PYTHONPATH=wheels/deepspeed-0.19.8 python -m tools.gpu_check

For the rows of vLLM FeynRL must be installed, too (make install), because vLLM finds the receiver of weights by it.

A rehearsal takes gloo in place of NCCL. Where unit_tests/helpers/pretend_cuda.py can be had, rows run on its pretend
CUDA device, so that a mistake of devices is met here and not on the first GPU.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from tools.gpu_day.report import describe, write_files, write_table
from tools.gpu_day.rows import BY_NAME, ROOT, TIME_OVER, Outcome, run_alone, run_row, write_outcome

# no more than these, so that the rows run on a machine where FeynRL is not installed
WANTED = ("torch", "transformers", "numpy", "pydantic")
WITHOUT = ("ray", "deepspeed", "vllm", "peft", "pytest")
MINUTES = 9.5
"""Default of --minutes; the table is printed before ten are over."""


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.one:
        # the child process of run_alone
        write_outcome(run_row(BY_NAME[args.one], args.folder, rehearse=args.rehearse), args.folder)
        return 0
    if missing := [package for package in WANTED if find_spec(package) is None]:
        print(explain_missing(missing))
        return 2
    began = time.monotonic()
    # in a process of its own: CUDA's context would stay here, and take half a GiB from every row
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        machine = pool.submit(describe_machine).result()
    print(*(f"{name}: {value}" for name, value in machine.items()), "", sep="\n", flush=True)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gpu_check") as folder:
        for row in map(BY_NAME.__getitem__, args.only or BY_NAME):
            left = 60 * args.minutes - (time.monotonic() - began)
            limit_s = min(left, row.limit_s)
            outcomes.append(run_alone(row, Path(folder), rehearse=args.rehearse, limit_s=limit_s))
            print(f"{row.name}: {describe(outcomes[-1])}", flush=True)
            # after every row, for the case that the machine is taken away
            write_files(args.out, machine, outcomes, rehearsal=args.rehearse)
    print("\n" + write_table(outcomes))
    for outcome in outcomes:
        if outcome.log:
            print(f"\nthe end of what {outcome.name} wrote:\n{outcome.log}")
    return int(any(outcome.state == "failed" or outcome.reason == TIME_OVER for outcome in outcomes))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--only", nargs="+", choices=BY_NAME, metavar="ROW", help=f"some of {', '.join(BY_NAME)}")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all rows together (default {MINUTES})")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU: it shows only that the rows run")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_day", help="folder of the written table")
    parser.add_argument("--one", choices=BY_NAME, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def explain_missing(packages: Sequence[str]) -> str:
    """Return the sentence on packages that all rows need, with the commands that bring their wheels."""
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


def describe_machine() -> dict[str, str]:
    """Return the device and the versions, and which packages of a whole installation are not here."""
    import torch

    if torch.cuda.is_available():
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        gib, n = torch.cuda.mem_get_info()[1] / 2**30, torch.cuda.device_count()
        device = f"{n} x {name}, {gib:.0f} GiB, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    else:
        device = "no GPU: rows can only be rehearsed"
    found = {"device": device, "Python": platform.python_version()}
    found |= {package: find_version(package) for package in WANTED}
    old = [f"{p} is older than {least}" for p, least in read_bounds().items() if is_older(find_version(p), least)]
    if old:
        found["note"] = f"{'; '.join(old)}, which FeynRL asks for: what fails may be due to that"
    if absent := [package for package in WITHOUT if find_spec(package) is None]:
        found["not installed"] = ", ".join(absent)
    return found


def read_bounds() -> dict[str, str]:
    """Return the lowest version of each package that all rows need, by pyproject.toml."""
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


if __name__ == "__main__":
    sys.exit(main())
