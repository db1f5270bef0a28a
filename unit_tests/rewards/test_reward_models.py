"""Reward models: samples that wait together share a forward pass, and a model may have several labels."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from core.errors import UserError
from core.types.samples import Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from rewards import reward_model
from rewards.batches import Batcher
from unit_tests.helpers.chat_families import WEATHER

REPLIES = ["7", "a longer reply", "77", "no", "a reply that is longer than all the others"]


def classifier(tiny_path: str, folder: Any, n: int) -> str:
    """Save a random sequence classifier of n labels."""
    config = AutoConfig.from_pretrained(tiny_path)
    config.num_labels = n
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    ChatTokenizer(tiny_path, "chat").save(folder)
    return str(folder)


async def score_all(replies: list[str], **settings: Any) -> list[dict[str, float]]:
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "Write."}])
    calls = (reward_model.score(prompt, [{"role": "assistant", "content": reply}], **settings) for reply in replies)
    return await asyncio.gather(*calls)


def test_samples_in_a_batch_have_the_rewards_of_each_alone(tiny_path, tmp_path, monkeypatch):
    path, sizes = classifier(tiny_path, tmp_path / "rm", 3), list[int]()
    compute = reward_model.Scorer.compute
    monkeypatch.setattr(reward_model.Scorer, "compute", lambda s, b: sizes.append(len(b)) or compute(s, b))
    labels = {"honest": 2, "brief": 0}
    together = asyncio.run(score_all(REPLIES, model=path, labels=labels))
    assert sizes == [len(REPLIES)]
    alone = [asyncio.run(score_all([reply], model=path, labels=labels))[0] for reply in REPLIES]
    assert [found.keys() for found in together] == [labels.keys()] * len(REPLIES)
    for found, own in zip(together, alone, strict=True):
        assert found == pytest.approx(own, abs=1e-5)
    assert len({round(found["honest"], 4) for found in together}) == len(REPLIES)
    assert all(abs(found["honest"] - found["brief"]) > 1e-4 for found in together)
    asyncio.run(score_all(REPLIES, model=path, labels=labels, batch_tokens=70))
    assert sizes[len(REPLIES) + 1 :] == [3, 1, 1], "the longest have about 60 and 30 tokens"


def test_a_reply_that_the_prompt_begins_is_scored_as_one_turn(tiny_path, tmp_path):
    """data.continue_final_message: the policy goes on after `7`, and the reward model sees `77` of one assistant."""
    path, asked = classifier(tiny_path, tmp_path / "rm", 1), {"role": "user", "content": "Write."}

    def score(before: list[Any], reply: str) -> dict[str, float]:
        call = reward_model.score(
            Prompt(id="p", messages=[asked, *before]), [{"role": "assistant", "content": reply}], model=path
        )
        return asyncio.run(call)

    assert score([{"role": "assistant", "content": "7"}], "7") == score([], "77") != score([], "7")


def test_a_reward_model_reads_the_tools_of_the_prompt(qwen):
    scorer = reward_model.Scorer(None, qwen, None, [("reward", 0)], 1000)
    asked: Any = {"id": "p", "messages": [{"role": "user", "content": "Write."}]}
    with_tools, without = (
        qwen.hf.decode(scorer.encode(prompt, [{"role": "assistant", "content": "7"}]).token_ids)
        for prompt in (Prompt(**asked, tools=[WEATHER]), Prompt(**asked))
    )
    name = WEATHER["function"]["name"]
    assert name in with_tools and name not in without


def test_calls_that_arrive_during_a_batch_are_the_next(tiny_path):
    """The first call runs alone, those that wait meanwhile share the second pass, and an error is of its batch."""
    batches, go = list[list[int]](), threading.Event()

    def run(items: list[int]) -> list[int]:
        batches.append(items)
        go.wait(5)
        if 9 in items:
            raise ValueError("nine")
        return [-item for item in items]

    async def main() -> list[Any]:
        batcher = Batcher(run, abs, 12)
        first = asyncio.ensure_future(batcher.call(1))
        while not batches:
            await asyncio.sleep(0)
        rest = asyncio.gather(*map(batcher.call, (3, 2, 9, 3)), return_exceptions=True)
        await asyncio.sleep(0)
        go.set()
        return [await first, *await rest]

    *found, nine, last = asyncio.run(main())
    assert found == [-1, -3, -2] and last == -3 and isinstance(nine, ValueError)
    assert batches == [[1], [2, 3, 3], [9]]


def test_a_model_without_the_labels_is_refused(tiny_path, tmp_path):
    path = classifier(tiny_path, tmp_path / "rm", 3)
    for given, said in (
        ({"model": tiny_path}, "is no sequence classifier"),
        ({"model": path}, r"has 3 labels: set reward\.settings\.labels"),
        ({"model": path, "labels": {"kind": 3}}, r"reward\.settings\.labels\.kind: .* has the labels 0 to 2"),
    ):
        with pytest.raises(UserError, match=said):
            reward_model.prepare(**given)


def test_the_settings_of_a_reward_model_reach_it_each_in_its_place(tiny_path, tmp_path):
    path = classifier(tiny_path, tmp_path / "rm", 2)
    given: dict[str, Any] = {"model": path, "labels": {"kind": 1}, "template": "plain", "device": "cpu"}
    given |= {"template_date": "2024-07-26", "dtype": "bfloat16", "batch_tokens": 70}
    reward_model.load_once.cache_clear()
    reward_model.prepare(**given)
    [found] = asyncio.run(score_all(["7"], **given))
    scorer = reward_model.load_once(path, (("kind", 1),), "plain", "2024-07-26", False, "cpu", "bfloat16", 70)
    assert (reward_model.load_once.cache_info().misses, reward_model.load_once.cache_info().hits) == (1, 2)
    assert [*found] == ["kind"] and [*scorer.labels] == [("kind", 1)]
    assert {p.dtype for p in scorer.net.parameters()} == {torch.bfloat16} and not scorer.net.training
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "Write."}])
    sample = scorer.encode(prompt, [{"role": "assistant", "content": "7"}])
    assert sample.action_mask.tolist() == [False] * (len(sample.token_ids) - 1) + [True]
    assert not sample.rollout_logp.any() and {*sample.versions.tolist()} == {-1}
    reward_model.load_once.cache_clear()
