"""--explain shows rows as the model will see them, and names the form that the run would write down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import main_eval
import main_rl
import main_sl
from configs.schema import SLConfig
from driver.load_recipe import load_config_of_run
from unit_tests.helpers.examples import run_here

ASKED = {"role": "user", "content": "1+1="}
TALK = [ASKED, {"role": "assistant", "content": "2"}, ASKED, {"role": "assistant", "content": "3", "train": False}]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def explained(recipe, tmp_path, capsys):
    def explain(rows: list[dict[str, Any]], changes: dict[str, Any], kind: str) -> tuple[dict[str, Any], str]:
        path = recipe({"data.train": write(tmp_path / "x.jsonl", rows)} | changes, kind=kind)
        assert run_here(main_rl if kind == "rl" else main_sl, "--config", path, "--explain")[0] == 0
        said = capsys.readouterr().out
        return yaml.safe_load(said.partition("# what follows")[0]), said.rpartition("# ")[2]

    return explain


def test_an_explanation_has_a_line_for_each_part(recipe, capsys):
    assert run_here(main_rl, "--config", recipe(), "--explain")[0] == 0
    facts = capsys.readouterr().out.partition("# what follows from it\n")[2].partition("\n\n")[0]
    names = {line[:22].rstrip() for line in facts.splitlines()}
    assert {"a step", "a reply", "rows", "this process", "memory per rank", "memory per engine"} <= names


def test_what_is_trained_on_is_marked(explained):
    _, said = explained([{"id": "a", "messages": TALK}], {}, "sl")
    assert said.splitlines() == [
        "rows of data.train as the model will see them; {+...+} is trained on",
        "row a: 16 tokens, 2 trained on",
        "  <|user|>1+1=<|assistant|>{+2<|end|>+}<|user|>1+1=<|assistant|>3<|end|>",
    ]


def test_a_recognised_form_is_named_with_the_first_rows(explained):
    rows = [{"prompt": [ASKED], "reward_model": {"ground_truth": str(n)}} for n in range(5)]
    config, said = explained(rows, {}, "rl")
    assert config["data"]["train"][0]["form"] == "verl"
    assert "x.jsonl is of form verl (recognised): messages = prompt, answer = reward_model.ground_truth" in said
    assert said.count("\nrow ") == 3 and "row 2: 6 tokens, answer '2'\n  <|user|>1+1=<|assistant|>\n" in said


def test_both_replies_of_a_pair_are_shown(explained):
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    changes = {"alg": {"name": "dpo"}, "trainer.micro_batch_tokens": 128}
    _, said = explained(rows, changes, "sl")
    assert "chosen, 8 tokens, 2 trained on\n  <|user|>1+1=<|assistant|>{+2<|end|>+}" in said
    assert "rejected, 8 tokens, 2 trained on\n  <|user|>1+1=<|assistant|>{+3<|end|>+}" in said


def test_rows_that_are_not_there_yet_are_unknown(explained):
    _, said = explained([], {"data.train": "later.parquet"}, "rl")
    assert said.startswith("the rows of data.train are unknown: data.train=later.parquet: there is no such file")


def test_an_evaluation_shows_rows_too(tmp_path, tiny_path, capsys):
    train = write(tmp_path / "x.jsonl", [{"question": f"{n}+1=", "answer": n + 1} for n in range(5)])
    data = {"sets": [{"path": train}], "max_prompt_tokens": 32, "by": ["level"]}
    raw = {"name": "e", "backend": "local", "model": {"path": tiny_path}, "data": data, "reward": {"function": "gsm8k"}}
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(raw))
    code, err = run_here(main_eval, "--config", str(tmp_path / "eval.yaml"), "--explain")
    said = capsys.readouterr().out
    assert code == 0, err
    assert "x.jsonl is of form question_answer (recognised): messages = question, answer = answer" in said
    assert said.endswith("row 2: 6 tokens, answer '3'\n  <|user|>2+1=<|assistant|>\n") and said.count("\nrow ") == 3


def test_a_run_writes_the_form_down_and_says_it(trained, tmp_path, capsys):
    train = write(tmp_path / "x.jsonl", [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(8)])
    folder = trained({"data.train": train, "data.eval": train}, kind="sl")
    data = yaml.safe_load((folder / "config.yaml").read_text())["data"]
    assert [data["train"][0]["form"], data["eval"]["form"]] == ["prompt_completion", "prompt_completion"]
    assert json.loads((folder / "summary.json").read_text())["data.train"]["x"]["form"] == "prompt_completion"
    assert "is of form prompt_completion (recognised): messages = prompt + completion" in capsys.readouterr().out
    assert load_config_of_run(SLConfig, folder / "config.yaml", []).cfg.data.model_dump() == data
