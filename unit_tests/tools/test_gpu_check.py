"""The script for a lent GPU: its rows run on a CPU, with the few packages that it asks for, and see what is wrong."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from tools.gpu_day import attention, bench, ranks, report, rows, speeds
from tools.gpu_day.bench import compare
from tools.gpu_day.rows import BY_NAME, ROWS, CheckFailed, NotRun, Outcome, run_alone, run_row
from unit_tests.helpers.pretend_cuda import needs_pretend_cuda

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
LOSES_MOMENTS = """
import sys
from pathlib import Path
from tools.gpu_day.rows import BY_NAME, run_row
from trainers import fsdp2

really = fsdp2.as_part_of
fsdp2.as_part_of = lambda p, held: really(p, held.clone())
print(run_row(BY_NAME["fsdp2 offload"], Path(sys.argv[1]), rehearse=True).reason)
"""


def test_every_row_names_a_check():
    assert len(BY_NAME) == len(ROWS) and all(callable(resolve_name(f"tools.gpu_day.{row.check}")) for row in ROWS)
    assert {row.name for row in ROWS if "vllm" in row.needs} == {"engine", "colocate", "nccl"}


def test_what_travels_to_a_lent_gpu_is_far_below_its_limit():
    """With wheels of DeepSpeed and pydantic, 5 MB more, at most 64 MiB may travel."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = [(ROOT / file).stat().st_size for file in listed.splitlines() if (ROOT / file).exists()]
    assert len(sizes) > 500 and sum(sizes) < 16 * 2**20


@needs_pretend_cuda
def test_attention_is_compared_and_another_kernel_fails(tmp_path, monkeypatch, one_thread):
    right = run_row(BY_NAME["attention"], tmp_path, rehearse=True)
    assert (right.state, right.numbers["rows"], right.numbers["kernel"]) == ("ok", 21, "varlen_attn"), right
    assert all(0 < right.numbers[f"head size {n}, % from a CPU"] < 1 for n in (64, 128, 256))
    really = attention.attend

    def sees_no_prefix(inputs, slope, segments, window):
        half = inputs[0].dtype == torch.bfloat16
        alone = type(segments)(segments.lengths, [-1] * len(segments.lengths))
        return really(inputs, slope, alone if half else segments, window)

    monkeypatch.setattr(attention, "attend", sees_no_prefix)
    wrong = run_row(BY_NAME["attention"], tmp_path, rehearse=True)
    assert wrong.state == "failed" and "CheckFailed: output of Rows(" in wrong.reason and "attention.py" in wrong.log


@needs_pretend_cuda
def test_a_wait_too_many_is_named(tmp_path, monkeypatch, one_thread):
    right = run_row(BY_NAME["waits"], tmp_path, rehearse=True)
    # whether the gradient is finite, its norm, and the metrics
    assert right.numbers["waits"] == 3 and right.numbers["lines"].count("trainers/local.py:") == 2
    monkeypatch.setattr(speeds, "MOST_WAITS", 2)
    wrong = run_row(BY_NAME["waits"], tmp_path, rehearse=True)
    assert wrong.reason.startswith("CheckFailed: a step waits 3 times, and at most 2 are expected: trainers/local.py:")


def test_copies_that_no_profiler_sees_are_not_counted_as_none():
    """A CPU has none, which is what a machine without access to a GPU's counters looks like."""
    if not torch.cuda.is_available():
        with pytest.raises(NotRun, match="profiler sees no copies"):
            speeds.count_copies_back(lambda: torch.ones(3).sum().item())


def test_a_number_that_is_none_is_beyond_every_bound():
    one = torch.ones(3)
    assert compare("x", one, one * 1.01, 0.02) == pytest.approx(0.0099, abs=1e-4)
    for wrong in (one * 1.1, one * torch.nan):
        with pytest.raises(CheckFailed, match=r"^x: the difference is .*, and at most 2.00% is expected$"):
            compare("x", wrong, one, 0.02)


def test_the_table_names_what_failed_and_what_did_not_run(tmp_path):
    late = run_alone(BY_NAME["head"], tmp_path, rehearse=True, limit_s=-1.0)
    absent = run_alone(replace(BY_NAME["nccl"], needs=("no_such",)), tmp_path, rehearse=True, limit_s=9.0)
    failed = Outcome(name="sync", state="failed", reason="RuntimeError: CUDA error", seconds=2.0, peak_mib=12.3)
    right = Outcome(name="logp", state="ok", numbers={"nats": 1.25e-4, "tokens/s": 51234.5})
    day = [right, failed, late, absent]
    assert [report.describe(outcome) for outcome in day] == [
        "ok; nats 0.000125; tokens/s 51,234",
        "failed: RuntimeError: CUDA error",
        "not run: the time was over: give more with --minutes",
        "not run: no no_such",
    ]
    table = report.write_table(day)
    assert re.search(r"^sync +failed +2\.0 +12 ", table, re.MULTILINE) and "RuntimeError: CUDA error" in table
    assert table.endswith("\n1 ok, 1 failed, 2 not run")
    report.write_files(tmp_path / "out", {"device": "H100"}, day, rehearsal=False)
    written = json.loads((tmp_path / "out/gpu_day.json").read_text())
    assert written["machine"] == {"device": "H100"} and Outcome(**written["rows"][1]) == failed
    markdown = (tmp_path / "out/gpu_day.md").read_text()
    assert f"| sync | {BY_NAME['sync'].about} | failed: RuntimeError: CUDA error | 2 |" in markdown


def test_a_row_without_its_gpus_or_packages_is_no_failure(tmp_path, monkeypatch):
    assert [row.name for row in ROWS if not row.gpus] == []
    if not torch.cuda.is_available():
        assert run_row(BY_NAME["logp"], tmp_path, rehearse=False).reason == "no GPU"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert run_row(BY_NAME["nccl"], tmp_path, rehearse=False).reason == "it needs 2 GPUs, and 1 is here"
    monkeypatch.setattr(rows, "find_spec", lambda package: None)
    reasons = [rows.find_missing(BY_NAME[name]) for name in ("engine", "zero 3", "fsdp2")]
    assert reasons == ["no vLLM", "no DeepSpeed", ""]


def test_memory_is_compared_with_what_explain_says(tmp_path, one_thread):
    here = bench.Bench(device="cpu", folder=tmp_path, small=True)
    done = speeds.check_throughput(here)
    # two bytes of a weight, four each of its master, its gradient and two moments
    said = done["--explain says, of without activations, GiB"]
    assert done["without activations, GiB"] == pytest.approx(said, rel=0.02)
    assert done["--explain is"] == "within 15 %" and done["tokens/s"] > 0 and 0 < done["MFU, %"] < 100
    path = here.make_large_model()
    assert speeds.compare_with_explain(path, held_gib=2 * said)["--explain is"] == "off by +100 %"


def test_the_limit_of_a_row_ends_all_its_processes(tmp_path):
    outcome = run_alone(BY_NAME["sync"], tmp_path, rehearse=True, limit_s=0.2)  # torch alone takes longer to import
    assert (outcome.state, outcome.reason) == ("failed", "it took more than 0.2 seconds")
    started = tmp_path / "pid"
    with (tmp_path / "log").open("w") as log:
        said = rows.end_in_time(["sh", "-c", f"sleep 60 & echo $! > {started}; wait"], log, 1.0)
    assert said == "it took more than 1 seconds"
    state = Path(f"/proc/{started.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def run_where_nothing_else_is(folder: Path, *options: str) -> str:
    """Run the script, and every process that it starts, with the packages that it asks for and no others."""
    (folder / "sitecustomize.py").write_text(ONLY_THESE)
    alone = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.gpu_check", "--rehearse", "--out", str(folder / "out"), *options]
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not installed: ray, deepspeed, vllm, peft, pytest" in done.stdout
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


@pytest.mark.verify
@pytest.mark.timeout(300)
def test_the_rows_run_where_only_the_packages_that_they_ask_for_are(tmp_path):
    said = run_where_nothing_else_is(tmp_path, "--only", *(row.name for row in ROWS if row.name != "head"))
    absent = {"zero 1": "DeepSpeed", "zero 2": "DeepSpeed", "zero 3": "DeepSpeed", "tests": "pytest"}
    absent |= dict.fromkeys(("engine", "colocate", "nccl"), "vLLM")
    for name, package in absent.items():
        assert f"\n{name}: not run: no {package}\n" in said
    assert "\nwaits: not run: no device, and no compiler for the pretend one\n" in said
    assert said.endswith(f"{len(ROWS) - 1 - len(absent) - 1} ok, 0 failed, {len(absent) + 1} not run\n"), said


@pytest.mark.one_core
@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["zero 3", *(pytest.param(way, marks=pytest.mark.verify) for way in ranks.WAYS if way != "zero 3")]
)
def test_a_rank_equals_the_local_trainer_and_resumes(tmp_path, way):
    done = run_alone(BY_NAME[way], tmp_path, rehearse=True, limit_s=100.0)
    assert done.state == "ok", done
    assert done.numbers["backend"] == ("nccl" if torch.cuda.is_available() else "gloo")
    assert done.numbers["tensors equal after resume"] >= 3


@pytest.mark.verify
def test_a_resume_that_loses_the_moments_fails(tmp_path):
    """What FSDP2 with offload did on a GPU, where it filled a copy of them."""
    done = subprocess.run(
        [sys.executable, "-c", LOSES_MOMENTS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert re.search(r"fsdp2 offload: after resume \d+ of \d+ tensors have changed, such as state ", done.stdout), done


@pytest.mark.verify
def test_all_rows_are_rehearsed(tmp_path):
    command = [sys.executable, "-m", "tools.gpu_check", "--rehearse", "--minutes", "30", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"{len(ROWS)} ok, 0 failed, 0 not run" in done.stdout, done.stdout + done.stderr
