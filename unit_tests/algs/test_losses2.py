"""Losses and advantages against the numbers of the second independent oracle (numpy, float64, finite differences)."""

import pytest
import torch

from algs.base import Algorithm
from algs.bco import BCO
from algs.by_source import BySource
from algs.chord import CHORD
from algs.dpo import DPO
from algs.dpo_nll import DPOWithNLL
from algs.dro import DRO
from algs.echo import ECHO
from algs.gpg import GPG
from algs.grpo import GRPO
from algs.ipo_rl import IPORL
from algs.luffy import LUFFY
from algs.objective import compute_objective
from algs.opo import OPO
from algs.otb import OTB
from algs.passk import PassK
from algs.positive_nll import PositiveNLL
from algs.raft import RAFT
from algs.terms import Correction
from algs.vespo import VESPO
from algs.wpo import WPO
from core.types.samples import Policy
from core.types.terms import Term
from unit_tests.helpers.golden import TOLERANCES
from unit_tests.helpers.golden2 import CASES2, GOLDEN2, PREF2, RL2, batch_of_groups, pref_groups, rl_groups, rl_inputs

OFF = Correction(level="none")
OPSM = {"loss_norm": "sequence", "clip_high": 0.2, "correction": Correction(level="none", max_drift=0.15)}
CASES: dict[str, Algorithm] = {
    "ipo_rl/prime_rl": IPORL(delta=0.1, kl_tau=1e-3),
    "ipo_rl/prime_rl_default": IPORL(),
    "opsm/rollout_anchor": GRPO(**OPSM),
    "opsm/token_level_adv": GRPO(**OPSM),
    "vespo/no_is": VESPO(correction=OFF),
    "vespo/rollout_anchor": VESPO(anchor="rollout", correction=OFF),
    "dro/verl": DRO(correction=OFF),
    "dro/tinker": DRO(anchor="rollout", correction=OFF),
    "dro/richemond_sequence": DRO(anchor="ref", level="sequence", loss_norm="sequence_sum", correction=OFF),
    "advantage/opo": OPO(correction=OFF),
    "advantage/otb_compact": OTB(correction=OFF),
    "advantage/gpg_paper": GPG(correction=OFF),
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
}
COMPUTED = ("advantage/", "lite_ppo/", "raft", "best_of_n/")
"""Cases whose advantages are the algorithm's own."""
ADVANTAGES: dict[str, Algorithm] = {
    "opo": OPO(),
    "gpg_paper": GPG(),
    "maxrl": GRPO(scale_rewards="mean"),
    "passk_analytical": PassK(k=2, threshold=0.75),
    "lite_ppo": GRPO(scale_rewards="batch"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
@pytest.mark.parametrize("poison", [0.0, float("nan"), 1e6])
def test_loss_and_gradient_are_the_oracles(name, dtype, rtol, poison):
    case, alg = CASES2[name], CASES[name]
    if name.startswith("pref/"):
        mask, logp_of, groups = PREF2["mask"], PREF2["logp"], pref_groups(poison)
        groups = alg.compute_advantages([[s] for g in groups for s in g] if alg.rows == "unpaired" else groups)
    else:
        given = "seq_adv" if name.startswith("dro/richemond") else case["hyperparameters"].get("advantages", "adv")
        mask, logp_of, groups = RL2["mask"], RL2["logp"], rl_groups(given, poison)
        if name.startswith(COMPUTED):
            groups = alg.compute_advantages(rl_groups(None, poison))
    batch = batch_of_groups(alg, groups, dtype)
    kept = torch.cat([torch.from_numpy(s.loss_mask[2:].copy()) for g in groups for s in g])
    whole = torch.tensor([x for row in logp_of for x in row], dtype=dtype)
    logp = whole[kept].requires_grad_()
    measures = {}
    if name == "pref/wpo":
        collision = torch.tensor([x for row in PREF2["log_sum_pi_sq"] for x in row], dtype=dtype)[kept]
        measures["collision"] = collision.exp().requires_grad_()
    loss = compute_objective(alg, Policy(logp=logp, measures=measures), batch).loss
    total = (loss * batch.tokens.weight).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=rtol / 100)
    want = torch.tensor([x for row in case["grad"]["logp"] for x in row], dtype=dtype)
    torch.testing.assert_close(logp.grad, want[kept], rtol=rtol, atol=rtol / 100)
    assert all(x.grad is None for x in measures.values()), "the weights of pairs are detached"
    assert want[~kept].abs().max() == 0 and int(kept.sum()) <= sum(map(sum, mask))


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
    assert got == pytest.approx(GOLDEN2["advantages"][name], abs=1e-9)
