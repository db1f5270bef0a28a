"""Observation of a run from outside: the CPU seconds of its processes, and the end of its first step."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PLACES: tuple[str, ...] = ("driver", "engine actor", "rewards", "trainer", "Ray")


@dataclass(slots=True)
class Watched:
    """CPU seconds of a run by process, and the end of its first step."""

    before: dict[str, float] = field(default_factory=dict[str, float])
    """CPU seconds after the first step."""
    after: dict[str, float] = field(default_factory=dict[str, float])
    """CPU seconds after the last step but one: the last ends the engine."""
    first_end: float = 0.0
    """Seconds from the command to the end of the first step."""

    def count_cpu(self) -> dict[str, float]:
        return {place: self.after[place] - self.before.get(place, 0.0) for place in self.after}


def watch(process: subprocess.Popen[bytes], folder: Path, steps: int) -> Watched:
    """Watch a run that has just been started, until its end."""
    start, seen = time.perf_counter(), Watched()
    while process.poll() is None:
        done = sum(len(file.read_bytes().splitlines()) for file in folder.glob("*/metrics.jsonl"))
        # the first step loads, compiles and warms up, and is not counted
        if done and not seen.before:
            seen.first_end = time.perf_counter() - start
            seen.before = read_cpu(process.pid)
        if done >= steps - 1 and not seen.after:
            seen.after = read_cpu(process.pid)
        time.sleep(0.05)
    return seen


def read_cpu(pid: int) -> dict[str, float]:
    """Return the CPU seconds so far of a process and its descendants, by place."""
    seconds = dict.fromkeys(PLACES, 0.0)
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
            seconds[find_place(process, pid)] += times.user + times.system
        # a process may end between the listing and the reading
        except psutil.NoSuchProcess:
            continue
    return seconds


def find_place(process: psutil.Process, driver: int) -> str:
    """Return the place of a process. The actors of Ray have one title; an engine's has reward processes below it."""
    line = " ".join(process.cmdline())
    if process.pid == driver:
        return "driver"
    if "rewards.worker" in line:
        return "rewards"
    if "ray::Actor" not in line:
        return "Ray"
    is_engine = any("rewards.worker" in " ".join(child.cmdline()) for child in process.children())
    return "engine actor" if is_engine else "trainer"
