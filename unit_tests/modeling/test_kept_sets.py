"""Truncated sampling: the engine reports the kept set of every token, and the trainer's softmax is over it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from algs.grpo import GRPO
from algs.ops import importance_ratio
from analysis.capture.batch_file import read_batch, write_batch
from analysis.capture.recompute import replay
from configs.rollout_schema import RolloutConfig
from core.errors import RunStopped, UserError
from core.types.allowed_tokens import AllowedTokens
from core.types.episodes import prepare_credit
from core.types.kept_sets import KeptSets, KeptTokens
from core.types.measures import ENTROPY
from core.types.truncation import Truncation
from data_feeds.packing.batches import pack, plan_update
from modeling.attention import BY_SEQUENCE
from modeling.forward import forward
from rollouts.agents.dialects.chat import read_ask
from rollouts.agents.wire import BadRequest
from rollouts.engines.base import Completion
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.kept_sets import KeptReports
from rollouts.engines.vllm_support.settings import engine_args
from rollouts.transcript import Conversation, check_completion
from unit_tests.helpers.engines import PROMPTS, engine_config, engine_of, several
from unit_tests.helpers.examples import a_changed, families, some_groups, through_checkpoint, with_kept
from unit_tests.helpers.golden2 import CASES2, GOLDEN2
from unit_tests.helpers.local_trainers import TEMPERATURE, trainer_of
from unit_tests.helpers.models import compute_policy, random_model
from unit_tests.helpers.runs import OWN_ENGINE, file_of
from unit_tests.helpers.shared_prefixes import check_alike

pytestmark = pytest.mark.usefixtures("one_thread")

LOGITS, SUPPORT = GOLDEN2["fixtures"]["logits"], GOLDEN2["support"]
RULES = Truncation(top_p=0.8, top_k=12, min_p=0.01)


def sets_of(mask: Tensor) -> KeptTokens:
    return KeptTokens.of(KeptSets.of_lists([row.nonzero()[:, 0].tolist() for row in mask]))


# the oracle ---------------------------------------------------------------------------------------------------


def golden_rows(poison: float) -> tuple[Tensor, Tensor, KeptTokens, Tensor, Tensor]:
    """Logits, labels, sets, and the engine's log-probabilities and advantages of the trained tokens."""
    mask = torch.tensor(LOGITS["mask"]).bool()
    logits = torch.tensor(LOGITS["logits"], dtype=torch.float64)
    logits[~mask] = poison
    keep = torch.tensor(LOGITS["keep"]).bool()[mask]
    columns = [torch.tensor(LOGITS[name], dtype=torch.float64)[mask] for name in ("rollout_logp", "adv")]
    return logits.requires_grad_(), torch.tensor(LOGITS["labels"])[mask], sets_of(keep), *columns


@pytest.mark.parametrize("name", ["support/ppo_replayed", "support/WRONG_full_softmax", "support/entropy_restricted"])
@pytest.mark.parametrize("poison", [0.0, float("nan"), 1e6])
def test_losses_over_kept_sets_are_the_oracles(name, poison, monkeypatch):
    monkeypatch.setattr("modeling.softmax.CHUNK_LOGITS", 18)  # three rows of six
    case, mask = CASES2[name], torch.tensor(LOGITS["mask"]).bool()
    logits, labels, kept, rollout_logp, advantage = golden_rows(poison)
    given = None if "WRONG" in name else kept
    policy = compute_policy(logits[mask], labels, temperature=1.0, measures=ENTROPY, kept=given)
    assert policy.entropy is not None
    ratio = importance_ratio(policy.logp, rollout_logp)
    surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = (policy.entropy if "entropy" in name else surrogate).mean()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-12)
    [grad] = torch.autograd.grad(loss, logits)
    want = torch.tensor(case["grad"]["logits"], dtype=torch.float64)
    torch.testing.assert_close(grad[mask], want[mask], rtol=1e-9, atol=1e-14)
    if given is not None:
        assert not grad[mask][~torch.tensor(LOGITS["keep"]).bool()[mask]].any(), "exactly 0"


@pytest.mark.parametrize("name", SUPPORT["rules"])
def test_enumeration_shows_no_bias_over_sets_and_some_over_all_tokens(name):
    """E[ratio x R x grad log pi] over all tokens that the sampler may draw, on-policy and after the weights moved."""
    rule = SUPPORT["rules"][name]
    mu, rewards = torch.tensor(rule["mu"], dtype=torch.float64), torch.tensor(SUPPORT["rewards"], dtype=torch.float64)
    drawn = mu.nonzero()[:, 0]
    sets = sets_of(torch.tensor(rule["kept"]).bool().expand(len(drawn), -1))

    def estimate(at: list[float], kept: KeptTokens | None) -> tuple[Tensor, Tensor]:
        logits = torch.tensor(at, dtype=torch.float64, requires_grad=True)
        each = logits.expand(len(drawn), -1)
        logp = compute_policy(each, drawn, temperature=1.0, kept=kept).logp
        ratio = (logp - mu[drawn].log()).exp()
        [grad] = torch.autograd.grad((mu[drawn] * rewards[drawn] * ratio).sum(), logits)
        return grad, ratio.detach()

    close = {"rtol": 1e-9, "atol": 1e-9}
    grad, ratio = estimate(SUPPORT["logits"], sets)
    torch.testing.assert_close(grad, torch.tensor(rule["true_gradient"], dtype=torch.float64), **close)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-14, atol=0)
    moved, _ = estimate(rule["moved_logits"], sets)
    torch.testing.assert_close(moved, torch.tensor(rule["moved_true_gradient"], dtype=torch.float64), **close)
    full, ratio = estimate(SUPPORT["logits"], None)
    assert ratio.tolist() == pytest.approx([rule["kept_mass"]] * len(drawn)), "below 1 at equal weights"
    bias = torch.tensor(rule["bias"], dtype=torch.float64)
    torch.testing.assert_close(full - grad, bias, **close)
    assert bool(bias.abs().max() > 0.02) == (name != "none")


# the trainer --------------------------------------------------------------------------------------------------


def test_chunks_take_the_same_softmax_and_others_get_no_gradient():
    model = random_model("llama", vocab_size=4096)
    [samples] = with_kept([[s for g in some_groups(2) for s in g]], vocab=4096, largest=40)
    batch = pack(samples, [1.0] * len(samples))
    head = model.get_output_embeddings().weight
    found = []
    for mib in (0, 1):
        policy = forward(model, model, batch, layout="padded", temperature=0.7, measures=ENTROPY, logits_mib=mib)
        assert policy.entropy is not None
        [grad] = torch.autograd.grad((policy.logp + 0.3 * policy.entropy).sum(), head)
        found.append((policy.logp, policy.entropy, grad))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert batch.kept is not None
    outside = torch.ones(4096, dtype=torch.bool)
    outside[batch.kept.ids.long()] = False
    assert outside.sum() > 3000
    for _, _, grad in found:
        assert not grad[outside].any() and grad[~outside].any(), "exactly 0"
    free = forward(model, model, replace(batch, kept=None), layout="padded", temperature=0.7).logp
    assert (found[0][0] > free).all(), "less to choose from makes each choice more probable"
    every = KeptTokens.of(KeptSets.of_lists([range(4096)] * len(batch.labels)))
    same = forward(model, model, replace(batch, kept=every), layout="padded", temperature=0.7).logp
    torch.testing.assert_close(same, free, rtol=1e-6, atol=1e-6)


def test_sets_stay_with_their_tokens_in_shared_packed_and_padded_rows():
    check_alike(random_model("llama", BY_SEQUENCE).double().eval(), with_kept(families()))


def test_a_trained_token_outside_its_own_set_stops_the_run(tiny_path):
    trainer = trainer_of(tiny_path, GRPO())
    [samples] = with_kept([some_groups(1)[0]])
    batch = pack(samples, [1.0] * len(samples))
    trainer.compute_columns([batch], frozenset({"prox_logp"}))
    wrong = replace(batch, labels=batch.labels.roll(1))
    with pytest.raises(RunStopped, match="not in its own kept set"):
        trainer.compute_columns([wrong], frozenset({"prox_logp"}))
    with pytest.raises(RunStopped, match="not in its own kept set"):
        trainer.step([[wrong]])


def test_a_sampled_token_without_a_set_is_refused():
    [samples] = with_kept([some_groups(1)[0]])
    with pytest.raises(ValueError, match="has no kept sets, and others"):
        pack([samples[0], replace(samples[1], kept=None)], [1.0, 1.0])
    with pytest.raises(UserError, match="must have a set for each sampled token"):
        replace(samples[0], kept=KeptSets.none(len(samples[0].token_ids)))
    with pytest.raises(UserError, match="a set per token"):
        replace(samples[0], kept=KeptSets.of_lists([[1]]))


def test_an_idle_rank_computes_no_token_over_no_set(tiny_path):
    plan = plan_update(with_kept(some_groups(2)), "token", 10**6, ranks=9)
    idle = plan.make_idle_batch()
    assert trainer_of(tiny_path, GRPO()).compute_columns([idle], frozenset({"prox_logp"}))[0]["prox_logp"].shape == (0,)


# on the way to it ---------------------------------------------------------------------------------------------


def test_samples_keep_their_sets_in_checkpoints_and_recorded_steps(tmp_path):
    groups = with_kept(some_groups(3))
    groups[1] = some_groups(3)[1]  # without sets
    for group in groups:
        assert through_checkpoint(group)[2].waiting[0].group == group
    write_batch(tmp_path, groups)
    assert read_batch(tmp_path) == groups


def test_branches_of_an_episode_are_joined_with_their_sets_and_split_again():
    """The second turn came before the last of the other branch; a branch without a reply has no sets."""
    one, two, _ = with_kept([some_groups(1)[0]])[0]
    one, two = (a_changed(s, episode=0, reward=1.0, turns=[], advantage=None) for s in (one, two))
    numbers = [[0, 2, *range(4, 40)], [1, 3, *range(40, 80)]]
    group = [replace(s, turn_numbers=tuple(n[: len(s.spans)])) for s, n in zip((one, two), numbers, strict=True)]
    silent = a_changed(one, action_mask=[False] * len(one.token_ids), kept=None)
    group.append(replace(silent, turn_numbers=()))
    [[joined]], give_back = prepare_credit([group])
    assert joined.kept is not None and joined.n_sampled == one.n_sampled + two.n_sampled
    assert joined.kept.contain(joined.token_ids).tolist() == joined.action_mask.tolist()
    assert sorted(joined.kept.sizes.tolist()) == sorted(
        [*one.kept.sizes.tolist(), *two.kept.sizes.tolist(), *[0] * len(one.token_ids)]
    )
    [back] = give_back([[joined.with_advantage(1.0)]])
    assert [s.kept for s in back] == [one.kept, two.kept, None]


def completion(**changes) -> Completion:
    there = {"token_ids": [4, 5], "logp": [-0.5, -0.1], "versions": [0, 0], "stop": "eos"}
    return Completion(**there | {"kept": KeptSets.of_lists([[4, 9], [5]])} | changes)


def test_a_conversation_keeps_the_sets_of_all_turns(tmp_path):
    talk = Conversation()
    for _ in range(2):
        talk.append_context([7, 8])
        talk.append_reply(completion())
    sample = talk.make_sample(some_groups(1)[0][0].prompt)
    assert sample.kept == KeptSets.of_lists([[], [], [4, 9], [5]] * 2)
    assert completion().cut(1) == completion(token_ids=[4], logp=[-0.5], versions=[0], kept=KeptSets.of_lists([[4, 9]]))


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (completion(kept=None), "no kept sets, and rollout.top_p"),
        (completion(kept=KeptSets.of_lists([[4]])), "2 tokens with 1 kept sets"),
        (completion(kept=KeptSets.of_lists([[4], [4]])), "the token 5, which is not in its own kept set"),
    ],
)
def test_an_engine_that_reports_wrong_sets_stops_the_run(done, said):
    check_completion(completion(), max_new_tokens=4, is_truncated=True)
    with pytest.raises(RunStopped, match=said):
        check_completion(done, max_new_tokens=4, is_truncated=True)
    with pytest.raises(RunStopped, match="kept sets, and none of"):
        check_completion(completion(), max_new_tokens=4, is_truncated=False)


# the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed_tokens", [AllowedTokens(), AllowedTokens(allowed=(0, 1, *range(5, 90, 2)))])
def test_the_engine_reports_sets_and_log_probabilities_over_them(allowed_tokens, tiny_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    engine = engine_of(tiny_path, temperature=0.4, truncation=RULES, allowed_tokens=allowed_tokens)
    sizes = set()
    for prompt, done in zip(PROMPTS, asyncio.run(several(engine, PROMPTS, range(4))), strict=True):
        check_completion(done, max_new_tokens=12, is_truncated=True)
        assert done.kept is not None
        ids = torch.tensor([prompt + done.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        restricted = allowed_tokens.restrict(logits, 0.4)
        want = [allowed_tokens.to_ids(row.nonzero()[:, 0]).tolist() for row in RULES.find_kept(restricted)]
        assert done.kept == KeptSets.of_lists(want)
        own = compute_policy(logits, ids[0, len(prompt) :], temperature=0.4, kept=KeptTokens.of(done.kept))
        assert done.logp == pytest.approx(own.logp.tolist(), abs=1e-5)
        sizes |= {*done.kept.sizes.tolist()}
    assert len(sizes) > 2 and max(sizes) <= 12
    greedy = asyncio.run(several(engine_of(tiny_path, temperature=0.0, truncation=RULES), PROMPTS, range(4)))
    assert all(done.kept is None for done in greedy), "nothing was drawn"


def test_frequencies_are_the_probabilities_over_the_kept_set(tiny_path):
    """4000 draws of the first token: every count within five standard deviations, and none outside."""
    engine = engine_of(tiny_path, temperature=0.3, truncation=Truncation(top_p=0.7))
    n = 4000
    done = asyncio.run(several(engine, [[5, 6]] * n, range(n), n=1))
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    logits = model(torch.tensor([[5, 6]])).logits[0, -1].detach() / 0.3
    kept = Truncation(top_p=0.7).find_kept(logits)
    p = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=len(p))
    assert not counts[~kept].any() and 3 < kept.sum() < len(p)
    assert ((counts - n * p).abs() < 5 * (n * p * (1 - p)).sqrt() + 1).all()


def test_at_learning_rate_0_every_ratio_is_1_to_the_bit(tiny_path):
    trainer = trainer_of(tiny_path, GRPO(), lr=1e-30)  # no weight moves
    engine = engine_of(tiny_path, temperature=TEMPERATURE, truncation=Truncation(top_p=0.9))
    samples = []
    for prompt, done in zip(PROMPTS, asyncio.run(several(engine, PROMPTS, range(4))), strict=True):
        talk = Conversation()
        talk.append_context(prompt)
        talk.append_reply(replace(done, versions=[0] * len(done.versions)))
        samples.append(talk.make_sample(some_groups(1)[0][0].prompt).with_advantage(1.0))
    batch = pack(samples, [1.0] * len(samples))
    [columns] = trainer.compute_columns([batch], frozenset({"prox_logp"}))
    prox = torch.from_numpy(columns["prox_logp"])
    trainer.step([[replace(batch, tokens=batch.tokens.replace(prox_logp=prox))]])
    logp = trainer.forward(batch).logp.detach()
    assert torch.equal(importance_ratio(logp, prox), torch.ones_like(logp)), "to the bit"
    # the engine computes one token at a time, with a cache: equal up to rounding
    torch.testing.assert_close(batch.tokens.rollout_logp, prox, rtol=0, atol=2e-6)
    full = trainer.forward(replace(batch, kept=None)).logp.detach()
    assert (importance_ratio(full, prox) < 0.97).any(), "the full softmax is another policy"


# whole runs ---------------------------------------------------------------------------------------------------


def test_a_run_and_its_replay_are_of_the_truncated_policy(trained):
    """A reference, an entropy bonus and several updates: every log-probability of the step is the restricted one."""
    changes = {
        "rollout.top_p": 0.7,
        "rollout.top_k": 20,
        "alg": {"name": "grpo", "kl": {"coef": 0.1}, "entropy_coef": 0.01},
        "updates_per_step": 2,
        "capture.every": 1,
    }
    folder = trained(changes)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "train/mismatch/kl" in line]
    assert steps and all(abs(line["train/mismatch/kl"]) < 1e-5 for line in steps)
    assert all(2 < line["rollout/kept_set_size_mean"] <= 20 for line in steps)
    assert all(0 < line["train/entropy"] < np.log(20) for line in steps), "that of the vocabulary is 4.6"
    for sample in (s for g in read_batch(folder / "snapshots" / "step_00000") for s in g if s.n_trained):
        assert sample.kept is not None and (sample.columns["ref_logp"] == sample.columns["prox_logp"]).all()
    assert replay(folder / "snapshots" / "step_00000", []).is_reproduced


def test_an_agent_may_name_the_rules_of_the_run_and_no_others():
    body = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "min_p": 0, "temperature": 1}
    asks = partial(read_ask, temperature=1.0, truncation=Truncation(top_p=0.9, top_k=20))
    for same in ({}, {"top_p": 0.9, "top_k": 20}):
        assert asks(body | same).messages
    for other in ({"top_p": 1.0}, {"top_k": -1}, {"min_p": 0.1}):
        with pytest.raises(BadRequest, match="leave it out"):
            asks(body | other)


REFUSED = {
    "top_p 0": ({"rollout.top_p": 0}, ["rollout.top_p", "greater than 0"]),
    "top_k -1": ({"rollout.top_k": -1}, ["rollout.top_k", "greater than or equal to 0"]),
    "min_p 1": ({"rollout.min_p": 1}, ["rollout.min_p", "less than 1"]),
    "no choice": ({"rollout.top_k": 1}, ["rollout.top_k is 1", "no choice"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_rule_is_one_sentence_before_the_run(name, refused):
    changes, words = REFUSED[name]
    refused(changes, *words)


ON_GPU = {
    "no bound": (RolloutConfig(top_p=0.9), False, "set rollout.top_k too"),
    "stop strings": (RolloutConfig(top_k=9, stop=["x"]), False, "leave out rollout.stop"),
    "aborts": (RolloutConfig(top_k=9), True, "pause_mode: abort"),
}


@pytest.mark.parametrize("name", ON_GPU)
def test_what_vllm_does_not_report_on_a_gpu_is_refused(name):
    rollout, aborts, said = ON_GPU[name]
    VllmEngine.check_truncation(rollout, on_gpu=False, aborts=aborts)
    VllmEngine.check_truncation(RolloutConfig(top_k=9, top_p=0.9, min_p=0.1), on_gpu=True, aborts=False)
    with pytest.raises(UserError, match=said):
        VllmEngine.check_truncation(rollout, on_gpu=True, aborts=aborts)


def test_vllms_own_sampling_mask_is_read(tiny_path):
    """Written as vLLM's V2 runner writes it, which runs on GPUs only."""

    async def nobody(*_args: object, **_more: object) -> list[object]:
        raise AssertionError("no worker is asked")

    config = engine_config(tiny_path, truncation=RULES)
    reports = KeptReports(config, nobody, on_cpu=False)
    assert reports.make_params("a") == {"top_p": 0.8, "top_k": 12, "min_p": 0.01}
    done = SimpleNamespace(token_ids=[2, 3], sampling_mask=SimpleNamespace(token_ids=[[1, 2], [3]]))
    sets = asyncio.run(reports.read("a", done))
    assert [ids.tolist() for ids in sets] == [[1, 2], [3]]
    with pytest.raises(RunStopped, match="no kept sets"):
        asyncio.run(reports.read("a", SimpleNamespace(token_ids=[2], sampling_mask=None)))
    assert engine_args(config, on_cpu=False)["return_sampling_mask"] is True
    off = KeptReports(engine_config(tiny_path), nobody, on_cpu=False)
    assert asyncio.run(off.read("a", done)) == [] and off.make_params("a")["top_p"] == 1


def test_an_engine_that_reports_no_sets_is_refused(refused, tmp_path):
    mine = file_of(tmp_path / "mine.py", OWN_ENGINE)
    refused({"rollout.min_p": 0.1, "rollout.engine": mine}, "does not report kept sets")
