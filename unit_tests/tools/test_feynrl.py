"""The command feynrl, `import feynrl`, and the link to the clone that gives both."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
import venv
from importlib import import_module
from pathlib import Path

import pytest

import feynrl
import main_rl
from tools.mutants import copy_tracked
from unit_tests.helpers.examples import run_here

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "transformers", "ray", "vllm", "deepspeed", "pydantic", "numpy", "yaml")


@pytest.mark.parametrize("words", [[], ["nonsense"], ["--config", "x.yaml"]])
def test_a_word_that_is_no_command_is_answered_with_the_commands(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["feynrl", *words])
    with pytest.raises(SystemExit) as end:
        feynrl.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("usage: feynrl rl|sl|eval|doctor|report ...\nfeynrl: error: ")


def test_importing_and_help_import_nothing_heavy():
    code = (
        "import sys, feynrl; sys.argv = ['feynrl', '--help']\n"
        "try: feynrl.main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert all(f"\n  {name} " in out for name in feynrl.PROGRAMS)


@pytest.mark.parametrize("name", feynrl.PROGRAMS)
def test_each_command_is_its_program(name, monkeypatch, capsys):
    """Its own words reach it, and its --help names the command."""
    monkeypatch.setattr(sys, "argv", ["feynrl", name, "--help"])
    with pytest.raises(SystemExit) as end:
        feynrl.main()
    assert end.value.code == 0
    by_command = capsys.readouterr().out
    assert by_command.startswith(f"usage: feynrl {name} [-h] ")
    monkeypatch.setattr(sys, "argv", [f"feynrl {name}", "--help"])
    with pytest.raises(SystemExit):
        import_module(feynrl.PROGRAMS[name][0]).main()
    assert capsys.readouterr().out == by_command


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rl", "--config", "nowhere.yaml"], "error: --config nowhere.yaml: there is no such file\n"),
        (["doctor", "nowhere"], "error: --config nowhere: there is no such file\n"),
        (["report", "nowhere"], "error: nowhere is no folder: "),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, sentence, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["feynrl", *words])
    assert feynrl.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(sentence) and said.count("\n") == 1


def test_a_notebook_trains_and_evaluates(recipe, tmp_path, sums, one_thread):
    """A notebook's cell runs within an event loop. What is evaluated is the model that the run has saved."""
    keys = {
        "backend": "local",
        "run_dir": str(tmp_path / "runs"),
        "data": {"sets": [{"path": str(sums / "eval.parquet")}], "max_prompt_tokens": 32},
        "reward": {"function": "arithmetic", "workers": 1},
        "rollout": {"engine": "hf", "max_new_tokens": 4},
    }

    async def cell():
        warmed = feynrl.run_sl(recipe(kind="sl"), ["steps=1"])
        trained = feynrl.run_rl(recipe(), ["steps=1", f"model.path={warmed.model}"])
        return warmed, trained, feynrl.run_eval(keys, [f"model.path={trained.model}", "samples=2", "name=eval"])

    warmed, trained, evaluated = asyncio.run(cell())
    assert warmed.steps_done == trained.steps_done == 1
    assert "train/loss" in warmed.metrics and "reward/mean" in trained.metrics
    assert (evaluated.table[0].prompts, evaluated.table[0].samples) == (10, 20)
    assert (evaluated.folder / "results.json").is_file()


@pytest.fixture(scope="module")
def linked(tmp_path_factory) -> Path:
    """A folder with a fresh clone, and an environment in which it is installed: env/ sees the packages of this one."""
    folder = tmp_path_factory.mktemp("linked")
    copy_tracked(ROOT, folder / "clone")
    venv.create(folder / "env", symlinks=True)
    [site] = (folder / "env").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    before = {path.name for path in (folder / "clone").iterdir()}
    python = str(folder / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps"]
    subprocess.run([*pip, "--editable", str(folder / "clone")], check=True, cwd=folder, capture_output=True)
    left = {path.name for path in (folder / "clone").iterdir()} - before
    assert left <= {"build"}, "nothing that lies on the path of every run"
    return folder


def run_in(folder: Path, linked: Path, *command: str) -> str:
    """What a command of the new environment prints, without the variables by which a test finds the clone."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(linked / "env" / "bin" / command[0]), *command[1:]]
    return subprocess.run(words, cwd=folder, env=env, check=True, text=True, stdout=subprocess.PIPE).stdout


@pytest.mark.slow
def test_the_link_brings_all_folders_the_command_and_vllms_plugin_unlisted(linked, tmp_path):
    """A folder that appears later is found as well."""
    (linked / "clone" / "added_later").mkdir()
    (linked / "clone" / "added_later" / "__init__.py").touch()
    [plugin] = run_in(
        tmp_path,
        linked,
        "python",
        "-c",
        "from importlib.metadata import entry_points as found\n"
        "import added_later, algs.base, core.cli, data_prep, feynrl, main_eval, main_rl, main_sl, tools.layers\n"
        "print([one.load().__module__ for one in found(group='vllm.general_plugins') if one.name == 'feynrl'])",
    ).splitlines()
    assert plugin == "['rollouts.engines.vllm_support.plugin']"


@pytest.mark.slow
def test_the_command_works_from_everywhere_also_beside_a_core_of_the_users(linked, tmp_path):
    """The command does not look into the current folder; Python does, and there the user's own come first."""
    for name in ("core", "tools"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("WHOSE = 'mine'\n")
    clone = linked / "clone"
    explained = run_in(clone, linked, "feynrl", "rl", "--config", "configs/tiny.yaml", "--explain")
    assert "# what follows from it" in explained
    config = str(clone / "configs/tiny.yaml")
    assert run_in(tmp_path, linked, "feynrl", "rl", "--config", config, "--explain") == explained
    script = "import core, tools; print(core.WHOSE, tools.WHOSE)"
    assert run_in(tmp_path, linked, "python", "-c", script) == "mine mine\n"


@pytest.mark.verify
def test_a_run_by_the_command_is_the_run_by_its_program(linked, recipe, tmp_path):
    path = recipe()
    run_in(tmp_path, linked, "feynrl", "rl", "--config", path, "name=command")
    assert run_here(main_rl, "--config", path, "name=program") == (0, "")
    [command], [program] = ([*(tmp_path / "runs").glob(f"{name}-*")] for name in ("command", "program"))
    weights = "model/model.safetensors"
    assert (command / weights).read_bytes() == (program / weights).read_bytes()
