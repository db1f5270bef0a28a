"""Vision-language reward and value models: the model's body with a scalar head.

transformers has no sequence classifier for these families. A classifier per family is built here from its generic
parts. A saved model is a normal model folder, whose class is found by the config.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn


@cache
def scalar_class(model_type: str) -> Any:
    """Return a family's sequence classifier, registered with AutoModelForSequenceClassification."""
    from transformers import AutoModelForSequenceClassification
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    body: Any = MODEL_MAPPING[config_class]
    parent = next(base for base in body.__mro__ if base.__name__.endswith("PreTrainedModel"))
    name = parent.__name__.replace("PreTrainedModel", "ForSequenceClassification")
    # config.json stores the class by name, so the name follows transformers' scheme.
    made = type(name, (GenericForSequenceClassification, parent), {"__module__": __name__})
    AutoModelForSequenceClassification.register(config_class, made, exist_ok=True)
    return made


def with_scalar_head(model: nn.Module) -> nn.Module:
    """Replace the head of a model by a scalar head."""
    lm: Any = model
    lm.config.num_labels = 1
    # A copy by values: the choice of experts' kernels, made for the model, is not known to a class made here.
    empty = type(lm.config).from_dict(lm.config.to_dict())
    # without memory: the body and the head are replaced right below
    with torch.device("meta"):
        scalar = scalar_class(lm.config.model_type)(empty)
    scalar.model, scalar.config = lm.model, lm.config
    # no bias, as in the sequence classifiers of transformers
    scalar.score = nn.Linear(lm.config.get_text_config().hidden_size, 1, bias=False, dtype=lm.dtype)
    return scalar
