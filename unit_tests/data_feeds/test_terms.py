"""Terms of an objective: which tokens each has, and that no term moves the denominator of another."""

import numpy as np
import pytest
import torch

from algs.base import Algorithm
from algs.chord import CHORD
from algs.echo import ECHO
from algs.grpo import GRPO
from algs.luffy import LUFFY
from algs.objective import check_demonstrations, check_terms, compute_objective
from algs.ppo import PPO
from core.errors import RunStopped, UserError
from core.types.samples import Group, MissingColumn, Policy, Prompt, Sample, make_sample
from core.types.terms import Term, find_term_tokens
from data_feeds.packing.batches import plan_update

MASK = [False, False, True, True, False, False, True, False]
"""Prompt of two tokens, a reply, a tool's answer, a reply, a tool's answer."""


def a_sample(mask: list[bool] = MASK, **more) -> Sample:
    n = len(mask)
    there = {"rollout_logp": [-1.0 if m else 0.0 for m in mask], "versions": [0 if m else -1 for m in mask]}
    there |= {"prompt": Prompt(id="p", messages=[], source="a"), "reward": 1.0, "advantage": [0.5] * n}
    return make_sample(action_mask=mask, **{"token_ids": [*range(n)]} | there | more)


def a_demonstration(**more) -> Sample:
    n = len(MASK)
    return a_sample(**{"origin": "demonstration", "rollout_logp": [0.0] * n, "versions": [-1] * n} | more)


def slopes(alg: Algorithm, groups: list[Group], **how) -> dict[int, float]:
    """Gradient of the update's loss by the log-probability of each token, by token id."""
    found: dict[int, float] = {}
    plan = plan_update(groups, alg.loss_norm, 1000, padded=False, terms=alg.terms, **how)
    for batch in (b for rank in plan.batches(torch.float64) for b in rank):
        logp = torch.full((len(batch.labels),), -1.0, dtype=torch.float64, requires_grad=True)
        (compute_objective(alg, Policy(logp=logp), batch).loss * batch.tokens.weight).sum().backward()
        assert logp.grad is not None
        found |= dict(zip(batch.labels.tolist(), logp.grad.tolist(), strict=True))
    return found


@pytest.mark.parametrize(
    ("where", "changes", "want"),
    [
        ("sampled", {}, [2, 3, 6]),
        ("observed", {}, [4, 5, 7]),
        ("demonstrated", {}, []),
        ("observed", {"excluded": [t > 4 for t in range(8)]}, [4]),
        ("observed", {"failure": "timeout"}, []),
        ("observed", {"mask": [False] * 8}, []),
        (lambda s: np.ones(8, dtype=np.bool_), {}, [1, 2, 3, 4, 5, 6, 7]),  # nothing predicts the first
    ],
)
def test_a_term_has_the_tokens_that_it_names(where, changes, want):
    assert np.flatnonzero(find_term_tokens(a_sample(**changes), where)).tolist() == want


def test_a_term_of_other_sources_has_no_tokens():
    assert not find_term_tokens(a_sample(), "sampled", frozenset({"b"})).any()
    assert find_term_tokens(a_sample(), "sampled", frozenset({"a"})).any()


def test_demonstrated_tokens_are_the_reply_of_a_demonstration():
    assert np.flatnonzero(find_term_tokens(a_demonstration(), "demonstrated")).tolist() == [2, 3, 6]
    assert not find_term_tokens(a_demonstration(), "sampled").any()
    assert not find_term_tokens(a_demonstration(), "observed").any()


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(UserError, match="8 booleans"):
        find_term_tokens(a_sample(), lambda s: np.ones(3, dtype=np.bool_))


def test_a_longer_answer_of_a_tool_moves_no_sampled_token():
    alg, longer = ECHO(alpha=0.25), a_sample([*MASK, False, False, False, False])
    one, other = slopes(alg, [[a_sample()]]), slopes(alg, [[longer]])
    # -A w at the three sampled tokens, and -alpha w at 3 or 7 observed ones
    assert [one[t] for t in (2, 3, 6)] == [other[t] for t in (2, 3, 6)]
    assert [one[t] for t in (4, 5, 7)] == pytest.approx([-0.25 / 3] * 3)
    assert [other[t] for t in (4, 5, 7, 8, 9, 10, 11)] == pytest.approx([-0.25 / 7] * 7)


def test_a_coefficient_multiplies_and_enters_no_denominator():
    one, other = (slopes(ECHO(alpha=alpha), [[a_sample()]]) for alpha in (0.25, 0.5))
    assert [other[t] for t in (4, 5, 7)] == [2 * one[t] for t in (4, 5, 7)]
    assert [other[t] for t in (2, 3, 6)] == [one[t] for t in (2, 3, 6)]


def test_a_term_without_tokens_is_zero():
    plain = a_sample([False, False, True, True])
    assert slopes(ECHO(), [[plain]]) == slopes(GRPO(), [[plain]])


def test_terms_that_share_a_mean_count_the_same_tokens():
    alg = LUFFY(gamma=0.1)
    got = slopes(alg, [[a_sample([False, True, True]), a_demonstration(token_ids=[*range(10, 18)])]])
    p = float(torch.tensor(-1.0).exp())
    # five tokens in the mean: two sampled, and three demonstrated whose slope is gamma p / (p + gamma)^2
    assert [got[t] for t in (1, 2)] == pytest.approx([-0.5 / 5] * 2)
    assert [got[t] for t in (12, 13, 16)] == pytest.approx([-0.5 * 0.1 * p / (p + 0.1) ** 2 / 5] * 3)


class Reads(ECHO):
    """A loss of observed tokens that reads a column."""

    column: str

    def predict_answer(self, policy, tokens):
        return -policy.logp * tokens.column(self.column), {}


class ReadsRollout(CHORD):
    def imitate(self, policy, tokens):
        return -policy.logp * tokens.rollout_logp, {}


@pytest.mark.parametrize("column", ["advantage", "rollout_logp", "prox_logp"])
def test_a_column_is_missing_where_it_does_not_exist(column):
    scored = a_sample(columns={"prox_logp": [-1.0] * 8})
    with pytest.raises(MissingColumn, match=column):
        slopes(Reads(column=column), [[scored]])


def test_a_demonstration_has_no_rollout_logp():
    with pytest.raises(MissingColumn, match="rollout_logp"):
        slopes(ReadsRollout(), [[a_sample(), a_demonstration()]])
    with pytest.raises(UserError, match="no policy sampled a demonstration"):
        a_demonstration(rollout_logp=[-1.0] * 8)
    with pytest.raises(UserError, match="no policy sampled a demonstration"):
        a_demonstration(versions=[0] * 8)


def test_whether_a_column_exists_does_not_depend_on_the_split():
    def find_chosen(s: Sample):
        return s.loss_mask

    class Both(GRPO):
        terms = property(lambda self: (Term("all", lambda p, t: (p.logp, {}), on=find_chosen),))

    groups = [[a_sample()], [a_demonstration()]]
    for max_tokens in (8, 1000):
        plan = plan_update(groups, "token", max_tokens, terms=Both().terms)
        assert not any(b.terms["all"].tokens.has("rollout_logp") for rank in plan.batches() for b in rank)
        assert all(b.terms["all"].tokens.has("advantage") for rank in plan.batches() for b in rank)


def test_observed_tokens_of_an_episode_of_several_samples_are_refused():
    group = [a_sample(episode=0), a_sample(episode=0, turn_numbers=())]
    with pytest.raises(RunStopped, match="several samples"):
        slopes(ECHO(), [group])


def test_a_demonstration_that_nobody_learns_from_is_refused():
    group = [a_sample(), a_demonstration()]
    for alg in (GRPO(), ECHO()):
        with pytest.raises(RunStopped, match="trains on none"):
            check_demonstrations(alg, [group])
    check_demonstrations(CHORD(), [group])


def test_terms_of_one_name_or_with_a_value_model_are_refused():
    class Twice(GRPO):
        terms = property(lambda self: (Term("rl", self.loss), Term("rl", self.loss)))

    class WithValues(PPO):
        terms = property(lambda self: (Term("rl", self.loss),))

    for alg, why in ((Twice(), "same name"), (WithValues(), "value")):
        with pytest.raises(UserError, match=why):
            check_terms(alg)


def test_the_baseline_counts_the_policy_alone_unless_said_otherwise():
    group = [a_sample(reward=1.0), a_sample(reward=0.0), a_demonstration(reward=1.0)]
    of_policy = [float(s.advantage[2]) for s in GRPO().compute_advantages([group])[0]]
    of_all = [float(s.advantage[2]) for s in LUFFY().compute_advantages([group])[0]]
    assert of_policy == [0.5, -0.5, 0.5]
    assert of_all == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    # equal rewards of the policy are no signal for it, whatever the demonstration earned
    failed = [a_sample(reward=0.0), a_sample(reward=0.0), a_demonstration(reward=1.0)]
    assert [float(s.advantage[2]) for s in GRPO().compute_advantages([failed])[0]] == [0.0, 0.0, 1.0]
    scaled = GRPO(scale_rewards="group").compute_advantages([failed])[0]
    assert [float(s.advantage[2]) for s in scaled] == [0.0, 0.0, 0.0]
    assert not GRPO(dynamic_sampling=True).accept_group(failed)
    assert LUFFY(dynamic_sampling=True).accept_group(failed)


@pytest.mark.parametrize("alg", [GRPO(whiten=True), GRPO(credit="turn")])
def test_outside_of_the_baseline_whitening_and_turns_give_no_advantage(alg):
    group = [a_sample(reward=1.0), a_sample(reward=0.0)]
    with_it = alg.compute_advantages([[*group, a_demonstration(reward=1.0)]])[0]
    for alone, beside in zip(alg.compute_advantages([group])[0], with_it, strict=False):
        assert np.array_equal(alone.advantage, beside.advantage)
    assert not with_it[2].advantage.any()
