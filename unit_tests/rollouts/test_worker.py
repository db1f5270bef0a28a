"""A rollout worker: its seeds, and the reward that it makes of the parts. A scripted engine, real reward processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from configs.rollout_schema import RewardConfig, RolloutConfig
from core.errors import UserError
from core.types.samples import Prompt, Sample
from rewards import resolve_reward
from rewards.rewarder import Rewarder
from rollouts.engines.base import Completion, Engine
from rollouts.envs.single_turn import SingleTurn
from rollouts.episode import run_episode
from rollouts.places import EpisodeTimedOut, Places
from rollouts.seeds import make_seed
from rollouts.transcript import SharedPrompt
from rollouts.turns import EpisodeRules
from rollouts.worker import RolloutWorker
from tools.benchmarks.simulated_run import run_in_virtual_time
from unit_tests.helpers.episodes import Scripted, Tool, Words
from unit_tests.helpers.one_reward import one_reward

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "1 2"}], answer="5")
PARTS = """
def score(prompt, messages):
    if messages[-1]["content"] == "6":
        raise ValueError("six")
    return {"correct": float(messages[-1]["content"] == prompt.answer), "length": float(len(messages))}
"""


class Counting(Tool):
    """Scores the episode itself, too."""

    def scores(self):
        return {"calls": 3.0}


def play(tmp_path: Path, engine: Scripted, *, weights: dict[str, float], env=Tool, size: int = 1) -> list[Sample]:
    """The samples of the group of ticket 4."""
    file = tmp_path / "parts.py"
    file.write_text(PARTS)
    pool = Rewarder(one_reward(resolve_reward(str(file)), {}), 1, 30.0)
    worker = RolloutWorker(
        engine,
        Words(),
        lambda prompt: env(),
        pool,
        reward=RewardConfig(function=str(file), weights=weights),
        rollout=RolloutConfig(max_new_tokens=20, max_turns=3),
        seed=11,
    )
    try:
        return asyncio.run(worker.generate_group(4, PROMPT, size))
    finally:
        pool.close()


def test_every_turn_of_every_sibling_has_a_seed_of_its_own(tmp_path):
    engine = Scripted([3], [5], [3], [5])
    play(tmp_path, engine, weights={"correct": 1.0}, size=2)
    seeds = {make_seed(11, 4, sibling, turn) for sibling in (0, 1) for turn in (0, 1)}
    assert {seed for _, _, seed in engine.asked} == seeds and len(engine.asked) == 4


def test_siblings_share_a_rendered_prompt_until_an_environment_changes_it(tmp_path):
    class Rendering(Words):
        def __init__(self):
            self.rendered: list[str] = []

        def render(self, messages, tools=()):
            self.rendered.append(" ".join(m["content"] for m in messages))
            return super().render(messages, tools)

    prompt = Prompt(id="p", messages=[{"role": "user", "content": "1 2"}])
    words = Rendering()
    tokenizer = SharedPrompt(words)
    assert [tokenizer.render(prompt.messages) for _ in range(3)] == [[1, 2]] * 3
    prompt.messages[0]["content"] = "1 3"
    assert tokenizer.render(prompt.messages) == [1, 3]
    prompt.messages.append({"role": "user", "content": "4"})
    assert tokenizer.render(prompt.messages) == [1, 3, 4] == tokenizer.render([*prompt.messages])
    assert words.rendered == ["1 2", "1 3", "1 3 4"]


def test_the_reward_is_the_weighted_sum_of_the_parts(tmp_path):
    [sample] = play(
        tmp_path, Scripted([3, 4], [5]), weights={"correct": 2.0, "length": -0.5, "calls": 0.25}, env=Counting
    )
    assert sample.reward_parts == {"correct": 1.0, "length": 3.0, "calls": 3.0}
    assert sample.reward == 2.0 - 0.5 * 3 + 0.25 * 3
    [alone] = play(tmp_path, Scripted([5]), weights={"correct": 2.0})
    assert alone.reward == 2.0, "a part without a weight is logged and does not count"


class PerTurn(Tool):
    """Scores every reply that it was shown, in two parts."""

    def __init__(self):
        super().__init__()
        self.shown = []

    async def step(self, reply):
        self.shown.append({"found": float(len(self.shown) + 1), "speed": 100.0})
        return await super().step(reply)

    def turn_scores(self, player):
        return self.shown


class CutOff(Scripted):
    """Its last reply ends where the budget does."""

    async def generate(self, token_ids, *, max_new_tokens, seed):
        self.stop = "eos" if len(self.replies) > 1 else "length"
        return await super().generate(token_ids, max_new_tokens=max_new_tokens, seed=seed)


@pytest.mark.parametrize(("engine", "earned"), [(Scripted, (2.0, 4.0, 6.0)), (CutOff, (2.0, 4.0, 0.0))])
def test_the_reward_of_a_turn_is_the_weighted_sum_of_its_scores(tmp_path, engine, earned):
    """A part without a weight is logged and does not count; a reply that was cut off has earned nothing."""
    weights = {"correct": 1.0, "found": 2.0}
    [sample] = play(tmp_path, engine([3], [3], [5]), weights=weights, env=lambda: WithParts())
    assert sample.turn_rewards == earned


class WithParts(PerTurn):
    def scores(self):
        return {"found": 3.0, "speed": 1.0}


def test_a_failed_reward_leaves_no_reward_behind(tmp_path):
    refused, broken = play(tmp_path, Scripted([6], [4]), weights={"correct": 1.0}, size=2)
    assert refused.failure.startswith("ValueError: six") and "the tool broke" in broken.failure
    for sample in (refused, broken):
        assert sample.reward is None and sample.reward_parts == {}, "what failed is not rewarded"


def test_names_that_do_not_fit_are_the_users_to_correct(tmp_path):
    with pytest.raises(UserError, match=r"reward\.weights names 'corect', but the reward returns only correct, length"):
        play(tmp_path, Scripted([5]), weights={"corect": 1.0})

    class Twice(Tool):
        def scores(self):
            return {"correct": 1.0}

    with pytest.raises(UserError, match="both return a part 'correct'"):
        play(tmp_path, Scripted([5]), weights={"correct": 1.0}, env=Twice)


RICH = """
from rewards import Scored, Steps

def score(prompt, messages):
    said = messages[-1]["content"]
    tokens = {"process": Steps(" 7 ", [0.5, 0.25])} if " 7 " in said else {}
    turns = [{"found": 1.0}] * (1 if said == "8" else len(messages) // 2 + 1)
    return Scored({"correct": 1.0}, turn_parts=turns, token_parts=tokens, notes=[{"by": "me", "text": said}])
"""


def play_rich(tmp_path: Path, engine: Scripted, code: str, *, weights: dict[str, float], size: int) -> list[Sample]:
    file = tmp_path / "rich.py"
    file.write_text(code)
    rewarder = Rewarder(one_reward(resolve_reward(str(file)), {}), 1, 30.0)
    reward, rollout = RewardConfig(function=str(file), weights=weights), RolloutConfig(max_new_tokens=20, max_turns=3)
    worker = RolloutWorker(engine, Words(), lambda _: Tool(), rewarder, reward=reward, rollout=rollout, seed=11)
    try:
        return asyncio.run(worker.generate_group(4, PROMPT, size))
    finally:
        rewarder.close()


def test_a_reward_of_tokens_and_turns_reaches_the_sample(tmp_path):
    """Steps 5 and 6, with 7 between them: token 5 earned 2 x 0.5, and token 6 earned 2 x 0.25."""
    weights = {"correct": 1.0, "process": 2.0, "found": 4.0}
    [with_steps] = play_rich(tmp_path, Scripted([5, 7, 6]), RICH, weights=weights, size=1)
    assert with_steps.columns["token_rewards"].tolist() == [0.0, 0.0, 1.0, 0.0, 0.5]
    assert with_steps.reward == 1.0 + 2.0 * 0.75 + 4.0 and with_steps.turn_rewards == (4.0,)
    assert with_steps.notes == [{"by": "me", "text": "5 7 6"}]


def test_shares_that_fit_no_token_fail_the_sample(tmp_path):
    too_many, uneven = play_rich(tmp_path, Scripted([5, 7, 6, 7, 6], [3], [8]), RICH, weights={"correct": 1.0}, size=2)
    assert too_many.failure == "token_parts['process'] has 2 values for 3 steps of the last reply"
    assert uneven.failure == "turn_parts has 1 entries for 2 replies" and uneven.reward is None


COMPARED = """
def score_group(prompt, conversations):
    said = [int(messages[-1]["content"]) for messages in conversations]
    return [{"rank": sorted(said).index(number), "shown": len(said)} for number in said]
"""


def test_live_siblings_are_compared_and_failed_ones_are_not_shown(tmp_path):
    samples = play_rich(tmp_path, Scripted([9], [4], [5]), COMPARED, weights={"rank": 1.0}, size=3)
    assert [s.reward for s in samples] == [1.0, None, 0.0]
    assert "the tool broke" in samples[1].failure
    assert samples[0].reward_parts == {"rank": 1.0, "shown": 2.0}


class BySeed(Engine):
    """Replies with digits of the seed, and notes the sizes of groups."""

    def __init__(self):
        self.sizes: list[int] = []

    async def generate(self, token_ids, *, max_new_tokens, seed):
        return Completion(token_ids=[seed % 7, seed % 3], logp=[-0.5] * 2, versions=[0] * 2, stop="eos")

    async def generate_group(self, token_ids, *, size, **asked):
        self.sizes.append(size)
        return await super().generate_group(token_ids, size=size, **asked)


ALONE = [1] * 4
BUSY = """
import time

def score(prompt, messages):
    time.sleep(0.05)
    return 1.0
"""


@pytest.mark.parametrize(
    ("code", "changes", "sizes"),
    [
        ("def score(prompt, messages): return 1.0", {}, [4]),
        ("def score(prompt, messages): return 1.0", {"max_concurrency": 2}, ALONE),
        ("async def score(prompt, messages): return 1.0", {}, ALONE),
        (BUSY, {}, ALONE),
    ],
    ids=["at once", "few places", "async reward", "slow reward"],
)
def test_siblings_are_sampled_together_where_no_reward_should_wait(code, changes, sizes, tmp_path):
    """The samples are the same: sibling i has the seed of the first, plus i."""
    file = tmp_path / "reward.py"
    file.write_text(code)
    pool, engine = Rewarder(one_reward(resolve_reward(str(file)), {}), 2, 30.0), BySeed()
    reward, rollout = RewardConfig(function=str(file)), RolloutConfig(max_new_tokens=20, **changes)
    worker = RolloutWorker(engine, Words(), SingleTurn, pool, reward=reward, rollout=rollout, seed=11)

    async def body():
        if code == BUSY:  # only a first result shows that it is slow
            await worker.generate_group(3, PROMPT, 1)
            engine.sizes.clear()
        return await worker.generate_group(4, PROMPT, 4)

    try:
        group = asyncio.run(body())
    finally:
        pool.close()
    assert engine.sizes == sizes and [s.reward for s in group] == [1.0] * 4
    seeds = [make_seed(11, 4, sibling, 0) for sibling in range(4)]
    assert [s.token_ids.tolist() for s in group] == [[1, 2, seed % 7, seed % 3] for seed in seeds]


class Slow:
    """Replies after 0.05 s."""

    def __init__(self, hangs_at: int = -1):
        self.n, self.hangs_at = 0, hangs_at

    async def generate(self, token_ids, *, max_new_tokens, seed):
        self.n += 1
        await asyncio.sleep(30 if self.n - 1 == self.hangs_at else 0.05)
        return Completion(token_ids=[5], logp=[-0.5], versions=[0], stop="eos")


@pytest.mark.parametrize("hangs_at", [-1, 3])
def test_time_before_a_place_does_not_count_towards_the_deadline(tmp_path, hangs_at):
    """Fourteen episodes with one place take 0.7 s, of 0.6 s. One that hangs still ends the group."""
    file = tmp_path / "parts.py"
    file.write_text(PARTS)
    pool = Rewarder(one_reward(resolve_reward(str(file)), {}), 1, 30.0)
    rollout = RolloutConfig(max_new_tokens=20, timeout_s=0.6, max_concurrency=1)
    reward = RewardConfig(function=str(file), weights={"correct": 1.0})
    worker = RolloutWorker(
        Slow(hangs_at), Words(), lambda prompt: Tool(), pool, reward=reward, rollout=rollout, seed=11
    )
    try:
        group = asyncio.run(worker.generate_group(4, PROMPT, 14))
    finally:
        pool.close()
    assert group is None if hangs_at >= 0 else group is not None and len(group) == 14


def test_an_environment_that_does_not_close_gives_its_place_back():
    """The episode ends at its deadline, and close() after as long again."""

    class NeverCloses(Tool):
        async def close(self) -> None:
            await asyncio.sleep(100)

    rules = EpisodeRules(seed_of_turn=lambda turn: turn, max_new_tokens=20, max_turns=1, timeout_s=9.0)

    async def play_one(places: Places) -> None:
        async with places.take():
            await run_episode(Slow(hangs_at=0), lambda prompt: NeverCloses(), PROMPT, SharedPrompt(Words()), rules)

    async def go() -> float:
        places = Places(1, rules.timeout_s)
        with pytest.raises(EpisodeTimedOut):
            await play_one(places)
        async with places.take():
            return asyncio.get_running_loop().time()

    assert run_in_virtual_time(go()) == pytest.approx(18.0)
