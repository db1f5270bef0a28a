"""Recipes, models, folders and user code that are wrong: one sentence, no traceback, nothing left behind."""

import json
import os
import re
import resource
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import main_rl
import main_sl
from data_feeds.chat.tokenizer import ChatTokenizer
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import file_of, folder_of, metrics_of

pytestmark = pytest.mark.one_core

HUGE = 10**29
NUMBERS = {
    # key: values that are refused before the start
    "seed": [-1, HUGE, True, 1.5, float("nan")],
    "steps": [0, -1, True, HUGE, float("inf")],
    "timeout_s": [0, -1.0, 1e30, float("inf"), float("nan"), True],
    "group_size": [True, HUGE],
    "groups_per_step": [0, 2**40],
    "max_staleness": [-1, True],
    "eval_every": [-2, True],
    "trainer.lr": [0, -1e-5, 1e30, float("inf"), float("nan"), True, "fast"],
    "trainer.ranks": [0, True],
    "trainer.eps": [0, float("inf")],
    "trainer.weight_decay": [-1, float("nan"), 1e30],
    "trainer.max_grad_norm": [-1, float("inf"), True],
    "trainer.warmup_updates": [-1, 3, True, HUGE],
    "trainer.micro_batch_tokens": [0, True, 1e12],
    "trainer.logits_mib": [-1, True, 1.5],
    "trainer.betas": [[0.9], [0.9, 1.0], [float("nan"), 0.9], "0.9"],
    "trainer.max_skipped_updates": [0, True],
    "model.lora": [{"r": 0}, {"r": 65}, {"r": True}, {"alpha": float("inf")}, {"r": 4096, "targets": ["q_proj"]}],
    "rollout.temperature": [0, 1e-6, 1e30, float("nan"), True],
    "rollout.max_new_tokens": [0, True, HUGE],
    "rollout.timeout_s": [0, 1e30, float("inf")],
    "rollout.agent": [{"command": ["true"], "timeout_s": 811}],
    "rollout.max_concurrency": [0, True],
    "rollout.kv_cache_gib": [0, float("inf"), True],
    "reward.weights": [{}, {"correct": float("nan")}, {"correct": 1e30}, {"correct": "much"}],
    "reward.timeout_s": [0, float("nan")],
    "reward.workers": [0, True],
    "reward.max_concurrency": [0, True],
    "weight_sync.bucket_mib": [0, True],
    "weight_sync.timeout_s": [1e30],
    "data.eval_rows": [0, True],
    "data.max_invalid_fraction": [-0.1, 1.1, float("nan")],
    "checkpoint.every": [-1, True],
    "alg.clip_low": [0, 1.5, float("nan"), True],
    "alg.clip_high": [-1, float("nan")],
    "name": ["", "a/b", "..", "x" * 300, "a\nb"],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in NUMBERS.items() for v in values], ids=str)
def test_a_value_that_makes_no_sense_is_refused_by_its_key(key, value, refused):
    refused({key: value}, key.rpartition(".")[2])


def test_a_warm_up_longer_than_the_epochs_is_refused_too(refused):
    changes = {"steps": None, "epochs": 1, "trainer.warmup_updates": 4}
    refused(changes, "trainer.warmup_updates=4, and the run makes 3 updates", kind="sl")


def drop(tensors: dict, folder: Path) -> None:
    del tensors["model.layers.0.self_attn.q_proj.weight"]


def add_prefix(tensors: dict, folder: Path) -> None:
    for name in list(tensors):
        tensors[f"_orig_mod.{name}"] = tensors.pop(name)


def reshape(tensors: dict, folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


def add(tensors: dict, folder: Path) -> None:
    tensors["model.extra"] = torch.zeros(2)


def grow_vocabulary(tensors: dict, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 7}))


MODELS = {
    "a tensor is missing": (drop, "lack model.layers.0.self_attn.q_proj.weight"),
    "all have a prefix": (add_prefix, "hold _orig_mod."),
    "a shape differs": (reshape, r"up_proj.weight has shape \[256, 63\] in its files, and \[256, 64\]"),
    "one is too many": (add, "hold model.extra"),
    "another vocabulary": (grow_vocabulary, "and .110, 64. by its config.json"),
}
FILES = {
    "truncated": (lambda whole: whole[:-100], "cannot be loaded"),
    "empty": (lambda _: b"", "cannot be loaded"),
    "no safetensors": (lambda _: b"hello" * 100, "cannot be loaded"),
    "missing": (None, "cannot be loaded"),
}


def copy_of(tiny_path: str, folder: Path, name: str) -> Path:
    shutil.copytree(tiny_path, folder)
    file = folder / "model.safetensors"
    if name in MODELS:
        tensors = load_file(file)
        MODELS[name][0](tensors, folder)
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        whole, make = file.read_bytes(), FILES[name][0]
        file.unlink()
        if make is not None:
            file.write_bytes(make(whole))
    return folder


@pytest.mark.parametrize("role", ["policy", "supervised", "teacher"])
@pytest.mark.parametrize("name", [*MODELS, *FILES])
def test_a_model_whose_files_do_not_fit_is_refused_by_name(name, role, refused, tmp_path, tiny_path):
    folder = copy_of(tiny_path, tmp_path / "model", name)
    changes = {"alg": {"name": "opd", "teacher": str(folder)}} if role == "teacher" else {"model.path": str(folder)}
    err = refused(changes, str(folder), kind="sl" if role == "supervised" else "rl")
    assert re.search((MODELS | FILES)[name][1], err), err


def test_a_reward_model_in_place_of_the_policy_is_refused(recipe, tmp_path, tiny_path):
    from modeling.load import load_scalar_model

    model = load_scalar_model(tiny_path, dtype="float32", attention="sdpa")
    model.save_pretrained(tmp_path / "rm")
    ChatTokenizer(tiny_path, "chat").save(tmp_path / "rm")
    code, err = run_here(main_rl, "--config", recipe({"model.path": str(tmp_path / "rm")}))
    assert code == 2 and err.startswith("error: ") and "score.weight" in err and len(err.splitlines()) == 1, err


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(refused, tmp_path, tiny_path):
    shutil.copytree(tiny_path, tmp_path / "model")
    tokenizer = ChatTokenizer(tiny_path, "chat")
    tokenizer.hf.add_tokens(["<more>"])
    tokenizer.save(tmp_path / "model")
    says = "its tokenizer has ids up to 103, and the model has 103 embeddings"
    refused({"model.path": str(tmp_path / "model")}, says)


def below(path: Path) -> Path:
    path.write_text("a file")
    return path


FOLDERS = {
    # name: (what is set, the sentence)
    "save_to a file": (lambda d, m: {"save_to": str(below(d / "f"))}, "save_to=.* is a file"),
    "save_to below a file": (lambda d, m: {"save_to": str(below(d / "f") / "x")}, "save_to=.* lies below .*f, which"),
    "save_to the model": (lambda d, m: {"save_to": m}, "is a model that this run reads"),
    "save_to the teacher": (
        lambda d, m: {"save_to": str(shutil.copytree(m, d / "t")), "alg": {"name": "opd", "teacher": str(d / "t")}},
        "is a model that this run reads",
    ),
    "save_to the opponent": (
        lambda d, m: {
            **{"save_to": str(shutil.copytree(m, d / "o")), "rollout.opponent": str(d / "o")},
            **{"rollout.env": "textarena", "rollout.max_turns": 2},
        },
        "is a model that this run reads",
    ),
    "save_to a link to the model": (
        lambda d, m: {"save_to": str(linked(d / "l", m))},
        "is a model that this run reads",
    ),
    "save_to a link": (lambda d, m: {"save_to": str(linked(d / "l", str(d / "own")))}, "is a link: name .*/own$"),
    "save_to a mount point": (lambda d, m: {"save_to": "/proc"}, "is a mount point: name a folder in it"),
    "save_to another's folder": (lambda d, m: {"save_to": str(below(d / "f").parent)}, "holds .*and no run of FeynRL"),
    "save_to above the runs": (lambda d, m: {"save_to": str(d / "new"), "run_dir": str(d / "new/r")}, "holds run_dir="),
    "run_dir a file": (lambda d, m: {"run_dir": str(below(d / "f"))}, "run_dir=.*no run folder can be made"),
    "run_dir below a file": (lambda d, m: {"run_dir": str(below(d / "f") / "r")}, "run_dir=.*Not a directory"),
    "run_dir too long": (lambda d, m: {"run_dir": str(d / ("x" * 300))}, "run_dir=.*File name too long"),
    "run_dir where nobody writes": (lambda d, m: {"run_dir": "/proc/runs"}, "run_dir=/proc/runs: no run folder"),
}


def linked(link: Path, target: str) -> Path:
    link.symlink_to(target)
    return link


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_written_is_known_before_the_start(name, refused, tmp_path, tiny_path):
    make, words = FOLDERS[name]
    (tmp_path / "own").mkdir()
    changes = make(tmp_path / "own", tiny_path)
    before = sorted((tmp_path / "own").rglob("*"))
    assert re.search(words, refused(changes))
    assert sorted((tmp_path / "own").rglob("*")) == before, "nothing was made or lost"


LOSSES = {
    # name: (body of the loss, the sentence)
    "a mean": ("return -(policy.logp * tokens.advantage).mean(), {}", "the loss has shape .*one value per token"),
    "no metrics": ("return -policy.logp", "must return .loss, metrics."),
    "a number": ("return 1.0, {}", "the loss is float"),
    "whole numbers": ("return (policy.logp * 0).long(), {}", "dtype torch.int64"),
    "detached": ("return -policy.logp.detach(), {}", "has no gradient"),
    "a metric that is a mean": ("return -policy.logp, {'m': policy.logp.mean()}", "m has shape"),
    "a metric that is a number": ("return -policy.logp, {'m': 1.0}", "m is float"),
    "a metric of the framework's": (
        "return -policy.logp, {'loss': policy.logp}",
        "a metric 'loss', which the framework",
    ),
    "on another device": ("return -policy.logp.to('meta'), {}", "is on meta, expected cpu"),
    "a metric that is not finite": ("return -policy.logp, {'m': policy.logp / 0}", "the metric train/m is -inf"),
    "never finite": ("return policy.logp / 0, {}", "all 2 updates of the run were skipped"),
}
ADVANTAGES = {
    "nan": ("return [[s.with_advantage(float('nan')) for s in g] for g in groups]", "the advantage nan"),
    "a group dropped": ("return groups[1:]", "was given 4 groups of 16 samples and returned 3 groups of 12"),
    "a list": (
        "return [[replace(s, advantage=[1.0] * len(s.token_ids)) for s in g] for g in groups]",
        "advantage of a Sample must be a numpy array of float32, found list",
    ),
    "another length": (
        "return [[replace(s, advantage=s.rollout_logp[1:]) for s in g] for g in groups]",
        "must have one length: token_ids has .*, advantage has",
    ),
    "samples swapped": ("return groups[::-1]", "every sample in its group and order"),
}
ALGORITHM = """
from dataclasses import replace
from algs.base import PolicyGradient
class Mine(PolicyGradient):
    def compute_advantages(self, groups):
        {advantages}
    def loss(self, policy, tokens):
        {loss}
"""
FINE_LOSS = "return -policy.logp * tokens.advantage, {}"
FINE_ADVANTAGES = "return [[s.with_advantage(1.0) for s in g] for g in groups]"
ENVIRONMENTS = {
    "text": ("'more'", "must return None or a list of messages, it returned 'more'"),
    "a number": ("5", "it returned 5"),
    "one message": ("{'role': 'user', 'content': '1'}", r"must return a list of messages, .* return \[message\]"),
    "an unknown role": ("[{'role': 'teacher', 'content': '1'}]", "answered as 'teacher', which is none of system"),
    "no content": ("[{'role': 'user'}]", "it returned {'role': 'user'}"),
    "content that is no text": ("[{'role': 'user', 'content': 3}]", "it returned"),
}
ENVIRONMENT = """
from rollouts.envs.base import Env
class Mine(Env):
    def __init__(self, prompt): pass
    async def step(self, reply): return {answer}
    def scores(self): return {{}}
"""
ENGINES = {
    "more tokens than asked": ("token_ids=d.token_ids * 9, logp=d.logp * 9, versions=d.versions * 9", "where 1 to 8"),
    "no token": ("token_ids=[], logp=[], versions=[]", "0 tokens where 1 to 8 were asked for"),
    "columns of two lengths": ("logp=d.logp[1:]", "log-probabilities and"),
    "a positive log-probability": ("logp=[0.5] * len(d.logp)", "the log-probability 0.5"),
    "nan": ("logp=[float('nan')] * len(d.logp)", "the log-probability nan"),
    "a token below 0": ("token_ids=[-1] * len(d.token_ids)", "the token ids"),
    "another reason to stop": ("stop='tired'", "the stop reason 'tired'"),
    "a version that it never had": ("versions=[7] * len(d.versions)", "its engine did not sample from the version"),
}
ENGINE = """
from dataclasses import replace
from rollouts.engines.hf import HfEngine
class Mine(HfEngine):
    async def generate(self, token_ids, *, max_new_tokens, seed):
        d = await super().generate(token_ids, max_new_tokens=max_new_tokens, seed=seed)
        return replace(d, {changes})
"""
REWARDS = {
    "too large": ("return {'correct': 1e308}", "numbers up to 1e.09 by name"),
    "nan": ("return {'correct': float('nan')}", "'correct': nan"),
    "text": ("return {'correct': 'yes'}", "'correct': 'yes'"),
    "a list": ("return [1.0]", "must return a dict of named numbers, it returned .1.0."),
    "another part": ("return {'right': 1.0}", "reward.weights names 'correct'"),
}


def user_code(kind: str, name: str, folder: Path) -> tuple[dict, str]:
    """Return the changes to a recipe that bring one piece of wrong user code, and what the sentence must hold."""
    match kind:
        case "loss":
            body, words = LOSSES[name]
            text = ALGORITHM.format(advantages=FINE_ADVANTAGES, loss=body)
            return {"alg": {"file": file_of(folder / "mine.py", text)}}, words
        case "advantages":
            body, words = ADVANTAGES[name]
            text = ALGORITHM.format(advantages=body, loss=FINE_LOSS)
            return {"alg": {"file": file_of(folder / "mine.py", text)}}, words
        case "environment":
            answer, words = ENVIRONMENTS[name]
            text = ENVIRONMENT.format(answer=answer)
            ends = file_of(folder / "ends.py", ENGINE.format(changes="stop='eos'"))
            return {
                "rollout.env": file_of(folder / "env.py", text),
                "rollout.max_turns": 2,
                "rollout.engine": ends,
            }, words
        case "engine":
            changes, words = ENGINES[name]
            return {"rollout.engine": file_of(folder / "engine.py", ENGINE.format(changes=changes))}, words
        case _:
            body, words = REWARDS[name]
            return {"reward.function": file_of(folder / "r.py", f"def score(prompt, messages):\n    {body}\n")}, words


KINDS = {
    "loss": LOSSES,
    "advantages": ADVANTAGES,
    "environment": ENVIRONMENTS,
    "engine": ENGINES,
    "reward": REWARDS,
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names], ids=str)
def test_user_code_that_misbehaves_stops_the_run_with_one_sentence(kind, name, recipe, tmp_path):
    changes, words = user_code(kind, name, tmp_path)
    code, err = run_here(main_rl, "--config", recipe(changes))
    assert code in (1, 2) and err.count("\n") == 1 and re.search(words, err), err
    summary = json.loads(((folder := folder_of(tmp_path)) / "summary.json").read_text())
    assert summary["exit_reason"].startswith("stopped: ") and not (folder / "model").exists()


def run_with_small_files(program, path: str, limit: int) -> tuple[int, str]:
    """Run with a limit on the size of a file, which fails as a full disk does: in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        return run_here(program, "--config", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


@pytest.mark.parametrize(
    ("changes", "limit", "words"),
    [
        ({"steps": 60}, 8_000, "metrics.jsonl cannot be written: .*; the steps before are logged"),
        ({"checkpoint.every": 1}, 100_000, r"step_00001.partial cannot be written"),
        ({}, 100_000, "model cannot be written"),
    ],
    ids=["log", "checkpoint", "model"],
)
def test_a_full_disk_stops_the_run_and_what_was_logged_stays(changes, limit, words, recipe, tmp_path):
    code, err = run_with_small_files(main_sl, recipe(changes, kind="sl"), limit)
    assert code == 1 and err.count("\n") == 1 and re.search(words, err), err
    rows = metrics_of(folder := folder_of(tmp_path))
    assert rows and [row["step"] for row in rows] == list(range(len(rows))), "only whole lines"
    assert not list(folder.rglob("*.partial"))


def test_two_runs_of_one_name_with_dots_get_folders_of_that_name(tmp_path, monkeypatch):
    from driver.records import run_folder

    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260101-000000")
    names = [run_folder.RunFolder(str(tmp_path), "qwen2.5-grpo", {}).path.name for _ in range(3)]
    assert names == [f"qwen2.5-grpo-20260101-000000{n}" for n in ("", ".2", ".3")]


def test_a_later_run_may_replace_a_saved_model_and_everybody_may_read_it(recipe, tmp_path):
    out = tmp_path / "out"
    path = recipe({"save_to": str(out)}, kind="sl")
    old = os.umask(0o022)
    try:
        assert run_here(main_sl, "--config", path)[0] == 0
        (out / "left_from_before").touch()
        assert run_here(main_sl, "--config", path)[0] == 0
    finally:
        os.umask(old)
    assert json.loads((out / "feynrl.json").read_text())["steps"] == 2
    assert not (out / "left_from_before").exists() and (out / "model.safetensors").is_file()
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.rglob("*") if file.is_file()} == {0o644}


def test_kto_needs_both_labels(refused, tmp_path):
    row = {"messages": [{"role": "user", "content": "1="}, {"role": "assistant", "content": "2"}], "label": True}
    data = file_of(tmp_path / "rows.jsonl", 6 * (json.dumps(row) + "\n"))
    refused({"data.train": data, "alg": {"name": "kto"}}, "label", "true", kind="sl")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    # name: (the file, what happens to it, the sentence)
    "weights cut off": ("policy/state.pt", truncate, "policy/state.pt has .* of .* bytes"),
    "weights gone": ("policy/state.pt", Path.unlink, "policy/state.pt is missing"),
    "counters cut off": ("rank_0.pt", truncate, "rank_0.pt has .* of .* bytes"),
    "progress gone": ("progress.json", Path.unlink, "progress.json is missing"),
    "progress cut off": ("progress.json", truncate, "progress.json has .* of .* bytes"),
    "progress of another size": ("progress.json", lambda p: p.write_text("{}"), "progress.json has 2 of"),
    "sizes no JSON": ("COMPLETE", lambda p: p.write_text("yes"), "COMPLETE: Expecting value"),
    "sizes of another form": ("COMPLETE", lambda p: p.write_text("[1]"), "is damaged: COMPLETE"),
}


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory, tiny_path, sums) -> Path:
    """The run folder of a supervised run with checkpoints after two and after four steps."""
    home = tmp_path_factory.mktemp("checkpointed")
    raw = {
        "name": "test",
        "steps": 4,
        "backend": "local",
        "run_dir": str(home / "runs"),
        "model": {"path": tiny_path, "dtype": "float32"},
        "rows_per_step": 5,
        "alg": {"name": "sft"},
        "data": {"train": str(sums / "sft.parquet"), "max_tokens": 32},
        "trainer": {"lr": 1e-3},
        "checkpoint": {"every": 2},
    }
    (home / "sl.yaml").write_text(yaml.safe_dump(raw))
    assert run_here(main_sl, "--config", str(home / "sl.yaml"))[0] == 0
    return folder_of(home)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_known_before_reading_and_the_checkpoint_before_is_used(name, checkpointed, tmp_path, capsys):
    file, damage, words = DAMAGE[name]
    run = tmp_path / "run"
    shutil.copytree(checkpointed, run, symlinks=True)
    damage(run / "checkpoints" / "step_00004" / file)
    recipe, again = str(checkpointed.parent.parent / "sl.yaml"), f"run_dir={tmp_path / 'again'}"

    code, err = run_here(main_sl, "--config", recipe, again, "steps=6", f"resume={run / 'checkpoints' / 'step_00004'}")
    assert code == 2 and re.search(f"step_00004 is damaged: .*|{words}", err) and err.count("\n") == 1, err
    assert re.search(words, err) and not (tmp_path / "again").exists(), err

    capsys.readouterr()
    code, err = run_here(main_sl, "--config", recipe, again, "steps=6", f"resume={run}")
    out = capsys.readouterr().out
    assert code == 0 and re.search(f"{words}.*: it is not used", out) and "resumed after 2 steps" in out, (err, out)
