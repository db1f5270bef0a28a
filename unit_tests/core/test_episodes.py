"""An episode of several samples counts as one; and each of its turns can have its own credit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algs.base import accepts_group, assign_advantages
from algs.check.cuts import cut_after_every_turn, cut_in_alternation
from algs.gmpo import GMPO
from algs.grpo import GRPO
from algs.gspo import GSPO
from algs.ppo import PPO
from algs.reinforce_pp import ReinforcePP
from algs.rloo import RLOO
from algs.terms import Correction, Overlong
from algs.turns import hold_last, rewards_of_turns, turn_advantages
from analysis.capture.batch_file import read_batch, write_batch
from core.errors import RunStopped, UserError
from core.types.arrays import DOUBLE
from core.types.episodes import join_episodes, number_episodes, prepare_credit
from core.types.samples import Group, MissingColumn, Prompt, Sample, make_sample
from data_feeds.packing.batches import micro_batches, plan_update, token_weights
from driver.evaluation.suites.generations import describe_group
from driver.records.rollout_metrics import check_failures, measure_drawn, measure_groups, measure_passes
from rollouts.scheduling.buffer import FinishedGroup
from unit_tests.helpers.examples import some_groups, through_checkpoint
from unit_tests.helpers.local_trainers import change

NORMS = ("token", "sequence", "sequence_sum", "constant", "prompt")


def an_episode(
    *turns: int, reward: float = 1.0, earned: tuple[float, ...] = (), name: str = "p", **more: Any
) -> Sample:
    """Return an episode with turns of so many tokens, each after two tokens of context; values rise by 0.1."""
    mask = [chosen for n in turns for chosen in (False, False, *[True] * n)]
    n = len(mask)
    return make_sample(
        dtype=DOUBLE,
        prompt=Prompt(id=name, messages=[]),
        token_ids=list(range(5, 5 + n)),
        action_mask=mask,
        rollout_logp=[-4.5 if chosen else 0.0 for chosen in mask],
        versions=[0 if chosen else -1 for chosen in mask],
        reward=reward,
        turn_rewards=earned,
        **{"columns": {"values": [0.1 * t for t in range(n)]}} | more,
    )


def a_group() -> Group:
    """Three episodes of one to three turns, with rewards 1, 0 and 1/2."""
    return [
        an_episode(2, 1, 3, reward=1.0, earned=(0.5, 0.0, 0.25)),
        an_episode(1, 2, reward=0.0, earned=(0.0, -0.5)),
        an_episode(3, reward=0.5),
    ]


def trained(groups: list[Group]) -> list[list[float]]:
    """Advantages of the trained tokens of every episode, in order of time."""
    return [e.advantage[e.loss_mask].tolist() for g in groups for e in g if e.advantage is not None]


# what a Sample says of its turns


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"turns": [(2, 4), (3, 5)]}, "in order, none empty, within its 5 tokens"),
        ({"turns": [(2, 2)]}, "none empty"),
        ({"turns": [(2, 9)]}, "within its 5 tokens"),
        ({"turns": [(1, 5)]}, "contains a token that the policy did not choose"),
        ({"turns": [(2, 4)]}, "cover 2 of its 3 sampled tokens; add the span of every reply"),
        ({"turns": [(2, 4), (4, 5)], "turn_rewards": [1.0]}, "one number per turn; found 1 for 2 turns"),
        ({"turn_rewards": [1.0, 2.0]}, "found 2 for 1 turns"),
        ({"turn_rewards": [float("nan")]}, "must be finite"),
        ({"turns": [(2, 4), (4, 5)], "turn_numbers": [1, 1]}, "must rise from turn to turn"),
    ],
)
def test_turns_that_cannot_be_are_refused(changes, says):
    with pytest.raises(UserError, match=says):
        an_episode(3, **{"earned": changes.pop("turn_rewards", ())}, **changes)


def test_turns_are_the_runs_of_sampled_tokens_unless_they_are_given():
    assert an_episode(2, 1).spans == ((2, 4), (6, 7))
    assert an_episode(3, turns=[[2, 4], [4, 5]]).spans == ((2, 4), (4, 5)), "two replies with nothing between"
    assert an_episode(3, failure="x").spans == ((2, 5),)


def test_the_episode_fields_of_a_sample_survive_checkpoints_and_snapshots(tmp_path):
    group = [replace(s, columns={}) for s in cut_in_alternation(a_group())]
    single = [
        make_sample(
            **{name: getattr(s, name) for name in ("prompt", "token_ids", "action_mask", "rollout_logp", "versions")},
            **{name: getattr(s, name) for name in ("reward", "episode", "turns", "turn_rewards", "turn_numbers")},
        )
        for s in group
    ]
    assert through_checkpoint(single)[2].waiting[0].group == single
    write_batch(Path(tmp_path), [single])
    assert read_batch(Path(tmp_path)) == [single]


# one episode, several samples


def test_samples_of_one_number_are_one_episode():
    a, b, c, d = (replace(an_episode(1), episode=number) for number in (7, None, 7, None))
    assert number_episodes([a, b, c, d]) == [0, 1, 0, 2]
    assert number_episodes([]) == []


@pytest.mark.parametrize("cut", [cut_after_every_turn, cut_in_alternation])
def test_an_episode_is_joined_in_order_of_time(cut):
    whole = a_group()
    joined = join_episodes(cut(whole)).samples
    by_reward = sorted(joined, key=lambda s: -(s.reward or 0.0))
    for one, want in zip(by_reward, (whole[0], whole[2], whole[1]), strict=True):
        assert one.token_ids[one.action_mask].tolist() == want.token_ids[want.action_mask].tolist()
        assert one.columns["values"][one.loss_mask].tolist() == want.columns["values"][want.loss_mask].tolist()
        assert [end - begin for begin, end in one.spans] == [end - begin for begin, end in want.spans]
        assert one.turn_rewards == want.turn_rewards
        assert one.n_sampled == want.n_sampled


@pytest.mark.parametrize("cut", [cut_after_every_turn, cut_in_alternation])
def test_what_the_joined_episode_gets_is_taken_back_to_its_samples(cut):
    group = cut(a_group())
    joined = join_episodes(group)
    marked = [s.with_advantage(s.token_ids.astype(float)) for s in joined.samples]
    marked[0] = replace(marked[0], excluded=marked[0].token_ids % 2 == 0)
    taken = joined.split(marked)
    assert [s.token_ids.tolist() for s in taken] == [s.token_ids.tolist() for s in group]
    for s in taken:
        assert s.advantage is not None
        assert s.advantage.tolist() == s.token_ids.tolist(), "each token has its own"
        assert s.excluded is None or s.excluded.tolist() == (s.token_ids % 2 == 0).tolist()
    assert any(s.excluded is not None for s in taken)


def test_a_group_of_single_samples_is_left_as_it_is():
    group = a_group()
    joined = join_episodes(group)
    assert joined.samples is group and joined.split(group) is group
    numbered = [replace(s, episode=i) for i, s in enumerate(group)]
    assert all(one is other for one, other in zip(join_episodes(numbered).samples, numbered, strict=True))


def test_a_branch_that_is_not_trained_on_needs_no_columns():
    first, second = cut_after_every_turn([an_episode(1, 1)])
    context = replace(first, action_mask=first.action_mask & False, turns=(), turn_rewards=(), columns={})
    [joined] = join_episodes([context, second]).samples
    assert joined.n_trained == 1 and joined.columns["values"][joined.loss_mask] == pytest.approx([0.5])
    back = join_episodes([context, second]).split([joined.with_advantage(2.0)])
    assert back[0].columns == {} and back[1].columns["values"].tolist() == second.columns["values"].tolist()


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "rewards": ({"reward": 0.25}, "have the rewards 0.25, 1.0; all samples of an episode"),
    "failures": ({"failure": "timeout"}, "some samples of episode 0 of p failed and some did not"),
    "numbers": ({"turn_numbers": ()}, "some samples of episode 0 of p have turn_numbers and some do not"),
    "turns": ({"turn_numbers": (0, 2)}, "two turns of episode 0 of p have the same number"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_branches_that_contradict_each_other_stop_the_run(what):
    changes, says = CONTRADICTIONS[what]
    first, second = cut_in_alternation([an_episode(1, 1, 1, 1, earned=(0.0, 0.0, 0.0, 1.0))])
    with pytest.raises(RunStopped, match=says):
        join_episodes([first, replace(second, **changes)])
    bare = make_sample(
        prompt=first.prompt, token_ids=[1], action_mask=[True], rollout_logp=[0.0], versions=[0], episode=0, reward=1.0
    )
    with pytest.raises(RunStopped, match="begins with a token that the policy chose"):
        join_episodes([bare, bare])


# what is counted


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cut", [cut_after_every_turn, cut_in_alternation])
def test_weights_count_episodes(norm, cut):
    failed = an_episode(2, 2, reward=0.0, failure="timeout")
    groups = [a_group(), [an_episode(2, name="q"), failed]]
    branches = [cut(g) for g in groups]

    def by_token(given: list[Group]) -> dict[tuple[str, int], float]:
        """Weight of each trained token; of all that have the same id in a group, the sum."""
        weights = iter(token_weights(given, norm, horizon=9))
        found: dict[tuple[str, int], float] = {}
        for s, w in ((s, next(weights)) for g in given for s in g):
            for t in s.token_ids[s.loss_mask].tolist():
                found[s.prompt.id, t] = found.get((s.prompt.id, t), 0.0) + w
        return found

    assert by_token(branches) == pytest.approx(by_token(groups), rel=1e-12)


def test_advantages_and_rejections_count_episodes():
    """Means of 1, 0 and 1/2, whatever the number of samples: a mean over samples would be another."""
    group = a_group()
    for alg in (GRPO(), RLOO(), GRPO(scale_rewards="group"), GRPO(scale_rewards="batch", whiten=True), ReinforcePP()):
        want = {t: a for s in assign_advantages(alg, [group])[0] for t, a in credit_of(s)}
        got = {t: a for s in assign_advantages(alg, [cut_after_every_turn(group)])[0] for t, a in credit_of(s)}
        assert got == pytest.approx(want, abs=1e-12)
    equal = [replace(s, reward=0.5) for s in cut_after_every_turn(group)]
    assert accepts_group(GRPO(dynamic_sampling=True), cut_after_every_turn(group))
    assert not accepts_group(GRPO(dynamic_sampling=True), equal)


def credit_of(s: Sample) -> list[tuple[tuple[int, float], float]]:
    assert s.advantage is not None
    tokens = zip(s.token_ids[s.loss_mask].tolist(), s.advantage[s.loss_mask].tolist(), strict=True)
    return [((t, s.reward or 0.0), a) for t, a in tokens]


def test_a_truncated_episode_is_left_out_whole_and_as_long_as_its_samples():
    long, short = an_episode(2, 2, stop="length"), an_episode(2, reward=0.0)
    cut = cut_after_every_turn([long, short])
    for given in (cut, cut_in_alternation([long, short]), cut_in_alternation([long, short])[::-1]):
        [filtered] = assign_advantages(GRPO(overlong=Overlong(mode="filter")), [given])
        assert [s.n_trained for s in sorted(filtered, key=lambda s: -(s.reward or 0))] == [0, 0, 2]
        assert measure_groups([given])["rollout/truncated_fraction"] == 0.5, "as its last turn ended, wherever that is"
    penalty = Overlong(mode="penalty", max_tokens=4, buffer=2)
    [shaped] = assign_advantages(GRPO(overlong=penalty), [cut])
    assert {s.advantage[s.loss_mask][0] for s in shaped} == {0.0}, "four tokens cost the whole reward of 1"


class CountsSamples(GRPO):
    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return [[s.with_advantage(float(len(g))) for s in g] for g in groups]


class DropsOne(GRPO):
    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return [g[1:] for g in groups]


def test_an_algorithm_of_ones_own_is_given_episodes_and_nothing_else():
    [credited] = assign_advantages(CountsSamples(), [cut_after_every_turn(a_group())])
    assert {s.advantage[0] for s in credited} == {3.0} and len(credited) == 6
    with pytest.raises(RunStopped, match="was given 1 groups of 3 samples and returned 1 groups of 2"):
        assign_advantages(DropsOne(), [cut_after_every_turn(a_group())])


def test_metrics_count_episodes():
    group = a_group()
    cut = cut_after_every_turn(group)
    whole, branched = measure_groups([group]), measure_groups([cut])
    assert (branched.pop("rollout/samples"), whole.pop("rollout/samples")) == (6.0, 3.0)
    assert (branched.pop("rollout/branches_per_episode"), whole.pop("rollout/branches_per_episode")) == (2.0, 1.0)
    assert branched == pytest.approx(whole)
    assert (
        whole["reward/mean"] == 0.5 and whole["rollout/tokens_mean"] == 4.0 and whole["rollout/trained_fraction"] == 1
    )
    assert measure_passes([cut], pass_reward=0.5) == measure_passes([group], pass_reward=0.5)
    drawn = [[FinishedGroup(ticket=0, group=g, accepted=True, seconds=1.0)] for g in (group, cut)]
    assert measure_drawn(drawn[1]) == pytest.approx(measure_drawn(drawn[0]))
    rows = describe_group(cut, cut[0].prompt, of_set="s", index=0)
    assert [row.sample for row in rows] == [0, 1, 2] and sorted(row.tokens for row in rows) == [3, 3, 6]
    failing = [replace(s, reward=None, failure="timeout") if s.reward == 1 else s for s in cut]
    with pytest.raises(RunStopped, match="1 of 3 samples failed"):
        check_failures([failing], max_failed_fraction=0.2)


def test_equal_rewards_of_unlike_turns_are_a_signal_for_turn_credit_alone():
    group = [an_episode(1, 1, reward=1.0, earned=(1.0, 0.0)), an_episode(1, 1, reward=1.0, earned=(0.0, 1.0))]
    assert [measure_groups([group], by_turn=by)["rollout/zero_std_groups"] for by in (False, True)] == [1.0, 0.0]
    assert not accepts_group(GRPO(dynamic_sampling=True), group)
    assert accepts_group(GRPO(dynamic_sampling=True, credit="turn"), group)
    assert not accepts_group(GRPO(dynamic_sampling=True, credit="turn"), [group[0]] * 2)


# sequences of a loss


def test_groups_of_single_samples_go_to_the_algorithm_as_they_are():
    groups = some_groups(2, 3)
    given, give_back = prepare_credit(groups)
    assert given is groups and give_back(groups) is groups
    groups[0] = [replace(s, episode=i) for i, s in enumerate(groups[0])]
    assert prepare_credit(groups)[0] is groups, "every episode is one sample"
    groups[1][2] = replace(groups[1][2], player=1)
    assert [len(g) for g in prepare_credit(groups)[0]] == [3, 2, 1]


def test_a_loss_of_sequences_gets_whole_episodes():
    groups = [cut_after_every_turn(a_group()), [an_episode(2, name="q")]]
    groups = [[s.with_advantage(1.0) for s in g] for g in groups]
    for how in ({"padded": True}, {"padded": False}, {"padded": False, "share_prefixes": True}):
        plan = plan_update(groups, "sequence", 40, ranks=2, whole_episodes=True, **how)
        where = [{plan.episodes[i] for i in b} for rank in plan.bins for b in rank]
        assert sum(map(len, where)) == 4 == len(set().union(*where)), "four episodes, none in two micro-batches"
        for batch in (b for rank in plan.batches() for b in rank):
            assert sorted({*batch.tokens.seq_ids.tolist()}) == list(range(len({*batch.tokens.seq_ids.tolist()})))
        split = plan_update(groups, "sequence", 40, ranks=2, **how)
        for batch in (b for rank in split.batches() for b in rank):
            with pytest.raises(MissingColumn, match="whole_episodes adds seq_ids"):
                batch.tokens.seq_ids  # noqa: B018
    alone = plan_update([a_group()], "sequence", 100)
    assert alone.batches()[0][0].tokens.seq_ids.max() == 2, "where each episode is one sample they are there"
    with pytest.raises(RunStopped, match=r"the samples of an episode have 20 tokens, .*micro_batch_tokens=19"):
        plan_update(groups, "sequence", 19, padded=False, whole_episodes=True)


@pytest.mark.parametrize(
    "alg",
    [
        GRPO(loss_norm="sequence", credit="turn", turn_discount=0.5),
        GSPO(clip_high=1e-3),
        GMPO(correction=Correction(level="sequence")),
        PPO(credit="turn", lam=0.5),
    ],
    ids=lambda alg: type(alg).__name__,
)
def test_the_gradient_of_a_model_is_that_of_the_uncut_episodes(tiny_path, alg):
    groups = [[replace(s, stop="eos") for s in a_group()], [an_episode(2, 2), an_episode(1, 1, reward=0.0)]]
    given = [(groups, {"padded": True})]
    given += [([cut(g) for g in groups], how) for cut, how in CUT_AND_LAID]
    changes: list[torch.Tensor] = []
    for these, how in given:
        credited = assign_advantages(alg, [[narrow(s) for s in g] for g in these])
        [micro] = micro_batches(credited, alg.loss_norm, 60, horizon=9, whole_episodes=alg.whole_episodes, **how)
        layout = "padded" if how["padded"] else "packed"
        changes.append(change(tiny_path, alg, micro, layout=layout, attention="sdpa" if how["padded"] else "auto")[0])
    assert changes[0].norm() > 0
    for cut in changes[1:]:
        assert (cut - changes[0]).norm() < 1e-5 * changes[0].norm()


CUT_AND_LAID = [
    (cut_after_every_turn, {"padded": True}),
    (cut_in_alternation, {"padded": False, "share_prefixes": True}),
]


def narrow(s: Sample) -> Sample:
    """The sample in float32, as in a run."""
    floats = {"rollout_logp": s.rollout_logp.astype(np.float32)}
    return replace(s, columns={n: v.astype(np.float32) for n, v in s.columns.items()}, **floats)


# credit of turns


def test_what_the_turn_rewards_leave_comes_with_the_last_turn():
    sample = an_episode(2, 1, 3, reward=1.0, earned=(0.5, 0.0, 0.25))
    assert rewards_of_turns(sample, 1.0) == pytest.approx([0.5, 0.0, 0.5])
    assert rewards_of_turns(an_episode(2, 1), 1.0) == pytest.approx([0.0, 1.0])
    kl = -0.1 * np.arange(6)
    assert rewards_of_turns(sample, 1.0, kl) == pytest.approx([0.5 - 0.1, -0.2, 0.5 - 0.3 - 0.4 - 0.5])


def test_a_turn_is_compared_with_what_others_had_still_to_come():
    """Returns from the turn on: 3, 1 and 2; 4; 0 and 2. The one that stopped counts in every turn with its last."""
    returns = [np.array([3.0, 1.0, 2.0]), np.array([4.0]), np.array([0.0, 2.0])]
    assert hold_last(returns).tolist() == [[3, 1, 2], [4, 4, 4], [0, 2, 2]]
    others = turn_advantages(returns, leave_one_out=True)
    assert [row.tolist() for row in others] == [
        pytest.approx([3 - 2, 1 - 3, 2 - 3]),
        pytest.approx([4 - 1.5]),
        pytest.approx([0 - 3.5, 2 - 2.5]),
    ]
    for one, all_of_them in zip(others, turn_advantages(returns), strict=True):
        assert all_of_them == pytest.approx(one * 2 / 3), "the same share of each, whatever the turn"
    failed = turn_advantages([None, *returns[:2]], leave_one_out=True)
    assert failed[0].tolist() == [0.0] and failed[2] == pytest.approx([1.0])


def test_one_deviation_scales_all_turns_of_a_group():
    returns = [np.array([2.0, 5.0]), np.array([0.0, 5.0])]
    plain, scaled = turn_advantages(returns), turn_advantages(returns, scale="group")
    deviation = ((2.0 + 0.0) / 2) ** 0.5 + 1e-6  # variances 2 and 0
    assert [row.tolist() for row in scaled] == [pytest.approx(row / deviation) for row in plain]
    assert scaled[0][1] == 0.0, "no noise where all are equal"
    assert turn_advantages(returns, scale="mean")[0][0] == pytest.approx(1.0)
    assert [row.tolist() for row in turn_advantages([np.array([0.1] * 2)] * 3, scale="group")] == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("name", ["grpo", "rloo", "scaled", "batch", "mean", "rpp", "rpp_baseline"])
def test_one_undiscounted_final_reward_gives_each_turn_the_episodes_credit(name):
    make: dict[str, Any] = {
        "grpo": (GRPO, {}),
        "rloo": (RLOO, {}),
        "scaled": (GRPO, {"scale_rewards": "group"}),
        "batch": (GRPO, {"scale_rewards": "batch", "whiten": True}),
        "mean": (GRPO, {"scale_rewards": "mean"}),
        "rpp": (ReinforcePP, {}),
        "rpp_baseline": (ReinforcePP, {"baseline": True}),
    }
    kind, settings = make[name]
    groups = [[replace(s, turn_rewards=()) for s in a_group()], [an_episode(1, 1), an_episode(2, reward=0.0)]]
    got, want = (trained(kind(**settings, **more).compute_advantages(groups)) for more in ({"credit": "turn"}, {}))
    assert got == [pytest.approx(row, abs=1e-12) for row in want]


def test_returns_of_turns_are_discounted_from_turn_to_turn():
    [pair] = [[an_episode(2, 1, reward=1.0, earned=(0.5, 0.5)), an_episode(1, reward=0.0)]]
    rows = trained(RLOO(credit="turn", turn_discount=0.5).compute_advantages([pair]))
    assert rows == [pytest.approx([0.75, 0.75, 0.5]), pytest.approx([-0.75])]
    rows = trained(RLOO(credit="turn", turn_discount=0.0).compute_advantages([pair]))
    assert rows == [pytest.approx([0.5] * 3), pytest.approx([-0.5])], "each turn for itself"


def test_ppo_takes_a_turn_for_one_action():
    """Values before the turns' first tokens: 0.2 and 0.6; rewards 1/2 and 1/2."""
    sample = an_episode(2, 1, reward=1.0, earned=(0.5, 0.5))
    ppo = PPO(credit="turn", turn_discount=0.5, lam=0.8, whiten=False)
    [[done]] = ppo.compute_advantages([[sample]])
    second = 0.5 - 0.6
    first = 0.5 + 0.5 * 0.6 - 0.2 + 0.5 * 0.8 * second
    assert done.advantage[done.loss_mask] == pytest.approx([first, first, second])
    assert done.columns["returns"][done.loss_mask] == pytest.approx([first + 0.2, first + 0.2, second + 0.6])
    [[failed]] = ppo.compute_advantages([[replace(sample, failure="timeout", reward=None, columns={})]])
    assert not failed.advantage.any()


def test_ppo_bootstraps_within_the_turn_that_was_cut_off():
    cut = an_episode(2, 2, reward=1.0, earned=(0.5, 0.5), stop="length")
    ppo = PPO(credit="turn", turn_discount=0.5, lam=0.0, whiten=False, bootstrap_truncated=True)
    [[done]] = ppo.compute_advantages([[cut]])
    assert done.n_trained == 3
    assert done.advantage[done.loss_mask] == pytest.approx([0.5 + 0.5 * 0.6 - 0.2] * 2 + [0.5 + 0.7 - 0.6])
    one = an_episode(2, 1, reward=1.0, earned=(0.5, 0.5), stop="length")
    [[alone]] = ppo.compute_advantages([[one]])
    assert alone.advantage[alone.loss_mask] == pytest.approx([0.5 + 0.5 + 0.6 - 0.2] * 2), "no token of it is left"


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (GSPO, {"credit": "turn"}, "this loss is one number per episode"),
        (GMPO, {"credit": "turn"}, "this loss is one number per episode"),
        (PPO, {"credit": "turn", "gamma": 0.9}, "set turn_discount"),
        (ReinforcePP, {"credit": "turn", "gamma": 0.9}, "set turn_discount"),
        (GRPO, {"turn_discount": 0.9}, "turn_discount has no effect with credit: episode"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(kind, settings, says):
    with pytest.raises(ValueError, match=says):
        kind(**settings)
    GSPO(form="token", credit="turn")
