"""The one place that reads models, configs and tokenizers from a folder or the hub. Code beside them never runs.

transformers would otherwise ask in the terminal whether to run it, or in some versions take a default.
"""

from __future__ import annotations

from typing import Any

TRUST_REMOTE_CODE = False
"""Whether code that comes with a model may run; see the key model.trust_remote_code. vLLM is given it as well."""


def load_pretrained(auto: Any, path: str, **settings: Any) -> Any:
    """Return `auto.from_pretrained(path)` of a class of transformers."""
    return auto.from_pretrained(path, trust_remote_code=TRUST_REMOTE_CODE, **settings)


def build_from_config(auto: Any, config: Any) -> Any:
    """Return `auto.from_config(config)`: a model with new weights."""
    return auto.from_config(config, trust_remote_code=TRUST_REMOTE_CODE)
