"""Recorded episodes: read with their log-probabilities, weighed exactly, or refused with the reason."""

import asyncio
import json

import pytest

import main_rl
from algs.chord import CHORD
from algs.gpg import GPG
from algs.grpo import GRPO
from algs.rloo import RLOO
from algs.terms import Correction
from configs.data_schema import PromptDataConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from configs.schema import RLConfig
from core.errors import UserError
from core.types.allowed_tokens import AllowedTokens
from core.types.samples import Prompt, RecordedEpisode
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_prompts
from data_feeds.rows.episodes import Sampling, read_episodes
from data_feeds.rows.invalid_rows import InvalidRow
from driver.checks.terms import check_demonstrated, check_recorded
from driver.load_recipe import load_recipe
from driver.records.rollout_metrics import measure_groups
from rewards import resolve_reward
from rewards.rewarder import Rewarder
from rollouts.worker import RolloutWorker
from unit_tests.helpers.chat_families import assistant, user
from unit_tests.helpers.episodes import Scripted, Tool
from unit_tests.helpers.examples import run_here, through_checkpoint
from unit_tests.helpers.one_reward import one_reward
from unit_tests.helpers.runs import LUCK, file_of, folder_of, metrics_of, samples_of


def write(tmp_path, *rows) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(chat, path, *, max_new_tokens: int | None = 20):
    data = PromptDataConfig(train=path, max_prompt_tokens=20)
    sampling = None if max_new_tokens is None else Sampling(max_new_tokens=max_new_tokens)
    return load_prompts(data, "train", chat, seed=0, sampling=sampling)


EXACT = {"alg.correction": {"level": "sequence", "high": float("inf")}}


@pytest.fixture(scope="module")
def chat(tiny_path) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def an_episode(chat: ChatTokenizer, text: str = "2", **changes) -> dict:
    asked, said = chat.render([user("1+1=")]), chat.encode(text)
    logp = [None] * len(asked) + [-0.5] * len(said)
    whole = {"completion": text, "token_ids": [*asked, *said], "logp": logp, "temperature": 1.0}
    return {name: value for name, value in (whole | changes).items() if value != "gone"}


def read(chat: ChatTokenizer, episode: dict, **sampling) -> RecordedEpisode:
    rules = Sampling(**{"max_new_tokens": 20} | sampling)
    [made] = read_episodes([episode], chat.render([user("1+1=")]), chat, rules, longest=40, fills_gaps=False)
    return made


def test_an_episode_keeps_its_tokens_and_log_probabilities(chat, tmp_path):
    episode = an_episode(chat, "12", stop="length")
    row = {"messages": [user("1+1=")], "episodes": json.dumps([episode, {"completion": "3"}])}
    [prompt] = load(chat, write(tmp_path, row)).all()
    first, second = prompt.recorded
    assert (first.token_ids, first.logp, first.stop) == (episode["token_ids"], episode["logp"], "length")
    assert first.messages == [assistant("12")] and second.messages == [assistant("3")] and not second.token_ids
    assert load(chat, write(tmp_path, row), max_new_tokens=None).all()[0].recorded == ()


def test_an_episode_whose_policy_ended_at_once_is_its_tokens(chat):
    ids = [*chat.render([user("1+1=")]), chat.hf.eos_token_id]
    made = read(chat, an_episode(chat, "", token_ids=ids, logp=[None] * (len(ids) - 1) + [-0.5]))
    assert (made.token_ids, made.completion, made.messages) == (ids, "", [assistant("")])
    assert read(chat, {"completion": ""}).messages == [assistant("")]


@pytest.mark.parametrize(
    ("changes", "sampling", "why"),
    [
        ({"logp": "gone"}, {}, "no logp: its importance weight is unknown, and 1 would point"),
        ({"token_ids": "gone"}, {}, "no token_ids: its text, encoded again"),
        ({"logp": [None, -1.0]}, {}, "2 numbers of logp"),
        ({"token_ids": [10**6, 1]}, {}, "numbers of logp"),
        ({"completion": "3"}, {}, "its completion is '3': they are of another tokenizer"),
        ({"temperature": 0.7}, {}, "sampled at temperature 0.7, and rollout.temperature is 1"),
        ({"temperature": "gone"}, {}, "logp and no temperature"),
        ({"top_p": 0.9}, {}, "sampled with top_p"),
        ({}, {"is_truncated": True}, "rollout has top_p, top_k or min_p"),
        ({"allowed_tokens": ["2"]}, {}, "other allowed_tokens"),
        ({"allowed_tokens": 5}, {}, "allowed_tokens must be a list of texts, found 5"),
        ({}, {"allowed": AllowedTokens(allowed=(1,))}, "rollout.allowed_tokens excludes"),
        ({"score": 1}, {}, "an episode has 'score'"),
        ({"completion": 5}, {}, "completion is text"),
        ({"completion": "gone", "token_ids": "gone", "logp": "gone"}, {}, "neither completion"),
    ],
)
def test_what_has_no_exact_weight_is_refused_with_the_reason(chat, changes, sampling, why):
    with pytest.raises(InvalidRow, match=why):
        read(chat, an_episode(chat, **changes), **sampling)


def test_tokens_of_another_prompt_vocabulary_or_number_are_refused(chat):
    good = an_episode(chat)
    assert read(chat, good | {"completion": None}).completion == "2"
    n = len(good["logp"])
    wrong = [
        ({"token_ids": [10**6, *good["token_ids"][1:]]}, "has the token id 1000000, and this vocabulary has"),
        ({"token_ids": [good["token_ids"][1], *good["token_ids"][1:]]}, "other tokens than its prompt has here"),
        ({"logp": [*good["logp"][:-1], 0.5]}, "the log-probability 0.5"),
        ({"logp": [*good["logp"][:-1], float("nan")]}, "the log-probability nan"),
        ({"logp": [*good["logp"][:-1], -(10**400)]}, "the log-probability -1000"),
        ({"logp": [None] * n}, "a logp for none of its tokens"),
    ]
    for change, why in wrong:
        with pytest.raises(InvalidRow, match=why):
            read(chat, good | change)
    with pytest.raises(InvalidRow, match=r"more than data.max_prompt_tokens"):
        read_episodes([good], [], chat, Sampling(max_new_tokens=1), longest=2, fills_gaps=False)


def test_a_group_compares_recorded_episodes_with_its_own(chat, tmp_path):
    text = "def score(prompt, messages):\n    return {'right': float(messages[-1]['content'] == '2')}\n"
    file = file_of(tmp_path / "reward.py", text)
    pool = Rewarder(one_reward(resolve_reward(file), {}), 1, 30.0)
    rollout, reward = RolloutConfig(max_new_tokens=20), RewardConfig(function=file, weights={"right": 1.0})
    engine = Scripted(chat.encode("2"), chat.encode("3"))
    worker = RolloutWorker(engine, chat, Tool, pool, reward=reward, rollout=rollout, seed=0)
    recorded = (read(chat, an_episode(chat)), read(chat, {"completion": "2"}))
    prompt = Prompt(id="p", messages=[user("1+1=")], recorded=recorded)
    try:
        group = asyncio.run(worker.generate_group(0, prompt, 2))
    finally:
        pool.close()
    assert [s.origin for s in group] == ["policy", "policy", "other", "demonstration"]
    assert [s.reward for s in group] == [1.0, 0.0, 1.0, 1.0] and not any(s.prompt.recorded for s in group)
    other = group[2]
    assert other.rollout_logp[other.action_mask].tolist() == [-0.5] and other.completion == "2"
    # the mean of the policy's own two, whatever joined them
    [credited] = GRPO().compute_advantages([group[:3]])
    assert [float(s.advantage[-1]) for s in credited] == [0.5, -0.5, 0.5]
    measured = measure_groups([group])
    assert measured["reward/mean"] == 0.5 and measured["reward/others"] == 1.0
    assert through_checkpoint(group)[2].waiting[0].group == group


def test_an_algorithm_that_would_weigh_them_wrongly_is_refused(chat, tmp_path, recipe):
    row = {"messages": [user("1+1=")], "episodes": [an_episode(chat)]}
    feed, cfg = load(chat, write(tmp_path, row)), load_recipe(RLConfig, recipe(), []).cfg
    exact = Correction(level="sequence")
    check_recorded(cfg, RLOO(correction=exact), feed)
    wrong = [
        (GRPO(), "level=token is biased"),
        (GRPO(correction=Correction(level="none")), "weighs them by 1"),
        (GPG(correction=exact), "no baseline of the policy's own"),
        (GRPO(correction=exact, whiten=True), "no baseline of the policy's own"),
    ]
    for alg, why in wrong:
        with pytest.raises(UserError, match=why):
            check_recorded(cfg, alg, feed)
    played = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"env": "calculator"})})
    with pytest.raises(UserError, match=r"rollout.env=calculator may add messages"):
        check_recorded(played, RLOO(correction=exact), feed)
    early = cfg.model_copy(update={"weight_sync": cfg.weight_sync.model_copy(update={"max_kl": 0.1})})
    with pytest.raises(UserError, match=r"weight_sync.max_kl would count them: unset it"):
        check_recorded(early, RLOO(correction=exact), feed)
    shown = load(chat, write(tmp_path, {"messages": [user("1+1=")], "episodes": [{"completion": "2"}]}))
    check_demonstrated(cfg, CHORD(), shown)
    with pytest.raises(UserError, match=r"episodes without logp .* trains on none"):
        check_demonstrated(cfg, GRPO(), shown)


def test_a_null_of_a_recorded_run_was_written(qwen, tmp_path):
    """A run's folder has no suffix, and holds JSON lines: tools with a default of null can be replayed."""
    schema = {"type": "object", "properties": {"x": {"type": ["integer", "null"], "default": None}}}
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": schema}}
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"x": None}}}
    turns = [{**assistant(""), "tool_calls": [call]}, {"role": "tool", "content": "1", "tool_call_id": "call00000"}]
    record = {"group": 0, "id": "a", "prompt": [user("1+1=")], "tools": [tool], "turns": [*turns, assistant("1")]}
    (tmp_path / "samples").mkdir()
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "samples" / "step_00001.jsonl").write_text(json.dumps({**record, "completion": "1"}))
    data = PromptDataConfig(train=str(tmp_path), max_prompt_tokens=4000)
    prompt = load_prompts(data, "train", qwen, seed=0, sampling=Sampling(max_new_tokens=4000)).draw(0)
    assert prompt.tools == [tool] and prompt.recorded[0].messages[0]["tool_calls"] == [call]


@pytest.mark.one_core
@pytest.mark.slow
def test_a_recorded_run_is_replayed_as_data(tmp_path, recipe):
    # a reward that reads another column of the row
    reads = LUCK.replace("return", "assert p.extra['level'] in 'abc'; return")
    rows = [{"messages": [user(f"{n}+1=")], "level": "abc"[n % 3]} for n in range(9)]
    lucky = {"reward.function": file_of(tmp_path / "luck.py", reads), "data.train": write(tmp_path, *rows)}
    assert run_here(main_rl, "--config", recipe({"record_tokens": True, "name": "first", **lucky})) == (0, "")
    first = folder_of(tmp_path, "first")
    again = {**lucky, "data.train": str(first), "name": "again", "group_size": 2, **EXACT}
    assert run_here(main_rl, "--config", recipe(again)) == (0, "")
    second = folder_of(tmp_path, "again")
    # two of its own and the four of a recorded group, whose weights are those of the tokens as they were recorded
    groups = [[s for s in samples_of(second) if s["group"] == g] for g in range(4)]
    assert [[s.get("origin") for s in g] for g in groups] == [[None] * 2 + ["other"] * 4] * 4
    assert {s["completion"] for g in groups for s in g[2:]} <= {
        s["completion"] for step in (0, 1) for s in samples_of(first, step)
    }
    steps = metrics_of(second)
    # the same weights sampled the episodes of step 0, and of step 1 after one update at a small learning rate
    assert steps[0]["train/mismatch/ess"] == pytest.approx(1, abs=0.05) and steps[0]["rollout/samples"] == 8
    with pytest.raises(UserError, match="is a recorded run"):
        load(None, [{"path": str(first), "lazy": True}])
    # without tokens it is a run of demonstrations
    assert run_here(main_rl, "--config", recipe({"name": "bare"})) == (0, "")
    code, said = run_here(main_rl, "--config", recipe(again | {"data.train": str(folder_of(tmp_path, "bare"))}))
    assert code == 2 and "episodes without logp" in said
