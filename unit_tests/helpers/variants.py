"""Settings of algorithms under which they are checked."""

from typing import Any

NEEDED: dict[str, dict[str, Any]] = {
    **{name: {"teacher": "somewhere"} for name in ("opd", "gkd", "minillm")},
    "by_source": {"by_source": {"": {"name": "grpo"}}},
}
OFF = {"correction": {"level": "none"}}
KL_IN_REWARD = {"kl": {"coef": 0.05, "place": "reward"}}
CANDIDATES = {"cov_above": 0.05, "cov_below": 0.6, "fraction": 0.12}
Variant = tuple[str, dict[str, Any]]
VARIANTS: list[Variant] = [
    (
        "grpo",
        {"scale_rewards": "group", "loss_norm": "sequence", "clip_high": 0.2, "kl": {"coef": 0.04, "estimator": "k3"}},
    ),
    ("grpo", {"overlong": {"mode": "filter"}, "kl": {"coef": 0.1}}),
    ("grpo", {"scale_rewards": "batch", "whiten": True, "dual_clip": 3.0, "entropy_coef": 0.01}),
    ("grpo", {"correction": {"level": "sequence", "mode": "mask"}, "kl": {"coef": 0.1, "estimator": "k2"}}),
    ("grpo", {"credit": "turn", "turn_discount": 0.5, "scale_rewards": "group", "dynamic_sampling": True}),
    ("cispo", {"anchor": "rollout", **OFF}),
    ("reinforce_pp", {"baseline": True, **KL_IN_REWARD}),
    ("ppo", {"credit": "turn", "turn_discount": 0.9, "bootstrap_truncated": True, **KL_IN_REWARD}),
    (
        "grpo",
        {
            "kl": {"coef": 0.01, "target": 0.5, "horizon": 20},
            "adaptive_entropy": {"target": 1.0, "delta": 0.01, "high": 0.05},
            "schedules": {"clip_high": {"start": 0.2, "end": 0.3, "steps": 4}},
        },
    ),
    ("grpo", {"kl": {"coef": 0.1, "estimator": "full"}}),
    ("clip_cov", CANDIDATES),
    ("kl_cov", {"fraction": 0.2}),
    ("sft", {"dft": True}),
    ("dpo", {"reference_free": True, "length_norm": True, "beta": 2.0, "target_margin": 1.0}),
]
MORE: list[Variant] = [
    ("distill", {"form": "cross_entropy"}),
    ("distill", {"form": "truncated", "loss_norm": "sequence"}),
    ("gkd", {"divergence": {"beta": 0.0, "topk": 3, "rest": "renormalise"}}),
    ("gkd", {"divergence": {"beta": 1.0, "topk": 3, "support": "student"}, "kl": {"coef": 0.1}}),
    ("minillm", {"length_norm": False}),
    ("wpo", {"form": "ipo", "nll_coef": 0.5}),
    ("grpo", {"kl": {"coef": 0.1, "estimator": "full_forward"}, "entropy_coef": 0.01}),
    ("dpo_nll", {"reference_free": True, "form": "hinge"}),
    ("echo", {"alpha": 0.5, "loss_norm": "sequence", "kl": {"coef": 0.1}, "entropy_coef": 0.01}),
    ("chord", {"phi": False, "mu": 0.5, "loss_norm": "constant"}),
    ("luffy", {"loss_norm": "constant", "scale_rewards": "group"}),
    ("dro", {"anchor": "ref", "level": "sequence", "loss_norm": "sequence_sum"}),
    ("dro", {"anchor": "rollout", **OFF}),
    # with the published k_neg of 3 the weight is a power above 1 of the ratio to the engine, which (k) tells
    ("vespo", {"anchor": "rollout", "k_neg": 2.5, **OFF}),
    ("grpo", {"correction": {"level": "none", "max_drift": 0.5}}),  # beyond the clip, or it hides that
    ("gdpo", {"over": "token"}),
    ("passk", {"form": "best"}),
    ("gpg", {"counts": "nonzero"}),
    ("tilted", {"beta": 2.0}),
    ("top_entropy", {"quantile": 0.5, "entropy_coef": 0.01}),
    ("grpo", {"kl": {"coef": 0.1, "estimator": "score"}, "correction": {"max_drift": 0.5, "drift_from": "prox"}}),
    ("ipo_rl", {"delta": 0.1, "kl_tau": 0.001}),
    ("raft", {"keep": "best", "clip": 0.2}),
    ("dpo", {"form": "exo", "label_smoothing": 0.1}),
    ("dpo", {"form": "apo_zero", "nll_coef": 0.5, "length_decay": 0.5}),
    ("dpo", {"form": "nca", "divergence": "js"}),
    ("grpo", {"correction": {"mode": "clip"}, **KL_IN_REWARD}),
    ("gspo", {"form": "token"}),
    ("dppo", {"divergence": "kl"}),
    ("dpo", {"form": "hinge", "beta": 2.0}),
    ("reward_model", {"target_margin": 0.5, "center": 0.01}),
    ("grpo", {"loss_norm": "constant"}),
    ("grpo", {"dynamic_sampling": True, "overlong": {"mode": "penalty", "max_tokens": 10, "buffer": 4}}),
    ("grpo", {"scale_rewards": "mean", "kl": {"coef": 0.1, "estimator": "k3plus"}}),
    ("grpo", {"correction": {"level": "geometric", "mode": "mask", "low": 0.7, "high": 1.3}}),
    ("gspo", {"ratio": "product"}),
    ("gspo", {"ratio": "product", "form": "token", "leave_one_out": True}),
    ("gspo", {"credit": "turn", "form": "token"}),
    ("cispo", {"loss_norm": "prompt", "scale_rewards": "batch"}),
    ("reinforce_pp", KL_IN_REWARD),
    ("reinforce_pp", {"credit": "turn", "baseline": True, **KL_IN_REWARD}),
    ("ppo", {"value_clip": 0.2, "bootstrap_truncated": True}),
    ("ppo", {"dual_clip": 3.0, **KL_IN_REWARD}),
    ("rloo", KL_IN_REWARD),
    ("rloo", {"credit": "turn", **KL_IN_REWARD}),
    ("dpo", {"form": "ipo", "length_norm": True}),
    ("dpo", {"form": "robust", "label_smoothing": 0.2}),
]
"""More relatives, most of them parts of the variants above in other company: they take twice as long again."""


def name_variant(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(value)
