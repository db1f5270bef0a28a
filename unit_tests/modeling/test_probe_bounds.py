"""What a layout probe compares with what: the noise, its bounds, half precision, and which token reaches which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError
from modeling.attention_fixed import use_fixed_order
from modeling.layout_probe import (
    LayoutProbe,
    can_share_prefixes,
    find_probe,
    layout_for,
    probe_layout,
    set_exact_attention,
)
from modeling.paths import list_layers
from unit_tests.helpers.models import random_model

pytestmark = pytest.mark.usefixtures("one_thread")


def make_model(attention: str = "by_sequence", *, scale: float = 1.0) -> Any:
    model = random_model("llama", attention, num_hidden_layers=1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(scale)
    return model


def measure(model: nn.Module, **settings: Any) -> LayoutProbe:
    return probe_layout(model, model, device="cpu", **settings)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 10.0), (torch.bfloat16, 4.0)])
def test_the_noise_is_that_of_a_rounding_error_of_the_embeddings(dtype, scale):
    model, passes = make_model(scale=scale).to(dtype), list[Tensor]()
    hook = list_layers(model)[0].register_forward_pre_hook(lambda _, args: passes.append(args[0].float()))
    seen: list[float] = []
    found = measure(model, agree=lambda worst: seen.append(float(worst)) or worst)
    hook.remove()
    alone, changed = passes[:4], passes[4]
    assert [len(x) for x in passes[:5]] == [1, 1, 1, 1, 4]
    apart = torch.cat([(changed[row, : x.shape[1]] - x[0]) / x[0] for row, x in enumerate(alone)]).abs()
    eps = torch.finfo(dtype).eps
    assert 0 < apart.max() <= 2 * eps and apart.mean() < eps / 2
    least = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    assert least < 5 * seen[0] < 0.3 and found.bound == pytest.approx(5 * seen[0])


def test_differences_of_a_third_are_refused_whatever_the_noise():
    model = make_model("sdpa", scale=10.0).train()
    list_layers(model)[0].register_forward_hook(lambda _module, _args, out: functional.dropout(out, 0.5))
    with pytest.raises(UserError, match=r"differ by \d\.\de\+0\d nats from each sequence alone \(bound 3e-01\)"):
        measure(model)


@pytest.mark.parametrize(
    ("dtype", "spoilt", "level"),
    [
        (torch.bfloat16, 0, "shared"),
        (torch.bfloat16, 1, "shared"),
        (torch.bfloat16, 3, "padded"),
        (torch.float32, 0, "shared"),
        (torch.float32, 1, "padded"),
    ],
)
def test_in_half_precision_one_token_in_ten_may_be_another(dtype, spoilt, level):
    """Of the last sequence, which has 20 tokens that are scored; an expert may be chosen by a hair."""
    model = make_model(scale=10.0).to(dtype)

    def spoil(_norm: nn.Module, _args: Any, out: Tensor) -> Tensor:
        if out.shape[0] > 1 or out.shape[1] < 40 or not spoilt:
            return out  # a sequence by itself, or padded rows
        changed = out.clone()
        changed[0, -1 - spoilt : -1] *= -1
        return changed

    model.model.norm.register_forward_hook(spoil)
    assert measure(model).level == level


@pytest.mark.parametrize(
    ("place", "reached", "level"),
    [
        (0, slice(None), "padded"),
        (26, slice(None), "padded"),
        (0, slice(33, 34), "padded"),
        (None, slice(None), "shared"),
    ],
)
def test_nan_that_reaches_another_sequence_is_noticed_wherever_it_is(place, reached, level):
    """Of the first sequence or reply, in the first of the second reply's tokens; it adds nothing, but for NaN."""
    model = make_model()

    def leak(_layer: nn.Module, _args: Any, out: Tensor) -> Tensor:
        if place is None or out.shape[0] > 1 or out.shape[1] < 40:
            return out
        changed = out.clone()
        changed[:, reached] += 0.0 * out[:, place : place + 1]
        return changed

    list_layers(model)[0].register_forward_hook(leak)
    found = measure(model)
    assert found.level == level and len(found.refuted) == (0 if level == "shared" else 2)
    assert all(told.endswith(": NaN of a sequence reaches another") for told in found.refuted)


def test_an_attention_that_a_model_does_not_have_is_a_reason():
    model = make_model("sdpa")
    with pytest.raises(UserError) as refused:
        set_exact_attention(model, device="cpu", names=("none_such",))
    assert str(refused.value).startswith(
        'this model: padded rows (none_such attention): Specified `attn_implementation="none_such"` is not supported.'
    )
    assert str(refused.value).endswith(": take another model")


def test_a_layout_is_chosen_by_what_was_measured():
    model = make_model()
    for level, layout, shares in (("shared", "packed", True), ("packed", "packed", False), ("padded", "padded", False)):
        model.layout_probe = LayoutProbe(level=level, attention="by_sequence", error=0.0, bound=1.0)
        assert find_probe(model) is model.layout_probe
        assert (layout_for("auto", model), can_share_prefixes(model)) == (layout, shares)
        assert [layout_for(name, model) for name in ("padded", "packed")] == ["padded", "packed"]
    model.layout_probe = LayoutProbe(level="shared", attention="sdpa", error=0.0, bound=1.0)
    assert find_probe(model).attention == "by_sequence", "that of another attention is measured anew"
    plain = make_model("sdpa")
    plain.layout_probe = LayoutProbe(level="shared", attention="sdpa", error=0.0, bound=1.0)
    assert not can_share_prefixes(plain)


@pytest.mark.parametrize(
    ("attention", "layout", "level", "tried"),
    [
        ("by_sequence", "auto", "shared", 1),
        ("by_sequence", "packed", "shared", 1),
        ("by_sequence", "padded", "padded", 1),
        ("fixed_order", "auto", "shared", 1),
        ("sdpa", "auto", "padded", 1),
        ("sdpa", "packed", "packed", 1),
        ("eager", "packed", "packed", 1),
        ("eager", "auto", "padded", 1),
    ],
)
def test_the_best_layout_of_an_attention_is_tried_first(attention, layout, level, tried):
    model = make_model("sdpa" if attention == "fixed_order" else attention)
    if attention == "fixed_order":
        use_fixed_order(model)
    seen: list[str] = []
    found = measure(model, layout=layout, agree=lambda worst: seen.append("") or worst)
    assert (found.level, found.attention, found.refuted) == (level, attention, ())
    poisons = level != "padded" and attention in ("by_sequence", "fixed_order")
    assert len(seen) == 1 + tried + poisons and model.config._attn_implementation == attention
    assert found.error <= found.bound == 1e-5


@pytest.mark.parametrize("leaks", [False, True])
def test_layers_run_by_path_only_where_that_is_exact(leaks):
    """The layers of this family drop the segments."""
    model: Any = random_model("nemotron", "by_sequence")
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.15)

    def leak(_norm: nn.Module, _args: Any, out: Tensor) -> Tensor:
        return out + 0.0 * out[:, :1] if leaks and out.shape[0] == 1 and out.shape[1] > 40 else out

    model.model.norm.register_forward_hook(leak)
    found = measure(model)
    if leaks:
        assert (found.level, found.by_path) == ("padded", "")
        assert [told.rpartition(": ")[2] for told in found.refuted] == ["NaN of a sequence reaches another"] * 2
    else:
        assert (found.level, found.by_path, found.refuted) == ("shared", "2 x NemotronAttention", ())
    hooks = [len(layer._forward_pre_hooks) for layer in list_layers(model)]
    assert hooks == [0 if leaks else 1] * 2
