"""--explain: print what a recipe means, without starting anything."""

from __future__ import annotations

import os
from typing import Any

import yaml

from algs import load_algorithm
from configs.schema import RLConfig, RunConfig, SLConfig
from driver.devices import check_devices, count_gpus, uses_gpus
from driver.explain_vision import describe_vision
from driver.load_recipe import Loaded
from driver.memory_estimate import estimate_memory
from driver.shared_memory import describe_turns
from modeling.hf_config import ModelUnreadable

ROWS = {"conversations": "rows", "pairs": "pairs", "unpaired": "rows"}


def explain(loaded: Loaded[Any]) -> str:
    cfg: RunConfig = loaded.cfg
    parts = [
        "# the configuration as it will run",
        yaml.safe_dump(cfg.model_dump(), sort_keys=False).rstrip(),
        "",
        "# what follows from it",
        *(
            f"{name:<22} {text}"
            for name, text in (*describe_arithmetic(loaded), *describe_placement(cfg), *describe_memory(loaded))
        ),
    ]
    if lacking := check_devices(cfg):
        parts += ["", f"warning: {lacking}"]
    return "\n".join(parts)


def describe_arithmetic(loaded: Loaded[Any]) -> list[tuple[str, str]]:
    cfg: RunConfig = loaded.cfg
    trainer = cfg.trainer
    if isinstance(cfg, SLConfig):
        rows = load_algorithm(loaded.alg_spec, cfg.alg).rows
        tokens = cfg.rows_per_step * cfg.data.max_tokens * (2 if rows == "pairs" else 1)
        return [
            ("a step", f"{cfg.rows_per_step} {ROWS[rows]} -> at most {tokens:,} tokens -> 1 optimizer update"),
            ("micro-batches", describe_micro_batches(tokens, trainer.micro_batch_tokens, trainer.ranks)),
            (
                "the run",
                f"{cfg.epochs:g} epochs of data.train"
                if cfg.steps is None
                else f"{cfg.steps} steps -> {cfg.steps * cfg.rows_per_step:,} rows -> {cfg.steps} optimizer updates",
            ),
        ]
    assert isinstance(cfg, RLConfig)
    samples = cfg.groups_per_step * cfg.group_size
    tokens = samples * cfg.longest_sample
    per_update = tokens // cfg.updates_per_step
    lag = (
        "the policy that sampled is the one in training"
        if cfg.updates_per_step == 1
        else ("prox_logp is scored before the first")
    )
    return [
        ("a step", f"{cfg.groups_per_step} prompts x {cfg.group_size} samples -> {samples} sequences"),
        (
            "a sequence",
            f"at most {cfg.data.max_prompt_tokens} prompt + {cfg.rollout.max_new_tokens} new = "
            f"{cfg.longest_sample} tokens",
        ),
        ("tokens of a step", f"at most {tokens:,}, dealt over {cfg.updates_per_step} optimizer updates ({lag})"),
        ("micro-batches", describe_micro_batches(per_update, trainer.micro_batch_tokens, trainer.ranks)),
        ("the run", f"{cfg.steps} steps -> {cfg.steps * samples:,} sequences -> {cfg.total_updates} optimizer updates"),
        ("generation", describe_schedule(cfg)),
    ]


def describe_schedule(cfg: RLConfig) -> str:
    often = "every step" if cfg.weight_sync.every == 1 else f"every {cfg.weight_sync.every} steps"
    publishes = f"weights are synced {often}"
    if cfg.weight_sync.max_kl is not None:
        publishes += f", or earlier where train/mismatch/kl is above {cfg.weight_sync.max_kl:g}"
    if cfg.max_staleness == 0:
        return f"waits for every weight sync (max_staleness=0); {publishes}"
    ahead = (cfg.max_staleness + 1) * cfg.groups_per_step // cfg.sample_reuse
    return f"runs up to {ahead} groups ahead of the trainer (max_staleness={cfg.max_staleness}); {publishes}"


def describe_micro_batches(tokens: int, budget: int, ranks: int) -> str:
    per_rank = -(-tokens // (budget * ranks))
    return f"at most {budget:,} tokens each -> at most about {per_rank} per rank and update, on {ranks} ranks"


def describe_placement(cfg: RunConfig) -> list[tuple[str, str]]:
    if cfg.backend == "local":
        device = "the GPU" if count_gpus() else "the CPU"
        return [
            (
                "this process",
                f"everything, on {device}: local trainer" + (" and engine" if isinstance(cfg, RLConfig) else ""),
            )
        ]
    kind = "GPU" if uses_gpus(cfg) else "share of the CPU"
    rows = [("trainer", f"{cfg.trainer.ranks} Ray actors, DeepSpeed ZeRO-{cfg.trainer.zero_stage}, one {kind} each")]
    if isinstance(cfg, RLConfig):
        rollout = cfg.rollout
        turns = " and in turns with the trainers" if cfg.placement == "colocate" else ""
        each = f"{rollout.tensor_parallel_size} {kind} each{turns}"
        rows.append(("engines", f"{rollout.engines} Ray actors ({rollout.engine}), {each}"))
        rows.append(("rewards", f"{cfg.reward.workers} processes beside each engine"))
    rows.append(("this machine", f"{count_gpus()} GPUs, {os.cpu_count()} CPU cores"))
    return rows


def describe_memory(loaded: Loaded[Any]) -> list[tuple[str, str]]:
    """Describe the memory of weights, gradients and optimizer states; activations and caches come on top."""
    try:
        m = estimate_memory(loaded)
    except ModelUnreadable as error:  # a recipe may name a model that is made later
        return [("memory", f"unknown: {error}")]
    of_adapter = f", and {m.adapter:,} of the adapter, which alone are trained" if m.adapter else ""
    rows = [
        ("parameters", f"{m.parameters:,}{of_adapter}"),
        *describe_vision(loaded.cfg, parameters=m.parameters),
        (
            "memory per rank",
            f"about {m.per_rank:.2f} GiB: weights {m.weights:.2f}, gradients {m.gradients:.2f}, optimizer "
            f"{m.optimizer:.2f}, frozen models {m.frozen:.2f}; activations come on top",
        ),
    ]
    if isinstance(loaded.cfg, RLConfig):
        rows.append(("memory per engine", f"about {m.per_engine:.2f} GiB of weights per rank, and its cache"))
        rows += describe_turns(loaded.cfg, m)
    return rows
