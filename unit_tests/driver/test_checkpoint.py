"""A checkpoint is whole or it is none; and a run that goes on from one is the run that was never stopped."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import main_rl
import main_sl
from configs.load import add_new_keys
from configs.schema import RLConfig, SLConfig
from core.cluster.workers import Local
from core.errors import RunStopped, UserError
from data_feeds.packing.batches import micro_batches
from driver.checkpoint import (
    COMPLETE,
    BestBy,
    RunState,
    find_checkpoint,
    is_due,
    list_checkpoints,
    read_checkpoint,
    remove_old_checkpoints,
    write_checkpoint,
)
from driver.checkpoint_model import find_checkpoint_model
from driver.load_recipe import load_recipe
from driver.resume import bitwise_only_changes, check_settings, collect_settings, restore_before
from driver.start.trainers import build_trainer
from trainers.checkpoint.state import rank_file
from unit_tests.helpers.checkpoints import Writer, stand
from unit_tests.helpers.examples import Malicious, run_here, some_groups, with_values
from unit_tests.helpers.ray_trainers import plan_of
from unit_tests.helpers.runs import LUCK, ROOT, evaluations_of, file_of, folder_of, numbers_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Elsewhere:
    def save_state(self, folder: Path) -> None:
        pass  # the folder is another machine's


BY_LOSS = BestBy(metric="eval/loss", lower=True)


def write(home: Path, steps_done: int, **metrics: float) -> Path:
    measured = {name.replace("_", "/"): value for name, value in metrics.items()}
    return asyncio.run(write_checkpoint(home, Local(Writer()), stand(steps_done, **measured)))


def names(home: Path) -> list[str]:
    return sorted(p.name for p in home.iterdir())


def test_a_checkpoint_is_what_was_written(tmp_path):
    folder = write(tmp_path / "new", 10, eval_loss=0.1)
    assert names(folder) == [COMPLETE, "progress.json", "rank_0.pt"] and folder.name == "step_00010"
    assert names(tmp_path / "new") == ["step_00010"]
    assert read_checkpoint(folder).state == stand(10, **{"eval/loss": 0.1})


def test_progress_that_no_run_writes_is_damage(tmp_path):
    folder = write(tmp_path, 10)
    for text, why in (
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[1]", "driver.checkpoint.RunState() argument after ** must be a mapping, not list"),
        ('{"steps": 3}', "RunState.__init__() got an unexpected keyword argument 'steps'"),
    ):
        (folder / "progress.json").write_text(text)
        sizes = json.loads((folder / COMPLETE).read_text())
        (folder / COMPLETE).write_text(json.dumps(sizes | {"progress.json": len(text)}))
        with pytest.raises(UserError) as refused:
            read_checkpoint(folder)
        assert str(refused.value) == f"the checkpoint {folder} is damaged: progress.json: {why}"


def test_a_model_is_made_of_no_unfinished_checkpoint_or_reward_model(tmp_path):
    assert find_checkpoint_model(str(tmp_path)) is None and find_checkpoint_model("x" * 5000) is None
    (begun := tmp_path / "step_00003").mkdir()
    (begun / "progress.json").touch()
    state = replace(stand(7), recipe={"settings": {"alg.name": "reward_model"}})
    scoring = asyncio.run(write_checkpoint(tmp_path, Local(Writer()), state))
    for folder, sentence in (
        (begun, "is a checkpoint that was not finished: name another one, or a model folder of the run"),
        (scoring, "is of a reward model, which scores text and writes none: name a run with a policy"),
    ):
        with pytest.raises(UserError) as refused:
            find_checkpoint_model(str(folder))
        assert str(refused.value) == f"{folder} {sentence}"


def test_the_newest_and_the_best_stay(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 4.0}
    for step, loss in losses.items():
        write(tmp_path, step, eval_loss=loss)
        remove_old_checkpoints(tmp_path, keep=2, by=BY_LOSS)
    assert names(tmp_path) == ["best", "last", "step_00002", "step_00004", "step_00005"], "of two equals the older"
    assert os.readlink(tmp_path / "last") == "step_00005" and os.readlink(tmp_path / "best") == "step_00002"
    write(tmp_path, 6, eval_loss=0.5)
    remove_old_checkpoints(tmp_path, keep=1, by=BY_LOSS)
    assert names(tmp_path) == ["best", "last", "step_00006"], "the former best has no claim left"


def test_the_best_is_the_highest_where_that_is_asked(tmp_path):
    for step, reward in {1: 0.1, 2: 0.9, 3: 0.9, 4: 0.3}.items():
        write(tmp_path, step, eval_reward=reward)
        best = remove_old_checkpoints(tmp_path, keep=1, by=BestBy(metric="eval/reward", lower=False))
    assert names(tmp_path) == ["best", "last", "step_00002", "step_00004"]
    assert best is not None and os.readlink(tmp_path / "best") == best.folder.name == "step_00002"


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path):
    for step, loss in {1: float("nan"), 2: 3.0, 3: float("-inf"), 4: 2.0, 5: 4.0}.items():
        write(tmp_path, step, eval_loss=loss)
        best = remove_old_checkpoints(tmp_path, keep=1, by=BY_LOSS)
        assert best is None if step == 1 else best is not None
    assert names(tmp_path) == ["best", "last", "step_00004", "step_00005"]


BEST = {
    # name of the metric: (changes, the sentence); None where the recipe is valid
    "eval/reward/mean": ({"eval_every": 0}, "it is measured with eval_every"),
    "eval/pass@4": ({"eval_every": 2}, "checkpoints are made every 3: make checkpoint.every a multiple"),
    "eval/reward/correct": ({}, None),
    "reward/polite": ({}, None),  # a reward may return parts that the recipe does not weigh
    "reward/men": ({}, "this run logs no such metric .did you mean 'reward/mean'"),
    "train/mine": ({}, "this run logs no such metric"),
    "evl/reward/mean": ({}, "this run logs no such metric .did you mean 'eval/reward/mean'"),
    "eval/loss": ({"checkpoint.every": 0}, "set checkpoint.every"),
}


@pytest.mark.parametrize("metric", BEST)
def test_a_best_that_cannot_be_compared_is_refused(metric, recipe, sums):
    changes, words = BEST[metric]
    held_out = {"data.eval": str(sums / "eval.parquet"), "eval_every": 3, "checkpoint.every": 3}
    path = recipe(held_out | {"checkpoint.best": metric} | changes)
    if words is None:
        assert load_recipe(RLConfig, path, []).cfg.checkpoint.best == metric
        return
    with pytest.raises(UserError, match=f"^checkpoint.best={metric}: .*{words}"):
        load_recipe(RLConfig, path, [])


def test_a_best_that_no_step_logs_stops_the_run_at_its_first_checkpoint(recipe, tmp_path):
    mine = file_of(tmp_path / "mine.py", "from algs.sft import SFT\nclass Mine(SFT):\n    dft: bool = True\n")
    path = recipe({"checkpoint": {"every": 1, "best": "train/mine"}, "alg": {"file": mine}}, kind="sl")
    code, err = run_here(main_sl, "--config", path, "name=none")
    assert code == 1 and "checkpoint.best=train/mine: no step has logged it; the steps log" in err, err
    path = recipe({"checkpoint": {"every": 1, "keep": 1, "best": "train/loss", "best_mode": "highest"}}, kind="sl")
    assert run_here(main_sl, "--config", path, "name=first") == (0, "")
    folder = folder_of(tmp_path, "first")
    losses = [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] > losses[1] and os.readlink(folder / "checkpoints/best") == "step_00001"
    assert (folder / "best_model/model.safetensors").read_bytes() != (folder / "model/model.safetensors").read_bytes()
    assert json.loads((folder / "best_model/feynrl.json").read_text())["steps"] == 1


def test_without_a_measurement_there_is_no_best(tmp_path):
    for step in (99_999, 100_000, 100_001):
        write(tmp_path, step)
        remove_old_checkpoints(tmp_path, keep=2, by=BY_LOSS)
    assert names(tmp_path) == ["last", "step_100000", "step_100001"], "in the order of numbers, not of names"
    assert [c.state.steps_done for c in list_checkpoints(tmp_path)] == [100_000, 100_001]


def test_half_a_checkpoint_is_none(tmp_path):
    run, home = tmp_path, tmp_path / "checkpoints"
    with pytest.raises(UserError, match="has no complete checkpoint"):
        find_checkpoint(str(run))
    whole, later = write(home, 2), write(home, 4)
    (later / COMPLETE).unlink()
    os.replace(write(home, 6), home / "step_00006.partial")
    assert find_checkpoint(str(run)).folder == whole
    assert find_checkpoint(str(whole)).state.steps_done == 2
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_checkpoint(str(home / "step_00006.partial"))
    with pytest.raises(UserError, match="there is no such folder"):
        find_checkpoint(str(tmp_path / "nowhere"))
    (home / "step_00006.partial" / "stale").touch()
    assert names(write(home, 6)) == [COMPLETE, "progress.json", "rank_0.pt"], "what a killed write left is in no other"


def test_a_link_names_the_checkpoint_it_points_at(tmp_path):
    write(tmp_path, 3, eval_loss=1.0)
    write(tmp_path, 6, eval_loss=2.0)
    remove_old_checkpoints(tmp_path, keep=2, by=BY_LOSS)
    assert find_checkpoint(str(tmp_path / "best")).state.steps_done == 3
    assert find_checkpoint(str(tmp_path / "last")).state.steps_done == 6


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from driver.checkpoint import RunState, write_checkpoint
from core.cluster.workers import Local

class Deadly:
    def save_state(self, folder):
        (folder / "rank_0.pt").write_text("wei")
        os.kill(os.getpid(), signal.SIGKILL)

stand = RunState(steps_done=4, metrics={}, position={}, recipe={})
asyncio.run(write_checkpoint(Path(sys.argv[1]), Local(Deadly()), stand))
"""


@pytest.mark.one_core
@pytest.mark.one_core
@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path):
    home = tmp_path / "checkpoints"
    write(home, 2)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(home)], cwd=ROOT, env=os.environ | {"PYTHONPATH": "."})
    assert killed.returncode == -signal.SIGKILL
    assert names(home) == ["step_00002", "step_00004.partial"]
    assert find_checkpoint(str(tmp_path)).state.steps_done == 2


def test_a_rank_that_writes_elsewhere_stops_the_run(tmp_path):
    with pytest.raises(RunStopped, match=r"trainer rank 0 .* run_dir must be a folder that every machine"):
        asyncio.run(write_checkpoint(tmp_path, Local(Elsewhere()), stand(1)))
    assert list_checkpoints(tmp_path) == []


def test_checkpoints_are_due_on_schedule_and_at_the_end():
    assert [n for n in range(1, 8) if is_due(n, every=3, steps=7)] == [3, 6, 7]
    assert [n for n in range(1, 7) if is_due(n, every=3, steps=6)] == [3, 6]
    assert not any(is_due(n, every=0, steps=6) for n in range(1, 7))


@pytest.mark.parametrize(("name", "dtype"), [("grpo", "float32"), ("grpo", "bfloat16"), ("ppo", "bfloat16")])
def test_the_reference_trainer_goes_on_to_the_bit(tiny_path, tmp_path, name, dtype):
    """Learning rates of warm-up and decay, moments, master weights and the critic's are all as they were."""
    settings = {"lr": 1e-2, "lr_schedule": "cosine", "warmup_updates": 3}
    plan = plan_of(tiny_path, alg={"name": name}, dtype=dtype, **settings)
    [micro] = micro_batches(with_values(some_groups()), "token", 60, ranks=1, padded=True)
    kept, resumed = build_trainer(None, plan), build_trainer(None, plan)
    for _ in range(2):
        kept.step([micro])
    torch.rand(3)
    kept.save_state(tmp_path)
    drawn, want = torch.rand(3), [kept.step([micro]) for _ in range(2)]
    resumed.load_state(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    assert [resumed.step([micro]) for _ in range(2)] == want
    assert torch.equal(resumed.flatten_weights(), kept.flatten_weights())
    assert all(torch.equal(a, b) for a, b in zip(resumed.policy.master, kept.policy.master, strict=True))


def test_a_checkpoint_of_other_trainers_is_refused(tiny_path, tmp_path):
    trainer = build_trainer(None, plan_of(tiny_path))
    trainer.save_state(tmp_path)
    saved = torch.load(tmp_path / rank_file(0), weights_only=True)
    cases = [
        ({"trainer.ranks": 2}, "trainer.ranks is 1 and the checkpoint .* made with 2"),
        ({"backend": "ray"}, "backend is local and"),
        ({"model": {}}, "does not hold what this run trains"),
    ]
    for changes, words in cases:
        torch.save(saved | {"fits": saved["fits"] | changes}, tmp_path / rank_file(0))
        with pytest.raises(UserError, match=words):
            trainer.load_state(tmp_path)


@pytest.mark.parametrize("file", ["rank_0.pt", "policy/state.pt"])
def test_a_checkpoint_that_holds_code_is_refused_and_its_code_does_not_run(tiny_path, tmp_path, file):
    trainer = build_trainer(None, plan_of(tiny_path))
    trainer.save_state(tmp_path)
    torch.save(torch.load(tmp_path / file, weights_only=True) | {"more": Malicious(tmp_path / "ran")}, tmp_path / file)
    with pytest.raises(UserError, match=r"^resume: .* is refused, because it is damaged or holds .* such as code"):
        trainer.load_state(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    torch.load(tmp_path / file, weights_only=False)
    assert (tmp_path / "ran").exists(), "the code is good"


def assert_same_end(whole: Path, resumed: Path, first_step: int) -> None:
    want, got = numbers_of(whole), numbers_of(resumed)
    assert len(want) > first_step > 0 and got == want[first_step:]
    evaluated = evaluations_of(whole)
    assert evaluations_of(resumed) == {step: line for step, line in evaluated.items() if step >= first_step}
    was, now = (json.loads((folder / "summary.json").read_text()) for folder in (whole, resumed))
    ends = [[summary.get(when) for when in ("before", "after")] for summary in (was, now)]
    assert ends[0] == ends[1], "before is the untrained model"
    assert (resumed / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()


SCHEDULED = {"trainer.lr_schedule": "linear", "trainer.warmup_updates": 2, "steps": 5}


def test_a_resumed_supervised_run_is_the_run_that_was_never_stopped(recipe, tmp_path, sums):
    held_out = {"data.eval": str(sums / "sft.parquet"), "eval_every": 1}
    path = recipe(SCHEDULED | held_out, kind="sl")
    assert run_here(main_sl, "--config", path, "name=whole") == (0, "")
    assert run_here(main_sl, "--config", path, "name=kept", "checkpoint={every: 2, keep: 1}") == (0, "")
    kept, whole = folder_of(tmp_path, "kept"), folder_of(tmp_path, "whole")
    assert names(kept / "checkpoints") == ["best", "last", "step_00005"], "the loss falls, so the last is the best"
    assert not (whole / "checkpoints").exists()
    assert numbers_of(kept) == numbers_of(whole), "saving changes nothing"

    assert run_here(main_sl, "--config", path, "name=first", "checkpoint.every=2", "checkpoint.keep=9")[0] == 0
    at = folder_of(tmp_path, "first") / "checkpoints/step_00002"
    assert run_here(main_sl, "--config", path, "name=second", f"resume={at}", "checkpoint.every=2") == (0, "")
    second = folder_of(tmp_path, "second")
    assert_same_end(whole, second, first_step=2)
    assert json.loads((second / "summary.json").read_text())["resumed"]["steps_done"] == 2
    assert names(second / "checkpoints") == ["best", "last", "step_00004", "step_00005"]

    code, err = run_here(main_sl, "--config", path, f"resume={kept}")
    assert code == 2 and f"steps=5, and resume={kept} has done 5" in err
    code, err = run_here(main_sl, "--config", path, f"resume={kept}", "steps=7")
    assert code == 2 and "steps is 7 and was 5" in err and "learning rate depends" in err


CHANGED = {
    # override: what the sentence begins with; None where the run goes on
    "trainer.lr=0.1": "error: trainer.lr is 0.1 and was 0.001",
    "seed=1": "error: seed is 1 and was 0",
    "alg.dft=true": "error: alg.dft is True and was False",
    "rows_per_step=3": "error: rows_per_step is 3",
    "trainer.optimizer=sgd": "error: trainer.optimizer is 'sgd'",
    "trainer.betas=[0.8, 0.9]": "error: trainer.betas is",
    "trainer.weight_decay=0": "error: trainer.weight_decay is 0.0 and was 0.03",
    "trainer.lr_schedule=cosine": "error: trainer.lr_schedule is 'cosine' and was 'constant'",
    "data.template=plain": "error: data.template is 'plain'",
    "model.dtype=bfloat16": "error: model.dtype is 'bfloat16' and was 'float32'",
    "backend=ray": "error: backend is 'ray' and was 'local'",
    "steps=1": "error: steps=1, and resume=",
    "steps=3": None,
    "trainer.micro_batch_tokens=40": None,
    "trainer.logits_mib=1": None,
    "timeout_s=100": None,
    "data.eval_rows=3": "error: data.eval_rows is set and would not be read",
}


def test_a_resume_with_another_recipe_names_the_first_key_that_differs(recipe, tmp_path, capsys):
    text = (ROOT / "algs/sft.py").read_text()
    (tmp_path / "mine.py").write_text(text)
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    changes = {"alg": {"file": str(tmp_path / "mine.py")}, "data.train": str(rows), "trainer.weight_decay": 0.03}
    path = recipe(changes, kind="sl")
    assert run_here(main_sl, "--config", path, "name=first", "checkpoint.every=1", "steps=1") == (0, "")
    resume = f"resume={folder_of(tmp_path, 'first')}"

    for changed, words in CHANGED.items():
        code, err = run_here(main_sl, "--config", path, resume, "steps=2", "name=again", changed)
        out = capsys.readouterr().out
        if words is None:
            assert code == 0, (changed, err)
            assert ("not to the last bit" in out) == ("micro_batch" in changed or "logits" in changed)
        else:
            assert code == 2 and err.startswith(words) and len(err.splitlines()) == 1, (changed, err)

    code, err = run_here(main_rl, "--config", recipe(), resume)
    assert code == 2 and "a run of the other program" in err
    path = recipe(changes, kind="sl")
    rows.write_text(rows.read_text() * 2)
    code, err = run_here(main_sl, "--config", path, resume, "steps=2")
    assert code == 2 and "what the rows of data.train hold changed since the checkpoint" in err, err
    (tmp_path / "mine.py").write_text(text + "\n")
    code, err = run_here(main_sl, "--config", path, resume, "steps=2")
    assert code == 2 and "the file of alg changed since the checkpoint" in err, err


def test_a_checkpoint_of_an_earlier_version_had_the_defaults_of_newer_keys(recipe):
    now = collect_settings(load_recipe(SLConfig, recipe(kind="sl"), []), {}, {})["settings"]
    newer = ("trainer.optimizer_settings", "trainer.layout", "model.lora", "trainer.betas", "model.images")
    then = {key: value for key, value in now.items() if key not in newer}
    assert len(now) - len(then) == len(newer)
    check_settings(add_new_keys(then, now, SLConfig), now)
    for key, value in (("trainer.layout", "padded"), ("trainer.optimizer_settings", {"eps": 1.0})):
        changed = now | {key: value}
        with pytest.raises(UserError, match=rf"^{key} is .* and was (auto|'auto'|{{}})"):
            check_settings(add_new_keys(then, changed, SLConfig), changed)
    changed = {key: value for key, value in now.items() if key != "model.lora"} | {"model.lora.r": 16}
    with pytest.raises(UserError, match=r"^model\.lora\.r is 16 and was None"):
        check_settings(add_new_keys(then, changed, SLConfig), changed)


@pytest.mark.parametrize("key", ["data.max_invalid_fraction", "weight_sync.delta", "record_tokens"])
def test_a_resume_may_change_what_no_number_depends_on(key, recipe):
    loaded = load_recipe(RLConfig, recipe({"model.lora": {"merge_on_save": True}}), [])
    now = collect_settings(loaded, {}, {})["settings"]
    changed = {key: "another"}
    check_settings(now, now | changed)
    check_settings(now | {"model.lora.merge_on_save": False}, now)
    with pytest.raises(UserError, match=r"^model\.lora\.r is 3"):
        check_settings(now, now | changed | {"model.lora.r": 3})


def test_held_out_prompts_move_last_bits_where_an_engine_answers_them():
    same = {"seed": 0, "trainer.sequence_parallel": 1, "trainer.offload": False}
    sl = {"eval_every": 0, "data.eval": "a.jsonl"} | same
    now = {"eval_every": 5, "data.eval.path": "a.jsonl"} | same
    assert bitwise_only_changes(sl, now) == []
    rl = {"groups_per_step": 8}
    assert sorted(bitwise_only_changes(sl | rl, now | rl)) == ["data.eval", "data.eval.path", "eval_every"]
    assert bitwise_only_changes(now | rl, now | rl) == []


MOVED = {
    # key: (what it was, what it is, whether only last bits depend on it)
    "rollout.servers": (["http://a:1"], ["http://b:1"], True),
    "rollout.max_concurrency": (None, 8, True),
    "rollout.agent.address": (["http://a:1"], ["http://b:1"], False),
    "rollout.gateway.listen": ("10.0.0.1", "10.0.0.2", False),
    "rollout.restarts": (3, 9, False),
    "profile.steps": ([], [5], False),
}


@pytest.mark.parametrize("key", MOVED)
def test_where_and_how_engines_run_may_change(key):
    was, now, moves_bits = MOVED[key]
    then = {"trainer.lr_schedule": "constant", key: was}
    check_settings(then, then | {key: now})
    assert bitwise_only_changes(then, then | {key: now}) == ([key] if moves_bits else [])


def test_a_run_whose_bits_differ_may_be_resumed_without_the_claim():
    then = {"rollout.batch_invariant": True, "trainer.lr_schedule": "constant"}
    check_settings(then, now := then | {"rollout.batch_invariant": False})
    assert bitwise_only_changes(then, now) == ["rollout.batch_invariant"]


def test_a_resumed_run_keeps_before_of_an_equal_evaluation():
    then = {"eval_samples": 4, "eval_every": 2, "data.eval": "a.jsonl", "trainer.lr": 1.0}
    state = RunState(steps_done=9, metrics={}, position={}, recipe={"settings": then}, before={"reward/mean": 0.1})

    def restore(**changes: object) -> dict:
        return restore_before(state, {"settings": then | changes})

    assert restore(eval_every=1) == {"before": {"reward/mean": 0.1}}
    assert restore(eval_samples=8) == restore(**{"data.eval": "b.jsonl"}) == restore(eval_reward="mine.py") == {}
    assert restore_before(replace(state, before={}), {"settings": then}) == {}, "an earlier checkpoint"


def test_a_run_without_a_checkpoint_cannot_be_resumed(recipe, tmp_path):
    path = recipe(kind="sl")
    assert run_here(main_sl, "--config", path, "steps=1", "name=first")[0] == 0
    code, err = run_here(main_sl, "--config", path, f"resume={folder_of(tmp_path, 'first')}")
    assert code == 2 and "has no complete checkpoint" in err and len(err.splitlines()) == 1


def test_a_resumed_rl_run_draws_samples_and_learns_the_same(recipe, tmp_path):
    """With PPO's critic and its warm-up, two updates a step, and tickets that ran ahead for groups drawn again."""
    (tmp_path / "luck.py").write_text(LUCK)
    changes = {
        "alg": {"name": "ppo", "critic_lr": 1e-3, "critic_warmup": 3, "critic_lam": 1.0},
        "updates_per_step": 2,
        "reward.function": str(tmp_path / "luck.py"),
        "checkpoint": {"every": 2, "keep": 9},
    }
    path = recipe(SCHEDULED | changes)
    assert run_here(main_rl, "--config", path, "name=whole") == (0, "")
    whole = folder_of(tmp_path, "whole")
    at = find_checkpoint(str(whole / "checkpoints/step_00002"))
    position = {"ticket": 12, "started": [8, 9, 10, 11], "n_reported": 0, "finished": [], "images": {}}
    assert at.state.position == position
    assert names(at.folder) == [COMPLETE, "critic", "policy", "progress.json", "rank_0.pt"]
    assert run_here(main_rl, "--config", path, "name=resumed", f"resume={at.folder}") == (0, "")
    assert_same_end(whole, folder_of(tmp_path, "resumed"), first_step=2)
    assert ["train/grad_norm" in row for row in numbers_of(whole)] == [False, False, False, True, True]


def test_tickets_of_groups_drawn_again_are_behind_a_resumed_run_too(recipe, tmp_path):
    (tmp_path / "luck.py").write_text(LUCK)
    changes = {"alg.dynamic_sampling": True, "reward.function": str(tmp_path / "luck.py"), "group_size": 2, "steps": 3}
    path = recipe(changes | {"checkpoint": {"every": 2, "keep": 9}})
    assert run_here(main_rl, "--config", path, "name=whole") == (0, "")
    at = find_checkpoint(str(folder_of(tmp_path, "whole") / "checkpoints/step_00002"))
    assert at.state.position["ticket"] > 2 * 4
    assert run_here(main_rl, "--config", path, "name=resumed", f"resume={at.folder}") == (0, "")
    assert_same_end(folder_of(tmp_path, "whole"), folder_of(tmp_path, "resumed"), first_step=2)


MORTAL = """
import os, signal
from algs.sft import SFT
calls = []
class Mortal(SFT):
    def loss(self, policy, tokens):
        calls.append(1)
        if len(calls) == int(os.environ.get("DIE_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(policy, tokens)
"""


@pytest.mark.one_core
@pytest.mark.one_core
@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_been(recipe, tmp_path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    changes = SCHEDULED | {"alg": {"file": str(tmp_path / "mortal.py")}, "checkpoint": {"every": 2}}
    path = recipe(changes, kind="sl")
    command = [sys.executable, "main_sl.py", "--config", path, "name=killed"]
    dead = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "DIE_AT": "4"})
    assert dead.returncode == -signal.SIGKILL, "in the fourth step, two after the checkpoint"
    killed = folder_of(tmp_path, "killed")
    assert len(numbers_of(killed)) == 3 and not (killed / "summary.json").exists()
    half = killed / "checkpoints/step_00004.partial"  # as a kill somewhat later would have left it
    half.mkdir()
    (half / "rank_0.pt").write_bytes(b"PK")
    assert run_here(main_sl, "--config", path, "name=whole") == (0, "")
    assert run_here(main_sl, "--config", path, "name=resumed", f"resume={killed}") == (0, "")
    whole, resumed = folder_of(tmp_path, "whole"), folder_of(tmp_path, "resumed")
    assert_same_end(whole, resumed, first_step=2)
    assert numbers_of(killed) == numbers_of(whole)[:3]


@pytest.mark.verify
@pytest.mark.timeout(300)
def test_a_run_of_two_deepspeed_ranks_goes_on_to_the_bit(recipe, tmp_path):
    parallel = {"backend": "ray", "trainer.ranks": 2, "trainer.zero_stage": 2, "steps": 4}
    path = recipe(SCHEDULED | parallel | {"checkpoint.every": 2}, kind="sl")
    assert run_here(main_sl, "--config", path, "name=whole") == (0, "")
    whole = folder_of(tmp_path, "whole")
    half_way = f"resume={whole / 'checkpoints/step_00002'}"
    assert run_here(main_sl, "--config", path, "name=resumed", half_way) == (0, "")
    assert_same_end(whole, folder_of(tmp_path, "resumed"), first_step=2)
