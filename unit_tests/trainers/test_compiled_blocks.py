"""Blocks that are compiled: which, how, and what is said where they cannot be. Nothing is compiled here."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from configs.trainer_schema import LoraConfig
from core.errors import UserError
from core.patches import read_attention
from modeling.attention import BY_SEQUENCE, attend_by_sequence
from modeling.layout_probe import LayoutProbe
from modeling.lora import with_adapter
from trainers.compiled import compile_blocks, find_compiled_blocks
from unit_tests.helpers.models import random_model

HAS_COMPILER = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").is_file()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="torch.compile needs g++ and Python.h")


def probed(*, by_path: str) -> Any:
    model: Any = random_model("llama", BY_SEQUENCE)
    attention = read_attention(model.config)
    model.layout_probe = LayoutProbe(level="shared", attention=attention, error=0.0, bound=0.0, by_path=by_path)
    return model


@pytest.fixture
def asked(monkeypatch) -> Iterator[list[Any]]:
    """What torch.compile was asked for, which compiles nothing meanwhile."""
    found: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **how: found.append((forward, how)) or "compiled")
    yield found
    AttentionInterface.register(BY_SEQUENCE, attend_by_sequence)


@needs_compiler
def test_blocks_are_compiled_for_every_length_and_attention_is_not(asked):
    AttentionInterface.register(BY_SEQUENCE, attend_by_sequence)
    model = probed(by_path="")
    forwards = [block.forward for block in model.model.layers]
    compile_blocks([model])
    assert asked == [(forward, {"dynamic": True}) for forward in forwards]
    assert [block.forward for block in model.model.layers] == ["compiled"] * 2
    attention: Any = AttentionInterface()[BY_SEQUENCE]
    assert attention is not attend_by_sequence and attention._torchdynamo_disable


@needs_compiler
def test_layers_that_run_by_path_are_not_compiled(asked):
    with pytest.raises(UserError) as raised:
        compile_blocks([probed(by_path=""), probed(by_path="2 x Mixer")])
    assert str(raised.value) == (
        "trainer.compile=true, and the 2 x Mixer of this llama model run path by path, in calls that depend on a row's "
        "lengths: leave it out"
    )
    assert len(asked) == 2


def test_a_trainer_without_a_compiler_says_so(asked, monkeypatch):
    """The driver's machine, where the recipe was checked, may have one."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"requires a C\+\+ compiler, and there is no no-such-compiler"):
        compile_blocks([probed(by_path="")])
    assert asked == []


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])

    def get_decoder(self) -> nn.Module:
        return self


def test_the_blocks_of_the_language_part_are_found_or_the_model_is_named():
    model, adapted = random_model("llama"), with_adapter(random_model("llama"), LoraConfig(r=4), path="here")
    assert find_compiled_blocks(model) == [*model.model.layers]
    assert find_compiled_blocks(adapted) == [*adapted.get_base_model().model.layers]
    with pytest.raises(UserError) as raised:
        find_compiled_blocks(Own())
    assert str(raised.value) == (
        "trainer.compile=true compiles a model block by block, and Own does not say what its blocks are "
        "(_no_split_modules): leave it out"
    )
