"""Before a model is loaded, a small one with the same kinds of layers is measured."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from core.errors import UserError
from modeling.layout_forecast import forecast_layout
from modeling.layout_probe import LayoutProbe


def forecast(folder, family: str, **settings: Any) -> LayoutProbe | str:
    AutoConfig.for_model(family).save_pretrained(folder)
    return forecast_layout(str(folder), **{"attention": "auto", "layout": "auto", **settings})


@pytest.mark.parametrize(
    ("family", "level", "by_path"),
    [
        ("qwen3_moe", "shared", ""),  # 30 billion parameters
        ("gpt_oss", "shared", ""),
        ("qwen3_5_text", "shared", "1 x Qwen3_5GatedDeltaNet"),
        ("llama4_text", "padded", ""),
    ],
)
def test_a_config_is_enough_to_tell_the_layout(tmp_path, family, level, by_path):
    found = forecast(tmp_path, family)
    assert isinstance(found, LayoutProbe), found
    assert (found.level, found.by_path) == (level, by_path) and found.error <= found.bound


def test_the_same_config_is_measured_the_same_in_every_run(tmp_path):
    found: list[float] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        probe = forecast(tmp_path, "gpt_oss")
        assert isinstance(probe, LayoutProbe)
        found.append(probe.error)
    assert found[0] == found[1] > 0


def test_a_refuted_setting_is_refused_before_the_model_is_loaded(tmp_path):
    with pytest.raises(UserError, match=r"differ by .* trainer\.layout=packed"):
        forecast(tmp_path, "llama4_text", layout="packed")


def test_where_no_small_model_can_be_made_the_load_decides(tmp_path):
    assert "when the model is loaded" in str(forecast(tmp_path, "llama", attention="flash_attention_2"))
    assert "no small model can be made of its config" in str(forecast(tmp_path, "granitemoehybrid"))
