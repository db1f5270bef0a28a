"""Losses and advantages against the numbers of the second independent oracle (numpy, float64, finite differences)."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from algs.aot import AOT
from algs.base import Algorithm
from algs.bco import BCO
from algs.by_source import BySource
from algs.chord import CHORD
from algs.clip_cov import KEY, ClipCov
from algs.dpo import DPO
from algs.dpo_nll import DPOWithNLL
from algs.dro import DRO
from algs.echo import ECHO
from algs.gdpo import GDPO
from algs.gpg import GPG
from algs.grpo import GRPO
from algs.ipo_rl import IPORL
from algs.kl_cov import KLCov
from algs.luffy import LUFFY
from algs.m2po import M2PO, find_limit
from algs.objective import add_totals, compute_objective, view_first
from algs.opo import OPO
from algs.otb import OTB
from algs.passk import PassK
from algs.positive_nll import PositiveNLL
from algs.raft import RAFT
from algs.scalerl import ScaleRL
from algs.terms import KL, Correction
from algs.tilted import Tilted
from algs.top_entropy import TopEntropy
from algs.totals import Alone, prepare_update, sum_totals
from algs.vespo import VESPO
from algs.wpo import WPO
from core.types.samples import Group, Policy
from core.types.terms import Term
from unit_tests.helpers.golden import TOLERANCES
from unit_tests.helpers.golden2 import CASES2, GOLDEN2, PREF2, RL2, batch_of_groups, pref_groups, rl_groups, rl_inputs

OFF = Correction(level="none")
OPSM = {"loss_norm": "sequence", "clip_high": 0.2, "correction": Correction(level="none", max_drift=0.15)}
FROM_PROX = {"correction": Correction(level="none", max_drift=0.15, drift_from="prox")}
COV = {"cov_above": 0.05, "cov_below": 0.6, "correction": OFF}
CASES: dict[str, Algorithm] = {
    "ipo_rl/prime_rl": IPORL(delta=0.1, kl_tau=1e-3),
    "ipo_rl/prime_rl_default": IPORL(),
    "opsm/rollout_anchor": GRPO(**OPSM),
    "opsm/token_level_adv": GRPO(**OPSM),
    "opsm/old_anchor": GRPO(**OPSM | FROM_PROX),
    "vespo/no_is": VESPO(correction=OFF),
    "vespo/rollout_is_capped": VESPO(rollout_cap=2.0, correction=OFF),
    "vespo/rollout_anchor": VESPO(anchor="rollout", correction=OFF),
    "dro/verl": DRO(correction=OFF),
    "dro/tinker": DRO(anchor="rollout", correction=OFF),
    "dro/richemond_sequence": DRO(anchor="ref", level="sequence", loss_norm="sequence_sum", correction=OFF),
    "advantage/otb_compact": OTB(correction=OFF),
    "dro/skyrl_tilt": Tilted(beta=0.5, correction=OFF),
    "m2po/update": M2PO(correction=OFF),
    "clip_cov/all_candidates": ClipCov(**COV, fraction=1.0),
    "clip_cov/hashed": ClipCov(**COV, fraction=0.12),
    "kl_cov/top_fraction": KLCov(fraction=0.2, correction=OFF),
    "top_entropy/q0.8": TopEntropy(correction=OFF),
    "top_entropy/q0.5": TopEntropy(quantile=0.5, correction=OFF),
    "scalerl/prompt_mean_zero_variance": ScaleRL(max_weight=1.2),
    "lite_ppo/token_mean": GRPO(scale_rewards="batch", correction=OFF),
    "raft_positive/nll": RAFT(threshold=1.0, correction=OFF),
    "best_of_n/nll": RAFT(keep="best", correction=OFF),
    "raft_pp/clip": RAFT(threshold=1.0, clip=0.2, correction=OFF),
    "pref/rpo_nll_seq_mean": DPO(nll_coef=1.0),
    "pref/rpo_nll_token_mean": DPOWithNLL(),
    "pref/cpo": DPOWithNLL(reference_free=True),
    "pref/apo_zero": DPO(form="apo_zero"),
    "pref/apo_down": DPO(form="apo_down"),
    "pref/nca_pair": DPO(form="nca"),
    "pref/bco_pair": DPO(form="bco"),
    "pref/bco_delta": BCO().with_state({"delta": 0.03, "completions": 6}),
    "pref/exo_pair": DPO(form="exo", label_smoothing=0.1),
    "pref/sppo_hard": DPO(form="sppo"),
    "pref/discopop": DPO(form="discopop"),
    "pref/ld_dpo": DPO(length_decay=0.5),
    "pref/wpo": WPO(),
    "pref/f_forward_kl": DPO(divergence="forward_kl"),
    "pref/f_js": DPO(divergence="js"),
    "pref/f_alpha0.5": DPO(divergence="alpha"),
    "pref/aot_unpaired": AOT(),
}
COMPUTED = ("advantage/", "lite_ppo/", "raft", "best_of_n/", "scalerl/")
"""Cases whose advantages are the algorithm's own."""
ADVANTAGES: dict[str, Algorithm] = {
    "opo": OPO(),
    "gpg_paper": GPG(),
    "gpg_verl": GPG(counts="nonzero"),
    "gdpo_trl": GDPO(),
    "gdpo_verl": GDPO(over="token"),
    "maxrl": GRPO(scale_rewards="mean"),
    "passk_max": PassK(form="best"),
    "passk_analytical": PassK(k=2, threshold=0.75),
    "lite_ppo": GRPO(scale_rewards="batch"),
}
OF_ADVANTAGES = {f"advantage/{name}": alg for name, alg in ADVANTAGES.items() if name != "lite_ppo"}
"""Cases of advantages, each with the loss of REINFORCE, which is that of RAFT."""
KLS = {"kl/abs": "abs", "kl/k2_is": "k2_is", "kl/k3_plus": "k3plus", "kl/unbiased_rollout": "unbiased"}
KLS |= {"kl/score": "score"}


ELSEWHERE = {
    "test_distributions.py": ("kl/full_", "gkd/", "topk/", "stored/", "ppo/exact_kl_penalty", "minillm/paper"),
    "test_teachers.py": ("opd/by_source_token_mean", "opd/iw", "opd/sampled_sg", "self/"),
    "../modeling/test_kept_sets.py": ("support/",),
}
"""Beginnings of the cases that other files test."""
LEFT_OUT: dict[str, str] = {
    "advantage/otb_positions": "counts positions and not tokens, which is wrong where masks have gaps",
    "opd/by_source_per_source": "a mean per source is alg.by_source; two teachers in one algorithm share one mean",
    "p3o/llm_exact_kl": "needs the engine's whole distribution at each token, which no engine reports",
    "minillm/trl": "counts each token's own KL twice; minillm/paper is the published one",
}
"""Cases that no test reads, with the reason."""


def test_every_case_of_the_oracle_is_tested_or_left_out():
    beginnings = tuple(b for own in ELSEWHERE.values() for b in own)
    elsewhere = [name for name in CASES2 if name.startswith(beginnings) and name not in LEFT_OUT]
    tested = [*CASES, *OF_ADVANTAGES, *KLS, *TERMS]
    assert sorted([*tested, *elsewhere, *LEFT_OUT]) == sorted(CASES2)
    for file, own in ELSEWHERE.items():
        text = (Path(__file__).parent / file).read_text()
        assert not [name for name in CASES2 if name in elsewhere and name.startswith(own) and name not in text], file


def with_keys(groups: list[Group], case: dict) -> list[Group]:
    """Return the groups with the oracle's random keys."""
    keys = iter(case["extra"]["keys"])

    def add(s):
        return replace(s, columns=s.columns | {KEY: np.array([np.nan, np.nan, *next(keys)])})

    return [[add(s) for s in g] for g in groups]


@pytest.mark.parametrize("name", [*CASES, *OF_ADVANTAGES])
@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
@pytest.mark.parametrize("poison", [0.0, float("nan"), 1e6])
def test_loss_and_gradient_are_the_oracles(name, dtype, rtol, poison):
    case, alg = CASES2[name], CASES.get(name) or RAFT(correction=OFF)
    if name.startswith("pref/"):
        mask, logp_of, groups = PREF2["mask"], PREF2["logp"], pref_groups(poison)
        groups = alg.compute_advantages([[s] for g in groups for s in g] if alg.rows == "unpaired" else groups)
    else:
        given = "seq_adv" if name.startswith("dro/richemond") else case["hyperparameters"].get("advantages", "adv")
        mask, logp_of, groups = RL2["mask"], RL2["logp"], rl_groups(given, poison)
        if name.startswith(COMPUTED) or name in OF_ADVANTAGES:
            groups = OF_ADVANTAGES.get(name, alg).compute_advantages(rl_groups(None, poison))
    groups = prepare_update(alg, groups)
    if name.startswith("clip_cov/"):
        groups = with_keys(groups, case)
    batch = batch_of_groups(alg, groups, dtype)
    kept = torch.cat([torch.from_numpy(s.loss_mask[2:].copy()) for g in groups for s in g])

    def live(rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=dtype)[kept]

    logp = live(logp_of).requires_grad_()
    measures = {"collision": live(PREF2["log_sum_pi_sq"]).exp().requires_grad_()} if name == "pref/wpo" else {}
    policy = Policy(logp=logp, entropy=live(RL2["ent"]) if alg.needs_entropy else None, measures=measures)
    [totals] = islice(sum_totals(alg, [view_first(policy, batch)], Alone()), 1)
    loss = compute_objective(alg, policy, add_totals(batch, totals)).loss
    total = (loss * batch.tokens.weight).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=rtol / 100)
    torch.testing.assert_close(logp.grad, live(case["grad"]["logp"]), rtol=rtol, atol=rtol / 100)
    assert all(x.grad is None for x in measures.values()), "the weights of pairs are detached"
    gone = torch.tensor([x for row in case["grad"]["logp"] for x in row])[~kept]
    assert gone.abs().max() == 0 and int(kept.sum()) <= sum(map(sum, mask))


@pytest.mark.parametrize("name", KLS)
@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
@pytest.mark.parametrize("poison", [0.0, float("nan"), 1e6])
def test_estimators_of_the_kl_are_the_oracles(name, dtype, rtol, poison):
    case, alg = CASES2[name], GRPO(correction=OFF, kl=KL(coef=1.0, estimator=KLS[name]))
    tokens = batch_of_groups(alg, rl_groups("adv", poison), dtype).tokens
    kept = torch.tensor(RL2["mask"], dtype=torch.bool)
    logp = torch.tensor(RL2["logp"], dtype=dtype)[kept].requires_grad_()
    total = (alg.kl.compute_penalty(Policy(logp=logp), tokens) * tokens.weight).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=rtol / 100)
    want = torch.tensor(case["grad"]["logp"], dtype=dtype)[kept]
    torch.testing.assert_close(logp.grad, want, rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize("threshold", GOLDEN2["update_wide"]["m2po_ties"]["tau"])
def test_equal_drifts_share_their_fate(threshold):
    ties = GOLDEN2["update_wide"]["m2po_ties"]
    assert find_limit(np.array(ties["values"]), float(threshold)) == ties["tau"][threshold]["limit"]


class ThreeComponents(IPORL):
    """prime-rl's components, routed by source: its RL loss, cross-entropy on answers, distillation from a teacher."""

    delta: float = 0.1
    kl_tau: float = 1e-3

    @property
    def terms(self):
        first, second = frozenset({"0"}), frozenset({"1"})
        return (
            Term("rl", self.loss, sources=first),
            Term("ce", lambda policy, tokens: (-policy.logp, {}), on="observed", sources=first),
            Term("ref_kl", self.distil, sources=second),
        )

    def distil(self, policy, tokens):
        u, lp = (policy.logp - tokens.rollout_logp).exp(), policy.logp.detach()
        dropped = lp.exp() - tokens.rollout_logp.exp() < -0.2
        gain = ((tokens.teacher_logp - lp) * u).masked_fill(dropped, 0.0)
        return self.kl_tau * (policy.logp - tokens.rollout_logp).square() - gain, {}


TERMS: dict[str, Algorithm] = {
    "echo/own_denominators": ECHO(correction=OFF),
    "aux/nll_on_positives": PositiveNLL(correction=OFF),
    "chord/phi": CHORD(mu=0.3, correction=OFF),
    "chord/sft": CHORD(mu=0.3, phi=False, correction=OFF),
    "luffy/token_mean": LUFFY(correction=OFF),
    "luffy/constant": LUFFY(loss_norm="constant", correction=OFF),
    "by_source/two_norms": BySource(
        by_source={
            "0": {"name": "grpo", "correction": OFF.model_dump()},
            "1": {"name": "sft", "loss_norm": "sequence"},
        },
        coefs={"1": 0.5},
    ),
    "by_source/rl_ce_refkl": ThreeComponents(correction=OFF),
}
"""Cases of several terms."""
DEMONSTRATIONS = dict.fromkeys(("chord/phi", "chord/sft", "luffy/token_mean", "luffy/constant"), "demo")
DEMONSTRATIONS["by_source/two_norms"] = "source"
"""Column that tells which rows are demonstrations, by case."""


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
@pytest.mark.parametrize("poison", [0.0, float("nan"), 1e6])
def test_terms_have_the_oracles_losses(name, dtype, rtol, poison):
    case, alg = CASES2[name], TERMS[name]
    groups = rl_groups("adv", poison, demonstrates=DEMONSTRATIONS.get(name, ""))
    batch = batch_of_groups(alg, groups, dtype)
    logp, kept = rl_inputs(groups, alg, dtype)
    found = compute_objective(alg, Policy(logp=logp), batch)
    total = (found.loss * batch.tokens.weight).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=rtol / 100)
    want = torch.tensor(case["grad"]["logp"], dtype=dtype)
    torch.testing.assert_close(logp.grad, want[kept], rtol=rtol, atol=rtol / 100)
    assert want[~kept].abs().max() == 0
    assert [len(weight) for weight, _ in found.of_terms] == case.get("extra", {}).get("tokens", [19, 5])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_the_oracles(name):
    groups = ADVANTAGES[name].compute_advantages(rl_groups(None, 0.0))
    got = [float(s.advantage[s.loss_mask][0]) for g in groups for s in g]
    want = [row if isinstance(row, float) else row[0] for row in GOLDEN2["advantages"][name]]
    assert got == pytest.approx(want, abs=1e-9)
