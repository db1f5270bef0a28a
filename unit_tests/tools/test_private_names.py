"""No private name of another library is used outside of the patch files: tools/private_names.py."""

from __future__ import annotations

import ast

import pytest

from tools.layers import ROOT, parse_file
from tools.private_names import EXEMPT, find_all, find_in, read_names


def found_in(source: str, *defined: str) -> list[str]:
    tree = ast.parse(source)
    return [what for _, what in find_in(tree, read_names(tree).defined | {*defined})]


def test_product_tools_and_data_prep_use_none():
    assert find_all(ROOT) == []


def test_what_is_exempt_is_there():
    for file, what in EXEMPT:
        assert what in {found for _, found in find_in(parse_file(ROOT / file), set())}, f"{file} has no {what}"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("engine._core", "engine._core"),
        ("engine.client._core.run()", "engine.client._core"),
        ("self._core", "self._core"),
        ("import torch\ntorch._C._cuda()", "torch._C._cuda"),
        ("from torch import distributed as d\nd._world", "torch.distributed._world"),
        ("import deepspeed\ndeepspeed.ops.__compatible_ops__", "deepspeed.ops.__compatible_ops__"),
        ("from ray._private import worker", "ray._private.worker"),
        ("from ray import _raylet", "ray._raylet"),
        ("import ray._private.state as s", "ray._private.state"),
        ("import_module('ray._raylet')", "ray._raylet"),
        ("getattr(model, '_core', None)", "_core"),
        ("for name in ('_core', 'b'): getattr(model, name)", "_core"),
        ("type('A', (B,), {'_core': 1})", "_core"),
        ("hasattr(model, '_elsewhere')", "hasattr(model, _elsewhere)"),
        ("ray.init(_temp_dir='x')", "ray.init(_temp_dir=)"),
        ("vars(model)", "vars(model)"),
        ("model.__dict__", "model.__dict__"),
        ("setattr(model, name, 1)", "setattr(model)"),
        ("object.__setattr__(model, name, 1)", "object.__setattr__(model)"),
        ("import torch\ntorch.compile = None", "torch.compile ="),
        ("import torch\ndel torch.compile", "torch.compile ="),
        ("from vllm import A\nA.wait, b = 1, 2", "vllm.A.wait ="),
        ("import deepspeed\ndeepspeed.ops.names['a'] = 1", "deepspeed.ops.names ="),
        ("def ours(): ...\nhead.forward = ours", "head.forward ="),
        ("head.forward = lambda x: x", "head.forward ="),
        ("model.__class__ = Own", "model.__class__ ="),
        ("from core.patches import patched", "core.patches.patched"),
    ],
)
def test_every_way_is_found(source, what):
    assert what in found_in(source, "_elsewhere")


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self): self._x = 1\ndef g(a): return a._x",
        "class A:\n    def _f(self): ...\n    def g(self, other: A): other._f(); super()._f()",
        "from core import hub\nhub._state",
        "from algs.base import _check",
        "self._elsewhere",
        "import os, sys\nos._exit(1); os.environ['A'] = '1'; sys.path[:] = []",
        "point._replace(x=1)._asdict()",
        "type(x).__name__, x.__class__, function.__wrapped__",
        "'''_core'''\nf'{name}_core'",
        "vars(self); self.__dict__; setattr(self, name, 1)",
        "optimizer.lr = 0.1",
        "for _ in x: f(_)",
    ],
)
def test_ours_and_pythons_are_left_alone(source):
    assert found_in(source, "_elsewhere") == []
