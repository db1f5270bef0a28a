"""The image of learning curves is what the code draws from the numbers beside it."""

import json
from xml.etree import ElementTree

import pytest

from tools.benchmarks.learning_curves import IMAGE, draw, keep, read_curves, running_mean

SVG = "{http://www.w3.org/2000/svg}"
PANELS = {"quickstart": (65, 455), "smollm2": (540, 930)}
"""Left and right ends in the image."""


@pytest.fixture(scope="module")
def curves() -> dict[str, dict[str, list[float]]]:
    return read_curves()


def points_of(image: str) -> list[tuple[float, float]]:
    """List the corners of every curve, and every dot."""
    root = ElementTree.fromstring(image)
    corners = [corner.split(",") for line in root.iter(f"{SVG}polyline") for corner in line.attrib["points"].split()]
    dots = [(dot.attrib["cx"], dot.attrib["cy"]) for dot in root.iter(f"{SVG}circle")]
    return [(float(x), float(y)) for x, y in [*corners, *dots]]


def test_the_image_is_what_the_numbers_draw(curves):
    assert IMAGE.read_text() == draw(curves), "python -m tools.benchmarks.learning_curves"


@pytest.mark.parametrize("panel", PANELS)
def test_every_point_lies_inside_its_panel(curves, panel):
    left, right = PANELS[panel]
    points = points_of(draw({panel: curves[panel]}))
    assert len(points) > len(curves[panel])
    assert all(left < x <= right and 80 <= y <= 380 for x, y in points)


def test_runs_are_kept_beside_each_other(tmp_path):
    file = tmp_path / "curves.json"
    keep(file, "smollm2", "GRPO", [0.5])
    keep(file, "quickstart", "GRPO", [0.1, 0.2])
    keep(file, "quickstart", "PPO", [0.123456])
    keep(file, "quickstart", "GRPO", [0.3])
    assert json.loads(file.read_text()) == {"quickstart": {"GRPO": [0.3], "PPO": [0.1235]}, "smollm2": {"GRPO": [0.5]}}


def test_the_first_steps_are_averaged_with_fewer():
    assert running_mean([0.0, 1.0, 0.5, 0.5, 0.5, 1.0]) == [0.0, 0.5, 0.5, 0.5, 0.5, 0.7]
