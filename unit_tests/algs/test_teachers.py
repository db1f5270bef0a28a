"""Losses that read a teacher against the numbers of the second oracle."""

import pytest
import torch
from torch import Tensor

from algs.base import Algorithm
from algs.opd import OPD
from algs.opsd import OPSD
from algs.sdpo import SDPO
from algs.terms import Correction
from core.types.arrays import DOUBLE
from core.types.samples import Policy, Prompt, make_sample
from unit_tests.helpers.examples import a_changed
from unit_tests.helpers.golden import TOLERANCES
from unit_tests.helpers.golden2 import CASES2, GOLDEN2, RL2, batch_of_groups, rl_groups
from unit_tests.helpers.golden_teachers import graded

OFF = Correction(level="none")
CASES: dict[str, Algorithm] = {
    "opd/by_source_token_mean": OPD(teacher={"0": "tea", "1": "tea2"}),
    "opd/iw": OPD(teacher="tea", early=1.0, ratio="none", correction=OFF),
    "self/sdpo_sampled_is": SDPO(max_weight=1.3, correction=OFF),
    "self/rows_without_teacher": SDPO(correction=OFF),
    "self/prime_opsd": OPSD(),
}
RL_SAMPLE = rl_groups(None, 0.0)[0][0]
LOGITS, SELF = GOLDEN2["fixtures"]["logits"], GOLDEN2["fixtures"]["self"]


def gradient(total: Tensor, of: Tensor) -> Tensor:
    total.backward()
    assert of.grad is not None
    return of.grad


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
@pytest.mark.parametrize("poison", [0.0, float("nan"), 1e6])
def test_loss_and_gradient_are_the_oracles(name, dtype, rtol, poison):
    case, alg = CASES2[name], CASES[name]
    groups = alg.compute_advantages(graded(name, poison))
    tokens = batch_of_groups(alg, [[s for s in g if s.n_trained] for g in groups], dtype).tokens
    kept = torch.cat([torch.from_numpy(s.loss_mask[2:].copy()) for g in groups for s in g])
    logp = torch.tensor([x for row in RL2["logp"] for x in row], dtype=dtype)[kept].requires_grad_()
    loss, _ = alg.objective(Policy(logp=logp), tokens)
    total = (loss * tokens.weight).sum()
    want = torch.tensor([x for row in case["grad"]["logp"] for x in row], dtype=dtype)
    torch.testing.assert_close(total.detach(), torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=rtol / 100)
    torch.testing.assert_close(gradient(total, logp), want[kept], rtol=rtol, atol=rtol / 100)
    assert want[~kept].abs().max() == 0


def test_weights_of_early_tokens_are_the_oracles():
    groups = CASES["opd/iw"].compute_advantages(graded("opd/iw", 0.0))
    got = [a for g in groups for s in g for a in (s.advantage * s.loss_mask)[2:].tolist()]
    assert got == pytest.approx([a for row in CASES2["opd/iw"]["extra"]["weighted_advantage"] for a in row], abs=1e-12)


def score_form(logp: Tensor, teacher: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and mean distance of tokens, [N] each, under SDPO with one update per step."""
    columns = {"teacher_logp": [0.0, *teacher.tolist()]}
    n = len(teacher)
    sample = make_sample(
        prompt=Prompt(id="p", messages=[]),
        token_ids=[0] * (n + 1),
        action_mask=[False] + [True] * n,
        rollout_logp=[0.0] * (n + 1),
        versions=[0] * (n + 1),
        dtype=DOUBLE,
        columns=columns,
    )
    alg = SDPO(correction=OFF)
    tokens = batch_of_groups(alg, [[sample]], torch.float64).tokens.replace(prox_logp=logp.detach())
    loss, metrics = alg.loss(Policy(logp=logp), tokens)
    return (loss * weight).sum(), (metrics["teacher_kl"] * weight).sum()


def test_sampled_tokens_have_the_oracles_gradient_of_the_logits():
    mask = torch.tensor(LOGITS["mask"], dtype=torch.bool)
    logits = torch.tensor(LOGITS["logits"], dtype=torch.float64).nan_to_num().requires_grad_()
    teacher = torch.tensor(LOGITS["teacher_logits"], dtype=torch.float64).log_softmax(-1)
    labels = torch.tensor(LOGITS["labels"])[..., None]
    logp, graded_by = (t.gather(-1, labels)[..., 0][mask] for t in (logits.log_softmax(-1), teacher))
    # the mean over sequences of the mean over their tokens
    weight = (mask / mask.sum(1, keepdim=True) / len(mask))[mask]
    total, _ = score_form(logp, graded_by, weight)
    case = CASES2["opd/sampled_sg"]
    assert total.item() == pytest.approx(case["loss"], abs=1e-9)
    torch.testing.assert_close(gradient(total, logits), torch.tensor(case["grad"]["logits"], dtype=torch.float64))


def test_over_all_tokens_it_is_the_reverse_kl_to_a_live_teacher():
    """Every token of the vocabulary counts as often as it would be sampled; the teacher has more context."""
    weights = torch.tensor(SELF["W"], dtype=torch.float64, requires_grad=True)
    student, privileged = (torch.tensor(SELF[f"x_{who}"], dtype=torch.float64) for who in ("student", "teacher"))
    mask = torch.tensor(SELF["mask"], dtype=torch.bool)
    own = (student @ weights.T).log_softmax(-1)[mask]
    live = (privileged @ weights.detach().T).log_softmax(-1)[mask]
    sampled = own.detach().exp() / mask.sum()
    total, distance = score_form(own.flatten(), live.flatten(), sampled.flatten())
    case = CASES2["self/live_teacher_reverse_kl"]
    assert distance.item() == pytest.approx(case["loss"], abs=1e-9)
    torch.testing.assert_close(gradient(total, weights), torch.tensor(case["grad"]["W"], dtype=torch.float64))


def test_the_solution_shown_is_another_samples():
    """The best; of equal ones the one whose tokens come first; never the sample itself, nor a branch of its episode."""
    rewards, episodes = [1.0, 0.0, 1.0, 0.5], [0, 1, 2, 3]
    prompt = Prompt(id="p", messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    group = [
        a_changed(RL_SAMPLE, reward=r, completion=f"reply {n}", token_ids=[9 - n] * 7, prompt=prompt, episode=e)
        for n, (r, e) in enumerate(zip(rewards, episodes, strict=True))
    ]
    alg = SDPO(shown=" <{solution}>")
    shown = [alg.show_solution(s, group) for s in group]
    assert [m[1]["content"] for m in shown] == ["q <reply 2>", "q <reply 2>", "q <reply 0>", "q <reply 2>"]
    assert all(m[0] == prompt.messages[0] for m in shown)
    branch = a_changed(group[0], episode=2)
    assert alg.show_solution(branch, [branch, group[1], group[2]]) is None
    assert alg.accept_group(group) and not alg.accept_group([group[1], group[3]])
    assert not SDPO().accept_group([a_changed(group[0], episode=None)]), "its own solution teaches nothing"
