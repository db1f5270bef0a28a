"""Load the samples of an interrupted evaluation, and check that they are usable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.eval_schema import EvalConfig
from configs.load import add_new_keys, flatten_settings
from core.errors import UserError
from core.loading import FileSpec
from core.text.secrets import hide_settings
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.rows.eval_sets import PromptSet
from driver.evaluation.suites.generations import Generation, list_files, read_generations
from driver.evaluation.suites.table import RESULTS
from driver.model_hash import hash_folders
from driver.resume import is_listed
from driver.run_inputs import hash_files, hash_row, hash_template

FREE = (
    *("name", "run_dir", "resume", "device", "ray_address", "ship_code", "timeout_s"),
    *(
        "k",
        "pass_reward",
        "resamples",
        "prompts_per_engine",
        "prompts_per_part",
        "data.by",
        "data.max_invalid_fraction",
    ),
    *(
        "reward.workers",
        "reward.timeout_s",
        "reward.max_failed_fraction",
        "reward.max_concurrency",
        "reward.judge_budget.calls",
        "reward.judge_budget.tokens",
        "rollout.timeout_s",
        "rollout.restarts",
    ),
    *("rollout.num_engines", "rollout.tensor_parallel_size", "rollout.enforce_eager", "rollout.kv_cache_gib"),
    *("rollout.gpu_memory_utilization", "rollout.max_concurrency", "rollout.agent.address"),
    *("rollout.gateway", "rollout.gateway."),
)
"""Keys that may differ: the samples are equal, up to last bits if an engine's batch shape changes."""

PromptKey = tuple[str, int]
"""Name of the data set, and number of the prompt in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Samples of the interrupted evaluation."""

    folder: Path
    done: dict[PromptKey, list[Generation]]


def collect_eval_settings(
    cfg: EvalConfig, code: Mapping[str, FileSpec | None], tokenizer: ChatTokenizer, base: str | None
) -> dict[str, Any]:
    """Return the configuration by dotted key, and hashes of the user's files, chat template and models.

    base: base model of a checkpoint that `model.path` names.
    """
    nested = cfg.model_dump(mode="json")
    # By name, so that another order of the data sets is no difference.
    nested["data"]["sets"] = {one.source.log_name: one.model_dump(mode="json") for one in cfg.data.sets}
    own = {key: spec for key, spec in code.items() if spec is not None and not spec.in_package}
    hashes = {f"the file of {key}": spec.sha256 for key, spec in own.items()}
    hashes |= hash_template(tokenizer) | hash_files(cfg, own.values())
    hashes |= hash_folders(
        {
            "model.path": cfg.model.path,
            "model.adapter": cfg.model.adapter,
            "rollout.opponent": cfg.rollout.opponent_folder,
            "the base of model.path": base,
        }
    )
    # Without secrets, because the run folder contains these settings.
    return {"settings": flatten_settings(hide_settings(nested)), "sha256": hashes}


def find_samples(resume: str, then: dict[str, Any], now: dict[str, Any], sets: list[PromptSet]) -> Resumed:
    """Load the samples of a run folder. Raises UserError if this evaluation would differ, or that is complete."""
    folder = Path(resume).expanduser()
    if (folder / RESULTS).is_file():
        raise UserError(f"resume={resume} is complete: its results are in {folder / RESULTS}")
    _check_settings(then, now)
    done: dict[PromptKey, list[Generation]] = {}
    for row in read_generations(list_files(folder)):
        done.setdefault((row.set, row.index), []).append(row)
    prompts = {(one.name, i): prompt for one in sets for i, prompt in enumerate(one.prompts)}
    for (name, index), rows in done.items():
        prompt = prompts.get((name, index))
        # Rows are matched by position, so a file with inserted rows would pair samples with other prompts.
        if prompt is None or hash_row(prompt) != rows[0].row:
            raise UserError(
                f"resume={resume}: prompt {rows[0].id} of {name} is not what it was, so the file has changed: restore "
                "it, or leave resume out to start again"
            )
    return Resumed(folder=folder, done=done)


def _check_settings(then: dict[str, Any], now: dict[str, Any]) -> None:
    after = now["settings"]
    # An older folder may hold secrets, which an error would quote. The last part of a dotted key tells.
    hidden = {key: hide_settings(value, key.rpartition(".")[2]) for key, value in then["settings"].items()}
    before = add_new_keys(hidden, after, EvalConfig)
    for key in [*after, *(k for k in before if k not in after)]:
        if not is_listed(FREE, key) and before.get(key) != after.get(key):
            raise UserError(
                f"{key} is {after.get(key)!r} and was {before.get(key)!r} when the samples were made: set it back to "
                "resume, or leave resume out to start again"
            )
    was, are = then["sha256"], now["sha256"]
    if unknown := [key for key in are if key not in was]:
        raise UserError(
            f"the samples were made before {unknown[0]} was compared or existed, so nothing shows that they are of the "
            "same evaluation: leave resume out to start again"
        )
    if changed := [key for key in [*are, *(k for k in was if k not in are)] if was.get(key) != are.get(key)]:
        raise UserError(
            f"{changed[0]} changed since the samples were made: restore it to resume, or leave resume out to start "
            "again"
        )
