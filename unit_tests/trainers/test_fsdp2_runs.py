"""Runs on FSDP2: weights are published and saved, other numbers of ranks go on, a death in a save costs nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling.load import load_model
from trainers.checkpoint.saved_policy import load_policy
from unit_tests.helpers.runs import EXACT, LUCK, ROOT, rows_of, start

FSDP = {"backend": "ray", "trainer.strategy": "fsdp2", "trainer.ranks": 2}


def finish(run: subprocess.Popen) -> str:
    out, err = (said.decode() for said in run.communicate())
    assert run.returncode == 0, out + err
    return out


@pytest.fixture
def made(recipe, tmp_path):
    """A run of two steps and its recipe, with rewards that differ."""
    (tmp_path / "luck.py").write_text(LUCK)
    changes = FSDP | {"reward.function": str(tmp_path / "luck.py")}
    path = recipe(changes | {"steps": 2, "checkpoint.every": 1, "trainer.lr": 1e-3, "model.dtype": "bfloat16"})
    finish(start(path, tmp_path / "first"))
    [folder] = (tmp_path / "first").iterdir()
    return path, folder


@pytest.mark.slow
@pytest.mark.usual
@pytest.mark.timeout(300)
def test_a_run_publishes_and_saves_what_it_trains(made, tiny_path):
    _, folder = made
    rows = rows_of(folder)
    assert all(row["sync/probe_gap"] < 0.05 and row["train/mismatch/abs_logp"] < 0.05 for row in rows.values())
    assert json.loads((folder / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    saved = load_file(folder / "model" / "model.safetensors")
    trained = load_model(tiny_path, dtype="float32", attention="sdpa")
    before = {name: p.detach().clone() for name, p in trained.named_parameters()}
    load_policy(trained, folder / "checkpoints" / "step_00002")
    for name, p in trained.named_parameters():
        assert torch.equal(p.detach().bfloat16(), saved[name]), "rounded where it leaves"
        assert not torch.equal(p.detach(), before[name]), name


ON_THREE_CORES = """
import os, runpy, sys
os.cpu_count = lambda: 3  # fewer cores are refused because they would be slow, not because they would be wrong
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_resume_a_run(made, tmp_path, ranks):
    path, folder = made
    program = [sys.executable, "-c", ON_THREE_CORES, "main_rl.py", "--config", path]
    changes = [f"run_dir={tmp_path / 'second'}", f"resume={folder}", f"trainer.ranks={ranks}", "steps=3"]
    done = subprocess.run([*program, *changes], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not to the last bit: trainer.ranks differs" in done.stdout
    [resumed] = (tmp_path / "second").iterdir()
    assert [*rows_of(resumed)] == [2]


DIES_IN_A_SAVE = """
import os, signal
from pathlib import Path
import trainers.checkpoint.fsdp2_state
from algs.grpo import GRPO

class Dying(trainers.checkpoint.fsdp2_state.HuggingFaceStorageWriter):
    def write_data(self, plan, planner):
        written = super().write_data(plan, planner)
        mark = Path(__file__).parent / "died"
        if "step_00002" in str(self.path) and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return written

trainers.checkpoint.fsdp2_state.HuggingFaceStorageWriter = Dying

class Mine(GRPO):
    pass
"""


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_rank_that_dies_in_a_save_does_not_change_the_numbers_of_a_run(recipe, tmp_path):
    (tmp_path / "mine.py").write_text(DIES_IN_A_SAVE)
    path = recipe(EXACT | FSDP | {"steps": 4, "alg": {"file": str(tmp_path / "mine.py")}})
    out = finish(start(path, tmp_path / "struck", "on_failure=resume", "max_resumes=1"))
    assert (tmp_path / "died").exists() and out.count("on_failure=resume: resuming from") == 1
    finish(start(path, tmp_path / "whole"))  # nothing dies any more
    [whole] = (tmp_path / "whole").iterdir()
    folders = sorted((tmp_path / "struck").iterdir())
    made = {}
    for folder in folders:
        made |= rows_of(folder)
    assert made == rows_of(whole)
    got, want = (load_file(folder / "model" / "model.safetensors") for folder in (folders[-1], whole))
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.verify
@pytest.mark.timeout(3000)
def test_the_quickstart_is_mastered_with_fsdp2(tmp_path):
    """From random weights; the engine hf samples."""

    def program(name: str, config: str, *settings: str) -> Path:
        command = [sys.executable, name, "--config", f"configs/{config}", f"run_dir={tmp_path / name}", *settings]
        subprocess.run(command, cwd=ROOT, check=True)
        [folder] = (tmp_path / name).iterdir()
        return folder

    def make(module: str, *settings: str) -> None:
        subprocess.run([sys.executable, "-m", module, *settings], cwd=ROOT, check=True)

    data, model = tmp_path / "data", tmp_path / "model"
    make("data_prep.tiny_model", "--out", str(model), "--hidden-size", "128", "--heads", "4")
    sizes = ("--max", "49", "--padded", "--train", "475", "--eval", "200")
    make("data_prep.arithmetic", "--out", str(data), *sizes, "--sft", "600", "--copies", "24", "--wrong-share", "0.66")
    own = ("save_to=null", f"model.path={model}", f"data.train={data / 'sft.parquet'}")
    warm = program("main_sl.py", "quickstart_sft.yaml", *own)
    rows = (f"data.{name}={data / name}.parquet" for name in ("train", "eval"))
    where = (f"model.path={warm / 'model'}", *rows)
    how = ("backend=ray", "trainer.strategy=fsdp2", "trainer.ranks=2", "rollout.engine=hf")
    folder = program("main_rl.py", "quickstart.yaml", *where, *how)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["before"]["reward/correct"] <= 0.5
    assert summary["after"]["reward/correct"] >= 0.9
