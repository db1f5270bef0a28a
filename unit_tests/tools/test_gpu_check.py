"""The script for a lent GPU: its checks run on a CPU, with the few packages that it asks for, and see what is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import gpu_numbers
from tools.gpu_check import CHECKS, Outcome, run_alone, run_check, write_table
from tools.gpu_numbers import CheckFailed, compare

ROOT = Path(__file__).parent.parent.parent
ONLY_THESE = '''
"""Python imports this at its start: no package is found but those that the script asks for, and what they ask for."""
import re
import sys
from importlib import metadata
from importlib.machinery import PathFinder


def with_needs(names):
    todo, seen = list(names), set()
    while todo:
        name = re.sub("[-_.]+", "-", todo.pop()).lower()
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        if name not in seen:
            seen.add(name)
            todo += [re.match(r"[\\w.-]+", need)[0] for need in needs if "extra ==" not in need]
    return seen


FOUND = with_needs(["torch", "transformers", "numpy", "pydantic"])
HIDDEN = {
    module
    for module, owners in metadata.packages_distributions().items()
    if not any(re.sub("[-_.]+", "-", owner).lower() in FOUND for owner in owners)
}
assert {"ray", "deepspeed", "vllm", "peft", "pytest", "pyarrow", "aiohttp", "psutil"} <= HIDDEN, HIDDEN


class Found(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Found
'''


def test_a_check_compares_and_a_kernel_that_computes_something_else_fails(tmp_path, monkeypatch):
    right = run_check("attention", tmp_path, small=True)
    assert right.state == "ok" and re.search(r"1 rows with gradients.*at most 0\.\d\d% from a CPU's", right.found)
    really = gpu_numbers.attend

    def sees_no_prefix(inputs, slope, segments, window):
        half = inputs[0].dtype == torch.bfloat16
        return really(inputs, slope, type(segments)(segments.lengths, [-1] * 6) if half else segments, window)

    monkeypatch.setattr(gpu_numbers, "attend", sees_no_prefix)
    wrong = run_check("attention", tmp_path, small=True)
    assert wrong.state == "FAILED" and "CheckFailed: output of Rows(" in wrong.found and "gpu_numbers.py" in wrong.log


def test_a_number_that_is_none_is_beyond_every_bound():
    one = torch.ones(3)
    assert compare("x", one, one * 1.01, 0.02) == pytest.approx(0.0099, abs=1e-4)
    for wrong in (one * 1.1, one * torch.nan):
        with pytest.raises(CheckFailed, match=r"^x: the difference is .*, and at most 2.00% is expected$"):
            compare("x", wrong, one, 0.02)


def test_the_table_names_what_failed_and_what_did_not_run(tmp_path):
    late = run_alone("head", tmp_path, small=True, limit_s=-1.0)
    failed = Outcome(name="sync", state="FAILED", found="RuntimeError: CUDA error", seconds=2.0, peak_mib=12.3)
    table = write_table([Outcome(name="logp", state="ok", found="1e-4 nats"), failed, late])
    assert re.search(r"^sync +FAILED +2\.0 +12 ", table, re.MULTILINE) and "RuntimeError: CUDA error" in table
    assert table.endswith("1 ok, 1 failed, 1 not run") and "the time was over" in table


def run_where_nothing_else_is(folder: Path, *options: str) -> str:
    """Run the script, and every process that it starts, with the packages that it asks for and no others."""
    (folder / "sitecustomize.py").write_text(ONLY_THESE)
    alone = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.gpu_check", "--small", *options]
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not installed, and not needed: ray, deepspeed, vllm, peft, pytest" in done.stdout
    return done.stdout


def test_a_bare_image_is_told_which_wheels_to_bring(tmp_path):
    """The images of torch have no pydantic."""
    without = ONLY_THESE.replace("HIDDEN = {", 'HIDDEN = {"pydantic", "pydantic_core"} | {', 1)
    assert without != ONLY_THESE
    (tmp_path / "sitecustomize.py").write_text(without)
    command = [sys.executable, "-m", "tools.gpu_check"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    python = "{}.{}".format(*sys.version_info)
    assert done.stdout.startswith(
        "gpu_check needs pydantic, which this Python does not have: run `python -m pip install"
    )
    assert f"--python-version {python} --platform manylinux2014_" in done.stdout
    assert done.stdout.count("'pydantic>=2.12'") == 3


@pytest.mark.slow
def test_the_checks_run_where_only_the_packages_that_they_ask_for_are(tmp_path):
    names = [name for name in CHECKS if name != "head"]  # its benchmark has a test of its own
    said = run_where_nothing_else_is(tmp_path, "--together", "--only", *names)
    assert "8 ok, 0 failed, 0 not run" in said
    speeds = re.findall(r"64 tokens(?: shared)?: (\d+) tokens/s, MFU (\d+\.\d)%, peak (-|\d+) MiB", said)
    assert len(speeds) >= 2 and all(float(n) > 0 and 0 < float(share) < 100 for n, share, _ in speeds)


@pytest.mark.verify
def test_each_check_runs_in_a_process_of_its_own(tmp_path):
    assert f"{len(CHECKS)} ok, 0 failed, 0 not run" in run_where_nothing_else_is(tmp_path)


def test_the_limit_of_a_check_ends_it(tmp_path):
    outcome = run_alone("sync", tmp_path, small=True, limit_s=0.2)  # torch alone takes longer to import
    assert (outcome.state, outcome.found) == ("FAILED", "it took more than 0.2 seconds")
