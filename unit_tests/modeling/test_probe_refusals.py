"""Layouts that a probe refutes, with the sentence for each, and a model inside of a trainer's engine."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError
from core.patches import read_attention
from modeling.layout_probe import LayoutProbe, find_probe, layout_for, probe_layout, set_exact_attention
from modeling.paths import list_layers
from unit_tests.helpers.models import random_model

NUMBER = r"\d(\.\d)?e[+-]\d\d"
APART = f"differ by {NUMBER} nats from each sequence alone \\(bound {NUMBER}\\)"
SHARED, PACKED, PADDED = "packed rows with shared prefixes", "packed rows", "padded rows"
OURS = "by_sequence attention"


class Engine(nn.Module):
    """Callable around a model, as DeepSpeed's, which counts its passes."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.inside, self.passes = model, 0

    def forward(self, **inputs: Any) -> Any:
        self.passes += 1
        return self.inside(**inputs)


def hook_layers(model: nn.Module, change: Any) -> nn.Module:
    for layer in list_layers(model):
        layer.register_forward_hook(change)
    return model


def leak(_layer: nn.Module, _args: Any, out: Any) -> Any:
    """Add nothing of the first token of the row, which is NaN if that is."""
    first = out[0] if isinstance(out, tuple) else out
    changed = first + 0.0 * first[:, :1]
    return (changed, *out[1:]) if isinstance(out, tuple) else changed


def mix(_layer: nn.Module, _args: Any, out: Any) -> Any:
    """Add a part of the first token of the row."""
    first = out[0] if isinstance(out, tuple) else out
    changed = first + 0.5 * first[:, :1]
    return (changed, *out[1:]) if isinstance(out, tuple) else changed


def forbid_segments(model: nn.Module) -> nn.Module:
    def refuse(_layer: nn.Module, _args: Any, given: dict[str, Any]) -> None:
        if given.get("segments") is not None:
            raise RuntimeError("no segments\nhere")

    for layer in list_layers(model):
        layer.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


def measure(model: nn.Module, **settings: Any) -> LayoutProbe:
    return probe_layout(model, model, device="cpu", **settings)


def refusal(call: Any, *args: Any, **given: Any) -> str:
    with pytest.raises(UserError) as refused:
        call(*args, **given)
    return str(refused.value)


def test_a_model_in_an_engine_is_measured_through_the_engine():
    plain, model = random_model("llama", "by_sequence"), random_model("llama", "by_sequence")
    engine, seen = Engine(model), list[float]()

    def agree(worst: Tensor) -> Tensor:
        seen.append(float(worst))
        return worst

    found, alone = probe_layout(engine, model, device="cpu", agree=agree), measure(plain)
    assert engine.passes == 4 + 1 + 2 and len(seen) == 3, "alone, the noise, the error and NaN"
    assert (found.level, found.attention, found.error, found.bound) == (
        *("shared", "by_sequence"),
        *(alone.error, alone.bound),
    )
    assert seen[1] == found.error and seen[2] == 0.0 and (found.by_path, found.refuted) == ("", ())
    assert find_probe(model) is found and layout_for("auto", model) == "packed"
    assert [layout_for(setting, model) for setting in ("padded", "packed")] == ["padded", "packed"]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 3e-3)]
)
def test_a_small_difference_is_never_refused(dtype, bound):
    found = measure(random_model("llama", "by_sequence", initializer_range=1e-3).to(dtype))
    assert (found.level, found.bound) == ("shared", bound) and found.error <= bound


def test_numbers_of_one_sequence_in_another_are_told_and_padded_rows_taken():
    found = measure(hook_layers(random_model("llama", "by_sequence"), leak))
    assert (found.level, found.attention) == ("padded", "by_sequence")
    reaches = "NaN of a sequence reaches another"
    assert found.refuted == (f"{SHARED} ({OURS}): {reaches}", f"{PACKED} ({OURS}): {reaches}")
    found = measure(hook_layers(random_model("llama", "by_sequence"), mix))
    assert found.level == "padded" and len(found.refuted) == 2
    for name, told in zip((SHARED, PACKED), found.refuted, strict=True):
        assert re.fullmatch(rf"{name} \({OURS}\) {APART}", told), told


def test_a_layout_that_does_not_hold_is_refused_with_all_reasons():
    model = hook_layers(random_model("llama", "by_sequence"), mix)
    whole = (
        rf"k: {PACKED} \({OURS}\) {APART} \({SHARED} \({OURS}\) {APART}\), so its training would not be that of its "
        r"sequences: with trainer\.layout=packed it cannot be trained; leave trainer\.layout and model\.attention at "
        "auto, or take another model"
    )
    assert re.fullmatch(whole, refusal(measure, model, layout="packed", key="k"))
    assert read_attention(model.config) == "by_sequence", "it is as it was"
    noisy = hook_layers(random_model("llama", "sdpa").train(), lambda _m, _a, out: functional.dropout(out, 0.5))
    whole = (
        rf"this model: {PADDED} \(sdpa attention\) {APART}, so its training would not be that of its sequences: with "
        r"model\.attention=sdpa it cannot be trained; leave trainer\.layout and model\.attention at auto, or take "
        "another model"
    )
    assert re.fullmatch(whole, refusal(measure, noisy))
    whole = (
        rf"this model: {PADDED} \(sdpa attention\) {APART}; {PADDED} \(eager attention\) {APART}: take another model"
    )
    assert re.fullmatch(whole, refusal(set_exact_attention, noisy, device="cpu"))


def test_an_error_of_the_models_code_is_a_reason_unless_it_is_sharded():
    told = f"({OURS}): no segments"
    found = measure(forbid_segments(random_model("llama", "by_sequence")))
    assert (found.level, found.refuted) == ("padded", (f"{SHARED} {told}", f"{PACKED} {told}"))
    model = forbid_segments(random_model("llama", "by_sequence"))
    assert refusal(probe_layout, Engine(model), model, device="cpu") == (
        f"{SHARED} ({OURS}) are not known to this model (no segments): set model.attention=eager and "
        "trainer.layout=padded"
    )


def test_an_exact_attention_is_the_first_that_is():
    for family, more, attention in (("llama", {}, "sdpa"), ("gemma2", {"attn_logit_softcapping": 0.01}, "eager")):
        model = random_model(family, "eager", **more)
        with torch.no_grad():
            for layer in list_layers(model):
                layer.self_attn.q_proj.weight.mul_(20)
        set_exact_attention(model, device="cpu")
        assert read_attention(model.config) == attention, family
    model = random_model("llama", "sdpa")
    set_exact_attention(model, device="cpu", names=("none_such", "eager"))
    assert read_attention(model.config) == "eager"
