"""Patterns on the names of a model's parameters, and the frozen parameters of `trainer.freeze`.

Frozen parameters are exported and saved like the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import nn

from core.errors import UserError
from modeling.experts import is_router
from modeling.hf_config import ImageUse, is_text_use, vision_family
from modeling.text_use import list_unused

ROUTER, VISION = "router", "vision"
"""Words of `trainer.freeze` and `trainer.lr_scales` that are no patterns."""


def find_frozen(
    model: nn.Module, patterns: Sequence[str], *, images: ImageUse = "auto", path: str | None = None
) -> set[str]:
    """Return the names of frozen parameters: those that `patterns` match, and those that text never reaches.

    A tied parameter has two names here, and is frozen by either. path: model.path, for errors: raises UserError for a
    pattern without a match, and if no parameter is left to train. None: such patterns are ignored, as in a value model,
    which has no language-model head.
    """
    if path is not None:
        check_patterns(model, patterns, key="trainer.freeze", images=images, path=path)
    frozen = add_tied(model, {*list_unused(model, images)})
    for pattern in patterns:
        frozen |= match_names(model, pattern, images)
    if path is not None and patterns and all(name in frozen for name, _ in model.named_parameters()):
        raise UserError(
            f"trainer.freeze={list(patterns)} freezes every parameter of model.path={path}, and nothing would be "
            "trained: name fewer"
        )
    return frozen


def freeze(model: nn.Module, names: set[str]) -> None:
    """Freeze the parameters of these names."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def match_names(model: nn.Module, pattern: str, images: ImageUse = "auto") -> set[str]:
    """Return the names of the parameters that a pattern or word matches, and those of tensors tied to them."""
    both = model.named_parameters(remove_duplicate=False)
    return add_tied(model, {name for name, _ in both if _is_match(model, name, pattern, images)})


def add_tied(model: nn.Module, names: set[str]) -> set[str]:
    """Return names with all names of the same tensors."""
    both = list(model.named_parameters(remove_duplicate=False))
    tensors = {id(p) for name, p in both if name in names}
    return {name for name, p in both if id(p) in tensors}


def check_patterns(model: nn.Module, patterns: Iterable[str], *, key: str, images: ImageUse, path: str) -> None:
    """Raise UserError for a pattern of `key` that matches no parameter of the model.path `path`."""
    for pattern in patterns:
        if not match_names(model, pattern, images):
            names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            raise UserError(_describe_mismatch(key, pattern, names, path))


def check_scales(
    model: nn.Module, scales: Mapping[str, float], frozen: Collection[str], *, images: ImageUse, path: str
) -> None:
    """Raise UserError for a pattern of trainer.lr_scales that no trained parameter has, or two that one has."""
    key = "trainer.lr_scales"
    check_patterns(model, scales, key=key, images=images, path=path)
    owners: dict[str, str] = {}
    for pattern in scales:
        trained = match_names(model, pattern, images) - {*frozen}
        if not trained:
            raise UserError(f"{key}: {pattern!r} names frozen parameters only: leave it out")
        for name in sorted(trained):
            if name in owners:
                raise UserError(f"{key}: {owners[name]!r} and {pattern!r} both match {name}: make one of them narrower")
            owners[name] = pattern


def _is_match(model: nn.Module, name: str, pattern: str, images: ImageUse) -> bool:
    """Tell whether a pattern matches a parameter's name, or that of a module it belongs to."""
    if pattern == ROUTER:
        return any(is_router(model, module) for module in accumulate(name.split(".")[:-1], "{}.{}".format))
    # as the base model of an adapter names it
    name = name.removeprefix("base_model.model.")
    if pattern == VISION:
        config: Any = model.config
        family = None if is_text_use(config, images) else vision_family(config)
        return family is not None and family.in_tower(name)
    return any(fnmatchcase(part, pattern) for part in accumulate(name.split("."), "{}.{}".format))


def _describe_mismatch(key: str, pattern: str, names: list[str], path: str) -> str:
    what = {
        ROUTER: "has no router of experts",
        VISION: "has no vision tower, or is used for text only, where the tower is frozen anyway",
    }
    if pattern in what:
        return f"{key} names {pattern}, and model.path={path} {what[pattern]}: leave it out"

    def count_shared(name: str) -> int:
        return sum(block.size for block in SequenceMatcher(None, pattern, name, autojunk=False).get_matching_blocks())

    # the layers have the same names but for their number
    closest = sorted(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names), key=count_shared)[:-4:-1]
    return (
        f"{key}: {pattern!r} matches no parameter of model.path={path}: name a parameter or a module, with * "
        f"for any characters, such as {', '.join(closest)}"
    )
