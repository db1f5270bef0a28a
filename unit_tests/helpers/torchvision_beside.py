"""torchvision beside a torch for CPUs, for tests: its build on PyPI is for CUDA, and asks for operators of that torch.

The product has no such thing: a user installs the build of PyTorch's index for CPUs.
"""

from __future__ import annotations

import os
from pathlib import Path

from unit_tests.helpers.other_packages import install_beside

OPERATORS = """import torch as _torch

_defined = _torch.library.Library("torchvision", "DEF")
_defined.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_defined.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""Lines before those of torchvision/__init__.py, which registers these operators; its image transforms call none."""


def environment_with_torchvision() -> dict[str, str]:
    """Return the environment of a process, and of its children, in which torchvision can be imported."""
    folder = install_beside("torchvision")
    package = Path(folder) / "torchvision" / "__init__.py"
    if package.is_file() and not (text := package.read_text(encoding="utf-8")).startswith(OPERATORS):
        package.write_text(OPERATORS + text, encoding="utf-8")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))}
