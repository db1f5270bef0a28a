"""Check tiny models of today's architectures: python -m tools.zoo [names] [--engine hf|vllm] [--page PATH]

Prints a JSON line per model and stage: ok with numbers, refused with the product's sentence, or failed with the reason.
With --engine vllm the stages that start vLLM run, too. With --page the lines replace those of the same stages in the
file beside the page, and the page is written anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.zoo.child import RESULTS
from tools.zoo.models import ZOO
from tools.zoo.page import OF_VLLM, make_page, read_lines, stored_lines, write_lines
from tools.zoo.ranks import LIBRARIES, run_ranks
from tools.zoo.stages import OF_RANKS, STAGES
from tools.zoo.subject import Subject

LIMIT_S = 600.0
"""Longest time of a process."""


def main(arguments: Sequence[str]) -> None:
    """Check the models, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tools.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="models; all without any")
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--stages", nargs="+", choices=[*STAGES], help="these stages alone")
    parser.add_argument("--page", type=Path, help="page to write; its lines are stored beside it")
    given = parser.parse_args(arguments)
    if unknown := sorted({*given.names} - {*ZOO}):
        parser.error(f"the zoo has no {unknown[0]}: take some of {', '.join(ZOO)}")
    stages = given.stages or [stage for stage in STAGES if given.engine == "vllm" or stage not in OF_VLLM]
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="zoo_") as folder:
        subjects = [Subject(name=name, folder=Path(folder) / name) for name in given.names or ZOO]
        if {*OF_RANKS} & {*stages}:
            prepare_ranks(subjects)
        for subject in subjects:
            for line in check_model(subject, stages):
                print(json.dumps(line), flush=True)
                lines.append(line)
            shutil.rmtree(subject.folder)
    if given.page is not None:
        stored = stored_lines(given.page)
        write_lines(stored, [*(read_lines(stored) if stored.exists() else []), *lines])
        given.page.write_text(make_page(read_lines(stored)))


def prepare_ranks(subjects: Sequence[Subject]) -> None:
    """Update all models on several ranks. Their processes start once, since that takes longer than an update."""
    for subject in subjects:
        subject.make()
    for library in LIBRARIES:
        run_ranks(subjects, library)


def check_model(subject: Subject, stages: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a model, stage by stage. vLLM has a process for each stage, since it may take it down."""
    together = [stage for stage in stages if stage not in OF_VLLM]
    for part in ([together] if together else []) + [[stage] for stage in stages if stage in OF_VLLM]:
        yield from run_child(subject.name, subject.folder, part)


def run_child(name: str, folder: Path, stages: Sequence[str]) -> list[dict[str, Any]]:
    """Run stages in a process, and return their lines. Stages that a dead process has not reached have failed."""
    folder.mkdir(exist_ok=True)
    results = folder / RESULTS
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.zoo.child", name, str(folder), *stages]
    try:
        done = subprocess.run(
            command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=sys.stderr, timeout=LIMIT_S, check=False
        )
        end = f"the process ended with code {done.returncode}"
    except subprocess.TimeoutExpired:
        end = f"no result within {LIMIT_S:g} s"
    lines = read_lines(results) if results.exists() else []
    reached = {line["stage"] for line in lines}
    lost = [{"model": name, "stage": s, "state": "failed", "why": end} for s in stages if s not in reached]
    return lines + lost


if __name__ == "__main__":
    main(sys.argv[1:])
