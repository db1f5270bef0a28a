"""A scripted conversation: who said what, and who gets trained on it."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

from core.errors import RunStopped, UserError
from core.types.samples import make_sample
from rollouts.envs.calculator import Calculator
from rollouts.seeds import make_seed
from rollouts.transcript import SharedPrompt
from unit_tests.helpers.episodes import PROMPT, Duel, Scripted, Tool, play, play_all, said
from unit_tests.helpers.examples import through_checkpoint


def test_only_what_the_policy_said_is_learnt():
    sample, messages = play(Scripted([3, 4], [5]))
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert sample.action_mask.tolist() == [False, False, True, True, False, False, True]
    assert sample.rollout_logp.tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert sample.versions.tolist() == [-1, -1, 7, 7, -1, -1, 8], "every token knows the policy that sampled it"
    assert [m["role"] for m in messages] == ["assistant", "tool", "assistant"]
    assert sample.turns == ((2, 4), (6, 7)) and sample.transcript == messages
    assert sample.stop == "eos"
    assert sample.completion == "3 4 9 9 5", "what follows the prompt, as text"


def test_the_engine_continues_its_own_tokens_and_episodes_have_one_budget():
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
    sample, messages = play(engine, max_turns=turns, max_new_tokens=budget)
    assert sample.stop == stop
    assert messages[-1]["role"] == "assistant", "a reward that reads the last message reads the policy's"
    assert sample.action_mask[-1], "nothing is observed that is not answered"


def test_an_answer_of_megabytes_ends_the_episode_without_being_encoded(qwen):
    """Encoding would stop every other episode of the process for seconds."""

    class Refusing(SharedPrompt):
        def __init__(self, tokenizer):
            super().__init__(tokenizer)
            self.render_turns = lambda reply, answers, tools=(): pytest.fail("all of it is encoded")

    reply = qwen.encode("3")
    sample, messages = play(Scripted(reply), env=Tool(answer="9 " * 2**20), tokenizer=Refusing(qwen))
    assert sample.stop == "length" and sample.token_ids[-len(reply) :].tolist() == reply
    assert [message["content"] for message in messages] == ["3"]


def test_an_environment_that_raises_fails_its_sample():
    sample, _ = play(Scripted([4]))
    assert sample.failure.startswith("OSError: the tool broke (episodes.py, line")
    assert not any(sample.loss_mask)


def test_the_calculator_answers_once_and_counts():
    env = Calculator(PROMPT)
    assert asyncio.run(env.step(said("12*3 = ?"))) == [{"role": "user", "content": "36"}]
    assert asyncio.run(env.step(said("I want to know\n2 + 3*4 = ?")))[0]["content"] == "14"
    assert asyncio.run(env.step(said("__import__('os') = ?")))[0]["content"].startswith("error")
    assert asyncio.run(env.step(said("36"))) is None
    assert asyncio.run(env.step(said("9-3 = ?")))[0]["content"] == "6"
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
            return [{"role": "tool", "content": await asyncio.to_thread(lambda: "9 9")}]


def test_an_environment_that_blocks_the_process_ends_the_run_with_its_line():
    with pytest.raises(RunStopped, match=r"rollout.timeout_s=0.2 .*test_episode.py, line \d+\); await slow calls"):
        play(Scripted([3]), env=Blocks(), timeout_s=0.2)


def test_an_environment_may_wait_longer_than_it_may_block():
    sample, messages = play(Scripted([3], [5]), env=Waits(), max_turns=2, timeout_s=5.0)
    assert [m["content"] for m in messages] == ["3", "9 9", "5"] and not sample.failure


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


BAD_ANSWERS = {
    "more": "must return None or a list of messages",
    5: "must return None or a list of messages",
    '{"role": "user", "content": "1"}': "one message alone: return [message]",
    '[{"role": "user"}]': "messages with role and content",
    '[{"role": "user", "content": 3}]': "messages whose content is text",
    '[{"role": "teacher", "content": "1"}]': "answered as 'teacher', which is none of",
    '[{"role": "user", "content": "1", "mood": "good"}]': "a message with 'mood', which no message has",
    "[]": "returned no message: return None",
}


@pytest.mark.parametrize("answer", BAD_ANSWERS, ids=str)
def test_an_answer_that_is_no_list_of_messages_fails_its_sample(answer):
    class Says(Tool):
        async def step(self, reply):
            return json.loads(answer) if isinstance(answer, str) and answer[0] in "[{" else answer

    sample, _ = play(Scripted([3]), env=Says())
    assert "Env.step()" in sample.failure and BAD_ANSWERS[answer] in sample.failure
    assert sample.reward_parts == {}


class Opens(Tool):
    """Shows something before the first reply, and notes that it was closed."""

    closed = 0

    async def open(self):
        return [{"role": "user", "content": "8 8"}]

    async def close(self):
        self.closed += 1


def test_an_environment_may_speak_first():
    env = Opens()
    engine = Scripted([3], [5])
    sample, _ = play(engine, env=env)
    assert engine.asked[0][0] == [1, 2, 8, 8] and env.closed == 1
    assert sample.prompt.messages == [*PROMPT.messages, {"role": "user", "content": "8 8"}]
    with pytest.raises(UserError, match=r"data.max_prompt_tokens=3: the prompt p has 4 tokens with what the env"):
        play(Scripted([5]), env=env, max_prompt_tokens=3)
    assert env.closed == 2, "after an error too"


def test_a_checkpoint_keeps_what_an_environment_adds_to_the_prompt():
    """A teacher with a prompt of its own compares it with the sample's tokens, and sample files tell it."""
    (told, _), (plain, _) = play(Scripted([5]), env=Opens()), play(Scripted([5]))
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    group = [told, replace(plain, prompt=replace(PROMPT, tools=[tool])), told, plain]
    [again] = through_checkpoint(group, replace(PROMPT, answer="of the row"))[2].waiting.values()
    assert [s.prompt for s in again.group] == [replace(s.prompt, answer="of the row") for s in group]


@pytest.mark.parametrize("replies, turns", [([[5]], 3), ([[3], [3]], 2)])
def test_an_environment_may_end_before_it_is_scored(replies, turns):
    """However the conversation ends, once; and one that cannot has failed."""

    class Judging(Tool):
        found = 0.0

        async def end(self):
            self.found += 1.0

        def scores(self):
            return {"found": self.found}

    class Failing(Judging):
        async def end(self):
            raise OSError("no verdict")

    assert play(Scripted(*replies), env=Judging(), max_turns=turns)[0].reward_parts == {"found": 1.0}
    failed = play(Scripted(*replies), env=Failing(), max_turns=turns)[0]
    assert "no verdict" in failed.failure and failed.reward_parts == {}


@pytest.mark.parametrize("method", ["open", "close", "scores", "counts", "turn_scores"])
def test_a_method_that_raises_fails_the_sample(method):
    def broken(self, *args):
        raise OSError("no more disk")

    async def broken_later(self):
        raise OSError("no more disk")

    env = type("Broken", (Tool,), {method: broken_later if method in ("open", "close") else broken})()
    sample, _ = play(Scripted([5]), env=env)
    assert sample.failure.startswith("OSError: no more disk") and sample.reward_parts == {}
    assert sample.n_sampled == (0 if method == "open" else 1)


def test_each_player_of_a_game_has_a_sample_of_its_own():
    engine = Scripted([3], [4], [5], [6])
    (first, _), (second, _) = play_all(engine, env=Duel(), max_turns=9)
    assert [asked for asked, _, _ in engine.asked] == [[1, 2, 7], [1, 2, 3], [1, 2, 7, 3, 4], [1, 2, 3, 4, 5]]
    assert first.token_ids.tolist() == [1, 2, 7, 3, 4, 5] and first.turns == ((3, 4), (5, 6))
    assert second.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and second.turns == ((3, 4), (5, 6))
    assert (first.reward_parts, second.reward_parts) == ({"won": 0.0}, {"won": 1.0})
    assert (first.counts, second.counts) == ({"turns": 4.0}, {}), "an episode is counted once"
    assert first.episode is None and second.episode is None, "they have rewards of their own"
