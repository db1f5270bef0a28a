"""The overrides of the quickstart for a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.schema import RLConfig
from driver.load_recipe import load_recipe
from tools.placement import choose_overrides
from unit_tests.helpers.fake_gpus import pretend

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
ENGINES, TURNS = "rollout.num_engines=2", "placement=colocate"


@pytest.mark.parametrize(
    "gpus, cores, expected",
    [(0, 1, []), (0, 2, [ENGINES]), (0, 64, [ENGINES]), (1, 1, [TURNS]), (1, 8, [TURNS]), (2, 8, [])],
)
def test_a_machine_has_its_overrides(gpus: int, cores: int, expected: list[str]) -> None:
    assert list(choose_overrides(gpus, cores)) == expected


@pytest.mark.parametrize("override", [ENGINES, TURNS])
def test_the_quickstart_takes_the_override(override: str) -> None:
    load_recipe(RLConfig, str(QUICKSTART), [override])


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_the_quickstart_asks_for_the_overrides_of_this_machine(tmp_path: Path, gpus: int) -> None:
    environment = pretend(tmp_path, cuda=None, answers="", nvidia_smi="echo 580.1;" * gpus + "true")
    command = [sys.executable, "-m", "tools.placement"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    chosen = choose_overrides(gpus, len(os.sched_getaffinity(0)))
    assert done.stdout.splitlines() == list(chosen)
    assert done.stderr.splitlines() == [f"{reason} ({override})" for override, reason in chosen.items()]
    assert ("one GPU: trainer and engine use it in turns" in done.stderr) == (gpus == 1)
    assert "seed=$(SEED) $$($(BIN)/python -m tools.placement)\n" in (ROOT / "Makefile").read_text()
