"""The generated function-calling task: its rows, its reward, and that a tiny model learns it through the real loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import main_rl
import main_sl
from core.types import Prompt
from data_feeds.tokenizer import ChatTokenizer
from data_feeds.tool_parsing import make_parser
from data_prep import function_calls, tiny_model
from rewards.function_calls import score
from rollouts.envs.number_tools import NumberTools
from unit_tests.examples import run_here
from unit_tests.test_tools import calls_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tools")
    tiny_model.make_tokenizer(tools=True).save_pretrained(folder)
    return ChatTokenizer(str(folder), "chat")


def rows_of(**sizes):
    return function_calls.make(**{"train": 0, "held_out": 0, "sft": 0} | sizes)


def test_rows_are_drawn_once_and_their_tools_answer_them():
    rows = rows_of(train=300, held_out=100, sft=100)
    asked = [row["messages"][0]["content"] for split in rows.values() for row in split]
    assert len(set(asked)) == 500
    for row in rows["train"]:
        offered = [spec["function"]["name"] for spec in row["tools"]]
        assert len(set(offered)) == 3 and row["call"]["name"] in offered
        prompt = Prompt(id="1", messages=row["messages"], tools=row["tools"])
        call = (row["call"]["name"], row["call"]["arguments"])
        [answer] = asyncio.run(NumberTools(prompt).step(calls_of(call)))
        assert answer["content"] == row["answer"]
    unoffered = next(name for name in function_calls.TOOLS if name not in offered)
    [refused] = asyncio.run(NumberTools(prompt).step(calls_of((unoffered, {"a": 1, "b": 2}))))
    assert refused["content"].startswith(f"Error: There is no function {unoffered}")
    assert rows_of(train=5, held_out=100)["eval"] == rows["eval"], "eval depends on the seed alone"


def test_a_careless_teacher_errs_in_the_call_and_believes_its_result():
    rows = rows_of(sft=2000, wrong_share=0.6)["sft"]
    calls = [row["messages"][1]["tool_calls"][0]["function"] for row in rows]
    assert 0.36 < sum(call == row["call"] for call, row in zip(calls, rows, strict=True)) / len(rows) < 0.44
    for row, call in zip(rows, calls, strict=True):
        result = str(function_calls.TOOLS[call["name"]](**call["arguments"]))
        assert [m["content"] for m in row["messages"][2:]] == [result, result]


def test_the_reward_wants_the_call_and_the_answer():
    [row] = rows_of(train=1)["train"]
    prompt = SimpleNamespace(id="1", answer=row["answer"], extra={"call": row["call"]})
    right = calls_of((row["call"]["name"], row["call"]["arguments"])).message
    wrong = calls_of((row["call"]["name"], row["call"]["arguments"] | {"a": 1})).message
    answer = {"role": "assistant", "content": f" {row['answer']} "}
    assert score(prompt, [right, answer]) == {"correct": 1.0, "called": 1.0}
    assert score(prompt, [wrong, right, answer]) == {"correct": 1.0, "called": 1.0}
    assert score(prompt, [answer]) == {"correct": 0.0, "called": 0.0}, "a lucky guess"
    assert score(prompt, [wrong, answer])["correct"] == 0 and score(prompt, [right])["correct"] == 0
    with pytest.raises(ValueError, match="has no call"):
        score(SimpleNamespace(id="1", answer="3", extra={}), [answer])


def test_what_is_learnt_from_a_conversation_is_what_an_episode_samples(tokenizer):
    """Taught and sampled tokens are the same, and the parser reads the taught call."""
    [row] = rows_of(sft=1)["sft"]
    question, call, result, answer = row["messages"]
    ids, learnt = tokenizer.mask_turns(row["messages"], tools=row["tools"])
    asked = tokenizer.render([question], row["tools"])
    played = [*asked]
    first = tokenizer.encode("@" + call["tool_calls"][0]["function"]["name"] + json_of(call) + ";<|end|>")
    played += first + tokenizer.render_turns(call, [result], row["tools"])
    played += tokenizer.encode(answer["content"] + "<|end|>")
    assert ids[: len(played)] == played
    assert [i for i, said in zip(ids, learnt, strict=True) if said] == first + tokenizer.encode(
        answer["content"] + "<|end|>"
    )
    parsed = make_parser(None, tokenizer).parse(first, tokenizer.decode(first), row["tools"])
    assert not parsed.problem
    assert [c["function"] for c in parsed.message["tool_calls"]] == [call["tool_calls"][0]["function"]]


def json_of(message) -> str:
    return json.dumps(message["tool_calls"][0]["function"]["arguments"], separators=(",", ":"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_model_learns_to_call_tools(tmp_path):
    """From a teacher who is right in one row of four to nine of ten: recipe, environment, reward and data."""
    model, data = str(tmp_path / "model"), str(tmp_path / "data")
    tiny_model.main(["--out", model, "--tools", "--hidden-size", "128", "--heads", "4", "--max-length", "128"])
    function_calls.main(["--out", data, "--train", "400", "--eval", "200", "--sft", "8000", "--wrong-share", "0.76"])
    warm, runs = f"save_to={tmp_path / 'warm'}", f"run_dir={tmp_path / 'runs'}"
    sft = str(ROOT / "configs/tools_quickstart_sft.yaml")
    given = [f"model.path={model}", f"data.train={data}/sft.jsonl", "backend=local", warm, runs]
    code, err = run_here(main_sl, "--config", sft, *given)
    assert code == 0, err
    recipe = str(ROOT / "configs/tools_quickstart.yaml")
    paths = [f"model.path={tmp_path / 'warm'}", f"data.train={data}/train.jsonl", f"data.eval={data}/eval.jsonl"]
    code, err = run_here(main_rl, "--config", recipe, *paths, f"run_dir={tmp_path / 'rl'}")
    assert code == 0, err
    [folder] = (tmp_path / "rl").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    before, after = (summary[when]["reward/mean"] for when in ("before", "after"))
    assert before <= 0.4 and after >= 0.9, (before, after)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(1 < step["rollout/turns_mean"] <= 3 for step in steps)
    assert steps[-1]["rollout/tool_errors"] < 0.05 and steps[-1]["time/engines/environment_s"] > 0
    samples = [json.loads(line) for line in (folder / "samples" / "step_00000.jsonl").read_text().splitlines()]
    taught = next(s for s in samples if s["reward"] == 1.0)
    assert [turn["role"] for turn in taught["turns"]] == ["assistant", "tool", "assistant"]
    assert taught["turns"][0]["tokens"] + taught["turns"][2]["tokens"] == taught["new_tokens"]
