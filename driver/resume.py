"""What a resumed run must have in common with the run it goes on from, and what it need not.

Every key is compared but for those named here, so that a new one is refused until somebody has thought about it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from configs.schema import RLConfig, RunConfig
from core.errors import UserError
from core.loading import FileSpec
from driver.checkpoint import Checkpoint, find_checkpoint
from driver.load_recipe import Loaded

NOT_FOR_TRAINING = (
    *("name", "run_dir", "save_to", "checkpoint.", "resume", "timeout_s", "device", "ray_address"),
    *("data.max_unfit_share", "model.lora.merge_on_save"),
    *("trainer.max_skipped_updates", "reward.workers", "reward.timeout_s", "reward.max_failed_share"),
    *("rollout.timeout_s", "weight_sync.bucket_mib", "weight_sync.timeout_s", "weight_sync.probe_tolerance"),
    "weight_sync.transport",
    "alg.file",  # its contents are compared, wherever it lies
)
"""May differ, and the run's numbers stay the same. A name that ends in a dot is a whole section."""
OTHER_BITS = (
    *("trainer.micro_batch_tokens", "trainer.gradient_checkpointing"),
    *("rollout.engines", "rollout.tensor_parallel", "rollout.enforce_eager"),
    *("rollout.kv_cache_gib", "rollout.gpu_memory_utilization"),
)
"""May differ, because a run that died for want of memory must be able to go on: the gradient is the same in exact
arithmetic, and its last bits are others. The log says so."""
EVALUATION = ("eval_every", "data.eval", "data.eval.", "data.eval_rows")
"""May differ. In RL an engine's batches hold held-out prompts beside the others, which moves last bits."""


def recipe_of(loaded: Loaded[Any], code: Mapping[str, FileSpec | None]) -> dict[str, Any]:
    """The whole configuration by dotted key, and the hashes of the files it names; `code` is key -> file.

    Data is hashed where it is a file; a folder and the hub are known by name only, and so are models.
    """
    cfg: RunConfig = loaded.cfg
    specs = {"alg": loaded.alg_spec, **code}
    hashes = {key: spec.sha256 for key, spec in specs.items() if spec is not None}
    sources = [cfg.data.train] if isinstance(cfg.data.train, str) else [source.path for source in cfg.data.train]
    for i, path in enumerate(sources):
        if Path(path).is_file():
            with Path(path).open("rb") as file:
                hashes[f"data.train[{i}]" if i else "data.train"] = hashlib.file_digest(file, "sha256").hexdigest()
    return json.loads(json.dumps({"settings": flat(cfg.model_dump(mode="json")), "sha256": hashes}))


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; an empty section is a value."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


def resume_from(loaded: Loaded[Any], recipe: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint the run goes on from; None without `resume`. Raises UserError where it cannot go on exactly."""
    cfg: RunConfig = loaded.cfg
    if cfg.resume is None:
        return None
    checkpoint = find_checkpoint(cfg.resume)
    then, now = checkpoint.stand.recipe, recipe
    if ("groups_per_step" in then["settings"]) != isinstance(cfg, RLConfig):
        raise UserError(f"resume={cfg.resume} is a run of the other program: go on with the one that made it")
    check_settings(then["settings"], now["settings"])
    check_files(then["sha256"], now["sha256"])
    if (done := checkpoint.stand.steps_done) >= cfg.steps:
        raise UserError(f"steps={cfg.steps}, and resume={cfg.resume} has done {done}: nothing is left, raise steps")
    return checkpoint


def check_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError naming the first key on which the resumed run would not be the same."""
    steps = ("steps",) if then["trainer.lr_schedule"] == "constant" else ()
    free = NOT_FOR_TRAINING + OTHER_BITS + EVALUATION + steps
    for key in [*now, *(k for k in then if k not in now)]:
        if is_among(free, key) or then.get(key) == now.get(key):
            continue
        why = "the learning rate" if key == "steps" else "what is learnt"
        raise UserError(
            f"{key} is {now.get(key)!r} and was {then.get(key)!r} when the checkpoint was made, and {why} depends on "
            "it: set it back to resume, or leave resume out to start anew"
        )


def check_files(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    for key in [*now, *(k for k in then if k not in now)]:
        if then.get(key) != now.get(key):
            raise UserError(
                f"{key}: the file is not the one the checkpoint was made with, and what is learnt depends on it: "
                "restore it to resume, or leave resume out to start anew"
            )


def other_bits(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys that differ and move the last bits only."""
    keys = OTHER_BITS + (EVALUATION if "groups_per_step" in now else ())
    return [key for key in now | then if is_among(keys, key) and then.get(key) != now.get(key)]


def is_among(names: Collection[str], key: str) -> bool:
    return key in names or key.startswith(tuple(name for name in names if name.endswith(".")))
