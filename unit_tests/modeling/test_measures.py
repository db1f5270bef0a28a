"""Measures of the distribution are those of all logits at once, however the head is cut, and so are their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from algs import find_algorithm
from algs.base import Algorithm, PolicyGradient
from algs.measures import plan_measures
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.errors import UserError
from core.types.allowed_tokens import AllowedTokens
from core.types.measures import ENTROPY, Measure
from core.types.samples import MissingColumn, Policy
from data_feeds.packing.batches import micro_batches
from modeling.forward import compute_states, forward
from modeling.head import choose_chunk
from modeling.softmax import KeptStates
from trainers.local import LocalTrainer
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.models import compute_policy, packed, random_model, some_samples
from unit_tests.helpers.variants import NEEDED

pytestmark = pytest.mark.usefixtures("one_thread")
TEMPERATURE = 0.7
MEASURES = {
    **ENTROPY,
    "collision": Measure(lambda s, at: (2 * s).exp().sum(-1)),
    "gap": Measure(lambda s, at: (s.exp() * (s - at.teacher("ref"))).sum(-1), teachers=("ref",)),
    "own": Measure(lambda s, at: s.gather(-1, at.labels[:, None])[:, 0] * at.column("rollout_logp")),
}
"""Of the distribution alone, of a teacher, and of the token and its columns."""


def wide_pair(vocabulary: int) -> tuple[nn.Module, nn.Module]:
    """Student and teacher in float64; the teacher has a soft cap after its head."""
    student = random_model("llama", vocab_size=vocabulary).double()
    teacher = random_model("gemma2", vocab_size=vocabulary, final_logit_softcapping=2.0).double()
    with torch.no_grad():
        for p in (*student.parameters(), *teacher.parameters()):
            p.add_(0.2 * torch.randn_like(p))  # so that no distribution is flat
    return student, teacher.requires_grad_(False)


def run(student: nn.Module, teacher: nn.Module, *, mib: int, allowed=None) -> Policy:
    batch = packed(some_samples(9, 20, 3))
    hidden = compute_states(teacher, teacher, batch, layout="padded")
    assert not hidden.requires_grad
    kept = KeptStates(model=teacher, hidden=hidden, weight=teacher.lm_head.weight)
    return forward(
        student,
        student,
        batch,
        layout="padded",
        temperature=TEMPERATURE,
        logits_mib=mib,
        allowed_tokens=AllowedTokens(allowed=allowed),
        measures=MEASURES,
        teachers={"ref": kept.compute_logits},
        measured=True,
    )


def right(student: nn.Module, teacher: nn.Module, allowed=None) -> list[Tensor]:
    """The same numbers, from whole rows of logits and without any of the code that is tested."""
    batch = packed(some_samples(9, 20, 3))
    rows: list[list[Tensor]] = []
    begins = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    for begin, n in zip(begins, batch.lengths.tolist(), strict=True):
        ids = batch.input_ids[begin : begin + n][None]
        here = [(int(a) - begin, i) for i, a in enumerate(batch.at) if begin <= a < begin + n]
        s, t = (m(input_ids=ids).logits[0].double() / TEMPERATURE for m in (student, teacher))
        keep = list(range(s.shape[-1])) if allowed is None else list(allowed)
        s, t = s[:, keep].log_softmax(-1), t[:, keep].log_softmax(-1).detach()
        for position, i in here:
            label, rollout = keep.index(int(batch.labels[i])), batch.tokens.rollout_logp[i]
            p, q = s[position], t[position]
            rows.append(
                [p[label], -(p.exp() * p).sum(), p.exp().square().sum(), (p.exp() * (p - q)).sum(), p[label] * rollout]
            )
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def slopes(model: nn.Module, rows: list[Tensor]) -> Tensor:
    loss = torch.stack([(row * torch.linspace(1, 2, len(row)).to(row)).sum() for row in rows]).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("restricted", [False, True], ids=["all", "allowed"])
@pytest.mark.parametrize(("vocabulary", "mib", "size"), [(64, 0, None), (4096, 0, None), (4096, 1, 3), (16_384, 1, 1)])
def test_chunks_of_any_size_give_the_numbers_of_whole_rows(vocabulary, mib, size, restricted):
    student, teacher = wide_pair(vocabulary)
    batch = packed(some_samples(9, 20, 3))
    assert choose_chunk(student, len(batch.labels), mib, measured=True) == size
    allowed = tuple(range(0, 64, 2)) + tuple(batch.labels.tolist()) if restricted else None
    allowed = tuple(sorted({*allowed})) if allowed else None
    got, want = run(student, teacher, mib=mib, allowed=allowed), right(student, teacher, allowed)
    rows = got.list_tensors()
    assert [*got.measures] == ["collision", "gap", "own"] and torch.equal(got.gap, rows[3])
    for ours, theirs in zip(rows, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    gradient, theirs = slopes(student, rows), slopes(student, want)
    assert (gradient - theirs).norm() < 1e-7 * theirs.norm()


def test_a_measure_of_float64_is_the_same_in_chunks_of_1_3_and_all():
    torch.manual_seed(0)
    logits, labels = torch.randn(10, 16, dtype=torch.float64), torch.arange(10)
    measures = {"collision": MEASURES["collision"], **ENTROPY}
    whole = compute_policy(logits, labels, temperature=0.7, measures=measures)
    for size in (1, 3):
        parts = [
            compute_policy(logits[i : i + size], labels[i : i + size], temperature=0.7, measures=measures)
            for i in range(0, 10, size)
        ]
        assert torch.equal(torch.cat([p.collision for p in parts]), whole.collision)
        assert torch.equal(torch.cat([p.entropy for p in parts]), whole.entropy)


class Collision(PolicyGradient):
    """A column before the update, and measures of it: of the policy, and of it beside a frozen model."""

    before: tuple[str, ...] = ("prox.collision", "ref_logp.collision", "ref_logp")

    @property
    def measures(self):
        return {
            "collision": MEASURES["collision"],
            "gap": Measure(lambda s, at: (s - at.teacher("ref_logp")).abs().amax(-1), teachers=("ref_logp",)),
        }

    @property
    def required_columns(self):
        return frozenset(self.before)

    def compute_advantages(self, groups):
        return [[s.with_advantage(s.columns["prox.collision"]) for s in g] for g in groups]

    def loss(self, policy, tokens):
        return -policy.logp * tokens.column("prox.collision"), {"gap": policy.gap}


def trainer_with(alg: Algorithm, path: str, lora=None) -> LocalTrainer:
    cfg = TrainerConfig(lr=1e-2, logits_mib=1)
    return LocalTrainer(
        ModelConfig(path=path, dtype="float32", lora=lora), cfg, alg, temperature=TEMPERATURE, total_updates=10
    )


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4)], ids=["weights", "adapter"])
def test_a_trainer_computes_columns_and_measures(tiny_path, lora):
    trainer = trainer_with(Collision(), tiny_path, lora)
    [micro] = micro_batches(some_groups(), "token", 10_000)
    [found] = trainer.compute_columns(micro, trainer.alg.required_columns)
    assert found.keys() == trainer.alg.required_columns
    assert (found["prox.collision"] == found["ref_logp.collision"]).all(), "both are the first model"
    assert ((found["ref_logp.collision"] > 0) & (found["ref_logp.collision"] < 1)).all()
    known = {name: torch.from_numpy(v) for name, v in found.items() if name != "ref_logp"}
    micro[0].tokens = micro[0].tokens.replace(
        columns=known, ref_logp=torch.from_numpy(found["ref_logp"]), advantage=torch.ones(len(micro[0].labels))
    )
    first, second = trainer.step([micro]), trainer.step([micro])
    assert first["gap"] == 0 and second["gap"] > 1e-4, "it moves away from the reference, which stays"


def test_a_measure_that_the_loss_cannot_have_is_named(tiny_path):
    trainer = trainer_with(Collision(), tiny_path)
    [micro] = micro_batches(some_groups(), "token", 10_000)
    policy = trainer.forward(micro[0])
    assert [*policy.measures] == ["gap"], "collision is a column of the step"
    with pytest.raises(MissingColumn, match=r"policy\.collision is not there; .* Measures of this pass: gap"):
        _ = policy.collision


class Wrong(Collision):
    which: str = "column"

    @property
    def measures(self):
        broken = {
            "column": super().measures,
            "plain": {"collision": lambda s, at: s},
            "taken": {"entropy": MEASURES["collision"]},
            "teacher": {"collision": MEASURES["gap"]},
        }
        return broken[self.which]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"before": ("prox.colision", "ref_logp")},
            "names 'prox.colision', which is no measure of a model: those are",
        ),
        ({"before": ("other.collision", "ref_logp")}, "names 'other.collision', which is no measure"),
        (
            {"before": ("teacher_logp", "ref_logp")},
            "names 'teacher_logp', which no model computes: there are prox_logp,",
        ),
        ({"which": "plain"}, "the measure collision is <function"),
        ({"which": "taken"}, "a measure is named entropy"),
        (
            {"which": "teacher"},
            "reads the distribution of 'ref', and the teachers that rest and read what the policy reads are ref_logp",
        ),
    ],
)
def test_a_wrong_name_is_refused_at_the_start(settings, said):
    with pytest.raises(UserError) as refused:
        plan_measures(Wrong(**settings))
    assert said in str(refused.value)


@pytest.mark.parametrize("rows", [lambda s, at: s, lambda s, at: s.sum(), lambda s, at: 1.0])
def test_a_measure_that_is_no_number_per_token_is_refused(rows):
    with pytest.raises(UserError, match=r"the measure mine returns .* expected one float per row of s"):
        compute_policy(torch.randn(4, 8), torch.arange(4), temperature=1.0, measures={"mine": Measure(rows)})


def test_a_teacher_that_is_not_declared_is_named():
    undeclared = {"mine": Measure(lambda s, at: at.teacher("ref").sum(-1))}
    with pytest.raises(UserError, match=r"reads at\.teacher\('ref'\), and those that it declares are: none"):
        compute_policy(torch.randn(4, 8), torch.arange(4), temperature=1.0, measures=undeclared)


def test_every_algorithm_of_the_library_has_names_that_exist():
    from algs import list_algorithms

    for name in list_algorithms():
        cls = find_algorithm({"name": name})[1]
        plan_measures(cls(**NEEDED.get(name, {})))
