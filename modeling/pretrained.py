"""The one place that reads models, configs and tokenizers from a folder or the hub.

Code beside them runs only where the recipe says so (model.trust_remote_code, and the setting of the same name of the
reward reward_model). Without an answer transformers would ask in the terminal, or in some versions take a default.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from core.errors import quote
from core.lean_imports import lean_transformers

FOREIGN_MODULES = "transformers_modules."
"""Package into which transformers loads the code of models."""


Place = Callable[[nn.Module], None]
"""Shards an empty model in place, so that its parameters are DTensors on the meta device."""


def load_pretrained(auto: Any, path: str, *, trust_remote_code: bool, **settings: Any) -> Any:
    """Return `auto.from_pretrained(path)` of a class of transformers."""
    with _lean(trust_remote_code):
        return auto.from_pretrained(path, trust_remote_code=trust_remote_code, **settings)


def load_placed(auto: Any, path: str, place: Place, *, trust_remote_code: bool, **settings: Any) -> Any:
    """Return the model and report of `load_pretrained`, sharded before it was filled.

    transformers makes the empty model, `place` gets it, and of every tensor in the files only this rank's part is read.
    So no rank ever holds the whole model. The parts that ranks on one machine read are in its memory once. A model with
    code of its own is read whole, and not placed.
    """
    from transformers import AutoConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    config = load_pretrained(AutoConfig, path, trust_remote_code=trust_remote_code)
    kind = auto._model_mapping.get(type(config), None)  # no other way leads to the class
    if hasattr(config, "auto_map") or not isinstance(kind, type):
        return load_pretrained(auto, path, trust_remote_code=trust_remote_code, **settings)

    def begin(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return super(placed, cls).from_pretrained(*args, distributed_config=DistributedConfig(), **kwargs)

    def distribute(_cls: Any, model: nn.Module, _config: Any, _mesh: Any) -> nn.Module:
        place(model)
        return model

    own = {"from_pretrained": classmethod(begin), "maybe_distribute_model": classmethod(distribute)}
    placed: Any = type(kind.__name__, (kind,), own | {"__module__": kind.__module__})
    finder: Any = type(auto.__name__, (auto,), {"_model_mapping": {type(config): placed}})
    model, report = load_pretrained(finder, path, trust_remote_code=trust_remote_code, **settings)
    del model.config.distributed_config  # it would be saved with the model
    return model, report


def load_adapter(model: nn.Module, folder: str) -> Any:
    """Return the model wrapped in the adapter that PEFT reads from a folder, which holds no code."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder)


def build_from_config(auto: Any, config: Any, *, trust_remote_code: bool) -> Any:
    """Return `auto.from_config(config)`: a model with new weights."""
    with _lean(trust_remote_code):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def _lean(trust_remote_code: bool) -> AbstractContextManager[None]:
    """Import transformers lean; but not beside a model's own code, which may ask for any library."""
    return nullcontext() if trust_remote_code else lean_transformers()


def refuse_own_code(error: Exception, *, key: str, path: str, trust_remote_code: bool) -> str | None:
    """Return the sentence for a load that failed because code beside the model may not run; None if it is another."""
    if trust_remote_code or "trust_remote_code" not in str(error):
        return None
    section = "reward.settings" if key.startswith("reward.") else "model"
    return (
        f"{key}={quote(path)} comes with code of its own, which does not run by default: read the code, then set "
        f"{section}.trust_remote_code=true, or take another model"
    )


def runs_own_code(model: nn.Module) -> bool:
    """Tell whether a model's class is code that came with it, whatever adapter wraps it."""
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(model, "peft_config") else wrapped
    return find_written_class(base).__module__.startswith(FOREIGN_MODULES)


def find_written_class(model: nn.Module) -> type:
    """Return the class of a model as somebody wrote it; FSDP2 puts one of its own before it."""
    return next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
