"""The generated function-calling task: its rows, its reward, and that a tiny model learns it through the real loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import main_rl
import main_sl
from core.types.samples import Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.chat.tool_parsing import make_parser
from data_prep import function_calls, tiny_model
from rewards.function_calls import score
from rollouts.envs.number_tools import NumberTools
from unit_tests.helpers.episodes import calls_of
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import metrics_of

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tools")
    tiny_model.make_tokenizer(tools=True).save_pretrained(folder)
    return ChatTokenizer(str(folder), "chat")


def test_a_saved_tiny_model_writes_and_reads_calls_if_asked(tmp_path):
    for name, options, has_tools in (("plain", [], False), ("tools", ["--tools"], True)):
        tiny_model.main(["--out", str(tmp_path / name), *options])
        saved = ChatTokenizer(str(tmp_path / name), "chat").hf
        assert bool(getattr(saved, "response_template", None)) == has_tools
        assert ("tools" in saved.chat_template) == has_tools


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
    wrong = [
        (row["call"]["arguments"][key], call["arguments"][key])
        for row, call in zip(rows, calls, strict=True)
        for key in ("a", "b")
        if row["call"]["arguments"][key] != call["arguments"][key]
    ]
    for right, said in wrong:
        assert 10 <= said <= 99, "a number keeps its two digits"
        assert sum(x != y for x, y in zip(str(right), str(said), strict=True)) == 1
    assert {digit for right, said in wrong if right % 10 != (digit := said % 10)} == {*range(10)}


def test_every_file_is_told_with_the_number_of_its_rows(tmp_path, capsys):
    function_calls.main(["--out", str(tmp_path / "new"), "--train", "3", "--eval", "2"])
    written = {path: len(path.read_text().splitlines()) for path in sorted((tmp_path / "new").iterdir())}
    assert {path.name: n for path, n in written.items()} == {"eval.jsonl": 2, "train.jsonl": 3}
    assert capsys.readouterr().out.splitlines() == [f"{path}: {n} rows" for path, n in written.items()]


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


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """A folder with the task's data, and `warm`: a model that has learnt from a teacher who errs six times of seven."""
    folder = tmp_path_factory.mktemp("calls")
    model, data = str(folder / "model"), str(folder / "data")
    tiny_model.main(["--out", model, "--tools", "--hidden-size", "128", "--heads", "4", "--max-length", "128"])
    function_calls.main(["--out", data, "--train", "400", "--eval", "200", "--sft", "8000", "--wrong-share", "0.85"])
    given = [f"model.path={model}", f"data.train={data}/sft.jsonl", f"save_to={folder / 'warm'}"]
    sft = str(ROOT / "configs/tools_quickstart_sft.yaml")
    assert run_here(main_sl, "--config", sft, *given, "backend=local", f"run_dir={folder / 'sft'}") == (0, "")
    return folder


def learn(warm: Path, folder: Path, *changes: str) -> tuple[float, float, list[dict]]:
    """Run the recipe with changes; return the held-out reward before and after it, and what its steps logged."""
    paths = [f"model.path={warm / 'warm'}", f"data.train={warm}/data/train.jsonl", f"data.eval={warm}/data/eval.jsonl"]
    recipe = str(ROOT / "configs/tools_quickstart.yaml")
    code, err = run_here(main_rl, "--config", recipe, *paths, f"run_dir={folder}", *changes)
    assert code == 0, err
    [run] = folder.iterdir()
    summary = json.loads((run / "summary.json").read_text())
    before, after = (summary[when]["reward/mean"] for when in ("before", "after"))
    print(f"held-out reward {before:.3f} before, {after:.3f} after")
    steps = metrics_of(run)
    assert all(1 < step["rollout/turns_mean"] <= 3 for step in steps)
    samples = [json.loads(line) for line in (run / "samples" / "step_00000.jsonl").read_text().splitlines()]
    right = next(s for s in samples if s["reward"] == 1.0)
    assert [turn["role"] for turn in right["turns"]][-3:] == ["assistant", "tool", "assistant"]
    assert sum(turn.get("tokens", 0) for turn in right["turns"]) == right["new_tokens"]
    return before, after, steps


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_tiny_model_learns_to_call_tools(warm, tmp_path):
    """From a teacher who is wrong in six rows of seven to nine of ten right: recipe, environment, reward and data."""
    before, after, steps = learn(warm, tmp_path)
    assert before <= 0.4 and after >= 0.9, (before, after)
    assert steps[-1]["rollout/tool_errors"] < 0.05 and steps[-1]["time/engines/environment_s"] > 0


ON_RAY = ["backend=ray", "rollout.engine=vllm", "rollout.kv_cache_gib=0.2"]


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_it_learns_the_same_on_ray_with_vllm(warm, tmp_path):
    before, after, steps = learn(warm, tmp_path, *ON_RAY)
    assert before <= 0.4 and after >= 0.9, (before, after)
    assert steps[-1]["rollout/tool_errors"] < 0.05 and steps[-1]["time/engines/environment_s"] > 0


AGENT = """
import json

import openai

from rollouts.envs.number_tools import TOOLS


async def run(task):
    messages = list(task.messages)
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        try:
            while True:
                answer = await client.chat.completions.create(model=task.model, messages=messages, tools=task.tools)
                said = answer.choices[0].message
                messages.append(said)
                if answer.choices[0].finish_reason != "tool_calls":
                    return {}
                results = [call(one.function) for one in said.tool_calls]
                for one, result in zip(said.tool_calls, results):
                    messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
        except openai.BadRequestError:  # turns or tokens are used up
            return {}


def call(function):
    try:
        return str(TOOLS[function.name](**json.loads(function.arguments)))
    except (KeyError, TypeError) as error:
        return f"Error: {error}"
"""


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_an_agent_with_openais_client_learns_it_on_ray_with_vllm(warm, tmp_path):
    """Real Ray, DeepSpeed, vLLM and client. The episodes of a step are processes; a third of the recipe's steps."""
    (tmp_path / "agent.py").write_text(AGENT)
    agent = ["rollout.env=single_turn", f"rollout.agent={{file: {tmp_path / 'agent.py'}}}", "steps=10"]
    before, after, steps = learn(warm, tmp_path / "runs", *ON_RAY, *agent)
    assert before <= 0.4 and after >= before + 0.2, (before, after)
    for step in steps:
        assert step["rollout/failed"] == 0 and step["rollout/branches_per_episode"] == 1
        assert step["rollout/trained_fraction"] == 1 and step["rollout/rewritten_fraction"] == 0


def test_more_questions_than_there_are_is_one_sentence(tmp_path, capsys):
    there_are = sum(map(len, function_calls.WORDS.values())) * 90**2
    with pytest.raises(SystemExit) as ended:
        function_calls.main(["--out", str(tmp_path), "--train", str(there_are), "--eval", "1", "--sft", "2"])
    assert ended.value.code == 2
    said = capsys.readouterr().err.rpartition("error: ")[2]
    assert said == f"{there_are + 3} questions were asked for, there are {there_are}\n"
