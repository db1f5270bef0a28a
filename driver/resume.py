"""Compare the settings of a resumed run with those in the checkpoint.

All keys are compared except those listed here, so changes of new keys are refused by default.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from configs.data_schema import OURS
from configs.load import add_new_keys, flatten_settings
from configs.schema import RLConfig, RunConfig
from core.errors import UserError
from core.loading import FileSpec
from core.text.secrets import hide_settings
from data_feeds.chat.template_args import pin_date
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checkpoint import Checkpoint, RunState, find_checkpoint
from driver.load_recipe import Loaded
from driver.model_hash import MODEL_FILES, hash_models

NOT_FOR_TRAINING = (
    *("name", "run_dir", "save_to", "checkpoint.", "resume", "timeout_s", "device", "ray_address", "ship_code"),
    *("on_failure", "max_resumes", "stop_when", "stop_when.", "push_to"),
    *("trackers", "tracking.", "display", "show_samples", "record_tokens"),
    *("data.max_invalid_fraction", "model.lora.merge_on_save"),
    *("trainer.max_skipped_updates", "trainer.peak_tflops"),
    *("reward.workers", "reward.timeout_s", "reward.max_failed_fraction"),
    *("reward.max_concurrency", "reward.judge_budget."),
    *("rollout.agent.address", "rollout.gateway", "rollout.gateway.", "rollout.restarts", "profile."),
    *("rollout.timeout_s", "weight_sync.bucket_mib", "weight_sync.timeout_s", "weight_sync.probe_tolerance"),
    *("weight_sync.transport", "weight_sync.folder", "weight_sync.delta", "weight_sync.whole_every"),
    *("capture.", "compare_losses", "placement", "rollout.sleep_mode"),
    *("alg.file", "data.sampler.file"),  # their contents are compared, wherever they lie
)
"""Keys that may change without any effect on the numbers. A name that ends in a dot is a whole section."""
BITWISE_ONLY = (
    *("trainer.micro_batch_tokens", "trainer.logits_mib", "trainer.gradient_checkpointing", "trainer.share_prefixes"),
    *("trainer.sequence_parallel", "trainer.offload", "trainer.compile"),
    *("rollout.num_engines", "rollout.num_engines.", "rollout.tensor_parallel_size", "rollout.enforce_eager"),
    *("rollout.batch_invariant", "rollout.kv_cache_gib", "rollout.gpu_memory_utilization"),
    *("rollout.max_concurrency", "rollout.servers"),
    *("judge.num_engines", "judge.tensor_parallel_size", "judge.placement"),
)
"""Keys that may change so that a run can continue after running out of memory, or without equal bits. The gradient is
equal in exact arithmetic, but not to the last bit; the log says so."""
EVALUATION = (
    "eval_every",
    "eval_samples",
    "eval_pass_reward",
    "eval_reward",
    "eval_reward.",
    "data.eval",
    "data.eval.",
    "data.eval_rows",
)
"""Keys that may change. In RL they affect the last bits, because an engine batches held-out prompts with others."""


C = TypeVar("C", bound=RunConfig)


def pin_template_date(loaded: Loaded[C], tokenizer: ChatTokenizer) -> Loaded[C]:
    """Return the recipe with the date that its chat template writes: a resumed run's is that of its checkpoint."""
    cfg, earlier = loaded.cfg, None
    if cfg.resume is not None:
        # a damaged checkpoint is reported when its settings are compared
        checkpoint = find_checkpoint(cfg.resume, say=lambda _: None)
        earlier = checkpoint.state.recipe["settings"].get("data.template_date")
    return replace(loaded, cfg=cfg.model_copy(update={"data": pin_date(tokenizer, cfg.data, earlier)}))


def collect_settings(
    loaded: Loaded[Any], code: Mapping[str, FileSpec | None], inputs: Mapping[str, str]
) -> dict[str, Any]:
    """Return the configuration by dotted key, and hashes of what it names.

    code: files of plug-ins by key. inputs: hashes of driver/run_inputs.py.
    """
    cfg: RunConfig = loaded.cfg
    specs = {key: spec for key, spec in {"alg": loaded.alg_spec, **code}.items() if spec is not None}
    hashes = {f"the file of {key}": spec.sha256 for key, spec in specs.items()}
    hashes |= {**inputs, **hash_models(cfg, loaded.alg)}
    in_package = sorted(f"the file of {key}" for key, spec in specs.items() if spec.in_package)
    settings = {
        # Without secrets, because a checkpoint contains these settings.
        "settings": flatten_settings(hide_settings(cfg.model_dump(mode="json"))),
        "sha256": hashes,
        "in_package": in_package,
    }
    # Through JSON, as in the checkpoint: otherwise a tuple here would differ from the list there.
    return json.loads(json.dumps(settings))


def find_checkpoint_to_resume(loaded: Loaded[Any], settings: dict[str, Any]) -> Checkpoint | None:
    """Return the checkpoint to resume; None without `resume`. Raises UserError if an exact resume is impossible."""
    cfg: RunConfig = loaded.cfg
    if cfg.resume is None:
        return None
    checkpoint = find_checkpoint(cfg.resume)
    then, is_rl = checkpoint.state.recipe, isinstance(cfg, RLConfig)
    # Only RL recipes have this key.
    if ("groups_per_step" in then["settings"]) != is_rl:
        raise UserError(
            f"resume={cfg.resume} is a run of the other program (main_rl.py or main_sl.py): resume it there"
        )
    # an older checkpoint may hold secrets
    before = {key: hide_settings(value, key.rpartition(".")[2]) for key, value in then["settings"].items()}
    check_settings(add_new_keys(before, settings["settings"], type(cfg)), settings["settings"])
    # FeynRL's own files may change, such as by a bug fix, and are only reported. A user's loss or reward is the
    # training.
    changed = [key for key in changed_files(then, settings) if key not in settings["in_package"]]
    if changed:
        raise UserError(
            f"resume={cfg.resume}: {changed[0]} changed since the checkpoint was made, and the training depends on it: "
            "restore it to resume, or leave resume out to start again"
        )
    if (done := checkpoint.state.steps_done) >= cfg.n_steps:
        raise UserError(f"steps={cfg.n_steps}, and resume={cfg.resume} has done {done}: nothing is left, raise steps")
    return checkpoint


def list_bitwise_only(now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return BITWISE_ONLY, and trainer.ranks if checkpoints can be resumed with any number of ranks."""
    return BITWISE_ONLY + (("trainer.ranks",) if now.get("trainer.strategy") == "fsdp2" else ())


def check_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError for the first changed key that affects training."""
    then = _complete_sources(then)
    # A schedule that decays depends on the number of steps; a constant learning rate does not.
    steps = ("steps",) if then["trainer.lr_schedule"] == "constant" else ()
    free = NOT_FOR_TRAINING + list_bitwise_only(now) + EVALUATION + steps
    for key in [*now, *(k for k in then if k not in now)]:
        if is_listed(free, key) or then.get(key) == now.get(key):
            continue
        why = "the learning rate" if key == "steps" else "the training"
        raise UserError(
            f"{key} is {now.get(key)!r} and was {then.get(key)!r} when the checkpoint was made, and {why} depends on "
            "it: set it back to resume, or leave resume out to start again"
        )


def _complete_sources(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a checkpoint's settings with all keys of each source.

    Before forms had names, all rows were of ours; before sources could be lazy, none was.
    """
    train = settings.get("data.train")
    if not isinstance(train, list):
        return settings
    return {**settings, "data.train": [{"form": OURS, "lazy": False} | source for source in train]}


def changed_files(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the files, rows and templates whose content differs from the checkpoint's."""
    before, after = then["sha256"], now["sha256"]
    # A file of FeynRL that the checkpoint does not know is new in the package; a user's is a change. A
    # checkpoint may be older than the hashes of models.
    new = [*now["in_package"], *(key for key in after if key.startswith(MODEL_FILES))]
    expected = [key for key in after if key in before or key not in new]
    return [key for key in [*expected, *(k for k in before if k not in after)] if before.get(key) != after.get(key)]


def changed_package_files(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the keys of FeynRL's own files that have changed since the checkpoint."""
    return [key for key in changed_files(then, now) if key in now["in_package"]]


def bitwise_only_changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the changed keys that affect only the last bits."""
    keys = list_bitwise_only(now) + (EVALUATION if "groups_per_step" in now else ())
    return [key for key in now | then if is_listed(keys, key) and then.get(key) != now.get(key)]


def describe_changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return sentences on changes since the checkpoint that are allowed."""
    said = [
        f"{key} (FeynRL's own) changed since the checkpoint was made; the numbers may differ"
        for key in changed_package_files(then, now)
    ]
    if moved := bitwise_only_changes(then["settings"], now["settings"]):
        said.append(f"not to the last bit: {', '.join(moved)} differs from the run that is resumed")
    return said


def restore_before(state: RunState, now: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the held-out metrics of the untrained model as the fact `before`.

    Empty if the checkpoint has none, or if the evaluation is another now, so that they could not be compared.
    """
    then, after = state.recipe["settings"], now["settings"]
    keys = [key for key in {**then, **after} if is_listed(EVALUATION, key) and key != "eval_every"]
    is_same = all(then.get(key) == after.get(key) for key in keys)
    return {"before": state.before} if state.before and is_same else {}


def is_listed(names: Collection[str], key: str) -> bool:
    return key in names or key.startswith(tuple(name for name in names if name.endswith(".")))
