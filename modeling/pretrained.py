"""The only place that loads models, configs and tokenizers from a folder or the Hub.

Code shipped with them runs only if the recipe allows it (model.trust_remote_code, and the reward reward_model's setting
of the same name). Without an explicit choice transformers would prompt in the terminal, or in some versions use a
default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from core.errors import quote
from core.patches import make_sharded_class

FOREIGN_MODULES = "transformers_modules."
"""Package in which transformers loads the code of models."""


Place = Callable[[nn.Module], None]
"""Function that shards an empty model in place; its parameters become DTensors on the meta device."""


def load_pretrained(auto: Any, path: str, *, trust_remote_code: bool, **settings: Any) -> Any:
    """Return `auto.from_pretrained(path)` of a transformers class."""
    return auto.from_pretrained(path, trust_remote_code=trust_remote_code, **settings)


def load_placed(auto: Any, path: str, place: Place, *, trust_remote_code: bool, **settings: Any) -> Any:
    """Load the model and report of `load_pretrained`, sharded before it is filled.

    transformers creates the empty model and `place` shards it; then each rank reads only its part of every tensor. So
    no rank ever has the whole model in memory, and ranks on a machine together read it once. A model with its own code
    is loaded whole, without `place`.
    """
    from transformers import AutoConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    config, unused = load_pretrained(
        AutoConfig, path, return_unused_kwargs=True, trust_remote_code=trust_remote_code, **settings
    )
    found = _find_class(auto, config)
    if found is None:  # a class of the language part alone
        found = _find_class(auto, config.get_text_config())
        config = config if found is None else config.get_text_config()
    # make_sharded_class subclasses a class of transformers, and the model's own code has another one
    if found is None or hasattr(config, "auto_map"):
        return load_pretrained(auto, path, trust_remote_code=trust_remote_code, **settings)
    unused["dtype"] = settings["dtype"]  # the config has taken it, and the model takes its own
    sharded = make_sharded_class(found, place)
    model, report = load_pretrained(
        sharded,
        path,
        config=config,
        distributed_config=DistributedConfig(),
        trust_remote_code=trust_remote_code,
        **unused,
    )
    del model.config.distributed_config  # it would be saved with the model
    return model, report


def _find_class(auto: Any, config: Any) -> Any:
    """Return the model class that a transformers Auto class selects for a config; None if it is not unique."""
    import transformers as hf

    mapping: Any = {
        hf.AutoModelForCausalLM: hf.MODEL_FOR_CAUSAL_LM_MAPPING,
        hf.AutoModelForImageTextToText: hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        hf.AutoModelForSequenceClassification: hf.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    }[auto]
    found = mapping.get(type(config), None)
    return found if isinstance(found, type) and found.config_class is type(config) else None


def load_adapter(model: nn.Module, folder: str) -> Any:
    """Wrap the model in the adapter that PEFT loads from a folder, which contains no code."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder)


def read_adapter(folder: str) -> Any:
    """Read the PEFT config of an adapter's folder."""
    from peft import PeftConfig

    return PeftConfig.from_pretrained(folder)


def build_from_config(auto: Any, config: Any, *, trust_remote_code: bool) -> Any:
    """Return `auto.from_config(config)`: a model with new weights."""
    return auto.from_config(config, trust_remote_code=trust_remote_code)


def refuse_own_code(error: Exception, *, key: str, path: str, trust_remote_code: bool) -> str | None:
    """Return the error for a load that failed because the model's code may not run; None for another failure."""
    if trust_remote_code or "trust_remote_code" not in str(error):
        return None
    section = "reward.settings" if key.startswith("reward.") else "model"
    return (
        f"{key}={quote(path)} comes with code of its own, which does not run by default: read the code, then set "
        f"{section}.trust_remote_code=true, or take another model"
    )


def runs_own_code(model: nn.Module) -> bool:
    """Tell whether a model's class is code shipped with it, whatever adapter wraps it."""
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(model, "peft_config") else wrapped
    return find_written_class(base).__module__.startswith(FOREIGN_MODULES)


def find_written_class(model: nn.Module) -> type:
    """Return the class of a model as written by its author; FSDP2 inserts a class before it."""
    return next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
