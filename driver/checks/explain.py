"""--explain: print the consequences of a recipe without starting anything."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import yaml
from pydantic import BaseModel

from algs.base import Algorithm
from algs.schedules import Schedule
from algs.teachers import START, list_paths
from configs.rollout_schema import RolloutConfig
from configs.schema import RLConfig, RunConfig, SLConfig
from configs.trainer_schema import LoraConfig, TrainerConfig
from data_feeds.rows.forms import RowKind
from driver.checks.engine_memory import describe_engine_memory
from driver.checks.explain_devices import describe_gpus, describe_processes
from driver.checks.explain_layout import describe_rows
from driver.checks.explain_rows import find_rows, show_rows
from driver.checks.explain_texts import describe_texts, find_tokenizer
from driver.checks.memory_estimate import CUDA_GIB, GIB, BytesEach, MemoryEstimate
from driver.checks.shared_memory import describe_turns
from driver.load_recipe import Loaded, with_forms
from driver.start.devices import check_devices, count_gpus, judge_takes_turns, uses_gpus
from modeling.freeze import find_frozen
from modeling.hf_config import ModelUnreadable, check_model_folder, meta_model, needs_images
from modeling.nf4 import BYTES as NF4_BYTES
from modeling.nf4 import list_quantized
from trainers.optimizer_probe import probe_optimizer

ROWS = {"conversations": "rows", "pairs": "pairs", "unpaired": "rows", "scored": "rows"}


def explain(loaded: Loaded[Any]) -> str:
    """Return the resolved configuration of a training run and derived facts."""
    cfg: RunConfig = loaded.cfg
    tokenizer = find_tokenizer(cfg.model, cfg.data)
    facts = [
        *describe_arithmetic(loaded),
        *describe_schedules(loaded.alg),
        *describe_texts(tokenizer, cfg.data),
        *describe_rows(cfg),
        *describe_placement(cfg),
        *describe_memory(loaded),
    ]
    kind: RowKind = "prompts" if isinstance(cfg, RLConfig) else loaded.alg.rows
    feed = find_rows(cfg, tokenizer, kind)
    if not isinstance(feed, str):
        cfg = with_forms(loaded, feed, None).cfg
    return "\n".join([format_explanation(cfg, facts, check_devices(cfg)), "", *show_rows(cfg, feed, tokenizer, kind)])


def format_explanation(cfg: BaseModel, facts: Iterable[tuple[str, str]], lacking: str | None) -> str:
    """Return the lines of --explain. facts: names and texts. lacking: a sentence on missing devices."""
    parts = [
        "# the configuration as it will run",
        yaml.safe_dump(cfg.model_dump(), sort_keys=False).rstrip(),
        "",
        "# what follows from it",
        *(f"{name:<22} {text}" for name, text in facts),
    ]
    return "\n".join(parts + (["", f"warning: {lacking}"] if lacking else []))


def describe_arithmetic(loaded: Loaded[Any]) -> list[tuple[str, str]]:
    cfg: RunConfig = loaded.cfg
    trainer = cfg.trainer
    if isinstance(cfg, SLConfig):
        rows = loaded.alg.rows
        # A pair is two sequences, each with the prompt.
        tokens = cfg.rows_per_step * cfg.data.max_tokens * (2 if rows == "pairs" else 1)
        return [
            ("a step", f"{cfg.rows_per_step} {ROWS[rows]} -> at most {tokens:,} tokens -> 1 optimizer update"),
            ("micro-batches", describe_micro_batches(tokens, trainer)),
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
    # With several updates the policy changes within the step, so the ratio's denominator must be fixed before.
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
        ("micro-batches", describe_micro_batches(per_update, trainer)),
        ("the run", f"{cfg.steps} steps -> {cfg.steps * samples:,} sequences -> {cfg.total_updates} optimizer updates"),
        ("generation", describe_schedule(cfg)),
    ]


def describe_schedules(alg: Algorithm) -> list[tuple[str, str]]:
    """Describe the hyper-parameters that change with the steps."""

    def describe(part: Schedule) -> str:
        return f"{part.start:g} -> {part.end:g} in {part.steps} steps ({part.shape})"

    return [(f"alg.{name}", ", then ".join(map(describe, parts))) for name, parts in alg.schedules.items()]


def describe_schedule(cfg: RLConfig) -> str:
    often = "every step" if cfg.weight_sync.every == 1 else f"every {cfg.weight_sync.every} steps"
    publishes = f"weights are synced {often}"
    if cfg.weight_sync.max_kl is not None:
        publishes += f", or earlier where train/mismatch/kl is above {cfg.weight_sync.max_kl:g}"
    if cfg.max_staleness == 0:
        return f"waits for every weight sync (max_staleness=0); {publishes}"
    # A step takes groups_per_step / sample_reuse new groups; generation may be max_staleness steps beyond the next.
    ahead = (cfg.max_staleness + 1) * cfg.groups_per_step // cfg.sample_reuse
    return f"runs up to {ahead} groups ahead of the trainer (max_staleness={cfg.max_staleness}); {publishes}"


def describe_micro_batches(tokens: int, cfg: TrainerConfig) -> str:
    budget, parts, each = cfg.micro_batch_tokens, cfg.data_parallel_size, cfg.sequence_parallel
    who = "rank" if each == 1 else f"group of {each} ranks"
    groups = "one such group" if parts == 1 else f"{parts} such groups"
    where = f"{cfg.ranks} ranks" if each == 1 else f"{groups} (trainer.sequence_parallel)"
    # Rounded up, because the last micro-batch may be partly full.
    most = -(-tokens // (budget * parts))
    return f"at most {budget:,} tokens each -> at most about {most} per {who} and update, on {where}"


def count_engines(rollout: RolloutConfig) -> str:
    """Return the number of engines, or the range of a varying number."""
    least, most = rollout.least_engines, rollout.most_engines
    return f"{least}" if least == most else f"{least} to {most}"


def describe_placement(cfg: RunConfig) -> list[tuple[str, str]]:
    if cfg.backend == "local":
        device = "the GPU" if count_gpus() else "the CPU"
        parts = "local trainer" + (" and engine" if isinstance(cfg, RLConfig) else "")
        return [("this process", f"everything, on {device}: {parts}"), *describe_gpus()]
    kind = "GPU" if uses_gpus(cfg) else "share of the CPU"
    offloaded = " with its state in the machine's memory" if cfg.trainer.offload else ""
    library = f"FSDP2{offloaded}" if cfg.trainer.strategy == "fsdp2" else f"DeepSpeed ZeRO-{cfg.trainer.zero_stage}"
    rows = [("trainer", f"{cfg.trainer.ranks} Ray actors, {library}, one {kind} each")]
    if (n := cfg.trainer.sequence_parallel) > 1:
        rows.append(("rows", f"each is computed by {n} ranks, which hold 1/{n} of its activations each"))
    if isinstance(cfg, RLConfig):
        rollout = cfg.rollout
        turns = " and in turns with the trainers" if cfg.placement == "colocate" else ""
        actors = f"{count_engines(rollout)} Ray actors ({rollout.engine})"
        rows.append(("engines", f"{actors}, {rollout.tensor_parallel_size} {kind} each{turns}"))
        rows.append(("rewards", f"{cfg.reward.workers} processes beside each engine"))
        if (judge := cfg.judge) is not None and not judge.is_policy:
            each = f"{judge.tensor_parallel_size} {kind} each{turns if judge_takes_turns(cfg) else ''}"
            rows.append(("judge", f"{judge.num_engines} Ray actors ({judge.engine}), {each}"))
    rows.append(("this machine", f"{count_gpus()} GPUs, {os.cpu_count()} CPU cores"))
    return [*rows, *describe_gpus(), *describe_processes(cfg)]


def describe_memory(loaded: Loaded[Any]) -> list[tuple[str, str]]:
    """Describe the memory of weights, gradients and optimizer states, without activations and caches."""
    try:
        m = estimate_memory(loaded)
    except ModelUnreadable as error:  # a recipe may name a model that is made later
        return [("memory", f"unknown: {error}")]
    alg = loaded.alg
    models = 1 if alg.value_lr is None else 2
    of_adapter = f", and {m.adapter:,} of the adapter, which alone are trained" if m.adapter else ""
    in_bits = f"; {m.quantized:,} are kept in four bits" if m.quantized else ""
    rows = [
        ("parameters", f"{m.parameters:,}{of_adapter}{in_bits}"),
        *describe_images(loaded.cfg, m, models=models),
        (
            "memory per rank",
            f"about {m.per_rank:.2f} GiB: weights {m.weights:.2f}, gradients {m.gradients:.2f}, optimizer "
            f"{m.optimizer:.2f}, frozen models {m.frozen:.2f}; activations come on top"
            + (", and are all that a GPU holds besides one block's weights" if loaded.cfg.trainer.offload else "")
            + (f", CUDA ({CUDA_GIB:g}) and DeepSpeed's buckets ({m.buckets:.2f})" if uses_gpus(loaded.cfg) else ""),
        ),
    ]
    if isinstance(loaded.cfg, RLConfig):
        rows.append(("memory per engine", describe_engine_memory(loaded.cfg, m)))
        rows += describe_turns(loaded.cfg, m)
    return rows


def describe_images(cfg: RunConfig, memory: MemoryEstimate, *, models: int) -> list[tuple[str, str]]:
    """Describe parameters and memory for images of a vision-language model. models: trained models, value model
    included.
    """
    model = cfg.model
    if not needs_images(model.path, trust_remote_code=model.trust_remote_code, images=model.images):
        return []
    from driver.checks.explain_images import describe_vision

    each = count_bytes(cfg)
    return describe_vision(cfg, parameters=memory.parameters, models=models, per_rank=memory.per_rank, each=each)


def estimate_memory(loaded: Loaded[Any]) -> MemoryEstimate:
    """Estimate the memory of weights, gradients and optimizer states. Raises UserError for an unreadable config."""
    cfg: RunConfig = loaded.cfg
    trusts = cfg.model.trust_remote_code
    n = count_parameters(cfg.model.path, trust_remote_code=trusts)
    held, states = count_held(cfg), count_states(cfg)
    each = count_bytes(cfg)
    alg = loaded.alg
    lora = cfg.model.lora
    adapter = 0 if lora is None else count_adapter(cfg.model.path, lora, trust_remote_code=trusts)
    critic = 0 if alg.value_lr is None else n  # the value model is as large as the policy, and has no adapter
    fixed = count_frozen(cfg, alg)
    packed = 0 if cfg.model.quantization is None else count_quantized(cfg.model.path, trust_remote_code=trusts)
    # max: without a value model, critic is 0, and has nothing to subtract.
    in_training = (n - fixed if lora is None else adapter) + max(0, critic - fixed)
    # a precomputed reference is not loaded, and that of an adapter is the policy without it
    spared = lora is not None or (isinstance(cfg, SLConfig) and cfg.precompute_ref_logp)
    starts = [] if spared else [t for t in alg.teachers.values() if t.model == START and not t.moves]
    frozen = sum(count_parameters(path, key="alg", trust_remote_code=trusts) for path in list_paths(alg.teachers))
    frozen += n if starts else 0  # teachers of the same weights share a model
    # float32 copies of the policy's trained weights
    copies = sum(t.moves for t in alg.teachers.values()) + (cfg.trainer.ema is not None)
    moving = copies * (n - fixed if lora is None else adapter)
    # Otherwise only the adapter is saved.
    policy = adapter if lora is not None and not lora.merge_on_save else n + adapter
    return MemoryEstimate(
        parameters=n,
        adapter=adapter,
        quantized=packed,
        # four bits are whole on every rank
        weights=(
            in_training * each.weights + (n + adapter + critic - in_training - packed) * each.idle + packed * NF4_BYTES
        )
        / GIB,
        gradients=in_training * each.gradients / GIB,
        optimizer=in_training * each.optimizer / GIB,
        frozen=(frozen * each.reference + moving * each.moving) / GIB,
        buckets=count_buckets(cfg) / GIB,
        per_engine=n * held / cfg.rollout.tensor_parallel_size / GIB if isinstance(cfg, RLConfig) else 0.0,
        checkpoint=(in_training * (4 + states) + moving * 4) / GIB,  # float32 weights and the optimizer
        saved=(policy * (1 if cfg.trainer.ema is None else 2) + critic) * held / GIB,
    )


def count_held(cfg: RunConfig) -> int:
    """Return the bytes of a weight in forward passes."""
    return 2 if cfg.model.dtype == "bfloat16" else 4


def count_states(cfg: RunConfig) -> float:
    """Return the bytes of optimizer states per parameter."""
    if cfg.trainer.is_optimizer_named:
        return probe_optimizer(cfg.trainer, is_sharded=cfg.backend == "ray").state_bytes
    # AdamW keeps two float32 numbers: the running means of gradient and squared gradient. Muon keeps one for a matrix,
    # and two for the other parameters, which may be most of a small model.
    return 0 if cfg.trainer.optimizer == "sgd" else 8


def count_bytes(cfg: RunConfig) -> BytesEach:
    """Return the bytes per parameter on a trainer rank."""
    held = count_held(cfg)
    # float32 weights are their own master copy.
    master = 4 if held == 2 else 0
    ranks, stage = cfg.trainer.ranks, cfg.trainer.zero_stage if cfg.backend == "ray" else 0
    if cfg.backend == "ray" and cfg.trainer.strategy == "fsdp2":
        parts = ranks if cfg.model.lora is None else 1  # an adapter is whole on every rank
        return BytesEach(
            weights=4 / parts,
            idle=held / ranks,
            reference=held / ranks,
            moving=4 / parts,
            gradients=4 / parts,
            optimizer=count_states(cfg) / parts,
        )
    # DeepSpeed keeps float32 master weights beside bfloat16 weights; FSDP2 keeps only float32 and casts per layer.
    weights = held / (ranks if stage == 3 else 1)
    return BytesEach(
        weights=weights,
        idle=weights,
        reference=held,
        moving=4 / (ranks if stage >= 1 else 1),
        gradients=4 / (ranks if stage >= 2 else 1),
        optimizer=(master + count_states(cfg)) / (ranks if stage >= 1 else 1),
    )


def count_buckets(cfg: RunConfig) -> float:
    """Return the bytes of DeepSpeed's buffer for gradients, which it allocates whole whatever the model's size."""
    trainer = cfg.trainer
    if cfg.backend != "ray" or trainer.strategy != "deepspeed" or trainer.zero_stage == 0:
        return 0
    defaults: dict[str, Any] = {"reduce_bucket_size": 5e8, "overlap_comm": False, "contiguous_gradients": True}
    given = defaults | trainer.deepspeed.get("zero_optimization", {})
    if not given["contiguous_gradients"]:
        return 0
    # ZeRO-1 reduces sums in float32; ZeRO-2 has a second buffer while the first is on its way
    held = 4 if trainer.zero_stage == 1 else count_held(cfg)
    size = given["reduce_bucket_size"]
    if not isinstance(size, int | float):  # DeepSpeed will refuse it
        return 0
    return size * held * (2 if trainer.zero_stage == 2 and given["overlap_comm"] else 1)


def count_frozen(cfg: RunConfig, alg: Algorithm) -> int:
    """Count the parameters frozen by trainer.freeze, or as text never reaches them."""
    model = meta_model(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    path = None if alg.model_kind == "reward" else cfg.model.path
    frozen = find_frozen(model, cfg.trainer.freeze, images=cfg.model.images, path=path)
    return sum(p.numel() for name, p in model.named_parameters() if name in frozen)


def count_adapter(path: str, lora: LoraConfig, *, trust_remote_code: bool) -> int:
    """Count the parameters of a new adapter for this model."""
    from modeling.lora import with_adapter

    model = meta_model(path, trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in with_adapter(model, lora, path=path).parameters() if p.requires_grad)


def count_quantized(path: str, *, trust_remote_code: bool) -> int:
    """Count the parameters that model.quantization keeps in four bits."""
    layers = list_quantized(meta_model(path, trust_remote_code=trust_remote_code))
    return sum(layer.weight.numel() for layer in layers.values())


def count_parameters(path: str, *, key: str = "model.path", trust_remote_code: bool) -> int:
    """Count a model's parameters without allocating them."""
    check_model_folder(path, key=key, trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in meta_model(path, key=key, trust_remote_code=trust_remote_code).parameters())
