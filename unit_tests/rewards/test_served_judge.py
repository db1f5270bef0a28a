"""A judge that the run serves: the endpoint of an engine, runs that ask it, and its engine's death."""

from __future__ import annotations

import asyncio
import json
import math
import random
import string
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.judge_schema import JudgeConfig
from configs.schema import RLConfig
from data_prep import tiny_model
from driver.checks.explain_devices import place_processes
from driver.load_recipe import load_recipe
from driver.start.devices import count_judge_ranks
from driver.start.judges import plan_judge, plan_judge_roles
from rewards import RewardRun, RunJudge, Scored
from rewards.judging.prompts import ask_for_verdict, enclose, fill_template, hash_text
from rewards.judging.settings import JudgeSettings
from rewards.weights import describe_judge
from rollouts.engines.base import Completion
from rollouts.judges.endpoint import JudgeEndpoint, Served
from tools.benchmarks.judge_server import Asked, JudgeServer, count_sevens
from unit_tests.helpers.characters import Characters
from unit_tests.helpers.judged import score_at
from unit_tests.helpers.runs import evaluations_of, metrics_of, samples_of

KEY = "sk-of-this-run-0123456789"
ASKED = {"model": "j", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}


class Echo:
    """Engine that repeats the end of the request, with the probability of its seed."""

    async def generate(self, token_ids: list[int], *, max_new_tokens: int, seed: int, images: Any = ()) -> Completion:
        ids = token_ids[-max_new_tokens:]
        return Completion(token_ids=ids, logp=[math.log(0.75)] * len(ids), versions=[0] * len(ids), stop="eos")


def post(*bodies: Any, key: str = KEY, choices: tuple[int, ...] = ()) -> list[tuple[int, dict[str, Any]]]:
    """Send requests to an endpoint of the engine above; return statuses and answers."""

    async def send() -> list[tuple[int, dict[str, Any]]]:
        served = Served(model="j", max_model_len=10, key=KEY, choices=choices)
        endpoint: Any = JudgeEndpoint(Echo(), Characters(), served)  # pyright: ignore[reportArgumentType]
        await endpoint.start()
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as client:
            texts = [body if isinstance(body, bytes) else json.dumps(body) for body in bodies]
            found = [await client.post(endpoint.url + "/chat/completions", content=text) for text in texts]
        await endpoint.close()
        return [(response.status_code, response.json()) for response in found]

    return asyncio.run(send())


def test_an_endpoint_answers_and_reports_two_probabilities():
    [(status, found)] = post(ASKED)
    assert status == 200 and found["choices"][0]["message"]["content"] == "abc"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 3}
    [(status, found)] = post(ASKED | {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}, choices=(ord("c"), 120))
    top = found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [(one["token"], round(math.exp(one["logprob"]), 6)) for one in top] == [("c", 0.75), ("x", 0.25)]


REFUSED: list[tuple[Any, int, str]] = [
    (ASKED | {"temperature": 0.3}, 400, "takes no temperature"),
    (ASKED | {"model": "k"}, 404, "there is no model k here: it is called j"),
    (ASKED | {"max_tokens": 8}, 400, "3 tokens, and with max_tokens=8 more than judge.max_model_len=10"),
    (ASKED | {"messages": [{"role": "user"}]}, 400, "messages must be"),
    (ASKED | {"logprobs": True}, 400, "set judge.allowed_tokens"),
    (ASKED | {"seed": "1"}, 400, "seed must be a number"),
    (ASKED | {"seed": 2**63}, 400, "seed must be a number"),
    ([], 400, "must be a JSON object"),
    (b"[" * 5000, 400, "the body is no JSON"),
]


def test_an_endpoint_refuses_in_one_sentence():
    found = post(*(body for body, _, _ in REFUSED))
    for (_, status, said), (got, answer) in zip(REFUSED, found, strict=True):
        assert got == status and said in answer["error"]["message"]


def test_an_endpoint_has_a_key():
    [(status, answer)] = post(ASKED, key="another")
    assert status == 401 and KEY not in json.dumps(answer)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory) -> str:
    """The tiny model, with positions for a judge's prompt."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model.make(folder, max_length=5000)
    return str(folder)


def served(model: str, **settings: Any) -> dict[str, Any]:
    """Return the changes of a recipe for a judge of the run; a random model states no verdict."""
    reward = {"function": "judge", "weights": {"score": 1.0}, "timeout_s": 130, "max_failed_fraction": 1.0}
    given = {"outage_s": 60, "timeout_s": 60, "max_tokens": 8, "parse_retries": 0, **settings}
    return {"reward": reward | {"settings": given}, "judge": {"model": model}, "steps": 1}


YES_NO = {"engine": "hf", "temperature": 0, "allowed_tokens": ["y", "n"]}


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_an_engine_of_its_own_states_probabilities(trained, tiny_path, backend):
    changes = served(tiny_path, verdict="probability")
    folder = trained(changes | {"judge": {"model": tiny_path, **YES_NO}, "backend": backend})
    [line] = metrics_of(folder)
    scores = [row["reward"] for row in samples_of(folder) if row["completion"]]
    assert line["judge/calls"] > 0 and line["judge/unanswered"] == line["rollout/failed"] == 0
    assert all(0 < score < 1 for score in scores) and len({*scores}) > 2
    assert {note["by"] for row in samples_of(folder) for note in row.get("notes", [])} == {tiny_path}
    texts = [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]
    assert not any("judge_key" in text for text in texts)


SPARES = """
import rewards.judge
from rewards import Failed, Scored

async def score(prompt, messages, *, run, **settings):
    try:
        return await rewards.judge.score(prompt, messages, run=run, **settings)
    except Failed as error:
        return Scored({"score": len(messages[-1]["content"])}, notes=error.notes, counts=error.counts)
"""


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.verify)])
def test_the_policy_judges(trained, tmp_path, backend):
    """A random policy states no verdict; the reward of this test goes on without."""
    (file := tmp_path / "spares.py").write_text(SPARES)
    changes = served("policy", max_tokens=4) | {"judge": {"model": "policy", "max_model_len": 900}}
    changes["reward"] |= {"function": str(file)}
    folder = trained(changes | {"backend": backend})
    [line] = metrics_of(folder)
    rows = [row for row in samples_of(folder) if row["completion"]]
    assert line["judge/calls"] == len(rows) and line["judge/unreadable_fraction"] == 1
    assert all(row["notes"][0]["by"] == "policy" and row["notes"][0]["reading"] is None for row in rows)


OWN = {"reward.function": "judge", "reward.weights": {"score": 1.0}, "reward.timeout_s": 240}


def test_what_a_judge_of_the_run_lacks_is_refused(refused, tiny_path):
    mine = {"model": tiny_path, "engine": "hf"}
    refused(OWN, "reward.settings.base_url is missing", "set judge.model")
    refused({"judge": mine}, "judge is set, and no reward asks it")
    refused({"judge": {"model": "policy", "engine": "hf"}}, "judge: engine is set and would not be read")
    refused(OWN | {"judge": mine | {"allowed_tokens": ["y"]}}, "must name two tokens")
    refused(OWN | {"judge": mine | {"allowed_tokens": ["y", "n"]}}, "set temperature to 0")
    yes_no = mine | {"allowed_tokens": ["yes", "no"], "temperature": 0}
    asks = {"reward.settings": {"verdict": "probability"}}
    refused(OWN | asks | {"judge": yes_no}, "judge.allowed_tokens names yes, which is 3 tokens")
    refused(OWN | asks | {"judge": mine}, "set judge.allowed_tokens to [yes, no]")
    refused(OWN | {"judge": yes_no | {"allowed_tokens": ["y", "n"]}}, "judge.allowed_tokens leaves two tokens")
    refused(OWN | {"judge": mine | {"template_args": {"x": 1}}}, "judge.template_args: ", "does not read x")
    refused(OWN | {"judge": mine | {"num_engines": 2}}, "set judge.num_engines and judge.tensor_parallel_size to 1")
    refused(OWN | {"judge": mine | {"model": "nowhere/at/all"}}, "judge.model=nowhere/at/all")
    for model in (mine, {"model": "policy"}):
        refused(OWN | {"judge": model | {"max_model_len": 10**6}}, "judge.max_model_len=1000000", "positions: lower it")
    given = {"judge": mine | {"temperature": 0}, "reward.settings": {"votes": 3}}
    refused(OWN | given, "votes would all be equal with judge.temperature=0")
    refused(OWN | {"judge": mine, "reward.settings": {"temperature": 1.0}}, "temperature is of a server")


def test_a_judge_has_engines_of_its_own(recipe, tiny_path, tmp_path):
    keys = {"model": tiny_path, "num_engines": 2, "tensor_parallel_size": 2}
    cfg = load_recipe(RLConfig, recipe(OWN | {"judge": keys, "backend": "ray", "rollout.engine": "vllm"}), []).cfg
    assert count_judge_ranks(cfg) == 4
    [role] = plan_judge_roles(cfg, Path("runs"))
    assert (role.n, role.resources.ranks, role.needs_run_folder) == (2, 2, False)
    places = dict(place_processes(cfg, gpus=8))
    assert places["judge 0"] == (0, [0, 1]) and places["judge 1"] == (0, [2, 3]) and places["trainer 0"] == (0, [4])
    plan = plan_judge(cfg)
    assert (plan.engine.temperature, plan.engine.max_model_len, plan.engine.tensor_parallel_size) == (0.7, 4096, 2)
    tiny_model.make(tmp_path / "short", max_length=300)
    short = load_recipe(RLConfig, recipe(OWN | {"judge": {"model": str(tmp_path / "short")}}), []).cfg
    assert plan_judge(short).engine.max_model_len == 300, "the positions of the model"


def test_a_judge_is_greedy_if_neither_its_weights_nor_its_draws_change():
    given: list[dict[str, Any]] = [{"model": "m", "temperature": 0}, {"model": "m"}, {"model": "policy"}]
    told = [describe_judge(JudgeConfig(**one)) for one in given]
    assert [(one.is_greedy, one.is_frozen) for one in told] == [(True, True), (False, True), (False, False)]


@pytest.mark.parametrize(
    ("kind", "replies", "calls"),
    [
        ({}, ("7", "7"), 1),
        ({"is_frozen": False}, ("7", "7"), 2),
        ({}, ("unreadable",), 3),
        ({"is_greedy": True}, ("unreadable",), 1),
    ],
)
def test_a_judge_is_asked_again_where_that_may_change_the_verdict(tmp_path, kind, replies, calls):
    """A policy of other weights may say something else, and a greedy judge does not. All requests carry the key."""

    def judge(asked: Asked) -> str:
        return "I like it." if asked.reply == "unreadable" else count_sevens(asked)

    server = JudgeServer(judge=judge, key=KEY)
    with server.running() as url:
        run = RewardRun(folder=str(tmp_path), judge=RunJudge(model="j", urls=(url,), key=KEY, **kind))
        score_at("", *replies, run=run, base_url=None, model=None)
    assert server.answered == calls and server.refused == 0
    assert all(body["model"] == "j" and "temperature" not in body for body in server.bodies)


def test_requests_go_to_the_least_busy_engine():
    """Two engines share the requests, and the other takes those of one that is gone."""
    first, second = JudgeServer(seconds=0.05), JudgeServer(seconds=0.05)
    with second.running() as b:
        with first.running() as a:
            ours = RewardRun(judge=RunJudge(model="j", urls=(a, b)))
            score_at("", "7", "77", "777", "7777", run=ours, base_url=None, model=None)
            assert (first.answered, second.answered) == (2, 2)
        [found] = score_at("", "7", run=ours, base_url=None, model=None, outage_s=9)
    assert isinstance(found, Scored) and second.answered == 3


KILLS = """
import os, pathlib, signal
import rewards.judge

killed = pathlib.Path({flag!r})

async def score(prompt, messages, *, run, **settings):
    if not killed.exists():
        killed.touch()
        os.kill(int(pathlib.Path({pid!r}).read_text()), signal.SIGKILL)
    return await rewards.judge.score(prompt, messages, run=run, **settings)
"""


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_killed_judge_engine_comes_back(trained, tiny_path, tmp_path, capfd):
    """It dies while rewards ask it. No sample fails: each has the verdict of the engine that came back."""
    flag, pid, engine = tmp_path / "killed", tmp_path / "pid", tmp_path / "engine.py"
    engine.write_text(
        "import os\nfrom pathlib import Path\nfrom rollouts.engines.hf import HfEngine\n\n\n"
        "class Mine(HfEngine):\n    def __init__(self, config):\n        super().__init__(config)\n"
        f"        Path({str(pid)!r}).write_text(str(os.getpid()))\n"
    )
    (mine := tmp_path / "mine.py").write_text(KILLS.format(flag=str(flag), pid=str(pid)))
    # a busy machine may take minutes to start an engine
    changes = served(tiny_path, verdict="probability", outage_s=400) | {"backend": "ray"}
    changes["judge"] |= YES_NO | {"engine": str(engine)}
    changes["reward"] |= {"function": str(mine), "max_failed_fraction": 0, "timeout_s": 500}
    folder = trained(changes)
    [line] = metrics_of(folder)
    assert flag.exists() and line["rollout/failed"] == 0 and line["judge/retries"] > 0
    said = capfd.readouterr().out
    assert "restarting it (1 of rollout.restarts=3)" in said and "judge 0 is back" in said


RULE = "{reply}\n{verdict}\n"
"""Prompt of the judge that is trained below."""


def write_verdicts(path: Path, n: int) -> str:
    """Write n requests to a judge that knows a rule: y if the reply has more sevens than twos."""
    rng = random.Random(0)
    settings = JudgeSettings(base_url="http://h/v1", model="j", verdict="probability", words=("y", "n"))
    rows = []
    for i in range(n):
        reply = "".join(rng.choice("72" * rng.randrange(3) + string.digits) for _ in range(rng.randint(1, 8)))
        key = hash_text(reply)
        text = fill_template(RULE, {"reply": enclose(reply, key), "verdict": ask_for_verdict(settings, key)})
        verdict = "y" if reply.count("7") > reply.count("2") else "n"
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": verdict}]
        rows.append(json.dumps({"id": str(i), "messages": turns}))
    path.write_text("\n".join(rows) + "\n")
    return str(path)


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_model_learns_from_a_judge_that_the_run_serves(trained, tmp_path, sums, backend, capsys):
    """The judge has learnt a rule from examples, and the policy learns it from the judge's probabilities alone."""
    rows = write_verdicts(tmp_path / "verdicts.jsonl", 4000)
    sl = {"name": "judge", "data": {"train": rows, "max_tokens": 128}, "steps": 300, "rows_per_step": 32}
    judge = trained(sl | {"trainer.lr": 3e-3, "trainer.warmup_updates": 20}, kind="sl", name="judge") / "model"
    (tmp_path / "rule.txt").write_text(RULE)
    changes = served(str(judge), verdict="probability", prompt_file=str(tmp_path / "rule.txt"))
    changes["judge"] |= YES_NO
    (tmp_path / "exact.py").write_text(
        "def score(prompt, messages):\n    text = messages[-1]['content']\n"
        "    return {'correct': float(text.count('7') > text.count('2'))}\n"
    )
    held_out = {"data.eval": str(sums / "eval.parquet"), "eval_reward": {"function": str(tmp_path / "exact.py")}}
    more = {"steps": 40, "groups_per_step": 4, "group_size": 16, "trainer.lr": 1e-2, "eval_samples": 4}
    folder = trained(changes | held_out | more | {"backend": backend}, name="test")
    before, after = evaluations_of(folder)[0], evaluations_of(folder)[40]
    with capsys.disabled():
        for line in (before, after):
            print({name: round(line[f"eval/{name}"], 3) for name in ("reward/mean", "second_reward/mean")})
    assert before["eval/second_reward/mean"] < 0.5
    assert after["eval/reward/mean"] > 0.9 and after["eval/second_reward/mean"] > 0.9
