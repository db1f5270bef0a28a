"""The recipes of papers: the loss that each names is the oracle's, and each trains.

The head of a recipe has the paper's title and address, `# differs:` and `# golden: FILE CASE key=value ...`, where the
settings are those in which the oracle's case differs from the recipe.
"""

import math
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

import main_rl
import main_sl
from algs import find_algorithm
from configs.load import apply_override, read_recipe, validate
from configs.schema import RLConfig, SLConfig
from core.errors import UserError
from data_prep import arithmetic, tiny_model
from driver.load_recipe import load_recipe
from tools.papers import ROOT, read_paper, read_papers
from tools.recipe import program_of
from unit_tests.helpers.golden2 import GOLDEN2, rl_groups
from unit_tests.helpers.golden_cases import run_case
from unit_tests.helpers.runs import LUCK

pytestmark = pytest.mark.one_core


def make_algorithm(settings):
    return validate(find_algorithm(settings)[1], settings, prefix="alg")


ADVANTAGES = "advantages/"
PAPERS = {paper.path.stem: paper for paper in read_papers()}


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_recipe_is_valid_and_says_where_it_is_from(name):
    paper = PAPERS[name]
    assert paper.address.startswith("https://") and paper.title
    cls = RLConfig if program_of(paper.path) == "main_rl.py" else SLConfig
    assert load_recipe(cls, str(paper.path), []).cfg.name == name


def algorithm_of(paper):
    """The recipe's algorithm, with the oracle's settings."""
    raw = read_recipe(str(paper.path))
    for setting in paper.case.settings:
        apply_override(raw["alg"], setting)
    return make_algorithm(raw["alg"])


@pytest.mark.parametrize("name", [n for n, p in PAPERS.items() if p.case and not p.case.name.startswith(ADVANTAGES)])
def test_the_loss_of_a_papers_recipe_is_the_oracles(name):
    case = PAPERS[name].case
    got, want = run_case(algorithm_of(PAPERS[name]), case.file, case.name)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(got.gradient, want.gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [n for n, p in PAPERS.items() if p.case and p.case.name.startswith(ADVANTAGES)])
def test_the_advantages_of_a_papers_recipe_are_the_oracles(name):
    groups = algorithm_of(PAPERS[name]).compute_advantages(rl_groups(None, 0.0))
    got = [float(s.advantage[s.loss_mask][0]) for g in groups for s in g]
    assert got == pytest.approx(GOLDEN2["advantages"][PAPERS[name].case.name.removeprefix(ADVANTAGES)], abs=1e-9)


def test_a_recipe_without_a_papers_address_is_refused(tmp_path):
    (tmp_path / "one.yaml").write_text("# GRPO\nbase: ../quickstart.yaml\n")
    with pytest.raises(UserError, match=r"one\.yaml: the first line must be `# TITLE \(https://\.\.\.\)`"):
        read_paper(tmp_path / "one.yaml")


def test_there_are_thirty_papers():
    assert len({paper.address for paper in PAPERS.values()}) >= 30


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a tiny random model, rows of every kind, and a reward that is right by luck."""
    home = tmp_path_factory.mktemp("papers")
    tiny_model.main(["--out", str(home / "model")])
    sizes = ["--max", "9", "--train", "20", "--eval", "5", "--sft", "10", "--pairs", "20"]
    arithmetic.main(["--out", str(home), *sizes])
    (home / "luck.py").write_text(LUCK)
    return home


def take_two_steps(name, home, run_dir):
    """Two steps of a recipe in one process: its loss is finite."""
    raw = read_recipe(str(PAPERS[name].path))
    rl = program_of(PAPERS[name].path) == "main_rl.py"
    small = ["groups_per_step=4", "group_size=8", "rollout.engine=hf", f"reward.function={home}/luck.py"]
    small += ["reward.workers=1", "updates_per_step=2", "data.eval=null"]
    changes = [f"model.path={home}/model", f"data.train={home}/{Path(raw['data']['train']).name}", f"run_dir={run_dir}"]
    changes += ["backend=local", "steps=2", "trainer.warmup_updates=0", *(small if rl else ["rows_per_step=8"])]
    changes += [f"save_to={run_dir}/saved"] if "save_to" in raw else []
    changes += [f"alg.teacher={home}/model"] if "teacher" in raw["alg"] else []
    result = (main_rl if rl else main_sl).run(str(PAPERS[name].path), changes)
    assert result.steps_done == 2 and math.isfinite(result.metrics["train/loss"])


def list_turn() -> list[str]:
    """Five recipes, chosen by the commit, and those that it changed."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    commit = git(["git", "rev-parse", "HEAD"]).stdout.strip() or "0"
    names = sorted(PAPERS)
    first = int(commit, 16) % len(names)
    changed = git(["git", "diff", "--name-only", "HEAD~1", "--", "configs/papers"]).stdout.split()
    return [*dict.fromkeys([*(names * 2)[first : first + 5], *(Path(file).stem for file in changed)])][:10]


@pytest.mark.slow
def test_some_papers_recipes_train_each_commit_has_its_turn(home, tmp_path):
    turn = [name for name in list_turn() if name in PAPERS]
    print(f"papers of this commit: {', '.join(turn)}")
    for name in turn:
        take_two_steps(name, home, tmp_path / name)


@pytest.mark.verify
@pytest.mark.parametrize("name", PAPERS)
def test_every_papers_recipe_trains(name, home, tmp_path):
    take_two_steps(name, home, tmp_path)
