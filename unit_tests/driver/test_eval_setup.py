"""Start of an evaluation, whole: what is explained, refused and said, and the evaluations of a training run."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import main_eval
from core import gpus
from core.errors import RunStopped
from core.timing.clock import Clock
from core.types.samples import Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.rows.eval_sets import load_sets
from driver.checks import memory_estimate
from driver.evaluation.evaluator import EvalResult, Evaluator
from driver.evaluation.suites.resume import Resumed
from driver.evaluation.suites.run import EvalRun
from driver.evaluation.suites.setup import (
    PreparedEval,
    check_eval_devices,
    explain_eval,
    load_eval_recipe,
    prepare_eval,
    start_eval,
    with_base,
    write_merged,
)
from driver.start.rollouts import check_siblings
from rewards.weights import plan_rewards
from rollouts.second_reward import AUTHOR, FAILED, PREFIX
from rollouts.worker import RolloutWorker
from tools.benchmarks.simulated_run import answer
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import folder_of
from unit_tests.helpers.sentences import tell

RAW: dict[str, Any] = {
    "name": "eval",
    "model": {"path": "models/none", "dtype": "float32"},
    "data": {"sets": [{"path": "a.jsonl"}, {"path": "b.jsonl", "samples": 2}], "max_prompt_tokens": 64},
    "reward": {"function": "arithmetic"},
    "rollout": {"engine": "hf", "max_new_tokens": 8, "num_engines": 3},
    "samples": 4,
    "pass_reward": 0.5,
}


def test_a_set_with_one_sample_of_a_prompt_has_no_siblings_to_compare(tmp_path):
    (ranks := tmp_path / "ranks.py").write_text("def score_group(prompt, conversations):\n    return [{}]\n")
    alone = (
        f"samples=1: score_group() of {ranks} compares the samples of a prompt, so there must be at least two: "
        "set samples to 2 or more"
    )

    def check(samples: int, of_second: int) -> None:
        sets = [{"path": "a.jsonl"}, {"path": "b.jsonl", "samples": of_second}]
        raw = RAW | {"samples": samples, "data": RAW["data"] | {"sets": sets}, "reward": {"function": str(ranks)}}
        cfg = load_eval_recipe(raw, [])
        check_siblings(cfg, plan_rewards(cfg.reward))

    assert tell(lambda: check(1, 3)) == tell(lambda: check(4, 1)) == alone
    check(2, 3)


def test_an_evaluation_explains_what_follows_from_it(monkeypatch):
    monkeypatch.setattr("driver.evaluation.suites.setup.count_gpus", lambda: 0)
    local = [
        "backend=local",
        "rollout.num_engines=1",
        "rollout.temperature=0",
        "samples=1",
        "data.sets=[{path: a.jsonl}]",
    ]
    said = {name: explain_eval(load_eval_recipe(RAW, given)).split("# what follows from it\n")[1].splitlines() for name,
            given in (("ray", ["data.max_prompt_tokens=32"]), ("local", local))}  # fmt: skip
    assert said["ray"][:4] == [
        "samples per prompt     a 4, b 2; at temperature 1",
        "a sample               at most 32 prompt + 8 new = 40 tokens",
        "engines                hf, in 3 Ray actors, each 1 ranks and 64 prompts at a time",
        "a sample passes        with a reward of 0.5 or more",
    ]
    assert said["local"][:3] == [
        "samples per prompt     a 1; greedy",
        "a sample               at most 64 prompt + 8 new = 72 tokens",
        "engines                hf, in this process, each 1 ranks and 64 prompts at a time",
    ]
    assert [lines[-1] for lines in said.values()] == [
        "# the rows of data.sets are unknown: model.path=models/none is no folder here"
    ] * 2


def test_missing_devices_are_counted(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def check(*overrides: str, gpus: int = 0) -> str | None:
        for module in ("driver.evaluation.suites.setup", "driver.start.devices"):
            monkeypatch.setattr(f"{module}.count_gpus", lambda: gpus)
        return check_eval_devices(load_eval_recipe(RAW, overrides))

    more = "engine ranks are more than this machine's"
    assert [check("rollout.num_engines=4"), check("rollout.num_engines=2", gpus=2), check(gpus=3)] == [None] * 3
    assert check("rollout.num_engines=5") == f"5 {more} 4 CPU cores: lower rollout.num_engines"
    assert check("rollout.num_engines=2", "rollout.tensor_parallel_size=3", "rollout.engine=vllm") == (
        f"6 {more} 4 CPU cores: lower rollout.num_engines or rollout.tensor_parallel_size"
    )
    assert check(gpus=2) == f"3 {more} 2 GPUs: lower rollout.num_engines"
    assert check("rollout.num_engines=9", "ray_address=a:1") is None
    assert check("backend=local", "rollout.num_engines=1") is None
    assert check("device=cuda") == "device is cuda, and this machine has no GPU: set device=auto"
    monkeypatch.setattr(os, "cpu_count", lambda: None)  # as on a system that does not tell
    assert check("rollout.num_engines=1") is None
    assert check("rollout.num_engines=2") == f"2 {more} 1 CPU cores: lower rollout.num_engines"
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr("driver.evaluation.suites.setup.check_gpus", lambda cfg: "the GPUs are old")
    assert check() == "the GPUs are old" and check("ray_address=a:1") is None
    assert tell(lambda: prepare_eval(load_eval_recipe(RAW, []))) == "the GPUs are old"
    assert tell(lambda: load_eval_recipe(RAW, ["ray_address=a"])).startswith(
        "ray_address='a' is not of the form host:port"
    )
    assert "rollout.engine" in tell(lambda: load_eval_recipe(RAW, ["rollout.engine=no_engine"]))


def test_an_adapter_or_checkpoint_is_named_where_it_belongs(tiny_path, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    (tmp_path / "adapter_config.json").write_text("{}")
    cfg = load_eval_recipe(RAW, [f"model.path={tmp_path}"])
    assert tell(lambda: prepare_eval(cfg)) == (
        f"model.path={tmp_path} is an adapter without its model: name it in model.adapter, and in model.path the model "
        "that it was trained on"
    )
    alone = load_eval_recipe(RAW, ["model.path=" + tiny_path, "model.adapter=models/none"])
    assert tell(lambda: prepare_eval(alone)) == (
        "model.adapter=models/none has no adapter_config.json: name the folder of an adapter in PEFT's format"
    )
    checkpoint: Any = SimpleNamespace(base="models/base")
    assert with_base(cfg, checkpoint).model.path == "models/base"
    with_adapter = load_eval_recipe(RAW, ["model.adapter=x"])
    assert tell(lambda: with_base(with_adapter, checkpoint)) == (
        "model.path=models/none is a checkpoint, and its adapter is in it: leave model.adapter out"
    )
    written: list[Any] = []
    for name in ("write_checkpoint_model", "merge_adapter"):
        monkeypatch.setattr(
            f"driver.evaluation.suites.setup.{name}", lambda *a, n=name, **k: written.append((n, *a, k))
        )
    prepared: Any = SimpleNamespace(cfg=with_adapter, checkpoint=None)
    write_merged(prepared, tmp_path)
    write_merged(SimpleNamespace(cfg=cfg, checkpoint=checkpoint), tmp_path)  # type: ignore[arg-type]
    write_merged(SimpleNamespace(cfg=cfg, checkpoint=None), tmp_path)  # type: ignore[arg-type]
    assert written == [
        ("merge_adapter", with_adapter.model, "x", tmp_path, {}),
        ("write_checkpoint_model", checkpoint, tmp_path, {"trust_remote_code": False}),
    ]


FAILS = "def score(prompt, messages):\n    return {'correct': float(len(messages[-1]['content']) > 0)}\n"


def test_an_evaluation_says_what_it_leaves_out_and_keeps_its_samples(tiny_path, tmp_path, capsys, one_thread):
    rows = [{"question": f"{i}+1=", "id": "a", "answer": str(i)} for i in range(2)] + [{"question": "1" * 60}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text(FAILS)
    path = tmp_path / "eval.json"
    data = {"sets": [{"path": str(tmp_path / "a.jsonl")}], "max_prompt_tokens": 32, "max_invalid_fraction": 0.5}
    raw = RAW | {"backend": "local", "run_dir": str(tmp_path / "runs"), "data": data, "samples": 2, "resamples": 100}
    raw |= {"model": {"path": tiny_path, "dtype": "float32"}, "rollout": {"engine": "hf", "max_new_tokens": 4}}
    raw |= {"reward": {"function": str(tmp_path / "score.py"), "workers": 1}}
    path.write_text(json.dumps(raw))
    assert run_here(main_eval, "--config", str(path)) == (0, "")
    lines = capsys.readouterr().out.splitlines()
    form = (
        f"data.sets[0]={tmp_path}/a.jsonl is of form question_answer (recognised): messages = question, answer = answer"
    )
    assert form in lines
    why = "62 tokens, more than data.max_prompt_tokens=32"
    assert f"a: 1 rows are invalid and not evaluated: 1 too_long (such as row 2: {why})" in lines
    assert "a: 1 rows have the id of an earlier row: # and their row number are appended to it" in lines
    folder = folder_of(tmp_path, "eval")
    settings = json.loads((folder / "evaluation.json").read_text())
    assert settings["settings"]["data.sets.a.form"] == "question_answer" and settings["settings"]["samples"] == 2
    assert next(iter(settings["sha256"])) == "the file of reward.function" and len(settings["sha256"]) > 2
    assert not (folder / "merged_model").exists() and (folder / "generations.parquet").is_file()


def test_an_evaluation_of_a_run_reports_rewards_of_one_version():
    def evaluate(*groups: list[Any], failed: float = 0.0, second: float | None = None) -> EvalResult | None:
        cfg: Any = SimpleNamespace(
            eval_pass_reward=1.0,
            reward=SimpleNamespace(max_failed_fraction=failed),
            eval_reward=None if second is None else SimpleNamespace(max_failed_fraction=second),
        )
        generation: Any = SimpleNamespace(buffer=SimpleNamespace(version=7))
        return Evaluator(cfg, [Prompt(id="0", messages=[])], generation).measure([*groups], "after step 3")

    good, bad = replace(answer(0, 2), reward=1.0), answer(0, 2)
    found = evaluate([good, bad])
    assert found is not None and (found.when, found.version) == ("after step 3", 2)
    assert {name: found.metrics[name] for name in ("reward/mean", "pass@1", "pass@2", "version")} == {
        **{"reward/mean": 0.5, "pass@1": 0.5, "pass@2": 1.0, "version": 2.0}
    }
    assert {name.split("/")[0] for name in found.metrics} <= {"reward", "rollout", "pass@1", "pass@2", "version"}
    assert evaluate([good], [replace(answer(0, 3), reward=1.0)]) is None
    broken = replace(answer(0, 2), reward=None, failure="it broke")
    silent = replace(broken, action_mask=broken.action_mask & False)
    assert "it broke" in tell(lambda: evaluate([good, broken]), RunStopped)
    alone = evaluate([silent], failed=1.0)
    assert alone is not None and alone.version == 7
    noted = replace(good, counts={PREFIX + FAILED: 1.0}, notes=[{"by": AUTHOR, "text": "no luck"}])
    assert tell(lambda: evaluate([noted], second=0.5), RunStopped) == (
        "eval_reward failed 1 of 1 samples, more than eval_reward.max_failed_fraction=0.5; the first: no luck"
    )
    assert evaluate([noted], second=1.0) is not None and evaluate([noted]) is not None


@pytest.mark.parametrize(
    ("best", "stop", "decides"),
    [(None, None, False), ("eval/loss", None, True), (None, "eval/x", True), ("loss", "evaluation", False)],
)
def test_an_evaluation_decides_where_a_run_reads_it(best, stop, decides):
    stop_when = None if stop is None else SimpleNamespace(metric=stop)
    cfg: Any = SimpleNamespace(checkpoint=SimpleNamespace(best=best), stop_when=stop_when)
    unused: Any = None
    assert Evaluator(cfg, [], unused).decides is decides


def test_every_set_has_the_system_prompt_of_the_recipe(tiny_path, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    data = {"sets": [{"path": str(rows)}], "max_prompt_tokens": 64, "system_prompt": "be brief"}
    cfg = load_eval_recipe(RAW | {"data": data}, [])
    [found] = load_sets(cfg, ChatTokenizer(tiny_path, "chat"))
    assert found.prompts[0].messages[0] == {"role": "system", "content": "be brief"}


def small(tiny_path: str, sums: Path) -> dict[str, Any]:
    """Return a recipe with a model and rows that are there."""
    data = {"sets": [{"path": str(sums / "eval.parquet")}], "max_prompt_tokens": 32}
    rollout = {"engine": "hf", "max_new_tokens": 8}
    model = {"path": tiny_path, "dtype": "float32"}
    return RAW | {"backend": "local", "model": model, "data": data, "rollout": rollout}


def test_what_a_model_cannot_do_is_one_sentence_before_the_start(tiny_path: str, sums: Path):
    raw = small(tiny_path, sums)
    for given, sentence in (
        ("data.template_args.x=1", "data.template_args.x: the chat template of this model does not read it"),
        ("rollout.tool_parser=hermis", "rollout.tool_parser=hermis is no parser; name the form"),
    ):
        assert tell(lambda given=given: prepare_eval(load_eval_recipe(raw, [given]))).startswith(sentence)


def test_a_special_token_is_allowed_where_replies_hold_it(tiny_path: str, sums: Path):
    given = ["rollout.allowed_tokens=['7', <|user|>]"]
    assert tell(lambda: prepare_eval(load_eval_recipe(small(tiny_path, sums), given))) == (
        "rollout.allowed_tokens names <|user|>, a special token, which rewards and environments do not see: set "
        "rollout.skip_special_tokens to false"
    )
    prepared = prepare_eval(load_eval_recipe(small(tiny_path, sums), [*given, "rollout.skip_special_tokens=false"]))
    assert prepared.cfg.rollout.allowed_tokens == ["7", "<|user|>"]


def test_an_opponent_that_does_not_fit_beside_vllm_is_refused(
    tiny_path: str, sums: Path, monkeypatch: pytest.MonkeyPatch
):
    gpu = gpus.Gpu(name="GPU", capability=(9, 0), total_gib=20.0, used_gib=0.0)
    monkeypatch.setattr(memory_estimate, "find_gpus", lambda timeout_s: gpus.Gpus(devices=(gpu,)))
    for module in ("driver.evaluation.suites.setup", "driver.start.devices", "driver.checks.memory_estimate"):
        monkeypatch.setattr(f"{module}.count_gpus", lambda: 1)
    given = ["backend=ray", "rollout.engine=vllm", "rollout.env=textarena", "rollout.max_turns=2"]
    given += [f"rollout.opponent={tiny_path}", "rollout.gpu_memory_utilization=0.95"]
    said = tell(lambda: prepare_eval(load_eval_recipe(small(tiny_path, sums), given)))
    assert said.startswith(f"rollout.opponent={tiny_path} takes 0.75 GiB of an engine's GPU, and vLLM leaves 0.00 of")


NO_ENGINE = """
from core.errors import UserError
from rollouts.engines.hf import HfEngine

class Mine(HfEngine):
    def __init__(self, config):
        raise UserError(f"no engine for {config.model_path}")
"""


def test_an_engine_that_cannot_start_leaves_no_merged_model(tiny_path, tmp_path, sums, monkeypatch):
    (tmp_path / "mine.py").write_text(NO_ENGINE)
    raw = small(tiny_path, sums) | {"rollout": {"engine": str(tmp_path / "mine.py"), "max_new_tokens": 8}}
    checkpoint: Any = SimpleNamespace(base=tiny_path)
    prepared = replace(prepare_eval(load_eval_recipe(raw, [])), checkpoint=checkpoint, why_text="it is blind")
    written: list[Path] = []

    def write(prepared: Any, folder: Path) -> None:
        folder.mkdir()
        written.append(folder)

    monkeypatch.setattr("driver.evaluation.suites.setup.write_merged", write)
    (run := tmp_path / "run").mkdir()
    said: list[str] = []
    console, folder = SimpleNamespace(say=said.append), SimpleNamespace(path=run)
    context: Any = SimpleNamespace(cluster=None, console=console, folder=folder, clock=Clock())
    assert tell(lambda: asyncio.run(start_eval(prepared, context))) == f"no engine for {run / 'merged_model'}"
    assert written == [run / "merged_model"] and not written[0].exists()
    assert json.loads((run / "evaluation.json").read_text()) == prepared.settings
    assert said[0] == "it is blind"


def start(prepared: PreparedEval, folder: Path) -> tuple[EvalRun, Any]:
    """Return a started evaluation and its context; the engines are closed."""
    context: Any = SimpleNamespace(
        cluster=None, console=SimpleNamespace(say=print), folder=SimpleNamespace(path=folder), clock=Clock()
    )

    async def body() -> EvalRun:
        run = await start_eval(prepared, context)
        await context.engines.call_all(RolloutWorker.close)
        return run

    return asyncio.run(body()), context


def test_an_evaluation_asks_the_engines_whose_deaths_are_watched(tiny_path, tmp_path, sums, one_thread):
    run, context = start(prepare_eval(load_eval_recipe(small(tiny_path, sums), ["reward.workers=1"])), tmp_path)
    assert run.requests.engines is context.availability, "else a dead engine would end it"


def test_rewards_know_the_folder_of_an_evaluation_and_of_the_resumed_one(tiny_path, tmp_path, sums, one_thread):
    """A judge keeps its verdicts in the one, and finds those that were paid for in the other."""
    old, new = tmp_path / "old", tmp_path / "new"
    new.mkdir()
    prepared = prepare_eval(load_eval_recipe(small(tiny_path, sums), ["reward.workers=1"]))
    _, context = start(replace(prepared, resumed=Resumed(folder=old, done={})), new)
    of_rewards = context.engines.worker.rewards.plan.run
    assert (of_rewards.folder, of_rewards.earlier_folder) == (str(new), str(old))
