"""Runs with a judge: what it writes, what it costs, and that its key is in no file."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import main_eval
import main_rl
from analysis.report.step_data import make_whole_step
from core.metrics import find_metric
from tools.benchmarks.judge_server import Asked, JudgeServer, count_sevens
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import evaluations_of, metrics_of, samples_of

SECRET = "sk-do-not-tell-0123456789"


def judged(url: str, **more: Any) -> dict[str, Any]:
    settings = {"base_url": url, "model": "j", "api_key_env": "MY_JUDGE_KEY", "outage_s": 5, "timeout_s": 5, **more}
    return {"function": "judge", "weights": {"score": 1.0}, "timeout_s": 30, "settings": settings}


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.verify)])
def test_a_run_writes_verdicts_and_costs_and_no_key(trained, monkeypatch, backend):
    monkeypatch.setenv("MY_JUDGE_KEY", SECRET)
    server = JudgeServer(unreadable_every=5, key=SECRET)
    with server.running() as url:
        reward = judged(url, parse_retries=0)
        folder = trained({"reward": reward, "backend": backend, "reward.max_failed_fraction": 1.0, "steps": 1})
    [line] = metrics_of(folder)
    rows = samples_of(folder)
    failed = [row for row in rows if row["failure"]]
    assert server.answered == line["judge/calls"] == line["judge/spent_calls"]
    assert failed and all(row["reward"] is None and row["notes"][0]["reading"] is None for row in failed)
    assert all("I count them" in row["notes"][0]["text"] for row in rows if not row["failure"] and row["completion"])
    [first, *_] = make_whole_step(rows, step=0)["groups"]
    assert [s["notes"] for s in first["samples"]] == [row["notes"] for row in rows if row["group"] == first["group"]]
    assert {"judge/seconds_p50", "judge/tokens_in", "judge/unreadable_fraction"} <= line.keys()
    assert [name for name in line if name.startswith("judge/") and find_metric(name) is None] == []
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert texts and not any(SECRET.encode() in text for text in texts)


def test_an_outage_costs_no_reward_and_no_wrong_sample(trained):
    """The server takes none of 60 requests in the middle of a step: it breaks them off, then refuses them."""
    server = JudgeServer()

    def judge_until_the_outage(asked: Asked) -> str:
        if server.answered == 5:
            server.statuses.extend([0] * 4 + [503, 429, 503, 502] * 14)
        return count_sevens(asked)

    server.judge = judge_until_the_outage
    with server.running() as url:
        reward = judged(url, api_key_env=None, outage_s=60, cache=False, max_concurrency=2)
        reward |= {"timeout_s": 70, "max_failed_fraction": 0}
        folder = trained({"reward": reward, "steps": 1})
    [line], rows = metrics_of(folder), samples_of(folder)
    assert server.refused == line["judge/retries"] == 60 and line["rollout/failed"] == 0
    for row in rows:
        assert row["reward"] == pytest.approx(1 + 9 * row["completion"].strip()[:8].count("7") / 8, abs=1e-3)


def test_a_run_ends_after_the_step_that_used_up_judge_budget_and_can_go_on(recipe, tmp_path, monkeypatch):
    """A step of 16 samples costs up to 16 calls of 110 tokens: the second step is the last."""
    limit = {"tokens": 2000}
    monkeypatch.setenv("MY_JUDGE_KEY", SECRET)
    with JudgeServer().running() as url:
        changes = {"reward": judged(url) | {"judge_budget": limit}, "steps": 4, "checkpoint.every": 1}
        code, err = run_here(main_rl, "--config", recipe(changes))
        assert code == 0, err
        [first] = (tmp_path / "runs").glob("test-*")
        lines = metrics_of(first)
        [key] = limit
        spent = [line[f"judge/spent_{key}"] for line in lines]
        assert 1 <= len(lines) < 4 and spent[-1] >= limit[key] and all(s < limit[key] for s in spent[:-1])
        more = [f"resume={first}", f"reward.judge_budget.{key}=100000"]
        code, err = run_here(main_rl, "--config", recipe(changes), *more)
        assert code == 0, err
        [second] = set((tmp_path / "runs").glob("test-*")) - {first}
        assert metrics_of(second)[0][f"judge/spent_{key}"] > spent[-1]
        assert len(lines) + len(metrics_of(second)) == 4


def test_a_wrong_key_stops_the_run_with_one_sentence(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", SECRET)
    with JudgeServer(key="another").running() as url:
        code, err = run_here(main_rl, "--config", recipe({"reward": judged(url)}))
    assert code == 2 and "answered 401" in err and SECRET not in err and "Traceback" not in err
    assert not any(SECRET in path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file())


def test_a_deadline_below_the_judge_s_is_refused(refused):
    reward = judged("http://127.0.0.1:1/v1", api_key_env=None) | {"timeout_s": 9}
    refused({"reward": reward}, "reward.timeout_s=9 must be at least reward.settings.outage_s=5 + timeout_s=5")


GROUPED = """
async def score_group(prompt, conversations):
    texts = [messages[-1]["content"] for messages in conversations]
    return [{"longest": float(len(text) == max(map(len, texts))), "shown": len(texts)} for text in texts]
"""


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.verify)])
def test_siblings_are_compared_in_training_and_evaluation(trained, refused, tmp_path, sums, backend):
    file = tmp_path / "mine.py"
    file.write_text(GROUPED)
    changes = {"reward": {"function": str(file), "weights": {"longest": 1.0}}, "data.eval": str(sums / "eval.parquet")}
    refused(changes, "eval_samples=1: score_group()", "set eval_samples to 2 or more")
    folder = trained(changes | {"eval_samples": 2, "data.eval_rows": 2, "steps": 1, "backend": backend})
    assert {row["reward_parts"]["shown"] for row in samples_of(folder)} == {4.0}
    [before, *_] = evaluations_of(folder).values()
    assert before["eval/reward/shown"] == 2.0


def test_an_evaluation_stops_at_the_budget_and_keeps_its_samples(tmp_path, tiny_path, sums):
    with JudgeServer().running() as url:
        recipe = {
            "name": "eval",
            "backend": "local",
            "run_dir": str(tmp_path / "runs"),
            "model": {"path": tiny_path, "dtype": "float32"},
            "data": {"sets": [{"path": str(sums / "eval.parquet"), "rows": 4}], "max_prompt_tokens": 32},
            "reward": judged(url, api_key_env=None) | {"judge_budget": {"calls": 2}},
            "rollout": {"engine": "hf", "max_new_tokens": 8},
            "samples": 2,
            "prompts_per_engine": 1,
        }
        path = tmp_path / "eval.yaml"
        path.write_text(yaml.safe_dump(recipe))
        code, err = run_here(main_eval, "--config", str(path))
    assert code == 1 and "reward.judge_budget.calls=2 is used up" in err
