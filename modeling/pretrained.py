"""The one place that reads models, configs and tokenizers from a folder or the hub.

Code beside them runs only where the recipe says so (model.trust_remote_code, and the setting of the same name of the
reward reward_model). Without an answer transformers would ask in the terminal, or in some versions take a default.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from core.errors import quote

FOREIGN_MODULES = "transformers_modules."
"""Package into which transformers loads the code of models."""


def load_pretrained(auto: Any, path: str, *, trust_remote_code: bool, **settings: Any) -> Any:
    """Return `auto.from_pretrained(path)` of a class of transformers."""
    return auto.from_pretrained(path, trust_remote_code=trust_remote_code, **settings)


def load_adapter(model: nn.Module, folder: str) -> Any:
    """Return the model wrapped in the adapter that PEFT reads from a folder, which holds no code."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder)


def build_from_config(auto: Any, config: Any, *, trust_remote_code: bool) -> Any:
    """Return `auto.from_config(config)`: a model with new weights."""
    return auto.from_config(config, trust_remote_code=trust_remote_code)


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
    return type(base).__module__.startswith(FOREIGN_MODULES)
