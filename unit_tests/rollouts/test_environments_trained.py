"""Environments of others in whole runs on Ray and vLLM: three steps, and every token as written by hand."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from data_prep import reasoning_gym as prep
from data_prep import tiny_model
from data_prep import verifiers as verifiers_rows
from unit_tests.helpers.environments import make_environment
from unit_tests.helpers.letters import Letters
from unit_tests.helpers.openenv_server import Server
from unit_tests.helpers.other_packages import install_by_page
from unit_tests.helpers.runs import folder_of, metrics_of, program, samples_of
from unit_tests.helpers.taught import teach_digits

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


def run_three_steps(recipe: Any, tmp_path: Path, model: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Run three steps; return all samples, which are exact and did not fail."""
    common = {
        **{"backend": "ray", "rollout.engine": "vllm", "rollout.kv_cache_gib": 0.25, "steps": 3, "groups_per_step": 2},
        **{"group_size": 6, "model": {"path": str(model), "dtype": "float32"}, "record_tokens": True},
        **{"name": "others", "trainer.lr": 1e-3},
    }
    done = program(recipe(common | changes))
    assert done.returncode == 0, done.stderr
    folder = folder_of(tmp_path, "others")
    steps = metrics_of(folder)
    assert len(steps) == 3 and all(step["rollout/failed"] == 0 for step in steps)
    assert all(step["train/mismatch/abs_logp"] < 1e-3 for step in steps), "what was sampled is what is trained on"
    return [row for step in range(3) for row in samples_of(folder, step)]


@contextmanager
def running(server: Server) -> Generator[str]:
    """Serve from a thread of its own; yield the address."""
    loop, over, urls = asyncio.new_event_loop(), asyncio.Event(), []
    ready = threading.Event()

    async def serve() -> None:
        async with server.running() as url:
            urls.append(url)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()], daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_openenv_is_trained_on_for_three_steps(trained, recipe, tmp_path):
    """The server says when a reply holds a 3, and ends the episode then."""
    model = teach_digits(trained, tmp_path)
    with running(server := Server()) as url:
        row = {"messages": [{"role": "user", "content": "1+4="}], "env_url": url}
        rows = write_rows(tmp_path / "rows.jsonl", [row | {"id": str(i), "reset": {"seed": i}} for i in range(4)])
        changes = {"data": {"train": rows, "max_prompt_tokens": 32}, "rollout.env": "openenv", "rollout.max_turns": 3}
        changes |= {"reward": {"function": "environment", "weights": {"return": 1.0}}, "rollout.max_new_tokens": 60}
        samples = run_three_steps(recipe, tmp_path, model, changes)
    letters = Letters(model)
    replies = [letters.check(row) for row in samples]
    assert len(samples) == len(server.resets) == 36 and sum(replies) == len(server.steps)
    assert max(replies) > 1 and server.sessions == 0
    for row, n in zip(samples, replies, strict=True):
        said = [t["content"] for t in row.get("turns", [])] or [row["completion"]]
        assert row["reward"] in (n * 0.25, (n - 1) * 0.25 + 1.0) and (row["reward"] > n * 0.25) == ("3" in said[-1])


def test_reasoning_gym_is_trained_on_for_three_steps(trained, recipe, tmp_path, monkeypatch):
    """The scores are those of the package itself, for the text between the tags."""
    install_by_page("reasoning-gym", monkeypatch)
    package: Any = importlib.import_module("reasoning_gym")

    tiny_model.make(tmp_path / "long", max_length=2000)
    rows = tmp_path / "rows.jsonl"
    prep.main(["--set", "leg_counting", "--size", "6", "--seed", "1", "--out", str(rows)])
    asked = json.loads(rows.read_text().splitlines()[0])["messages"][0]["content"]
    long = {"model.path": str(tmp_path / "long"), "data.max_tokens": 1000, "rows_per_step": 8, "steps": 80}
    model = teach_digits(trained, tmp_path, write="<answer>{}</answer>", asked=asked, **long)
    changes = {
        "data": {"train": str(rows), "max_prompt_tokens": 1500},
        "reward": {"function": "reasoning_gym", "weights": {"correct": 1.0, "format": 0.1}},
        "rollout.max_new_tokens": 40,
    }
    samples = run_three_steps(recipe, tmp_path, model, changes)
    letters = Letters(model)
    assert [letters.check(row) for row in samples] == [1] * 36
    formats = set()
    for row in samples:
        found = re.findall(r"<answer>(.*?)</answer>", row["completion"], re.DOTALL)
        formats.add(row["reward_parts"]["format"])
        if not found:
            assert row["reward_parts"] == {"correct": 0.0, "format": 0.0}
            continue
        given = json.loads(row["answer"])
        score = package.get_score_answer_fn(given["dataset"])
        assert row["reward_parts"]["correct"] == pytest.approx(score(found[-1].strip(), given["entry"]))
    assert formats == {0.0, 1.0}


SEVENTH = """
import verifiers.v1 as vf

__all__ = ["Seventh"]

class SeventhTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def seven(self, trace) -> float:
        return float("7" in trace.last_reply)

class Seventh(vf.Taskset[SeventhTask]):
    def load(self):
        for i in range(4):
            yield SeventhTask(vf.TaskData(prompt=f"{i}+4="), self.config.task)
"""


def test_verifiers_is_trained_on_for_three_steps(trained, recipe, tmp_path, monkeypatch):
    """Its Python is in an environment of its own, with a process that plays all episodes."""
    python = str(make_environment("verifiers"))
    (tmp_path / "seventh_taskset.py").write_text(SEVENTH)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    model = teach_digits(trained, tmp_path)
    rows = tmp_path / "rows.jsonl"
    verifiers_rows.main(["--env", "seventh-taskset", "--python", python, "--out", str(rows)])
    changes = {
        "data": {"train": str(rows), "max_prompt_tokens": 32},
        "rollout.agent": {"command": [python, str(verifiers_rows.AGENT), "play", "seventh-taskset"], "serve": True},
        "reward": {"function": "environment", "weights": {"return": 1.0}},
        "rollout.max_new_tokens": 24,
    }
    samples = run_three_steps(recipe, tmp_path, model, changes)
    letters = Letters(model)
    assert [letters.check(row) for row in samples] == [1] * 36
    assert all(row["reward"] == float("7" in row["completion"]) for row in samples)
    assert {row["reward"] for row in samples} == {0.0, 1.0}
