"""Keys of earlier versions: a recipe with one is refused with its new name; a checkpoint's settings are translated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

RENAMED: dict[str, str] = {
    "max_lag": "max_staleness",
    "publish_every": "weight_sync.every",
    "publish_drift": "weight_sync.max_kl",
    "reuse": "sample_reuse",
    "rollout.update": "weight_sync.pause_mode",
    "rollout.tensor_parallel": "rollout.tensor_parallel_size",
    "reward.max_failed_share": "reward.max_failed_fraction",
    "data.max_unfit_share": "data.max_invalid_fraction",
    "alg.scale": "alg.scale_rewards",
    "alg.drop_dead_groups": "alg.dynamic_sampling",
    "alg.overlong.longest": "alg.overlong.max_tokens",
}
"""Old dotted key -> new dotted key."""
RENAMED_IN_SUPERVISED = {
    "reference": "precompute_ref_logp",
    "data.max_prompt_tokens": "data.max_tokens",
    "data.learn": "data.train_on",
}
"""Keys renamed in supervised runs only."""
REMOVED_IN_RL = ("data.learn",)
"""Keys that reinforcement learning accepted and never read."""
VALUES: dict[str, dict[Any, Any]] = {
    "weight_sync.pause_mode": {"in_flight": "keep", "drain": "wait", "abort": "abort"},
    "precompute_ref_logp": {"ahead": True, "each_step": False},
}
"""New key -> old value -> new value."""
ADDED: dict[str, Any] = {
    **{"trainer.eps": 1e-8, "model.trust_remote_code": False, "trainer.lr_min_fraction": 0.0},
    "data.template_args": {},
    **{"trainer.strategy": "deepspeed", "trainer.sequence_parallel": 1, "trainer.offload": False},
}
"""New keys, with the constant that earlier versions used."""
ADDED_IN_RL: dict[str, Any] = {
    "rollout.stop": [],
    "rollout.stop_token_ids": [],
    "reward.functions": {},
    "reward.by_source": {},
}
"""New keys of RL runs, likewise."""


def find_renamed(
    raw: Mapping[str, Any], *, supervised: bool, is_known: Callable[[str], bool]
) -> tuple[str, str] | None:
    """Return the first old key of a recipe and the key and value that replace it, as `key: value`; None if all are new.

    is_known: tells whether a dotted key is one of today's; an algorithm of the user's may have any.

    >>> find_renamed({"rollout": {"update": "drain"}}, supervised=False, is_known=lambda key: False)
    ('rollout.update', 'weight_sync.pause_mode: wait')
    """
    for old, new in _get_renamed_keys(supervised).items():
        value = _look_up(raw, old.split("."))
        if value is not _MISSING and not is_known(old):
            return old, f"{new}: {_format_value(_translate_value(new, value))}"
    return None


def translate_settings(settings: Mapping[str, Any], *, supervised: bool, known: Collection[str] = ()) -> dict[str, Any]:
    """Return a checkpoint's settings, by dotted key, under today's keys and values.

    known: keys of the run that is compared with them, which mean themselves.
    """
    table = {old: new for old, new in _get_renamed_keys(supervised).items() if old not in known}
    translated: dict[str, Any] = {}
    for key, value in settings.items():
        if not supervised and key in REMOVED_IN_RL:
            continue
        new = table.get(key, key)
        translated[new] = _translate_value(new, value)
    return ADDED | ({} if supervised else ADDED_IN_RL) | translated


_MISSING = object()


def _get_renamed_keys(supervised: bool) -> dict[str, str]:
    return RENAMED | RENAMED_IN_SUPERVISED if supervised else RENAMED


def _look_up(raw: Any, keys: list[str]) -> Any:
    for key in keys:
        if not isinstance(raw, dict) or key not in raw:
            return _MISSING
        raw = raw[key]
    return raw


def _translate_value(new: str, value: Any) -> Any:
    return VALUES[new].get(value, value) if new in VALUES else value


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
