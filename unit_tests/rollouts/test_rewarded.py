"""Samples of an episode with the results of its rewards: parts, weights, turns, tokens, failures and branches."""

from __future__ import annotations

import pytest

from configs.agent_schema import TIMEOUTS
from configs.rollout_schema import RewardConfig
from core.errors import UserError
from core.types.notes import Note
from core.types.samples import TOKEN_REWARDS
from rewards.scored import RewardResult
from rollouts.rewarded import Episode, RewardedSamples
from rollouts.turns import Played
from unit_tests.helpers.episodes import Words
from unit_tests.helpers.examples import sample_of

NOTE, OTHER = Note(by="me", text="told"), Note(by="env", text="seen")


def reward(**keys) -> RewardConfig:
    return RewardConfig(**{"function": "mine", "weights": {"correct": 2.0, "won": 0.5}} | keys)


def played(turn_scores=(), **more) -> Played:
    sample = sample_of([5, 6, 7, 8], [False, True, False, True], **{"reward_parts": {"won": 4.0}} | more)
    return Played(sample=sample, messages=[], turn_scores=[*turn_scores])


def result(**more) -> RewardResult:
    return RewardResult(**{"reward_parts": {"correct": 1.0, "length": 9.0}} | more)


def make(one: Played, of_reward: RewardResult, *, config: RewardConfig | None = None, of_agent=False):
    maker = RewardedSamples(config or reward(), Words(), of_agent)
    [sample] = maker.make(Episode(played=[one], results=[of_reward]))
    return sample


def test_a_sample_has_the_weighted_parts_of_reward_and_environment():
    sample = make(
        played([{"won": 1.0}, {"won": 3.0}], counts={"turns": 2.0, "calls": 1.0}),
        result(
            turn_parts=({"correct": 1.0}, {"length": 7.0}),
            token_parts={"correct": (0.25, 0.75)},
            notes=(NOTE,),
            counts={"calls": 5.0, "more": 1.0},
        ),
    )
    assert sample.reward == 2.0 * 1.0 + 0.5 * 4.0 and sample.failure == ""
    assert sample.reward_parts == {"correct": 1.0, "length": 9.0, "won": 4.0}
    assert sample.turn_rewards == (2.5, 1.5)
    assert sample.columns[TOKEN_REWARDS].tolist() == [0.0, 0.5, 0.0, 1.5]
    assert sample.counts == {"turns": 2.0, "calls": 5.0, "more": 1.0} and sample.notes == [NOTE]


def test_a_sample_that_has_failed_stays_as_it_is():
    one = played(failure="before", notes=[OTHER])
    assert make(one, result(notes=(NOTE,))) is one.sample


@pytest.mark.parametrize(
    ("of_reward", "failure"),
    [
        ({"failure": "the judge is gone", "reward_parts": {}}, "the judge is gone"),
        ({"turn_parts": ({"correct": 1.0},)}, "turn_parts has 1 entries for 2 replies"),
        ({"token_parts": {"correct": (1.0,)}}, "token_parts['correct'] has 1 values for 2 sampled tokens"),
    ],
)
def test_a_reward_that_fails_leaves_notes_and_counts_alone(of_reward, failure):
    one = played(counts={"turns": 2.0})
    sample = make(one, result(notes=(NOTE,), counts={"calls": 1.0}, **of_reward))
    assert (sample.failure, sample.reward, sample.reward_parts, sample.turn_rewards) == (failure, None, {}, ())
    assert sample.counts == {"turns": 2.0, "calls": 1.0} and sample.notes == [NOTE] and not sample.columns


@pytest.mark.parametrize(("of_agent", "who"), [(False, "environment"), (True, "agent")])
def test_a_part_of_two_authors_is_refused(of_agent, who):
    one = played(reward_parts={"won": 4.0, "length": 1.0, "correct": 3.0})
    with pytest.raises(UserError) as refused:
        make(one, result(), of_agent=of_agent)
    assert str(refused.value) == f"reward and {who} both return a part 'correct': rename one of them"
    own = make(one, result(), config=reward(function="environment"), of_agent=of_agent)
    assert own.reward_parts == {"correct": 3.0, "length": 1.0, "won": 4.0} and own.reward == 8.0


def test_only_an_agent_without_time_may_leave_out_a_part():
    late = make(played(reward_parts={}, counts={TIMEOUTS: 1.0}), result())
    assert late.reward_parts == {"won": 0.0, "correct": 1.0, "length": 9.0} and late.reward == 2.0
    for counts in ({}, {TIMEOUTS: 0.0}):
        with pytest.raises(UserError) as refused:
            make(played(reward_parts={}, counts=counts), result())
        assert str(refused.value) == (
            "reward.weights names 'won', but the reward returns only correct, length: correct the name"
        )


def test_each_player_has_a_result_and_branches_share_one():
    maker = RewardedSamples(reward(), Words(), False)
    one, other = played(), played(reward_parts={"won": 2.0})
    two = Episode(played=[one, other], results=[result(), result(reward_parts={"correct": 3.0})])
    assert [sample.reward for sample in maker.make(two)] == [4.0, 7.0]
    branches = maker.make(Episode(played=[one, other], results=[result()], is_shared=True))
    assert [(s.reward, s.reward_parts, s.failure) for s in branches] == [
        (4.0, {"correct": 1.0, "length": 9.0, "won": 4.0}, "")
    ] * 2
    turns = result(turn_parts=({"correct": 1.0}, {"correct": 0.0}))
    [alone] = maker.make(Episode(played=[one], results=[turns], is_shared=True))
    assert alone.turn_rewards == (2.0, 0.0)


@pytest.mark.parametrize("more", [{"turn_parts": ({}, {})}, {"token_parts": {"correct": (1.0, 2.0)}}])
def test_branches_have_no_shares_of_turns_or_tokens(more):
    maker = RewardedSamples(reward(), Words(), True)
    shared = result(notes=(NOTE,), counts={"calls": 1.0}, **more)
    first, other = maker.make(Episode(played=[played(), played()], results=[shared], is_shared=True))
    why = "turn_parts and token_parts are of one conversation, and this episode has several branches"
    assert (first.failure, other.failure) == (why, why) and first.reward is other.reward is None
    assert first.reward_parts == other.reward_parts == {}
    assert (first.notes, other.notes) == ([NOTE], []) and (first.counts, other.counts) == ({"calls": 1.0}, {})
