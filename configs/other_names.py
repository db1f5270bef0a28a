"""Keys of TRL, verl and OpenRLHF, and our key for each: for errors about unknown keys, and for docs/coming_from/.

The pages of docs/coming_from/ say where the meaning or the default differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNames:
    """Names of a setting in other frameworks."""

    ours: str
    """Our key, with a value where theirs is a switch (`placement: colocate`); or several keys."""
    trl: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()
    openrlhf: tuple[str, ...] = ()
    note: str = ""
    """The computation, where ours is not their number."""

    def list_names(self) -> list[tuple[str, str]]:
        """List the frameworks, each with a name."""
        of = (("TRL", self.trl), ("verl", self.verl), ("OpenRLHF", self.openrlhf))
        return [(framework, name) for framework, names in of for name in names]


def _row(ours: str, trl: str = "", verl: str = "", openrlhf: str = "", note: str = "") -> OtherNames:
    return OtherNames(
        ours=ours,
        trl=tuple(trl.split()),
        verl=tuple(verl.split()),
        openrlhf=tuple(openrlhf.split()),
        note=note,
    )


OTHER_NAMES = (
    _row("groups_per_step", verl="data.train_batch_size", openrlhf="rollout.batch_size", note="counts prompts"),
    _row(
        "group_size",
        "num_generations",
        "actor_rollout_ref.rollout.n",
        "rollout.n_samples_per_prompt",
    ),
    _row(
        "updates_per_step",
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation",
        "actor.ppo_mini_batch_size",
        "train.batch_size",
        "the batch of one update is groups_per_step x group_size / updates_per_step samples",
    ),
    _row(
        "trainer.micro_batch_tokens",
        verl="actor.ppo_micro_batch_size_per_gpu actor.ppo_max_token_len_per_gpu actor.use_dynamic_bsz",
        openrlhf="train.micro_batch_size train.max_tokens_per_gpu",
        note="counts tokens, not sequences",
    ),
    _row("sample_reuse", "num_iterations", "actor.ppo_epochs", "train.max_epochs", "of RL; max_staleness allows it"),
    _row(
        "steps",
        "max_steps num_train_epochs",
        "trainer.total_epochs trainer.total_training_steps",
        "train.num_episodes",
        "supervised runs have epochs, too",
    ),
    _row(
        "alg.name",
        "importance_sampling_level",
        "algorithm.adv_estimator policy_loss.loss_mode",
        "algo.advantage.estimator actor.policy_loss_type",
    ),
    _row("alg.loss_norm", "loss_type", "actor.loss_agg_mode", "actor.loss_agg_mode"),
    _row(
        "alg.clip_low and alg.clip_high",
        "epsilon",
        "actor.clip_ratio",
        "actor.eps_clip",
    ),
    _row("alg.clip_low", verl="actor.clip_ratio_low", openrlhf="eps_clip_low_high"),
    _row("alg.clip_high", "epsilon_high", "actor.clip_ratio_high"),
    _row("alg.dual_clip", "delta", "actor.clip_ratio_c", "actor.dual_clip"),
    _row("alg.value_clip", verl="critic.cliprange_value", openrlhf="critic.value_clip"),
    _row("alg.critic_lr", verl="critic.optim.lr", openrlhf="critic.adam.lr", note="with alg.name: ppo"),
    _row("alg.critic_warmup", verl="trainer.critic_warmup", note="with alg.name: ppo"),
    _row("alg.lam", verl="algorithm.lam", openrlhf="algo.advantage.lambd"),
    _row("alg.gamma", verl="algorithm.gamma", openrlhf="algo.advantage.gamma"),
    _row(
        "alg.kl.coef", "beta", "actor.kl_loss_coef algorithm.kl_ctrl.kl_coef", "algo.kl.init_coef kl_coef init_kl_coef"
    ),
    _row("alg.kl.target", verl="algorithm.kl_ctrl.target_kl"),
    _row("alg.kl.horizon", verl="algorithm.kl_ctrl.horizon"),
    _row("alg.kl.place", verl="actor.use_kl_loss algorithm.use_kl_in_reward", openrlhf="algo.kl.use_loss"),
    _row("alg.kl.estimator", "use_bias_correction_kl", "actor.kl_loss_type", "kl_estimator"),
    _row("alg.scale_rewards", "scale_rewards", "algorithm.norm_adv_by_std_in_grpo"),
    _row("alg.entropy_coef", "entropy_coef", "actor.entropy_coeff", "actor.entropy_coef"),
    _row(
        "alg.correction",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max",
        "algorithm.rollout_correction.rollout_is",
        "algo.advantage.is_correction_level algo.advantage.is_correction_mode",
    ),
    _row("alg.dynamic_sampling", verl="algorithm.filter_groups.enable", openrlhf="algo.dynamic_filtering_enable"),
    _row("alg.overlong.mode: filter", "mask_truncated_completions"),
    _row("alg.overlong.buffer", verl="overlong_buffer.len", openrlhf="reward.overlong_buffer_len"),
    _row(
        "alg.overlong.coef",
        verl="overlong_buffer.penalty_factor",
        openrlhf="reward.overlong_penalty_factor",
    ),
    _row("alg.beta and alg.form", "DPOConfig.beta", openrlhf="model.beta model.ipo_enable", note="with alg.name: dpo"),
    _row("model.path", "model_name_or_path", "actor_rollout_ref.model.path", "actor.model_name_or_path pretrain"),
    _row("model.dtype", "bf16 fp16"),
    _row("model.lora", "peft_config use_peft"),
    _row("model.lora.r", "lora_r", "model.lora_rank", "ds.lora.rank"),
    _row("model.lora.alpha", "lora_alpha", "model.lora_alpha", "ds.lora.alpha"),
    _row("model.lora.targets", "lora_target_modules target_modules", "model.target_modules", "ds.lora.target_modules"),
    _row("data.train", "dataset_name train_dataset", "data.train_files", "data.prompt_dataset"),
    _row("data.eval", "eval_dataset", "data.val_files", "eval.dataset"),
    _row(
        "data.max_prompt_tokens",
        "max_prompt_length",
        "data.max_prompt_length data.truncation data.filter_overlong_prompts",
        "prompt_max_len",
        "of RL: a row that is too long is left out",
    ),
    _row("data.max_tokens", "max_length max_seq_length", openrlhf="data.max_len", note="of supervised runs"),
    _row("data.train_on", "assistant_only_loss completion_only_loss", openrlhf="multiturn pretrain_mode_enable"),
    _row("precompute_ref_logp", "precompute_ref_log_probs"),
    _row(
        "rollout.max_new_tokens",
        "max_completion_length max_new_tokens",
        "data.max_response_length rollout.response_length",
        "rollout.max_new_tokens generate_max_len",
        "of all turns of an episode",
    ),
    _row("rollout.temperature", "temperature", "rollout.temperature", "rollout.temperature"),
    _row("rollout.top_p", "top_p", "rollout.top_p", "rollout.top_p"),
    _row("rollout.top_k", "top_k", "rollout.top_k", "rollout.top_k", note="0 for all tokens, not -1"),
    _row("rollout.min_p", "min_p"),
    _row("rollout.engine", "use_vllm", "rollout.name", note="vllm or hf"),
    _row("placement", "vllm_mode", "hybrid_engine", "train.colocate_all colocate_all_models", "colocate or separate"),
    _row("rollout.sleep_mode", "vllm_enable_sleep_mode", "free_cache_engine", "vllm.enable_sleep"),
    _row("rollout.num_engines", openrlhf="vllm.num_engines vllm_num_engines"),
    _row(
        "rollout.tensor_parallel_size",
        "vllm_tensor_parallel_size",
        "rollout.tensor_model_parallel_size",
        "vllm.tensor_parallel_size",
    ),
    _row(
        "rollout.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "rollout.gpu_memory_utilization",
        "vllm.gpu_memory_utilization",
    ),
    _row(
        "rollout.env",
        verl="rollout.multi_turn.enable",
        openrlhf="train.agent_func_path",
        note="with rollout.max_turns",
    ),
    _row(
        "max_staleness",
        "AsyncGRPOConfig.max_staleness",
        "v1.trainer_mode v1.sampler.max_off_policy_threshold",
        "train.async_enable train.async_queue_size",
        "counts steps; above 0 is asynchronous",
    ),
    _row("weight_sync.every", "weight_sync_steps", "v1.separate_async.parameter_sync_step"),
    _row("weight_sync.transport", openrlhf="vllm.sync_backend vllm_sync_backend"),
    _row("weight_sync.pause_mode", openrlhf="train.partial_rollout_enable"),
    _row(
        "reward.function",
        "reward_funcs",
        "reward.custom_reward_function.path custom_reward_function.path reward_model.path",
        "reward.remote_url reward.model_name_or_path",
        "a Python file, or reward_model",
    ),
    _row("reward.weights", "reward_weights"),
    _row("trainer.lr", "learning_rate", "optim.lr", "actor.adam.lr actor_learning_rate"),
    _row("trainer.freeze", verl="actor.freeze_vision_tower", note="[vision]"),
    _row("trainer.betas", "adam_beta1 adam_beta2", "optim.betas", "actor.adam.betas"),
    _row("trainer.weight_decay", "weight_decay", "optim.weight_decay", "actor.adam.weight_decay l2"),
    _row("trainer.lr_schedule", "lr_scheduler_type", "optim.lr_scheduler_type", "actor.lr_scheduler lr_scheduler"),
    _row("trainer.warmup_updates", "warmup_steps warmup_ratio", "optim.lr_warmup_steps", "lr_warmup_ratio"),
    _row("trainer.max_grad_norm", "max_grad_norm", "actor.grad_clip", "max_norm"),
    _row("trainer.strategy", verl="actor.strategy", note="deepspeed or fsdp2"),
    _row("trainer.zero_stage", openrlhf="ds.zero_stage"),
    _row("trainer.ranks", verl="trainer.n_gpus_per_node", openrlhf="actor.num_gpus_per_node actor_num_gpus_per_node"),
    _row("trainer.sequence_parallel", verl="actor.ulysses_sequence_parallel_size", openrlhf="ring_attn_size"),
    _row("trainer.gradient_checkpointing", "gradient_checkpointing", "model.enable_gradient_checkpointing"),
    _row("trainer.compile", "torch_compile", "actor.use_torch_compile"),
    _row("trainer.layout", "packing padding_free", "model.use_remove_padding", "ds.packing_samples packing_samples"),
    _row("checkpoint.every", "save_steps save_strategy", "trainer.save_freq", "ckpt.save_steps"),
    _row("checkpoint.keep", "save_total_limit", "trainer.max_actor_ckpt_to_keep", "ckpt.max_num max_ckpt_num"),
    _row("resume", "resume_from_checkpoint", "trainer.resume_mode", "ckpt.load_enable load_checkpoint"),
    _row("eval_every", "eval_steps eval_strategy", "trainer.test_freq trainer.val_before_train", "eval.steps"),
    _row("run_dir", "output_dir", "trainer.default_local_dir", "ckpt.path"),
    _row("save_to", openrlhf="ckpt.output_dir save_path"),
    _row("push_to", "push_to_hub hub_model_id"),
    _row("trackers", "report_to", "trainer.logger", "logger.wandb.key use_wandb"),
    _row("name", "run_name", "trainer.experiment_name", "logger.wandb.run_name wandb_run_name"),
    _row("tracking.wandb_project", verl="trainer.project_name", openrlhf="logger.wandb.project wandb_project"),
)
"""One row for each key of ours. A name with its section is enough where the sections above it vary."""

OTHER_VALUES: dict[str, dict[str, tuple[str, str]]] = {
    "alg.loss_norm": {
        "dapo": ("TRL", "token"),
        "bnpo": ("TRL", "nearest to token, which is a mean over the update and not over a micro-batch"),
        "grpo": ("TRL", "sequence"),
        "luspo": ("TRL", "sequence_sum, with alg.name: gspo"),
        "dr_grpo": ("TRL", "constant"),
        "token-mean": ("verl", "token"),
        "seq-mean-token-mean": ("verl", "sequence"),
        "seq-mean-token-sum": ("verl", "sequence_sum"),
        "seq-mean-token-sum-norm": ("verl", "constant"),
    },
    "alg.kl.estimator": {
        "kl": ("verl", "k1"),
        "mse": ("verl", "k2"),
        "low_var_kl": ("verl", "k3"),
        "k3+": ("verl", "k3plus"),
    },
    "alg.name": {
        "gae": ("verl", "ppo"),
        "reinforce_plus_plus": ("verl", "reinforce_pp"),
        "reinforce": ("OpenRLHF", "reinforce_pp"),
        "reinforce_baseline": ("OpenRLHF", "reinforce_pp, with alg.baseline: true"),
        "group_norm": ("OpenRLHF", "grpo, with alg.scale_rewards: group"),
        "dr_grpo": ("OpenRLHF", "grpo, as in configs/dr_grpo.yaml"),
        "dapo": ("verl", "grpo, as in configs/dapo.yaml"),
    },
    "trainer.strategy": {"fsdp": ("verl", "fsdp2")},
}
"""Values of other frameworks for a key of ours: the framework, and our value."""

_CUT = (
    "the trainer's distribution must be the engine's, so only rollout.temperature, top_p, top_k, min_p and "
    "allowed_tokens, which the trainer repeats, may change it while sampling (docs/faq.md)"
)
NOT_HERE = {
    **dict.fromkeys(("typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"), _CUT),
    **dict.fromkeys(("clip_range", "reward_clip_range"), "clip in your reward"),
}
"""Reasons why a key has no counterpart, by its last name."""

RENAMED = {"trainer.vision": "trainer.freeze, a list: trainer.freeze=[vision] is what trainer.vision=frozen was"}
"""Keys of earlier versions, with what they are now."""


def describe_other_name(key: str, value: object = None, *, is_certain: bool = False) -> str:
    """Return our name for another framework's key, as a clause; "" for an unknown name.

    key: dotted, as far as the recipe has it. value: what the recipe sets it to; the first key below a section counts.
    is_certain: without names that are only the last word of a longer one, which may be a word of ours misplaced.

    >>> describe_other_name("num_generations")
    'num_generations of TRL is group_size here'
    >>> describe_other_name("actor_rollout_ref", {"rollout": {"n": 8}})
    'n of verl is group_size here'
    """
    while isinstance(value, Mapping) and value:
        below, value = next(iter(value.items()))
        key = f"{key}.{below}"
    if key in RENAMED:
        return f"it is now {RENAMED[key]}"
    given = key.split(".")
    if given[-1] in NOT_HERE:
        return f"there is no {given[-1]} here: {NOT_HERE[given[-1]]}"
    ranked: dict[tuple[int, bool], dict[str, list[str]]] = {}
    for row in OTHER_NAMES:
        for framework, name in row.list_names():
            shared = _count_shared(name.split("."), given)
            # A whole name is meant rather than the end of a longer one: optim.lr, not critic.optim.lr.
            rank = shared, shared == name.count(".") + 1
            meant = f"{row.ours} here" + (f" ({row.note})" if row.note else "")
            ranked.setdefault(rank, {}).setdefault(meant, []).append(framework)
    closest = max(ranked)
    if not closest[0] or (is_certain and closest == (1, False)):
        return ""
    whole, partial = ranked[closest], ranked.get((closest[0], False), {})
    return "; ".join(
        f"{given[-1]} of {' and '.join(dict.fromkeys(frameworks + partial.get(meant, [])))} is {meant}"
        for meant, frameworks in whole.items()
    )


def describe_other_value(key: str, value: object) -> str:
    """Return our value for another framework's value of a key of ours, as a clause; "" for an unknown one.

    >>> describe_other_value("alg.loss_norm", "token-mean")
    'token-mean of verl is token here'
    """
    framework, ours = OTHER_VALUES.get(key, {}).get(str(value), ("", ""))
    return f"{value} of {framework} is {ours} here" if ours else ""


def _count_shared(name: list[str], given: list[str]) -> int:
    """Count the equal parts at the end of two dotted names."""
    shared = 0
    while shared < min(len(name), len(given)) and name[-1 - shared] == given[-1 - shared]:
        shared += 1
    return shared
