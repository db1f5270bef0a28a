"""The overrides of the quickstart for a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import RLConfig
from driver.load_recipe import load_recipe
from tools.placement import choose_overrides

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
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
