"""The walks of docs/concepts/one_step.md are the ones that a run takes, and short."""

import re

import pytest

from tools.layers import LINES_OF_FILE, ROOT
from tools.walks import PAGE, WALKS, run_walk

LONGEST = {
    "reward": (10, 2_000),
    "weights": (9, 2_000),
    "sample": (9, 2_000),
    "tools": (15, 2_500),
    "image": (17, 3_500),
}
"""Most files and lines of each walk; a file of more than 350 lines counts twice."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_the_one_on_the_page_and_no_longer(name):
    files, others = run_walk(name)
    title = WALKS[name].title
    section = (
        PAGE.read_text(encoding="utf-8").partition(f"### {title[0].upper()}{title[1:]}\n")[2].partition("\n### ")[0]
    )
    assert re.findall(r"^\| \[`([\w/.]+)`\]", section, re.MULTILINE) == files, "run: python -m tools.walks --write"
    assert not {*files} & {*others}
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files}
    most_files, most_lines = LONGEST[name]
    assert sum(2 if n > LINES_OF_FILE else 1 for n in lines.values()) <= most_files
    assert sum(lines.values()) <= most_lines
