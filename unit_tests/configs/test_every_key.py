"""Changing a key changes something: the plan of the run, or what a named test observes of real runs.

The footprint below holds what the parts of a run are made of, and no part of the configuration itself. So a key that is
only copied from one settings object to another does not change it. A new key of the schema fails here until it has its
line: a value that changes the footprint, or the test that shows what it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from configs.load import sections_in
from configs.schema import RLConfig, RunConfig, SLConfig
from core.cluster.workers import Local
from data_feeds.chat.template_args import make_tokenizer
from data_feeds.chat.tool_parsing import make_parser
from data_feeds.feed import load_groups, load_prompts
from data_feeds.packing.batches import plan_update
from driver.checkpoint import is_due
from driver.early_stop import EarlyStop
from driver.load_recipe import Loaded, load_recipe
from driver.rl.row_order import make_schedule
from driver.start.rollouts import plan_rollouts
from driver.start.weight_sync import make_probe, make_weight_sync
from rewards.weights import find_weights, weigh_parts
from rollouts.allowed_tokens import resolve_allowed_tokens
from rollouts.stops import Stops
from trainers.deepspeed import deepspeed_config
from trainers.optimizer import make_lr_schedule, make_optimizer
from unit_tests.helpers.examples import some_groups

ROOT = Path(__file__).parent.parent.parent
PARTS = {"correct": 1.0, "other": 0.5, "gsm8k.correct": 2.0}
DUE = {"checkpoint.every": 2}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    # key: (another value, other settings of both footprints)
    "seed": (1, {}),
    "steps": (4, {}),
    "checkpoint.every": (1, {}),
    "data.template": ("plain", {}),
    "data.system_prompt": ("be brief", {}),
    "data.chat_template": ("{% for m in messages %}{{ m.content + '<|end|>' }}{% endfor %}", {}),
    "data.eval_rows": (3, {"data.eval": "EVAL"}),
    "data.max_prompt_tokens": (16, {}),
    "groups_per_step": (8, {}),
    "updates_per_step": (2, {"trainer.lr_schedule": "linear"}),
    "max_staleness": (2, {}),
    "sample_reuse": (2, {"max_staleness": 4}),
    "model.path": ("OTHER", {}),
    "model.dtype": ("bfloat16", {}),
    "model.trust_remote_code": (True, {}),
    "reward.weights": ({"other": 3.0}, {}),
    "reward.function": ("gsm8k", {}),
    "reward.functions": ({"gsm8k": 3.0}, {"reward.function": None}),
    "reward.by_source": ({"train": {"gsm8k": 1.0}}, {}),
    "reward.settings": ({"most": 1}, {}),
    "rollout.engine": ("vllm", {}),
    "rollout.env": ("calculator", {}),
    "rollout.temperature": (0.5, {}),
    "rollout.top_p": (0.9, {}),
    "rollout.top_k": (9, {}),
    "rollout.min_p": (0.1, {}),
    "rollout.allowed_tokens": (["1", "2"], {}),
    "rollout.router_replay": ("watch", {}),
    "rollout.max_new_tokens": (9, {}),
    "rollout.stop": (["7"], {}),
    "rollout.stop_token_ids": ([9], {}),
    "rollout.tool_parser": ("hermes", {}),
    "rollout.tensor_parallel_size": (2, {"backend": "ray", "rollout.engine": "vllm"}),
    "rollout.enforce_eager": (True, {}),
    "rollout.gpu_memory_utilization": (0.5, {}),
    "rollout.quantization": ("int8", {}),
    "rollout.batch_invariant": (True, {}),
    "rollout.vllm": ({"max_num_seqs": 3}, {"rollout.engine": "vllm"}),
    "weight_sync.every": (2, {"max_staleness": 4}),
    "weight_sync.max_kl": (0.1, {"weight_sync.every": 2, "max_staleness": 4}),
    "weight_sync.pause_mode": ("wait", {}),
    "weight_sync.transport": ("disk", {"backend": "ray"}),
    "weight_sync.bucket_mib": (1, {}),
    "weight_sync.timeout_s": (5.0, {}),
    "weight_sync.lora": ("adapter", {"model.lora": {}, "rollout.engine": "vllm"}),
    "weight_sync.probe_tolerance": (0.5, {}),
    "trainer.ranks": (2, {"backend": "ray"}),
    "trainer.zero_stage": (2, {}),
    "trainer.optimizer": ("sgd", {}),
    "trainer.optimizer_settings": ({"momentum_decay": 0.1}, {"trainer.optimizer": "torch.optim.NAdam"}),
    "trainer.lr": (0.5, {}),
    "trainer.lr_schedule": ("cosine", {}),
    "trainer.lr_min_fraction": (0.5, {"trainer.lr_schedule": "linear"}),
    "trainer.decay_fraction": (1.0, {"trainer.lr_schedule": "wsd"}),
    "trainer.warmup_updates": (2, {}),
    "trainer.betas": ([0.5, 0.6], {}),
    "trainer.eps": (1e-3, {}),
    "trainer.weight_decay": (0.5, {}),
    "trainer.max_grad_norm": (0.5, {}),
    "trainer.micro_batch_tokens": (41, {}),
    "trainer.deepspeed": ({"wall_clock_breakdown": True}, {}),
    "stop_when.metric": ("train/loss", {"stop_when": {"metric": "train/lr", "above": 2.0}}),
    "stop_when.above": (5.0, {"stop_when": {"metric": "train/lr", "above": 2.0}}),
    "stop_when.below": (1.0, {"stop_when": {"metric": "train/lr", "below": 9.0}}),
    "stop_when.for_steps": (2, {"stop_when": {"metric": "train/lr", "above": 2.0}}),
    "data.train.name": ("mine", {}),
    "data.train.ratio": (3.0, {}),
    "data.train.replacement": (True, {}),
    "data.train.columns": ({"messages": "answer"}, {}),
    "data.train.path": ("EVAL", {}),
    "data.train_on": ("everything", {}),
    "data.max_tokens": (8, {"data.max_invalid_fraction": 1.0}),
    "rows_per_step": (4, {}),
}
SHOWN: dict[str, tuple[str, ...]] = {
    "rollouts/test_http_engine.py": ("rollout.servers",),
    "driver/test_runs.py": (
        "name",
        "run_dir",
        "backend",
        "ray_address",
        "alg",
        "eval_every",
        "group_size",
        "rollout.num_engines",
    ),
    "driver/test_two_hosts.py": ("ship_code",),
    "data_feeds/test_decoding.py": ("rollout.skip_special_tokens",),
    "data_feeds/test_episodes.py": ("record_tokens",),
    "configs/test_bad_input.py": ("save_to",),
    "analysis/test_profile.py": ("profile.steps", "profile.trace", "profile.memory"),
    "driver/test_prometheus.py": ("tracking.prometheus_port", "tracking.prometheus_host"),
    "driver/test_elastic.py": ("rollout.num_engines.min", "rollout.num_engines.max"),
    "driver/test_push.py": ("push_to",),
    "trainers/test_gpu.py": ("device",),
    "driver/test_checkpoint.py": ("checkpoint.keep", "checkpoint.best", "checkpoint.best_mode", "resume"),
    "driver/test_eval_runs.py": ("eval_samples", "eval_pass_reward"),
    "driver/test_trackers.py": (
        *("trackers", "tracking.samples_every", "tracking.samples", "tracking.mlflow_uri"),
        *("tracking.group", "tracking.tags", "tracking.notes"),
        *("tracking.mlflow_experiment", "tracking.wandb_project", "tracking.wandb_entity", "tracking.wandb_mode"),
        *("tracking.group", "tracking.tags", "tracking.notes"),
    ),
    "driver/test_console.py": ("display", "show_samples"),
    "analysis/test_capture.py": (
        *(
            "compare_losses",
            "capture.every",
            "capture.on",
            "capture.kl_above",
            "capture.grad_norm_times",
            "capture.most",
        ),
        *("capture.weights",),
    ),
    "rollouts/test_opponents.py": ("rollout.opponent", "rollout.opponent_every"),
    "trainers/test_store_sync.py": ("weight_sync.folder",),
    "trainers/test_delta_sync.py": ("weight_sync.delta", "weight_sync.whole_every"),
    "core/test_watchdog.py": ("timeout_s", "rollout.restarts", "rollout.timeout_s"),
    "driver/test_rl_step.py": ("model.attention", "trainer.share_prefixes"),
    "modeling/test_lora.py": (
        *("model.lora.r", "model.lora.targets", "model.lora.rslora", "model.lora.dora"),
        *("model.lora.merge_on_save", "model.lora.experts"),
    ),
    "trainers/test_vision_training.py": ("model.lora.vision",),
    "modeling/test_nf4.py": ("model.quantization",),
    "modeling/test_text_use.py": ("model.images",),
    "modeling/test_freeze.py": ("trainer.freeze",),
    "trainers/test_optimizers.py": ("trainer.lr_scales",),
    "trainers/test_compiled.py": ("trainer.compile",),
    "trainers/test_references.py": ("trainer.ema",),
    "data_feeds/test_template_args.py": ("data.template_args",),
    "driver/test_run_inputs.py": ("data.template_date",),
    "data_feeds/test_template_rules.py": ("data.end_of_turn", "data.continue_final_message"),
    "data_feeds/test_feeds.py": ("data.train.split", "data.max_invalid_fraction", "data.eval"),
    "data_feeds/test_forms.py": ("data.train.form",),
    "data_feeds/test_disk_rows.py": ("data.train.lazy",),
    "data_feeds/test_mixture.py": ("data.curriculum.rows", "data.curriculum.ratios"),
    "driver/test_sampled_runs.py": ("data.sampler",),
    "trainers/test_shared_training.py": ("trainer.gradient_checkpointing",),
    "data_feeds/test_image_rows.py": ("data.max_image_pixels",),
    "modeling/test_head.py": ("trainer.logits_mib",),
    "trainers/test_deepspeed.py": ("trainer.layout", "trainer.strategy", "trainer.offload"),
    "modeling/test_sequence_parallel.py": ("trainer.sequence_parallel",),
    "trainers/test_step.py": ("trainer.max_skipped_updates",),
    "modeling/test_flops.py": ("trainer.peak_tflops",),
    "rewards/test_rewards.py": ("reward.workers", "reward.timeout_s"),
    "driver/test_second_reward.py": ("eval_reward",),
    "rewards/test_async_rewards.py": ("reward.max_concurrency",),
    "rewards/test_judge_runs.py": ("reward.judge_budget.calls", "reward.judge_budget.tokens"),
    "rewards/test_served_judge.py": (
        *("judge.model", "judge.engine", "judge.num_engines", "judge.tensor_parallel_size", "judge.temperature"),
        *("judge.max_model_len", "judge.allowed_tokens", "judge.template_args"),
    ),
    "driver/test_group_metrics.py": ("reward.max_failed_fraction",),
    "rollouts/test_vllm_adapter.py": ("model.lora.alpha",),
    "rollouts/test_episode.py": ("rollout.max_turns",),
    "rollouts/test_routable_gateway.py": (
        *("rollout.gateway.listen", "rollout.gateway.port", "rollout.gateway.url", "rollout.gateway.insecure"),
    ),
    "rollouts/test_agents.py": ("rollout.agent.file", "rollout.agent.command"),
    "rollouts/test_remote_agents.py": ("rollout.agent.address",),
    "rollouts/test_served_agents.py": (
        *("rollout.agent.serve", "rollout.agent.timeout_s", "rollout.agent.on_timeout", "rollout.max_concurrency"),
    ),
    "configs/test_recipes.py": ("epochs",),
    "driver/test_supervised.py": ("precompute_ref_logp",),
    "driver/test_killed.py": ("on_failure", "max_resumes", "rollout.kv_cache_gib"),
    "driver/test_colocation.py": ("placement", "rollout.sleep_mode"),
    "driver/test_judge_turns.py": ("judge.placement",),
}
"""Keys whose effect is seen in a run or in a part that this file does not make; the test file that shows it."""
SECTIONS = {
    *("checkpoint", "model", "model.lora", "data", "trainer", "reward", "rollout", "weight_sync", "stop_when"),
    *("capture", "profile", "tracking", "rollout.agent", "data.curriculum", "reward.judge_budget", "judge"),
    "rollout.gateway",
}


def list_keys(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every key of the schema, dotted."""
    for name, info in cls.model_fields.items():
        yield prefix + name
        for section in sections_in(info.annotation):
            yield from list_keys(section, f"{prefix}{name}.")


def all_keys() -> set[str]:
    """Keys of the schema without sections; those of data.eval and eval_reward are those of others."""
    keys = {*list_keys(RLConfig), *list_keys(SLConfig)}
    return {
        key
        for key in keys
        if key not in SECTIONS | {"data.train"} and not key.startswith(("data.eval.", "eval_reward."))
    }


def test_every_key_has_its_line():
    shown = {key for keys in SHOWN.values() for key in keys}
    assert all_keys() == {*CASES} | shown
    assert not {*CASES} & shown
    for file, keys in SHOWN.items():
        text = (ROOT / "unit_tests" / file).read_text(encoding="utf-8")
        assert [key for key in keys if key.rpartition(".")[2] not in text] == [], f"{file} names no such key"


def common_footprint(cfg: RunConfig) -> dict[str, Any]:
    get_lr = make_lr_schedule(cfg.trainer, cfg.total_updates)
    optimizer = make_optimizer(cfg.trainer, [torch.zeros(1, requires_grad=True)])
    stop = EarlyStop(cfg.stop_when)
    ends: list[str] = []
    for value in (3.0, 6.0):
        stop.note_step({"train/lr": value, "train/loss": 0.0})
        ends.append(stop.reason)
    ranks = cfg.trainer.ranks
    plan = plan_update(some_groups(), "token", cfg.trainer.micro_batch_tokens, ranks=ranks)
    return {
        "lr": [*map(get_lr, range(cfg.total_updates))],
        "optimizer": (type(optimizer).__name__, optimizer.defaults),
        "deepspeed": deepspeed_config(cfg.trainer, cfg.model.dtype),
        "checkpoints": [is_due(n, every=cfg.checkpoint.every, steps=cfg.n_steps) for n in range(1, 5)],
        "ends": ends,
        "micro-batches": [[len(batch.input_ids) for batch in of_rank] for of_rank in plan.batches()],
    }


def rl_footprint(loaded: Loaded[RLConfig]) -> dict[str, Any]:
    cfg = loaded.cfg
    rollouts = plan_rollouts(cfg)
    tokenizer = make_tokenizer(cfg.model, cfg.data)
    stops = Stops(tokenizer, cfg.rollout.stop, cfg.rollout.stop_token_ids)
    feed = load_prompts(cfg.data, "train", tokenizer, seed=cfg.seed)
    held_out = [] if cfg.data.eval is None else load_prompts(cfg.data, "eval", tokenizer, seed=cfg.seed).all()
    sync = make_weight_sync(
        cfg,
        Local(SimpleNamespace(timer=None)),
        Local(SimpleNamespace(timer=None, engine=None)),
        make_probe(cfg, tokenizer, feed.all()),
        rollouts=rollouts,
        say=print,
        facts={},
        folder=Path(),
    )
    drawn = [feed.draw(ticket) for ticket in range(8)]
    return common_footprint(cfg) | {
        "engine": asdict(rollouts.engine),
        "files": [rollouts.engine_spec.path, rollouts.env_spec.path, rollouts.transports],
        "rewards": rollouts.reward_functions,
        "reward": weigh_parts(find_weights(cfg.reward, PARTS, "train"), PARTS),
        "parser": vars(make_parser(cfg.rollout.tool_parser, tokenizer)).keys(),
        "allowed_tokens": resolve_allowed_tokens(tokenizer, cfg.rollout.allowed_tokens, stops.token_ids),
        "stops": (stops.token_ids, stops.strings and stops.strings.strings),
        "schedule": make_schedule(cfg),
        "prompts": [(p.source, tokenizer.render(p.messages)) for p in drawn],
        "held out": [p.id for p in held_out],
        "sync": (sync.probe, sync.max_bytes, sync.scope),
    }


def sl_footprint(loaded: Loaded[SLConfig]) -> dict[str, Any]:
    cfg = loaded.cfg
    tokenizer = make_tokenizer(cfg.model, cfg.data)
    feed = load_groups(cfg.data, "train", tokenizer, rows="conversations", seed=cfg.seed)
    step = [feed.draw(ticket)[0] for ticket in range(cfg.rows_per_step)]
    return {"rows": [(s.token_ids.tolist(), s.action_mask.tolist()) for s in step]}


@pytest.mark.parametrize("key", CASES)
def test_changing_a_key_changes_what_the_run_is_made_of(key, recipe, sums, tmp_path, tiny_path):
    value, others = CASES[key]
    is_sl = key in {*list_keys(SLConfig)} - {*list_keys(RLConfig)}
    base = {} if is_sl else {"reward.weights": {"correct": 1.0}}
    paths = {"EVAL": str(sums / "eval.parquet"), "OTHER": str(tmp_path / "other")}
    (tmp_path / "other").symlink_to(tiny_path)
    two = [{"path": str(sums / "train.parquet")}, {"path": str(sums / "eval.parquet"), "name": "b"}]
    base |= {k: paths.get(v, v) if isinstance(v, str) else v for k, v in others.items()}
    value = paths.get(value, value) if isinstance(value, str) else value
    if key.startswith("data.train."):
        base["data.train"] = two
        changed = base | {"data.train": [two[0] | {key.rpartition(".")[2]: value}, two[1]]}
    elif key.startswith("stop_when."):
        changed = base | {"stop_when": base["stop_when"] | {key.rpartition(".")[2]: value}}
    else:
        changed = base | {key: value}
    if key in ("reward.function", "reward.settings"):
        base, changed = ({k: v for k, v in one.items() if k != "reward.weights"} for one in (base, changed))
    if key == "reward.functions":
        changed.pop("reward.weights")
        base = {"reward.function": "arithmetic"}
    if key == "trainer.decay_fraction":
        base[key] = 0.5
    kind, footprint = ("sl", sl_footprint) if is_sl else ("rl", rl_footprint)
    made = [
        footprint(load_recipe(SLConfig if is_sl else RLConfig, recipe(one, kind=kind), [])) for one in (base, changed)
    ]
    assert made[0] != made[1], f"{key} changes nothing"


def test_a_footprint_depends_on_nothing_else(recipe):
    for cls, kind, footprint in ((RLConfig, "rl", rl_footprint), (SLConfig, "sl", sl_footprint)):
        one, again = (footprint(load_recipe(cls, recipe({}, kind=kind), [])) for _ in range(2))
        assert one == again
