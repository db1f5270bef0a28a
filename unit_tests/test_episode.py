"""A scripted conversation: who said what, and who gets trained on it."""

import asyncio
import re
from dataclasses import replace

import pytest

from core.errors import RunStopped, UserError
from core.types import Prompt, make_sample
from rollouts.engines.base import Completion
from rollouts.envs.calculator import Calculator
from rollouts.episode import make_seed, run_episode

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "1 2"}])


class Words:
    """Token id k is the word "k"."""

    def render(self, messages):
        return [int(w) for m in messages for w in m["content"].split()]

    def render_turn(self, message):
        return [int(w) for w in message["content"].split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


class Scripted:
    """Says each reply in turn; the version goes up between turns, as if weights landed in mid-episode."""

    def __init__(self, *replies, stop="eos"):
        self.replies, self.stop, self.version, self.asked = list(replies), stop, 7, []

    async def generate(self, token_ids, *, max_new_tokens, seed):
        self.asked.append((token_ids, max_new_tokens, seed))
        ids = self.replies.pop(0)
        self.version += 1
        n = len(ids)
        return Completion(token_ids=ids, logp=[-0.5] * n, versions=[self.version - 1] * n, stop=self.stop)


class Tool:
    """Answers a reply that begins with 3, and ends the episode on anything else."""

    def __init__(self, answer="9 9"):
        self.answer = answer

    async def step(self, reply):
        if reply.startswith("4"):
            raise OSError("the tool broke")
        return {"role": "tool", "content": self.answer} if reply.startswith("3") else None

    def scores(self):
        return {}


def play(engine, *, env=None, max_turns=3, max_new_tokens=10, timeout_s=60.0):
    episode = run_episode(
        engine,
        lambda prompt: env or Tool(),
        PROMPT,
        Words(),
        seed_of_turn=lambda turn: 100 + turn,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        timeout_s=timeout_s,
    )
    return asyncio.run(episode)


def test_only_what_the_policy_said_is_learnt():
    sample, said = play(Scripted([3, 4], [5]))
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert sample.action_mask.tolist() == [False, False, True, True, False, False, True]
    assert sample.rollout_logp.tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert sample.versions.tolist() == [-1, -1, 7, 7, -1, -1, 8], "every token knows the policy that sampled it"
    assert [m["role"] for m in said] == ["assistant", "tool", "assistant"]
    assert sample.stop == "eos"
    assert sample.completion == "3 4 9 9 5", "what follows the prompt, as text"


def test_the_engine_continues_its_own_tokens_and_the_budget_is_for_the_episode():
    engine = Scripted([3, 4], [5])
    play(engine)
    # 10 new tokens in all: 2 spoken and 2 observed leave 6
    assert engine.asked == [([1, 2], 10, 100), ([1, 2, 3, 4, 9, 9], 6, 101)]


@pytest.mark.parametrize(
    ("engine", "turns", "budget", "stop"),
    [
        (Scripted([3], [3]), 2, 10, "turns"),
        (Scripted([3], stop="length"), 2, 10, "length"),
        (Scripted([3]), 2, 3, "length"),  # the tool's answer would use the budget up
    ],
)
def test_why_it_stopped(engine, turns, budget, stop):
    sample, said = play(engine, max_turns=turns, max_new_tokens=budget)
    assert sample.stop == stop
    assert said[-1]["role"] == "assistant", "a reward that reads the last message reads the policy's"
    assert sample.action_mask[-1], "nothing is observed that is not answered"


def test_an_environment_that_raises_fails_its_sample():
    sample, _ = play(Scripted([4]))
    assert sample.failure.startswith("OSError: the tool broke (test_episode.py, line")
    assert not any(sample.loss_mask)


def test_the_calculator_answers_once_and_counts():
    env = Calculator(PROMPT)
    assert asyncio.run(env.step("12*3 = ?")) == {"role": "user", "content": "36"}
    assert asyncio.run(env.step("I want to know\n2 + 3*4 = ?"))["content"] == "14"
    assert asyncio.run(env.step("__import__('os') = ?"))["content"].startswith("error")
    assert asyncio.run(env.step("36")) is None
    assert asyncio.run(env.step("9-3 = ?"))["content"] == "6"
    assert env.scores()["calculator_calls"] == 4


def test_seeds_tell_runs_tickets_siblings_and_turns_apart():
    seeds = {make_seed(r, t, s, u) for r in range(3) for t in range(4) for s in range(4) for u in range(3)}
    assert len(seeds) == 3 * 4 * 4 * 3
    assert all(0 <= s < 2**63 for s in seeds)
    assert make_seed(1, 2, 3, 4) == make_seed(1, 2, 3, 4)


def test_a_sample_whose_lists_disagree_cannot_be_made():
    with pytest.raises(UserError, match="one length"):
        make_sample(prompt=PROMPT, token_ids=[1, 2], action_mask=[True], rollout_logp=[0.0, 0.0], versions=[0, 0])


class Blocks(Tool):
    async def step(self, reply):
        await asyncio.sleep(0)
        while True:  # an event loop hears of no deadline here
            pass


class Waits(Tool):
    """Awaits what succeeds and what fails, as an environment with a sandbox does."""

    async def step(self, reply):
        await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            return {"role": "tool", "content": await asyncio.to_thread(lambda: "9 9")}


def test_an_environment_that_blocks_the_process_ends_the_run_with_its_line():
    with pytest.raises(RunStopped, match=r"rollout.timeout_s=0.2 .*test_episode.py, line \d+\): await what"):
        play(Scripted([3]), env=Blocks(), timeout_s=0.2)


def test_an_environment_may_wait_longer_than_it_may_block():
    sample, said = play(Scripted([3], [5]), env=Waits(), max_turns=2, timeout_s=5.0)
    assert [m["content"] for m in said] == ["3", "9 9", "5"] and not sample.failure


class Plain(Tool):
    def step(self, reply):
        return None


def test_a_step_that_is_no_coroutine_fails_its_sample_and_says_so():
    sample, _ = play(Scripted([3]), env=Plain())
    assert "must be defined by `async def`" in sample.failure


IMPOSSIBLE = {
    "too long": ({"token_ids": [3] * 11, "logp": [-1.0] * 11, "versions": [0] * 11}, "11 tokens where 1 to 10"),
    "none": ({"token_ids": [], "logp": [], "versions": []}, "0 tokens where 1 to 10"),
    "two lengths": ({"logp": [-1.0, -1.0]}, "1 tokens with 2 log-probabilities and 1 versions"),
    "above 0": ({"logp": [0.5]}, "the log-probability 0.5"),
    "nan": ({"logp": [float("nan")]}, "the log-probability nan"),
    "a negative id": ({"token_ids": [-1]}, "the token ids"),
    "no such reason": ({"stop": "tired"}, "the stop reason 'tired'"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_completion_stops_the_run(name):
    changes, words = IMPOSSIBLE[name]

    class Engine(Scripted):
        async def generate(self, token_ids, *, max_new_tokens, seed):
            return replace(await super().generate(token_ids, max_new_tokens=max_new_tokens, seed=seed), **changes)

    with pytest.raises(RunStopped, match=f"returned {re.escape(words)}"):
        play(Engine([3]))


@pytest.mark.parametrize("answer", ["more", 5, {"role": "user"}, {"role": "teacher", "content": "1"}], ids=str)
def test_an_answer_that_is_no_message_fails_its_sample(answer):
    class Says(Tool):
        async def step(self, reply):
            return answer

    sample, _ = play(Scripted([3]), env=Says())
    assert "Env.step()" in sample.failure and ("teacher" in sample.failure or "must return None" in sample.failure)
