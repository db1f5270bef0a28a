"""Caps and sinks of attention are computed as transformers' own attention does, however sequences lie in rows."""

import pytest
import torch
from torch import nn

from modeling.attention import BY_SEQUENCE, attend_by_sequence
from modeling.attention_scores import Scores
from modeling.segments import Segments
from modeling.sequence_parallel import SequenceGroup
from unit_tests.helpers.alone import alone, check_alike
from unit_tests.helpers.examples import families
from unit_tests.helpers.models import random_model, some_samples
from unit_tests.helpers.shared_prefixes import check_alike as check_shared

SMALL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LENGTHS = (9, 9, 6, 20, 3)


def with_scores(family: str, attention: str, *, window: int = 64, **more) -> nn.Module:
    """A model whose scores are far beyond its cap, or whose sinks take a good share."""
    experts = SMALL_EXPERTS if family == "gpt_oss" else {}
    model = random_model(family, attention, sliding_window=window, **experts, **more)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                p.mul_(30 if family == "gemma2" else 8)
            if "sinks" in name:
                p.normal_(mean=1.0)
    return model


@pytest.mark.parametrize("window", [4, 64])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_caps_and_sinks_are_those_of_transformers(family, window):
    samples = some_samples(*LENGTHS)
    own = {"attn_logit_softcapping": 2.0} if family == "gemma2" else {}
    expected = alone(with_scores(family, "eager", window=window, **own), samples)
    without = with_scores(family, "eager", window=window, **(own and {"attn_logit_softcapping": None}))
    if family == "gpt_oss":
        for layer in without.model.layers:
            nn.init.constant_(layer.self_attn.sinks, -torch.inf)
    assert (expected[0] - alone(without, samples)[0]).abs().max() > 0.01, "it matters here"
    model = with_scores(family, BY_SEQUENCE, window=window, **own)
    for layout in ("padded", "packed"):
        check_alike(model, expected, samples, layout)
    check_shared(model.eval(), families(), tolerance=1e-5)


def test_a_cap_and_sinks_together_are_refused():
    x = torch.zeros(1, 1, 3, 8)
    with pytest.raises(ValueError, match="softcap and s_aux together"):
        attend_by_sequence(nn.Identity(), x, x, x, None, softcap=1.0, s_aux=torch.zeros(1))


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_values_narrower_than_queries_keep_their_width(cap, scaling):
    """As in latent attention, with sinks too, or a cap."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 7, 12), torch.randn(1, 2, 7, 12), torch.randn(1, 2, 7, 5)
    sinks = torch.randn(4) if cap is None else torch.full((4,), -torch.inf)
    given = {"s_aux": sinks} if cap is None else {"softcap": cap}
    segments = Segments([4, 3], [-1, -1])
    got, _ = attend_by_sequence(nn.Identity(), q, k, v, None, scaling=scaling, segments=segments, **given)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ keys.mT * (scaling or 12**-0.5)
    scores = scores if cap is None else (scores / cap).tanh() * cap
    at = torch.arange(7)
    apart = (at[:, None] < at[None]) | ((at[:, None] >= 4) & (at[None] < 4))
    scores = torch.cat([scores.masked_fill(apart, -torch.inf), sinks[None, :, None, None].expand(1, 4, 7, 1)], -1)
    torch.testing.assert_close(got, (scores.softmax(-1)[..., :-1] @ values).transpose(1, 2))


def test_a_rank_with_some_of_the_heads_has_their_sinks():
    scores = Scores(scaling=None, window=None, sinks=torch.arange(6.0))
    own = [scores.of_rank(SequenceGroup(place=place, size=3, group=None)).sinks for place in range(3)]
    assert [x.tolist() for x in own if x is not None] == [[0, 1], [2, 3], [4, 5]]
