"""A task in Harbor's format in a whole run: a tiny model that was taught a right and a wrong command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import main_sl
from data_prep import boxed_tasks, tiny_model
from rollouts.envs.harbor import Harbor
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.letters import Letters
from unit_tests.helpers.needs_sandbox import needs_sandbox
from unit_tests.helpers.runs import folder_of, metrics_of, program, samples_of

RIGHT, WRONG = "wc -l < trees.txt > count.txt", "ls"


def teach(row: dict[str, Any], command: str) -> dict[str, Any]:
    """A row with the turns of a teacher."""
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "call_0", "name": "bash"},
        {"role": "assistant", "content": "ok"},
    ]
    return row | {"id": f"{row['id']}/{command}", "messages": [*row["messages"], *turns], "tools": Harbor.tools}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@needs_sandbox
@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("one_thread")
def test_three_steps_on_a_task(tmp_path, monkeypatch, recipe):
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path / "cache"))
    tiny_model.main(
        ["--tools", "--out", str(tmp_path / "tools"), "--hidden-size", "128", "--heads", "4", "--max-length", "512"]
    )
    boxed_tasks.main(["--out", str(tmp_path / "boxed")])
    rows = [json.loads(line) for line in (tmp_path / "boxed/train.jsonl").read_text().splitlines()]
    [row] = [one for one in rows if one["id"] == "count-lines"]
    sft = {
        "steps": 25,
        "rows_per_step": 8,
        "save_to": str(tmp_path / "taught"),
        "model": {"path": str(tmp_path / "tools"), "dtype": "float32"},
        "data": {
            "train": write_rows(tmp_path / "sft.jsonl", [*(teach(row, c) for c in (RIGHT, WRONG))]),
            "max_tokens": 250,
        },
        "trainer": {"lr": 3e-3, "warmup_updates": 5},
        "run_dir": str(tmp_path / "sft_runs"),
    }
    code, said = run_here(main_sl, "--config", recipe(sft, kind="sl"))
    assert code == 0, said
    changes = {
        "backend": "ray",
        "rollout.engine": "vllm",
        "steps": 3,
        "groups_per_step": 2,
        "group_size": 6,
        "model": {"path": str(tmp_path / "taught"), "dtype": "float32"},
        "data": {"train": write_rows(tmp_path / "one.jsonl", [row]), "max_prompt_tokens": 200},
        "reward": {"function": "environment", "weights": {"reward": 1.0}},
        "rollout.env": "harbor",
        "trainer.lr": 1e-4,
        "rollout.max_turns": 3,
        "rollout.max_new_tokens": 160,
        "record_tokens": True,
        "run_dir": str(tmp_path / "runs"),
    }
    done = program(recipe(changes))
    assert done.returncode == 0, done.stderr
    folder = folder_of(tmp_path)
    steps = metrics_of(folder)
    assert len(steps) == 3 and all(step["rollout/failed"] == 0 for step in steps)
    samples = [sample for step in range(3) for sample in samples_of(folder, step)]
    letters, taught = Letters(tmp_path / "taught"), 0
    for sample in samples:
        replies = letters.check(sample, tools="bash(command)")
        if "turns" not in sample:  # a reply without a call
            assert sample["reward"] == 0.0
            continue
        said, *others = [turn for turn in sample["turns"] if turn["role"] == "assistant"]
        command = said["tool_calls"][0]["function"]["arguments"]["command"] if "tool_calls" in said else ""
        assert sample["reward"] == float(command == RIGHT), sample["turns"]
        taught += command in (RIGHT, WRONG) and replies == 2 and others[0]["content"] == "ok"
    assert taught > 5 and {sample["reward"] for sample in samples} == {0.0, 1.0}
