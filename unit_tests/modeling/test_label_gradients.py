"""The gradient of a token's log-probability is that of autograd, over every support and at every temperature."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.kept_sets import KeptSets, KeptTokens
from core.types.measures import ENTROPY, Measure
from modeling.softmax import Softmax

VOCABULARY = 7
SETS = [[0, 3, 5], [1, 2], [], [3], [4, 6], [0, 1, 2, 3]]
LABELS = torch.tensor([3, 2, 5, 3, 6, 1])
SUPPORTS = {
    "every token": {},
    "allowed": {"allowed_tokens": AllowedTokens(allowed=(1, 2, 3, 5, 6))},
    "banned": {"allowed_tokens": AllowedTokens(banned=(0, 4))},
    "sets of their own": {"kept": KeptTokens.of(KeptSets.of_lists(SETS))},
}


def find_live(name: str) -> Tensor:
    """Return the tokens [M, V] that may be chosen."""
    if name == "sets of their own":
        return torch.tensor([[not own or v in own for v in range(VOCABULARY)] for own in SETS])
    allowed = SUPPORTS[name].get("allowed_tokens", EVERY_TOKEN)
    return torch.tensor([[not allowed.find_outside([v]) for v in range(VOCABULARY)]] * len(LABELS))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", SUPPORTS)
def test_the_gradient_is_that_of_the_softmax(name: str, temperature: float):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, VOCABULARY, dtype=torch.float64, generator=draw).requires_grad_()
    weight = torch.randn(6, dtype=torch.float64, generator=draw)
    before = logits.detach().clone()

    rows = Softmax(labels=LABELS, temperature=temperature, **SUPPORTS[name])
    [logp] = torch.cat([rows.compute(logits[own], own) for own in (slice(0, 2), slice(2, 6))], dim=-1)
    [gradient] = torch.autograd.grad(logp @ weight, logits)
    [whole] = rows.compute_at_once(logits)

    wanted = (logits / temperature).masked_fill(~find_live(name), -torch.inf).log_softmax(-1)
    wanted = wanted.gather(-1, LABELS[:, None])[:, 0]
    torch.testing.assert_close(logp, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted @ weight, logits)[0])
    torch.testing.assert_close(whole, logp)
    torch.testing.assert_close(torch.autograd.grad(whole @ weight, logits)[0], gradient)
    assert torch.equal(logits, before)


def test_the_gradient_of_bfloat16_logits_is_rounded_once():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, VOCABULARY, dtype=torch.bfloat16, generator=draw).requires_grad_()
    [logp] = Softmax(labels=LABELS, temperature=1.0).compute_at_once(logits)
    assert logp.dtype == torch.float32
    [gradient] = torch.autograd.grad(logp.sum(), logits)
    wide = logits.detach().double().requires_grad_()
    [exact] = torch.autograd.grad(wide.log_softmax(-1).gather(-1, LABELS[:, None]).sum(), wide)
    assert torch.equal(gradient, exact.bfloat16())


@pytest.mark.parametrize("measures", [{}, ENTROPY], ids=["plain", "with entropy"])
def test_no_float32_copy_of_the_logits_waits_for_the_backward_pass(measures: dict[str, Measure]):
    logits = torch.randn(6, VOCABULARY, dtype=torch.bfloat16).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = Softmax(labels=LABELS, temperature=1.0, measures=measures).compute_at_once(logits)
    assert found.dtype == torch.float32 and found.shape == (1 + len(measures), 6)
    assert kept and all(t.dtype == torch.bfloat16 or t.numel() <= 6 for t in kept)
