"""Row layout that all models of a trainer support, measured on their own weights and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from configs.trainer_schema import ModelConfig, TrainerConfig
from core.types.batch import RowLayout
from modeling.hf_config import ImageUse, is_text_use
from modeling.layout_probe import can_share_prefixes, find_probe, layout_for, probe_layout
from modeling.text_use import list_unused
from trainers.learner import Learner


def measure_layouts(
    settings: ModelConfig,
    policy: Learner,
    critic: Learner | None,
    frozen: Mapping[str, nn.Module],
    cfg: TrainerConfig,
    *,
    device: torch.device | str,
    agree: Callable[[Tensor], Tensor],
) -> None:
    """Measure the best row layout of every model, and set the attention. All ranks call it together.

    settings: section `model` of the recipe. frozen: by the name of the teacher. agree: as in `probe_layout`.
    """
    given: dict[str, Any] = {"device": device, "layout": cfg.layout, "agree": agree}
    path, images = settings.path, settings.images
    learners = {f"model.path={path}": policy}
    if critic is not None:
        learners[f"model.path={path}, as a value model"] = critic
    for name, learner in learners.items():
        has_images = not is_text_use(learner.model.config, images)
        probe_layout(learner.module, learner.model, key=name, has_images=has_images, **given)
    # several teachers may have the same model
    for model, name in {model: name for name, model in frozen.items()}.items():
        has_images = not is_text_use(model.config, images)
        probe_layout(model, model, key=f"alg, the model of {name}", has_images=has_images, **given)


def combine_layouts(policy: nn.Module, others: list[nn.Module], cfg: TrainerConfig, *, images: ImageUse) -> RowLayout:
    """Return the row layout that all models support.

    Rows are padded if any model needs padding. Prefixes are shared if all models can share them.
    """
    models = [policy, *others]
    padded = any(layout_for(cfg.layout, m) == "padded" for m in models)
    able = not padded and all(can_share_prefixes(m) for m in models)
    shares = able and cfg.share_prefixes == "auto"
    measured = find_probe(policy).describe()
    hf: Any = policy
    if is_text_use(hf.config, images) and list_unused(policy, images):
        measured += "; used for text only, all other parts of the model are frozen"
    return RowLayout(padded=padded, shares_prefixes=shares, measured=measured)
