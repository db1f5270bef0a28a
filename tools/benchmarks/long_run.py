"""Memory and files of a run of many short steps: python -m tools.benchmarks.long_run --minutes 30

A model of two layers takes several steps a second on a CPU, so half an hour has about as many steps as a day of a usual
run. The run is on one process (`--set backend=ray` for several), with an evaluation every 50 steps and a checkpoint
every 20. It is interrupted at the end, as by Ctrl-C. Told of every tenth of the time:
resident memory of all processes of the run, their open files and threads, and the bytes and number of the run folder's
files. Exit code 1 where one of these fails:

    memory   from the second third to the last it grows by less than 3 %, or 8 MiB
    handles  open files and threads are no more in the last third than in the second
    folder   a step adds the same number of bytes in the last third as in the second, within 5 %; only metrics.jsonl and
             samples/ grow
    end      the run ends within a minute of the interrupt, with a summary
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from data_prep import arithmetic, tiny_model
from tools.benchmarks.processes import ROOT

GROWING = ("metrics.jsonl", "samples")
"""Parts of the run folder that hold something of every step."""
MOST_GROWTH, MOST_GROWN_MIB = 0.03, 8.0
MOST_BYTES_CHANGE = 0.05
END_TIMEOUT_S = 60.0
READINGS = 300
WIDTHS = (6, 8, 7, 9, 7, 7, 13, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """State of a run at one moment."""

    seconds: float
    steps: int
    memory_mib: float
    """Resident memory of all its processes."""
    handles: int
    """Open files and threads of all its processes."""
    processes: int
    growing_bytes: int
    """Bytes of the parts of the run folder that grow with the steps."""
    other_bytes: int
    files: int


def list_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, of which some may be removed meanwhile."""
    # not rglob(): it raises where a folder is gone before its turn, and os.walk() goes on
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def read_run(process: psutil.Process, folder: Path, since: float) -> Reading:
    memory, handles, alive = 0, 0, 0
    for one in [process, *process.children(recursive=True)]:
        try:
            memory += one.memory_info().rss
            handles += one.num_fds() + one.num_threads()
            alive += 1
        except psutil.NoSuchProcess:
            continue
    growing, other, files = 0, 0, 0
    for path in list_files(folder):
        try:
            size = path.lstat().st_size
        except FileNotFoundError:  # of an old checkpoint, removed meanwhile
            continue
        files += 1
        if path.relative_to(folder).parts[0] in GROWING:
            growing += size
        else:
            other += size
    return Reading(
        seconds=time.monotonic() - since,
        steps=len(list((folder / "samples").glob("step_*.jsonl"))),
        memory_mib=memory / 2**20,
        handles=handles,
        processes=alive,
        growing_bytes=growing,
        other_bytes=other,
        files=files,
    )


def prepare(home: Path) -> list[str]:
    """Make the model and the data; return the command of the run."""
    tiny_model.make(home / "model")
    arithmetic.main(["--out", str(home / "data"), "--max", "9", "--train", "30", "--eval", "10"])
    paths = {"model.path": "model", "data.train": "data/train.parquet", "data.eval": "data/eval.parquet"}
    changes = [f"{key}={home / path}" for key, path in (paths | {"run_dir": "runs"}).items()]
    changes += ["name=long", "steps=1000000", "eval_every=50", "checkpoint.every=20", "display=plain"]
    return [sys.executable, str(ROOT / "main_rl.py"), "--config", str(ROOT / "configs/tiny.yaml"), *changes]


def wait_for(found: Callable[[], list[Path]], process: subprocess.Popen[bytes], output: Path) -> Path:
    while not (paths := found()):
        if process.poll() is not None:
            raise SystemExit(f"error: the run ended at its start: {output.read_text()[-2000:]}")
        time.sleep(0.2)
    return paths[0]


def run_long(home: Path, minutes: float, changes: list[str]) -> tuple[list[Reading], list[str]]:
    """Run for a time, then interrupt. Return readings at equal distances, and what was wrong with the end."""
    output = home / "output.txt"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with output.open("wb") as file:
        command = [*prepare(home), *changes]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=home)
    try:
        folder = wait_for(lambda: [*home.glob("runs/long-*/samples/step_*")], process, output).parent.parent
        readings: list[Reading] = []
        since = time.monotonic()
        for n in range(1, READINGS + 1):
            time.sleep(max(0.0, since + n * minutes * 60 / READINGS - time.monotonic()))
            if process.poll() is not None:
                raise SystemExit(f"error: the run ended by itself: {output.read_text()[-2000:]}")
            readings.append(read_run(psutil.Process(process.pid), folder, since))
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return readings, [f"it still runs {END_TIMEOUT_S:g} s after Ctrl-C"]
    finally:
        process.kill()
        process.wait()
    reason = json.loads((folder / "summary.json").read_text())["exit_reason"]
    return readings, [] if reason == "interrupted" else [f"it ended with exit code {code}, {reason}"]


def judge(readings: list[Reading]) -> list[str]:
    """Judge the readings: a sentence for each number that grew.

    The first third is for the start: caches fill, threads begin.
    """
    n = len(readings) // 3
    middle, last = readings[n : 2 * n], readings[2 * n :]

    def median(part: list[Reading], of: Callable[[Reading], float]) -> float:
        return statistics.median(map(of, part))

    wrong: list[str] = []
    before, after = (median(part, lambda r: r.memory_mib) for part in (middle, last))
    if after - before > max(MOST_GROWTH * before, MOST_GROWN_MIB):
        wrong.append(f"memory grew from {before:.0f} to {after:.0f} MiB")
    for name, of in (("open files and threads", lambda r: r.handles), ("processes", lambda r: r.processes)):
        if median(last, of) > median(middle, of):
            wrong.append(f"{name} grew from {median(middle, of):.0f} to {median(last, of):.0f}")
    # the greatest of each, because a checkpoint is written beside the one that it replaces
    before, after = (max(r.other_bytes for r in part) for part in (middle, last))
    if after > (1 + MOST_BYTES_CHANGE) * before:
        wrong.append(f"files beside {' and '.join(GROWING)} grew from {before:,} to {after:,} bytes")
    before, after = map(bytes_per_step, (middle, last))
    if after > (1 + MOST_BYTES_CHANGE) * before:
        wrong.append(f"a step adds {after:,.0f} bytes, and added {before:,.0f}")
    return wrong


def bytes_per_step(part: list[Reading]) -> float:
    return (part[-1].growing_bytes - part[0].growing_bytes) / (part[-1].steps - part[0].steps)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.long_run", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe")
    args = parser.parse_args(argv)
    # what a shell starts in the background ignores Ctrl-C, and so would the run
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="long_run_") as folder:
        readings, wrong = run_long(Path(folder), args.minutes, args.set)
    heads = ("minute", "steps", "MiB", "processes", "handles", "files", "growing", "other bytes")
    print(*(head.rjust(width) for head, width in zip(heads, WIDTHS, strict=True)))
    for r in [readings[0], *readings[READINGS // 10 - 1 :: READINGS // 10]]:
        cells = (f"{r.seconds / 60:.1f}", f"{r.steps:,}", f"{r.memory_mib:.0f}", str(r.processes), str(r.handles))
        cells += (f"{r.files:,}", f"{r.growing_bytes:,}", f"{r.other_bytes:,}")
        print(*(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True)))
    wrong += judge(readings)
    for sentence in wrong or ["memory and files as bounded as they should be"]:
        print(f"wrong: {sentence}" if wrong else sentence)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
