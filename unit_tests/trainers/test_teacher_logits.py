"""Distributions that measures read in a trainer's passes: the logits of a frozen model, or of an adapter's base."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.trainer_schema import LoraConfig, TrainerConfig
from core.errors import UserError
from core.types.measures import Measure
from core.types.samples import Batch
from modeling.lora import with_adapter
from trainers import distributions
from trainers.distributions import keep_states
from unit_tests.helpers.models import packed, random_model, some_samples

pytestmark = pytest.mark.usefixtures("one_thread")
COMPUTE_STATES = distributions.compute_states


def rank_of(model: Any, **more: Any) -> Any:
    given = {"cfg": TrainerConfig(layout="padded"), "lora": None, "frozen": {}, "sequence_group": "ranks"}
    given |= {"model": model, "policy": SimpleNamespace(module=model), "gather_parameter": Tensor.detach}
    return SimpleNamespace(**given | more)


def reading(*teachers: str) -> dict[str, Measure]:
    return {"one": Measure(lambda s, at: s.sum(-1), teachers=teachers), "two": Measure(lambda s, at: s.sum(-1))}


@torch.no_grad()
def score_alone(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits at the trained tokens, [M, V], one sequence at a time."""
    rows: list[Tensor] = []
    for end, n in zip(batch.lengths.cumsum(0).tolist(), batch.lengths.tolist(), strict=True):
        logits = model(input_ids=batch.input_ids[end - n : end][None]).logits[0]
        rows += [logits[at - end + n] for at in batch.at.tolist() if end - n <= at < end]
    return torch.stack(rows)


@pytest.fixture
def groups(monkeypatch) -> list[Any]:
    """The sequence groups of the passes, which have none here."""
    found: list[Any] = []

    def compute(*args: Any, sequence_group: Any, **settings: Any) -> Tensor:
        found.append(sequence_group)
        return COMPUTE_STATES(*args, **settings)

    monkeypatch.setattr(distributions, "compute_states", compute)
    return found


@pytest.mark.parametrize("biased", [False, True])
def test_a_measure_reads_the_logits_of_the_frozen_model(groups, biased):
    student, teacher = random_model("llama"), random_model("llama", num_hidden_layers=1, tie_word_embeddings=False)
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(0.1 * torch.randn_like(p))
        if biased:
            teacher.lm_head.bias = nn.Parameter(torch.randn(64))
    batch = packed(some_samples(9, 20, 3))
    kept = keep_states(rank_of(student, frozen={"math.v2": teacher}), batch, reading("math.v2"))
    assert [*kept] == ["math.v2"] and groups == ["ranks"]
    want = score_alone(teacher, batch)
    torch.testing.assert_close(kept["math.v2"](slice(0, None)), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kept["math.v2"](slice(2, 5)), want[2:5], rtol=1e-5, atol=1e-5)
    assert (want - score_alone(student, batch)).abs().max() > 0.1


def test_the_reference_of_an_adapter_is_its_base_model(groups):
    plain, adapted = random_model("llama"), with_adapter(random_model("llama"), LoraConfig(r=4), path="here")
    with torch.no_grad():
        for p in adapted.parameters():
            p.add_(p.requires_grad * torch.randn_like(p))
    batch = packed(some_samples(9, 20, 3))
    kept = keep_states(rank_of(adapted, lora=LoraConfig(r=4)), batch, reading("ref_logp"))
    torch.testing.assert_close(kept["ref_logp"](slice(0, None)), score_alone(plain, batch), rtol=1e-5, atol=1e-5)
    assert (score_alone(adapted, batch) - score_alone(plain, batch)).abs().max() > 0.1 and groups == ["ranks"]


def test_a_distribution_of_a_model_that_is_not_loaded_is_named():
    batch, says = packed(some_samples(4)), "a measure reads the distribution of {!r}, and this run does not load that "
    for lora, name in ((None, "ref_logp"), (LoraConfig(r=4), "teacher_logp"), (None, "teacher_logp")):
        with pytest.raises(UserError) as raised:
            keep_states(rank_of(random_model("llama"), lora=lora), batch, reading(name))
        assert str(raised.value) == f"{says.format(name)}model: leave precompute_ref_logp out"
    assert keep_states(rank_of(None), batch, reading()) == {}
