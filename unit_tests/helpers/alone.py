"""Log-probabilities and gradients of plain transformers, one sequence at a time."""

import torch

from modeling.forward import forward
from unit_tests.helpers.models import packed


def gradient(model, values) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(values.square().sum(), list(model.parameters()))])


def one_by_one(model, samples, temperature) -> torch.Tensor:
    """Plain transformers: one sequence, all logits, log_softmax."""
    logp = []
    for s in samples:
        logits = model(input_ids=torch.tensor(s.token_ids[None])).logits[0].float() / temperature
        logp += [logits[t - 1].log_softmax(-1)[s.token_ids[t]] for t, yes in enumerate(s.loss_mask) if yes]
    return torch.stack(logp)


def alone(plain, samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and gradient of `plain` transformers, one sequence at a time."""
    values = one_by_one(plain, samples, 0.7)
    return values.detach(), gradient(plain, values)


def check_alike(model, expected, samples, layout):
    """Values and gradients of a batch are those of the sequences alone."""
    values, want = expected
    got = forward(model, model, packed(samples), layout=layout, temperature=0.7).logp
    torch.testing.assert_close(got, values, atol=1e-5, rtol=1e-4)
    assert (gradient(model, got) - want).norm() < 1e-5 * want.norm()
