"""Which numbers, texts and lists a key of a recipe may have: each bound just inside and just outside."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.capture_schema import CaptureConfig
from configs.data_schema import CurriculumPhase, HoldOutConfig, PromptDataConfig, RowDataConfig, SourceConfig
from configs.eval_schema import EvalConfig, EvalDataConfig, EvalRolloutConfig, EvalSetConfig
from configs.gateway_schema import GatewayConfig
from configs.judge_schema import JudgeBudgetConfig, JudgeConfig
from configs.profile_schema import ProfileConfig
from configs.rollout_schema import EngineRange, RewardConfig, RolloutConfig
from configs.schema import RLConfig, SLConfig
from configs.sync_schema import WeightSyncConfig
from configs.tracking_schema import TrackingConfig
from configs.trainer_schema import CheckpointConfig, LoraConfig, StopWhenConfig, TrainerConfig
from core.strict_model import StrictModel
from unit_tests.helpers.intervals import check_interval

SECONDS = "(0 10000000]"
COMMON = {"name": "a", "model": {"path": "m"}, "alg": {"name": "grpo"}}
REWARD = {"function": "arithmetic"}
RL = COMMON | {"data": {"train": "a.jsonl"}, "reward": REWARD, "steps": 1, "groups_per_step": 1}
SL = COMMON | {"data": {"train": "a.jsonl"}, "rows_per_step": 1}
EVAL = {"name": "a", "model": {"path": "m"}, "data": {"sets": [{"path": "a.jsonl"}]}, "reward": REWARD}
TRAIN = {"train": "a.jsonl"}
RUN = {"seed": "[0", "max_resumes": "[1", "timeout_s": SECONDS, "eval_every": "[0"}
DATA = {"max_image_pixels": "[1", "eval_rows": "[1", "max_invalid_fraction": "[0 1]"}
SECTIONS: list[tuple[type[StrictModel], dict[str, Any], dict[str, str]]] = [
    (
        *(RLConfig, RL),
        {
            **RUN,
            **{"steps": "[1", "groups_per_step": "[1", "group_size": "[1", "updates_per_step": "[1"},
            **{"max_staleness": "[0", "sample_reuse": "[1", "eval_samples": "[1", "show_samples": "[0"},
        },
    ),
    (SLConfig, SL | {"steps": 1}, {**RUN, "steps": "[1", "rows_per_step": "[1"}),
    (SLConfig, SL, {"epochs": "(0"}),
    (SourceConfig, {"path": "a"}, {"ratio": "(0"}),
    (HoldOutConfig, {}, {"from_train": "[1"}),
    (CurriculumPhase, {"ratios": {}}, {"rows": "[1"}),
    (PromptDataConfig, TRAIN, {**DATA, "max_prompt_tokens": "[1"}),
    (RowDataConfig, TRAIN, {**DATA, "max_tokens": "[1"}),
    (LoraConfig, {}, {"r": "[1 65536]", "alpha": "(0"}),
    (
        *(TrainerConfig, {}),
        {
            **{"ranks": "[1", "sequence_parallel": "[1", "lr": "(0 100]", "warmup_updates": "[0", "eps": "(0"},
            **{"weight_decay": "[0", "peak_tflops": "(0", "ema": "(0 1)", "max_grad_norm": "[0"},
            **{"micro_batch_tokens": "[1", "logits_mib": "[0", "max_skipped_updates": "[1"},
        },
    ),
    (TrainerConfig, {"lr_schedule": "linear"}, {"lr_min_fraction": "[0 1]"}),
    (TrainerConfig, {"lr_schedule": "wsd"}, {"decay_fraction": "(0 1]"}),
    (StopWhenConfig, {"metric": "train/loss", "above": 1.0}, {"for_steps": "[1"}),
    (CheckpointConfig, {}, {"every": "[0", "keep": "[1"}),
    (TrackingConfig, {}, {"samples_every": "[0", "samples": "[1", "prometheus_port": "[1 65535]"}),
    (
        *(RewardConfig, REWARD),
        {"workers": "[1", "max_concurrency": "[1", "timeout_s": SECONDS, "max_failed_fraction": "[0 1]"},
    ),
    (EngineRange, {"max": 9}, {"min": "[1"}),
    (EngineRange, {}, {"max": "[2"}),
    (
        *(RolloutConfig, {}),
        {
            **{"max_concurrency": "[1", "tensor_parallel_size": "[1", "restarts": "[0", "temperature": "[0.01 100]"},
            **{"top_p": "(0 1]", "top_k": "[0", "min_p": "[0 1)", "max_new_tokens": "[1", "max_turns": "[1"},
            **{"timeout_s": SECONDS, "kv_cache_gib": "(0", "gpu_memory_utilization": "(0 1)", "num_engines": "[1"},
        },
    ),
    (RolloutConfig, {"env": "a_game", "opponent": "policy"}, {"opponent_every": "[1"}),
    (GatewayConfig, {}, {"port": "[0 64000]"}),
    (JudgeBudgetConfig, {}, {"calls": "[1", "tokens": "[1"}),
    (
        *(JudgeConfig, {"model": "j"}),
        {"num_engines": "[1", "tensor_parallel_size": "[1", "temperature": "[0 2]", "max_model_len": "[2"},
    ),
    (
        *(WeightSyncConfig, {}),
        {
            **{"every": "[1", "max_kl": "(0", "bucket_mib": "[1", "timeout_s": SECONDS, "whole_every": "[1"},
            "probe_tolerance": "(0",
        },
    ),
    (CaptureConfig, {}, {"every": "[0", "kl_above": "(0", "grad_norm_times": "(1", "most": "[1"}),
    (EvalSetConfig, {"path": "a"}, {"rows": "[1", "samples": "[1"}),
    (EvalDataConfig, {"sets": [{"path": "a"}]}, {"max_prompt_tokens": "[1", "max_invalid_fraction": "[0 1]"}),
    (EvalRolloutConfig, {}, {"temperature": "[0 100]"}),
    (
        *(EvalConfig, EVAL),
        {
            **{"seed": "[0", "timeout_s": SECONDS, "samples": "[1", "resamples": "[100 100000]"},
            **{"prompts_per_engine": "[1", "prompts_per_part": "[1"},
        },
    ),
]


@pytest.mark.parametrize(("cls", "settings", "intervals"), SECTIONS)
def test_a_key_takes_all_numbers_of_its_interval_and_no_others(cls, settings, intervals):
    for key, interval in intervals.items():
        check_interval(cls, settings, key, interval)


def test_numbers_in_lists_and_sections_have_bounds_too():
    check_interval(TrainerConfig, {}, "betas", "[0 1)", wrap=lambda number: (number, 0.5))
    check_interval(TrainerConfig, {}, "betas", "[0 1)", wrap=lambda number: (0.5, number))
    check_interval(TrainerConfig, {}, "lr_scales", "(0", wrap=lambda number: {"a": number})
    check_interval(CurriculumPhase, {"rows": 1}, "ratios", "[0", wrap=lambda number: {"a": number})
    check_interval(RolloutConfig, {}, "stop_token_ids", "[0", wrap=lambda number: [1, number])
    check_interval(ProfileConfig, {}, "steps", "[0", wrap=lambda number: [1, number])
    check_interval(EvalConfig, EVAL, "k", "[1", wrap=lambda number: [1, number])
    weights = RewardConfig, REWARD, "weights", "[-1000000 1000000]"
    check_interval(*weights, wrap=lambda number: {"correct": number})


LENGTHS: list[tuple[type[StrictModel], dict[str, Any], str, int, int | None]] = [
    # a section, its other keys, a key, and the lengths of its text
    *((TrackingConfig, {}, key, 1, None) for key in ("mlflow_experiment", "wandb_project", "wandb_entity")),
    (TrackingConfig, {}, "prometheus_host", 1, None),
    (TrackingConfig, {}, "group", 1, 100),
    (TrackingConfig, {}, "notes", 1, 5000),
    *((PromptDataConfig, TRAIN, key, 1, None) for key in ("chat_template", "end_of_turn", "system_prompt")),
    (StopWhenConfig, {"above": 1.0}, "metric", 1, None),
    (JudgeConfig, {}, "model", 1, None),
    (RolloutConfig, {}, "tool_parser", 1, None),
    (RLConfig, RL, "name", 1, 100),
    (RLConfig, RL, "push_to", 1, 96),
    (EvalConfig, EVAL, "name", 1, 100),
]


@pytest.mark.parametrize(("cls", "settings", "key", "least", "most"), LENGTHS)
def test_a_key_takes_texts_of_its_lengths_and_no_others(cls, settings, key, least, most):
    for length in (least, most or 10_000):
        assert getattr(cls(**settings | {key: "x" * length}), key) == "x" * length
    for length in (least - 1, *([] if most is None else [most + 1])):
        with pytest.raises(ValidationError, match=rf"(?m)^{key}$"):
            cls(**settings | {key: "x" * length})


VALUES: list[tuple[type[StrictModel], dict[str, Any], str, list[Any], list[Any]]] = [
    # a section, its other keys, a key, and values that it takes and refuses
    (RLConfig, RL, "name", ["a b.c", "é"], [".a", "a/b", "a\nb", "\x1f"]),
    (RLConfig, RL, "push_to", ["me/it_is-1.0", "a/" + "b" * 96], ["a/b/c", "/b", "a/", "a b", "a/" + "b" * 97]),
    (EvalConfig, EVAL, "name", ["a b.c", "é"], [".a", "a/b", "a\nb", "\x1f"]),
    (SourceConfig, {"path": "a"}, "name", ["", "a b"], ["a/b", "/"]),
    (EvalSetConfig, {"path": "a"}, "name", ["", "a b"], ["a/b", "/"]),
    (RolloutConfig, {"engine": "http"}, "servers", [["http://h"], ["https://h"]], [["ftp://h"], ["h"], [""]]),
    (LoraConfig, {}, "targets", ["all-linear", ["a"]], [[], "a"]),
    (EvalDataConfig, {}, "sets", [[EvalSetConfig(path="a")]], [[]]),
    (TrainerConfig, {}, "freeze", [[], ["a"]], [[""], ["a", ""]]),
    (TrainerConfig, {}, "lr_scales", [{}, {"a": 1.0}], [{"": 1.0}]),
    (TrackingConfig, {}, "tags", [[], ["a", "x" * 64]], [[""], ["a", "x" * 65]]),
    (RolloutConfig, {}, "stop", [[], ["a"]], [[""], ["a", ""]]),
    (RolloutConfig, {}, "allowed_tokens", [[], ["a"] * 1000], [[""], ["a"] * 1001]),
    (JudgeConfig, {"model": "j", "temperature": 0.0}, "allowed_tokens", [[], ["a", "b"]], [["a", ""]]),
]


@pytest.mark.parametrize(("cls", "settings", "key", "taken", "refused"), VALUES)
def test_a_key_takes_and_refuses_these_values(cls, settings, key, taken, refused):
    for value in taken:
        assert getattr(cls(**settings | {key: value}), key) == value
    for value in refused:
        with pytest.raises(ValidationError, match=rf"(?m)^{key}(\.|$)"):
            cls(**settings | {key: value})


SOURCES = {
    "hub:openai/gsm8k/main": "gsm8k",
    "hub:openai/gsm8k": "gsm8k",
    "hub:squad": "squad",
    "data/gsm8k/train.parquet": "train",
    "data/v1.2.jsonl": "v1.2",
    "x/easy.jsonl.gz": "easy",
    "x/saved": "saved",
    "s3://bucket/x/easy.csv.gz": "easy",
    "https://host/rows.jsonl?version=3": "rows",
    "odd?.jsonl": "odd?",
}


def test_a_source_is_called_as_its_file_or_data_set():
    assert {path: SourceConfig(path=path).log_name for path in SOURCES} == SOURCES
    assert SourceConfig(path="hub:squad", name="mine").log_name == "mine"
