"""How long until the first sample? python -m tools.benchmarks.start_time [--runs 3] [--config ...] [key=value ...]

The real main_rl.py in a fresh process, --runs times, with one step. Two tables: when each milestone was reached, in
seconds since the command (the run writes them into its summary.json; a process's birth comes from the system), and the
CPU seconds, user and system, that every process had used when the held-out evaluation was done. Wall-clock seconds
depend on what else the machine does; the load that is shown is that of the minute before each run.

The quickstart's model and data are made by `make quickstart`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

ROOT = Path(__file__).parent.parent.parent
EVALUATED = "before:"
"""Begins the line that a run prints after its first evaluation."""
MEANING = {
    "checked": "imports and checks of the driver",
    "ray": "Ray runs",
    "EngineCore began": "vLLM's second process begins",
    "Worker began": "vLLM's third process begins",
    "trainers": "trainers are ready",
    "engines": "engines are ready",
    "synced": "engines have the trainer's weights",
    "sampled": "first sample",
}
PROCESSES = {"EngineCore": "EngineCore", "VLLM::Worker": "Worker"}
"""Names of vLLM's processes, by a part of the command line that they show."""


def cpu_seconds(process: psutil.Process) -> float:
    """Return user and system seconds of a process and of those of its children that have ended."""
    return sum(process.cpu_times()[:4])


def describe_processes(driver: psutil.Process) -> tuple[dict[str, float], dict[str, float]]:
    """Return the birth of vLLM's processes, and CPU seconds by name; the processes of a run are below its driver."""
    births: dict[str, float] = {}
    cpu: dict[str, float] = {"driver": cpu_seconds(driver)}
    for process in driver.children(recursive=True):
        try:
            shown = " ".join(process.cmdline())[:400]
            spent, born = cpu_seconds(process), process.create_time()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it ended while we looked
            continue
        name = next((name for part, name in PROCESSES.items() if part in shown), "")
        if name:
            births[f"{name} began"] = min(born, births.get(f"{name} began", born))
        elif "ray::" in shown:
            name = shown.partition("ray::")[2].split()[0].partition(".")[0]
        cpu[name or "Ray and others"] = cpu.get(name or "Ray and others", 0.0) + spent
    return births, cpu


def run_once(config: str, overrides: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Run the recipe; return the seconds since the command at which things were reached, and CPU seconds by process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "main_rl.py",
            "--config",
            config,
            "steps=1",
            "trainer.warmup_updates=0",
            f"run_dir={folder}",
            *overrides,
        ]
        began = time.time()
        seen: tuple[dict[str, float], dict[str, float]] | None = None
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            said: list[str] = []
            for line in run.stdout:
                said.append(line)
                if seen is None and line.startswith(EVALUATED):
                    seen = describe_processes(psutil.Process(run.pid))
        if run.returncode or seen is None:
            sys.exit(f"{' '.join(command)}: exit code {run.returncode}\n{''.join(said[-20:])}")
        [summary] = Path(folder).glob("*/summary.json")
        births, cpu = seen
        reached = json.loads(summary.read_text())["reached"] | births
    return {name: at - began for name, at in reached.items()}, cpu | {"all": sum(cpu.values())}


def show_table(title: str, rows: list[dict[str, float]], names: list[str], meaning: dict[str, str]) -> None:
    """Print one column per run, and the median."""
    print(f"\n{title:46}" + "".join(f"run {i + 1:<5}" for i in range(len(rows))) + "median")
    for name in names:
        values = [row[name] for row in rows if name in row]
        print(f"{meaning.get(name, name):46}" + "".join(f"{value:<9.1f}" for value in values) + f"{median(values):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--runs", type=int, default=3)
    args, overrides = parser.parse_known_args()
    times: list[dict[str, float]] = []
    used: list[dict[str, float]] = []
    loads: list[str] = []
    for _ in range(args.runs):
        loads.append(f"{os.getloadavg()[0]:.1f}")
        reached, cpu = run_once(args.config, overrides)
        times.append(reached)
        used.append(cpu)
    print(f"{len(os.sched_getaffinity(0))} cores; load before each run: {', '.join(loads)}")
    order = sorted(times[0], key=lambda name: median(row[name] for row in times if name in row))
    show_table("seconds since the command", times, order, MEANING)
    show_table("CPU seconds of", used, sorted(used[0], key=lambda name: used[0][name]), {})


if __name__ == "__main__":
    main()
