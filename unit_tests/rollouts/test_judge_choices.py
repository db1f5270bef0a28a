"""The engine of a judge: its settings, and the two tokens that it may be left with."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.cluster.workers import RankInfo
from core.loading import resolve
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from data_prep import tiny_model
from driver.start.judges import build_worker
from rollouts.engines.base import EngineConfig
from rollouts.judges.endpoint import Served
from rollouts.judges.worker import JudgePlan, JudgeWorker, build_judge, find_choices
from unit_tests.helpers.characters import Characters
from unit_tests.helpers.sentences import tell

ENGINE = """
from rollouts.engines.base import Completion, Engine

class Kept(Engine):
    def __init__(self, config):
        self.config = config

    async def generate(self, token_ids, *, max_new_tokens, seed):
        return Completion(token_ids=[110], logp=[-0.5], versions=[0], stop="length")

    async def close(self):
        pass
"""


class Plan(JudgePlan):
    """Plan with a tokenizer of characters."""

    def make_tokenizer(self) -> Any:
        return Characters()


async def ask(worker: JudgeWorker) -> Any:
    """Return the tokens whose probabilities the judge reports, or the status of a refusal."""
    url, _ = await worker.listen("127.0.0.1", 0)
    body = {"model": "j", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 1, "logprobs": True}
    async with httpx.AsyncClient(headers={"Authorization": "Bearer k"}, timeout=60) as client:
        answer = await client.post(url + "/chat/completions", json=body)
    await worker.close()
    if answer.status_code != 200:
        return answer.status_code
    [first] = answer.json()["choices"][0]["logprobs"]["content"]
    return [one["token"] for one in first["top_logprobs"]]


@pytest.mark.parametrize(
    ("texts", "choices", "allowed"),
    [
        (["y", "n"], (121, 110), AllowedTokens(allowed=(110, 121))),
        ([], (), EVERY_TOKEN),
    ],
)
def test_an_engine_of_a_judge_may_say_its_choices_alone(tmp_path, texts, choices, allowed):
    (file := tmp_path / "kept.py").write_text(ENGINE)
    config = EngineConfig(model_path="m", temperature=0.0, max_model_len=10, stop_token_ids=(), seed=5)
    plan = Plan(
        engine_spec=resolve(str(file), "rollouts.engines", offers=lambda _: True),
        engine=config,
        served=Served(model="j", max_model_len=10, key="k"),
        allowed_tokens=texts,
        template_args={},
    )
    worker = build_judge(plan, [2, 3])
    engine: Any = worker.engine
    kept = engine.config
    assert (kept.cores, kept.stop_token_ids, kept.allowed_tokens) == ([2, 3], (10, 13), allowed)
    assert (kept.model_path, kept.temperature, kept.max_model_len, kept.seed) == ("m", 0.0, 10, 5)
    letters: Any = Characters()
    assert find_choices(letters, texts) == choices
    assert asyncio.run(ask(worker)) == (["y", "n"] if texts else 400)


def test_an_engine_of_a_judge_has_the_devices_and_cores_of_its_rank(tmp_path, monkeypatch):
    (file := tmp_path / "kept.py").write_text(ENGINE)
    monkeypatch.setattr("driver.start.judges.collect_seldom", lambda: None)  # it is of the whole process
    plan = Plan(
        engine_spec=resolve(str(file), "rollouts.engines", offers=lambda _: True),
        engine=EngineConfig(model_path="m", temperature=0.0, max_model_len=10, stop_token_ids=()),
        served=Served(model="j", max_model_len=10, key="k"),
        template_args={},
        devices=("0,1", "2,3"),
    )
    here = sorted(os.sched_getaffinity(0))
    for info, visible, cores in (
        (None, "7", here),
        (RankInfo(rank=0, size=1, address="", port=0), "0,1", here),
        (RankInfo(rank=1, size=10_000, address="", port=0), "2,3", here),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        engine: Any = build_worker(info, plan).engine
        assert (os.environ["CUDA_VISIBLE_DEVICES"], engine.config.cores) == (visible, cores)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            ["y", "no"],
            "judge.allowed_tokens names no, which is 2 tokens of the judge's tokenizer: name single tokens, or leave "
            "it out and take another reward.settings.verdict",
        ),
        (["y", "y"], "judge.allowed_tokens names one token twice: name two that differ, such as [yes, no]"),
    ],
)
def test_choices_are_two_tokens_that_differ(texts, said):
    letters: Any = Characters()
    assert tell(lambda: find_choices(letters, texts)) == said


def plan_of(folder: Path, **template_args: str) -> JudgePlan:
    config = EngineConfig(model_path=str(folder), temperature=0.0, max_model_len=10, stop_token_ids=())
    return JudgePlan(
        engine_spec=resolve("hf", "rollouts.engines", offers=lambda _: True),
        engine=config,
        served=Served(model="j", max_model_len=10, key="k"),
        template_args=template_args,
    )


def test_a_judge_writes_requests_with_its_own_tokenizer_and_arguments(tmp_path):
    made = tiny_model.make_tokenizer()
    made.chat_template = "{{ mood }}" + tiny_model.CHAT_TEMPLATE
    made.save_pretrained(tmp_path)
    tokenizer = plan_of(tmp_path, mood="kind:").make_tokenizer()
    asked = tokenizer.render([{"role": "user", "content": "abc"}], [])
    assert tokenizer.hf.decode(asked) == "kind:<|user|>abc<|assistant|>"


def test_a_judge_without_a_tokenizer_is_told_by_its_key(tmp_path):
    assert tell(lambda: plan_of(tmp_path).make_tokenizer()).startswith(
        f"judge.model={tmp_path}: its tokenizer cannot be loaded: "
    )


def test_a_judge_stays_as_long_as_it_is_asked_to():
    async def go() -> None:
        given: Any = (None, Characters(), Served(model="j", max_model_len=10, key="k"))
        worker = JudgeWorker(*given)
        await worker.stay(0.0)
        staying = asyncio.create_task(worker.stay(60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not staying.done()
        staying.cancel()

    asyncio.run(go())
