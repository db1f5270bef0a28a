"""Losses and advantages against the numbers of the second independent oracle (numpy, float64, finite differences)."""

import pytest
import torch

from algs.base import Algorithm
from algs.bco import BCO
from algs.dpo import DPO
from algs.dro import DRO
from algs.gpg import GPG
from algs.grpo import GRPO
from algs.ipo_rl import IPORL
from algs.opo import OPO
from algs.passk import PassK
from algs.raft import RAFT
from algs.terms import Correction
from algs.vespo import VESPO
from core.types.samples import Policy
from unit_tests.helpers.golden import TOLERANCES
from unit_tests.helpers.golden2 import CASES2, GOLDEN2, PREF2, RL2, batch_of_groups, pref_groups, rl_groups

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
    "advantage/gpg_paper": GPG(correction=OFF),
    "lite_ppo/token_mean": GRPO(scale_rewards="batch", correction=OFF),
    "raft_positive/nll": RAFT(threshold=1.0, correction=OFF),
    "best_of_n/nll": RAFT(keep="best", correction=OFF),
    "raft_pp/clip": RAFT(threshold=1.0, clip=0.2, correction=OFF),
    "pref/rpo_nll_seq_mean": DPO(nll_coef=1.0),
    "pref/apo_zero": DPO(form="apo_zero"),
    "pref/apo_down": DPO(form="apo_down"),
    "pref/nca_pair": DPO(form="nca"),
    "pref/bco_pair": DPO(form="bco"),
    "pref/bco_delta": BCO().with_state({"delta": 0.03, "completions": 6}),
    "pref/exo_pair": DPO(form="exo", label_smoothing=0.1),
    "pref/sppo_hard": DPO(form="sppo"),
    "pref/discopop": DPO(form="discopop"),
    "pref/ld_dpo": DPO(length_decay=0.5),
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
    tokens = batch_of_groups(alg, groups, dtype).tokens
    kept = torch.cat([torch.from_numpy(s.loss_mask[2:].copy()) for g in groups for s in g])
    whole = torch.tensor([x for row in logp_of for x in row], dtype=dtype)
    logp = whole[kept].requires_grad_()
    loss, _ = alg.objective(Policy(logp=logp), tokens)
    total = (loss * tokens.weight).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=rtol / 100)
    want = torch.tensor([x for row in case["grad"]["logp"] for x in row], dtype=dtype)
    torch.testing.assert_close(logp.grad, want[kept], rtol=rtol, atol=rtol / 100)
    assert want[~kept].abs().max() == 0 and int(kept.sum()) <= sum(map(sum, mask))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_the_oracles(name):
    groups = ADVANTAGES[name].compute_advantages(rl_groups(None, 0.0))
    got = [float(s.advantage[s.loss_mask][0]) for g in groups for s in g]
    assert got == pytest.approx(GOLDEN2["advantages"][name], abs=1e-9)
