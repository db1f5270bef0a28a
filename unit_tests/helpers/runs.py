"""Whole runs of the programs, what they leave behind, and recipes' parts that several tests share."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from core.metrics import is_evaluation

TIMED = ("time/", "tokens_per_s", "mfu", "compile/")
"""In the names of metrics that depend on the machine."""
OF_TEST = "FEYNRL_TEST_RUN"
"""Variable by which the processes of a run are told from those of other runs."""
ROOT = Path(__file__).parent.parent.parent
SEVENS = '''
def score(prompt, messages):
    """Share of the reply's first eight characters that are a 7."""
    return {"correct": messages[-1]["content"][:8].count("7") / 8}
'''
[MY_LOSS] = re.findall(r"<!-- file: my_loss.py -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LEARN = {"steps": 16, "groups_per_step": 4, "group_size": 16, "trainer.lr": 1e-2}
LUCK = "import zlib\ndef score(p, m): return {'correct': float(zlib.crc32(m[-1]['content'].encode()) % 3 == 0)}\n"
EXACT = {"backend": "ray", "groups_per_step": 1, "group_size": 8, "checkpoint.every": 1, "trainer.lr": 1e-3}
"""One group in a step: with more, their timing decides which of them an engine samples in one batch: the last bits."""


def program(config: str, *overrides: str, main: str = "main_rl.py") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, main, "--config", config, *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def folder_of(tmp_path: Path, name: str = "*") -> Path:
    """Return the folder of the only run of this name that the fixture `recipe` made."""
    [folder] = (tmp_path / "runs").glob(f"{name}-*")
    return folder


def lines_of(folder: Path) -> list[dict]:
    """Every line of a run's log: of the steps, and of the evaluations."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics_of(folder: Path) -> list[dict]:
    """The metrics of the steps."""
    return [line for line in lines_of(folder) if not is_evaluation(line)]


def samples_of(folder: Path, step: int = 0) -> list[dict]:
    """The samples of a step, as a run wrote them."""
    return [json.loads(line) for line in (folder / f"samples/step_{step:05d}.jsonl").read_text().splitlines()]


def evaluations_of(folder: Path) -> dict[int, dict]:
    """The metrics of the evaluations, by the steps behind the weights."""
    return {int(line["step"]): line for line in lines_of(folder) if is_evaluation(line)}


def file_of(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def descendants(pid: int) -> set[int]:
    """Every living process below `pid`; none below one that has ended."""
    try:
        return {process.pid for process in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def numbers_of(folder: Path) -> list[dict[str, str]]:
    """Return the numbers of every step, as hexadecimal; without the seconds, and what is counted per second."""
    kept = [{k: v for k, v in row.items() if not any(part in k for part in TIMED)} for row in metrics_of(folder)]
    return [{k: float(v).hex() for k, v in row.items()} for row in kept]


def start(recipe: str, run_dir: Path, *overrides: str, program: str = "main_rl.py") -> subprocess.Popen:
    command = [sys.executable, program, "--config", recipe, f"run_dir={run_dir}", *overrides]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | {OF_TEST: str(run_dir)}}
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **how)


def rows_of(folder: Path) -> dict[int, dict]:
    """Return what a run logged by step, without seconds; a line that was being written is none."""
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1] if (folder / "metrics.jsonl").exists() else []
    rows: dict[int, dict] = {}
    for row in map(json.loads, lines):
        kept = {k: v for k, v in row.items() if not k.startswith(TIMED)}
        rows.setdefault(int(row["step"]), {}).update(kept)
    return rows


def list_started(run_dir: Path) -> set[int]:
    """Return the living processes of runs that `start` was given a folder for, whatever started them."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(OF_TEST) == str(run_dir) and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


OWN_ENGINE = "from rollouts.engines.base import Capabilities, Engine\nclass Mine(Engine):\n    pass\n"


def check_engines_follow(recipe, tmp_path: Path, **changes: object) -> tuple[Path, list[dict]]:
    """Run three steps on Ray with vLLM; what is sampled must be what is trained on. Return folder and metrics."""
    common = {
        **{"backend": "ray", "steps": 3, "group_size": 16, "rollout.engine": "vllm", "rollout.kv_cache_gib": 0.25},
        "reward.function": file_of(tmp_path / "sevens.py", SEVENS),
    }
    done = program(recipe(common | changes))
    assert done.returncode == 0, done.stderr
    metrics = metrics_of(folder := folder_of(tmp_path))
    assert all(m["train/mismatch/abs_logp"] < 1e-3 for m in metrics), "what was sampled is what is trained on"
    assert all(m["sync/probe_gap"] < 1e-3 for m in metrics)
    return folder, metrics
