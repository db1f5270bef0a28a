"""Demonstrations of prompts: read and checked as rows of supervised learning, scored, and never sampled."""

import asyncio
import json

import pytest

import main_rl
from algs.by_source import BySource
from algs.chord import CHORD
from algs.echo import ECHO
from algs.grpo import GRPO
from analysis.capture.batch_file import read_batch, write_batch
from configs.data_schema import PromptDataConfig, RowDataConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from configs.schema import RLConfig
from core.errors import RunStopped, UserError
from core.types.episodes import join_episodes
from core.types.samples import Prompt
from data_feeds.chat.demonstrations import make_demonstration
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed, load_groups, load_prompts
from data_feeds.rows.episodes import Sampling
from driver.checks.terms import check_demonstrated, check_given, check_sources
from driver.load_recipe import load_recipe
from driver.records.rollout_metrics import measure_groups, measure_staleness
from rewards import resolve_reward
from rewards.rewarder import Rewarder
from rewards.weights import plan_rewards
from rollouts.worker import RolloutWorker
from unit_tests.helpers.chat_families import assistant, user
from unit_tests.helpers.episodes import Scripted, Tool
from unit_tests.helpers.examples import a_changed, run_here, through_checkpoint
from unit_tests.helpers.one_reward import one_reward
from unit_tests.helpers.runs import folder_of, metrics_of


@pytest.fixture(scope="module")
def chat(tiny_path) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def write(tmp_path, *rows) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(chat, path: str, *, max_new_tokens: int | None = 20, **settings) -> Feed[Prompt]:
    data = PromptDataConfig(train=path, **{"max_prompt_tokens": 20, "max_invalid_fraction": 1.0} | settings)
    sampling = None if max_new_tokens is None else Sampling(max_new_tokens=max_new_tokens)
    return load_prompts(data, "train", chat, seed=0, sampling=sampling)


def test_a_demonstration_has_the_tokens_of_a_supervised_row(chat, tmp_path):
    asked = [user("1+1=")]
    [prompt] = load(chat, write(tmp_path, {"messages": asked, "demonstration": "2"})).all()
    assert prompt.messages == asked and prompt.demonstration == [assistant("2")] and not prompt.extra
    made = make_demonstration(chat, prompt)
    data = RowDataConfig(train=write(tmp_path, {"messages": [*asked, assistant("2")]}), max_tokens=40)
    [[row]] = load_groups(data, "train", chat, rows="conversations", seed=0).all()
    assert made.token_ids.tolist() == row.token_ids.tolist()
    assert made.action_mask.tolist() == row.action_mask.tolist()
    assert made.origin == "demonstration" and made.completion == "2" and {*made.versions.tolist()} == {-1}


def test_every_reply_of_a_longer_demonstration_is_trained_on(chat, tmp_path):
    asked = [user("1"), assistant("2"), user("3")]
    answered = [assistant("4"), user("5"), assistant("6")]
    [prompt] = load(chat, write(tmp_path, {"messages": asked, "demonstration": answered})).all()
    made = make_demonstration(chat, prompt)
    learnt = chat.decode([i for i, m in zip(made.token_ids.tolist(), made.action_mask, strict=True) if m])
    assert "4" in learnt and "6" in learnt and not any(said in learnt for said in "1235")


def test_a_demonstration_is_read_for_training_alone(chat, tmp_path):
    path = write(tmp_path, {"messages": [user("1+1=")], "demonstration": "2"})
    [prompt] = load(chat, path, max_new_tokens=None).all()
    assert prompt.demonstration == []


def test_a_flawed_demonstration_is_an_invalid_row(chat, tmp_path):
    rows = [{"messages": [user("1")], "demonstration": "2" * 40}, {"messages": [user("1")], "demonstration": " "}]
    rows += [{"messages": [user("1")], "demonstration": [user("2")]}, {"messages": [user("1")]}]
    feed = load(chat, write(tmp_path, *rows))
    assert len(feed.all()) == 1
    reasons = {reason: case.example for reason, case in feed.sources[0].invalid.cases.items()}
    assert reasons == {"too_long": "0", "empty": "1", "not_one_prompt": "2"}


def group_of(chat, tmp_path, demonstration: str):
    """A worker's group of two samples and a demonstration, with the requests to the engine."""
    file = tmp_path / "reward.py"
    file.write_text("def score(prompt, messages):\n    return {'right': float(messages[-1]['content'] == '2')}\n")
    pool = Rewarder(one_reward(resolve_reward(str(file)), {}), 1, 30.0)
    engine = Scripted(chat.encode("2"), chat.encode("3"))
    rollout, reward = RolloutConfig(max_new_tokens=20), RewardConfig(function=str(file), weights={"right": 1.0})
    worker = RolloutWorker(engine, chat, Tool, pool, reward=reward, rollout=rollout, seed=0)
    prompt = Prompt(id="p", messages=[user("1+1=")], demonstration=[assistant(demonstration)])
    try:
        return asyncio.run(worker.generate_group(0, prompt, 2)), engine.asked
    finally:
        pool.close()


def test_a_group_has_its_demonstration_scored_and_not_sampled(chat, tmp_path):
    group, asked = group_of(chat, tmp_path, "2")
    assert [s.origin for s in group] == ["policy", "policy", "demonstration"] and len(asked) == 2
    assert [s.reward for s in group] == [1.0, 0.0, 1.0]
    assert [s.prompt for s in group] == [group[0].prompt] * 3
    # metrics are the policy's, a checkpoint keeps the origin, and nothing is stale
    measured = measure_groups([group])
    assert measured["reward/mean"] == 0.5 and measured["rollout/samples"] == 2
    # the engine's version rose from 7 to 8 between the two samples
    assert measure_staleness([group], step=8, max_staleness=1)["rollout/staleness_max"] == 1
    _, _, buffer = through_checkpoint(group)
    assert buffer.waiting[0].group == group
    write_batch(tmp_path, [group])
    assert read_batch(tmp_path) == [group]


def test_samples_of_an_episode_have_one_origin(chat, tmp_path):
    group, _ = group_of(chat, tmp_path, "2")
    mixed = [a_changed(s, episode=0, reward=1.0, advantage=None) for s in group[1:]]
    with pytest.raises(RunStopped, match="several origins"):
        join_episodes(mixed)


def test_what_nobody_would_learn_or_score_is_refused(chat, tmp_path, recipe):
    shown = load(chat, write(tmp_path, {"messages": [user("1")], "demonstration": "2"}))
    plain = load(chat, write(tmp_path, {"messages": [user("1")]}))
    cfg = load_recipe(RLConfig, recipe(), []).cfg
    check_demonstrated(cfg, CHORD(), shown)
    check_demonstrated(cfg, GRPO(), plain)
    wrong = [(GRPO(), shown, "trains on none"), (ECHO(), shown, "trains on none"), (CHORD(), plain, "no row")]
    for alg, feed, why in wrong:
        with pytest.raises(UserError, match=why):
            check_demonstrated(cfg, alg, feed)
    with pytest.raises(UserError, match=r"reward.function=environment"):
        check_demonstrated(load_recipe(RLConfig, recipe({"reward.function": "environment"}), []).cfg, CHORD(), shown)


def test_the_sources_of_a_mixture_are_those_of_its_terms(chat, tmp_path, recipe):
    feed = load(chat, write(tmp_path, {"messages": [user("1")]}))
    check_sources(BySource(by_source={"rows": {"name": "grpo"}}), feed)
    with pytest.raises(UserError, match=r"for the source 'other', and data.train has rows"):
        check_sources(BySource(by_source={"rows": {"name": "grpo"}, "other": {"name": "grpo"}}), feed)
    path = write(tmp_path, {"messages": [user("1")]})
    both = load(chat, [{"path": path, "name": "rows"}, {"path": path, "name": "more"}])
    cfg = load_recipe(RLConfig, recipe(), []).cfg
    with pytest.raises(UserError, match="no term of BySource trains on the source 'more'"):
        check_given(cfg, BySource(by_source={"rows": {"name": "grpo"}}), both, plan_rewards(cfg.reward))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"by_source": {"a": {"name": "grpo"}}, "kl": {"coef": 0.1}}, "kl is a setting of each source"),
        ({"by_source": {"a": {"name": "grpo"}}, "adaptive_entropy": {"target": 0.3}}, "adaptive_entropy is a setting"),
        ({"by_source": {"a": {"name": "grpo"}}, "coefs": {"b": 0.5}}, "coefs names b"),
        ({"by_source": {"a": {"name": "ppo"}}}, "PPO has a value model"),
        ({"by_source": {"a": {"name": "dpo"}}}, "DPO compares completions"),
        ({"by_source": {"a": {"name": "grpo", "clip": 0.1}}}, "alg.by_source.a.clip"),
        ({"by_source": {"a": {"name": "no_such"}}}, "no_such"),
    ],
)
def test_a_mixture_of_algorithms_refuses_what_it_cannot_train(recipe, settings, why):
    with pytest.raises(UserError, match=why):
        load_recipe(RLConfig, recipe({"alg": settings}), [])


def test_a_run_has_an_algorithm_per_source(tmp_path, recipe):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    sums = [{"messages": [user(f"{n}+1=")], "answer": str(n + 1)} for n in range(8)]
    shown = [{**row, "demonstration": row["answer"]} for row in sums]
    sources = [{"path": write(tmp_path / at, *rows), "name": at} for at, rows in (("a", sums), ("b", shown))]
    alg = {"by_source": {"a": {"name": "grpo", "entropy_coef": 0.01}, "b": {"name": "sft"}}, "coefs": {"b": 0.5}}
    assert run_here(main_rl, "--config", recipe({"alg": alg, "data.train": sources, "trainer.lr": 1e-2})) == (0, "")
    steps = metrics_of(folder_of(tmp_path))
    assert [step["train/term/b/coef"] for step in steps] == [0.5, 0.5]
    parts = [step["train/term/a/loss"] + 0.5 * step["train/term/b/loss"] for step in steps]
    assert [step["train/loss"] for step in steps] == pytest.approx(parts)
    assert all("train/entropy" in step for step in steps)


def test_a_run_learns_from_its_demonstrations(tmp_path, recipe):
    rows = [{"messages": [user(f"{n}+1=")], "answer": str(n + 1), "demonstration": str(n + 1)} for n in range(8)]
    changes = {"alg": {"name": "chord", "mu": 0.9, "phi": False}, "data.train": write(tmp_path, *rows), "steps": 6}
    path = recipe(changes | {"trainer.lr": 1e-2, "updates_per_step": 2, "trainer.micro_batch_tokens": 200})
    assert run_here(main_rl, "--config", path) == (0, "")
    steps = metrics_of(folder_of(tmp_path))
    losses = [step["train/term/imitation/loss"] for step in steps]
    assert losses[-1] < 0.7 * losses[0]
    assert [step["train/term/imitation/coef"] for step in steps] == pytest.approx([0.9] * 6)
    assert {step["rollout/samples"] for step in steps} == {16.0}
