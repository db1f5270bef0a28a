"""The walks of docs/concepts/one_step.md are the ones that a run takes, and short."""

import re
import statistics

import pytest

from tools.layers import LINES_OF_FILE, ROOT
from tools.walks import FILES_OF_KEY, PAGE, WALKS, describe_keys, find_key_files, run_walk

LONGEST = {
    "reward": (10, 2_100),  # a tenth of it is the seats that a loss without terms, totals and teachers passes by
    "weights": (9, 2_000),
    "sample": (9, 2_000),
    "tools": (15, 2_500),
    "image": (17, 3_500),
}
"""Most files and lines of each walk; a file of more than 350 lines counts twice."""


@pytest.mark.verify
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


def test_most_keys_are_mentioned_in_few_files():
    files = find_key_files()
    assert (
        "configs/trainer_schema.py" in files["micro_batch_tokens"] and "trainers/layouts.py" in files["share_prefixes"]
    )
    assert statistics.median(map(len, files.values())) <= FILES_OF_KEY
    assert "model" not in files, "the name of several classes' fields"
    shown = describe_keys({"one": ["a.py"], "wide": [f"{n}.py" for n in range(5)]})
    assert "2 keys; the median is mentioned in 3 files" in shown
    assert shown.endswith("5 files mention wide: 0.py, 1.py, 2.py, 3.py, 4.py")
