"""Settings that make no sense together: each is refused in a sentence that names the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algs import load_nested
from algs.reductions import kth, quantile
from algs.teachers import Teacher
from core.errors import UserError

IN_REWARD: dict[str, Any] = {"kl": {"coef": 0.1, "place": "reward"}}
PENALTY: dict[str, Any] = {"overlong": {"mode": "penalty", "buffer": 2}}
TEACHER: dict[str, Any] = {"teacher": "somewhere"}
UNCORRECTED: dict[str, Any] = {"correction": {"level": "none"}}
NO_REWARD = "the reward has no effect on training: kl.place: reward and overlong.mode: penalty would do nothing"
TWICE = (
    "this loss is weighted by pi / pi_rollout already, and a correction would do it twice: set correction.level to none"
)
GRPO: dict[str, Any] = {"name": "grpo"}


def mix(**sources: Any) -> dict[str, Any]:
    return {"by_source": sources}


GDPO_SCALES = "GDPO has its own scale: leave out scale_rewards, leave_one_out and whiten"
GDPO_READS = (
    "GDPO reads the parts of the reward: kl.place: reward, overlong.mode: penalty and credit: turn would do nothing"
)
ONE_NUMBER = "the loss is one number per completion or pair, and only {} weights it correctly: leave it out"
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("cispo", {"anchor": "rollout"}, TWICE),
    ("p3o", {"correction": {"level": "token"}}, TWICE),
    (
        "gspo",
        {"credit": "turn"},
        "this loss is one number per episode, and credit: turn gives each turn its own: leave it out",
    ),
    (
        "ppo",
        {"credit": "turn", "gamma": 0.9},
        "gamma discounts tokens, and credit: turn has one return for all of a turn: set turn_discount",
    ),
    ("grpo", {"turn_discount": 0.9}, "turn_discount has no effect with credit: episode: set credit: turn"),
    (
        "by_source",
        mix(a=GRPO) | {"entropy_coef": 0.1},
        "entropy_coef is a setting of each source's algorithm: set it in by_source",
    ),
    (
        "by_source",
        mix(a=GRPO) | {"coefs": {"b": 1.0}},
        "coefs names b, which by_source has not: name one of its sources",
    ),
    *(
        (
            "by_source",
            mix(a={"name": name}),
            f"by_source.a: {cls} has a value model or totals, which a mixture cannot train: use another",
        )
        for name, cls in (("ppo", "PPO"), ("reward_model", "RewardModel"), ("p3o", "P3O"))
    ),
    *(
        (
            "by_source",
            mix(a=settings),
            f"by_source.a: {cls} changes from step to step or update to update: use it in a run of its own",
        )
        for settings, cls in (
            ({**GRPO, "kl": {"coef": 0.1, "target": 0.1}}, "GRPO"),
            ({**GRPO, "schedules": {"clip_high": {"start": 0.2, "end": 0.3, "steps": 2}}}, "GRPO"),
            ({"name": "m2po"}, "M2PO"),
        )
    ),
    (
        "by_source",
        mix(a={**GRPO, "kl": {"coef": 0.1, "ema": 0.5}}, b={**GRPO, "kl": {"coef": 0.1}}),
        "by_source.a: GRPO has another ref_logp than a source after it: use one of them alone",
    ),
    (
        "by_source",
        mix(a={"name": "dpo"}),
        "by_source.a: DPO compares completions of given rows: use it in a run of its own",
    ),
    (
        "by_source",
        mix(a={**GRPO, **PENALTY}),
        "by_source.a: GRPO has overlong.mode penalty without max_tokens: set overlong.max_tokens",
    ),
    (
        "gkd",
        TEACHER | {"divergence": {"topk": 3, "beta": 0.5}},
        "topk compares one distribution with another, and beta=0.5 mixes both: set beta to 0 or 1",
    ),
    *(
        ("gkd", TEACHER | {"divergence": more}, "support and rest say which tokens topk leaves out: set topk")
        for more in ({"support": "student"}, {"rest": "renormalise"})
    ),
    (
        "dpo",
        {"form": "hinge", "label_smoothing": 0.1},
        "label_smoothing belongs to the forms sigmoid, robust and exo, not to hinge: leave it out",
    ),
    ("dpo", {"form": "exo"}, "form: exo divides by label_smoothing: set it, such as 0.1"),
    *(
        (
            "dpo",
            more | {"target_margin": 1.0},
            "target_margin belongs to the form sigmoid without label_smoothing: leave it out",
        )
        for more in ({"form": "hinge"}, {"label_smoothing": 0.1})
    ),
    (
        "dpo",
        {"length_norm": True, "length_decay": 0.5},
        "length_decay is for sums, and length_norm takes means: leave one of them out",
    ),
    *(("dpo", {"loss_norm": norm}, ONE_NUMBER.format("prompt")) for norm in ("token", "sequence")),
    *(
        (name, {"loss_norm": norm}, ONE_NUMBER.format("sequence"))
        for name in ("bco", "kto", "offline_dro")
        for norm in ("token", "prompt")
    ),
    *(
        (
            "dro",
            {"level": "sequence", **more},
            "level: sequence is one number per episode: set loss_norm: sequence_sum, credit: episode",
        )
        for more in ({}, {"loss_norm": "sequence_sum", "credit": "turn"})
    ),
    *(("gdpo", more, GDPO_READS) for more in (IN_REWARD, PENALTY, {"credit": "turn"})),
    *(("gdpo", more, GDPO_SCALES) for more in ({"scale_rewards": "group"}, {"leave_one_out": True}, {"whiten": True})),
    *(
        (name, settings | more, NO_REWARD)
        for name, settings in (("gkd", TEACHER), ("minillm", TEACHER), ("opd", TEACHER), ("opsd", {}))
        for more in (IN_REWARD, PENALTY)
    ),
    *(
        (
            "sdpo",
            more,
            "the reward only chooses solutions: kl.place: reward and overlong.mode: penalty would do nothing",
        )
        for more in (IN_REWARD, PENALTY)
    ),
    ("opd", {"teacher": ""}, "name the path of a model, or a path for each data set"),
    ("opsd", {"hint": "x"}, "the teacher would read what the policy reads: write {answer} where the answer is to be"),
    ("sdpo", {"shown": "x"}, "the teacher would see no solution: write {solution} where it is to be"),
    (
        "grpo",
        {"schedules": {"clip_high": 3}},
        "the schedule of clip_high is 3, and must have start, end and steps",
    ),
    (
        "grpo",
        {"kl": {"ema": 0.5}},
        "coef is 0, so no reference would move: set coef, or leave out reset_every and ema",
    ),
    (
        "grpo",
        {"kl": {"coef": 0.1, "reset_optimizer": True}},
        "reset_optimizer has no effect without a reset: set reset_every, or leave it out",
    ),
    ("grpo", {"kl": {"coef": 0.1, "ema_every": 2}}, "ema_every has no effect without ema: set ema, or leave it out"),
    ("grpo", {"kl": {"target": 0.1}}, "target adapts coef, and 0 stays 0: set coef, such as to 0.1"),
    ("grpo", {"overlong": {"mode": "penalty"}}, "mode: penalty needs buffer, in tokens"),
    (
        "grpo",
        {"overlong": {"mode": "penalty", "buffer": 9, "max_tokens": 8}},
        "buffer=9 must not be larger than max_tokens=8",
    ),
    (
        "grpo",
        {"correction": {"mode": "mask", "low": 3.0}},
        "low=3.0 is above high=2.0, so every token would be masked: swap them",
    ),
    (
        "vespo",
        {"anchor": "rollout", "rollout_cap": 2.0} | UNCORRECTED,
        "rollout_cap is for anchor: prox, W is pi / pi_rollout already: leave it out",
    ),
]


@pytest.mark.parametrize(("name", "settings", "sentence"), CASES)
def test_settings_that_make_no_sense_together_are_refused(name, settings, sentence):
    with pytest.raises(UserError) as refused:
        load_nested({"name": name, **settings}, "x")
    assert str(refused.value).endswith(sentence), refused.value


def test_what_is_just_allowed_is_allowed():
    for name, settings in (
        ("grpo", {"credit": "turn", "turn_discount": 0.9, "correction": {"low": 3.0}}),
        ("ppo", {"gamma": 0.9}),
        ("dpo", {"form": "exo", "label_smoothing": 0.1, "length_decay": 0.5}),
        ("dpo", {"form": "robust", "label_smoothing": 0.1, "length_norm": True}),
        ("dpo", {"target_margin": 1.0}),
        ("gkd", TEACHER | {"divergence": {"topk": 3, "beta": 1.0, "support": "student", "rest": "renormalise"}}),
        ("dro", {"level": "sequence", "loss_norm": "sequence_sum"}),
        ("grpo", {"overlong": {"mode": "penalty", "buffer": 8, "max_tokens": 8}}),
        ("grpo", {"correction": {"mode": "mask", "low": 2.0}}),
        ("gkd", TEACHER | {"kl": {"coef": 0.1}, "overlong": {"mode": "filter"}}),
        ("vespo", {"anchor": "rollout"} | UNCORRECTED),
        ("vespo", {"anchor": "prox", "rollout_cap": 2.0} | UNCORRECTED),
    ):
        assert load_nested({"name": name, **settings}, "x")


TEACHERS: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, 'a teacher has no model: name a path, "start" or "live"'),
    *(
        (
            {"model": "m", **more},
            "a teacher that moves begins at the policy's weights, and this one is m: set its model to start, or leave "
            "out ema, reset_every and when",
        )
        for more in ({"ema": 0.1}, {"reset_every": 1}, {"when": bool})
    ),
    *(
        ({"ema": ema}, f"a teacher's ema={ema} must be above 0 and below 1: the rate of one step")
        for ema in (0.0, 1.0, -0.5, float("nan"))
    ),
    *(
        (more, "a teacher's ema_every and reset_every count steps: set them to 1 or more")
        for more in ({"ema": 0.5, "ema_every": 0}, {"reset_every": 0})
    ),
    ({"ema_every": 2}, "a teacher's ema_every has no effect without ema: set ema, or leave it out"),
    (
        {"with_optimizer": True, "ema": 0.5},
        "a teacher's with_optimizer has no effect without a reset: set reset_every or when",
    ),
    (
        {"model": "live"},
        "a live teacher that reads what the policy reads is the policy, and their KL is always 0: give it a prompt, or "
        "set its model to start",
    ),
]


@pytest.mark.parametrize(("settings", "sentence"), TEACHERS)
def test_a_teacher_that_makes_no_sense_is_told_in_one_sentence(settings, sentence):
    with pytest.raises(UserError) as refused:
        Teacher(**{"model": "start", **settings})
    assert str(refused.value) == sentence


def test_places_of_order_statistics_have_bounds():
    x = torch.arange(3.0)
    for more, sentence in (
        ({}, "kth() needs either k or fraction"),
        ({"k": 1, "fraction": 0.5}, "kth() needs either k or fraction"),
        ({"k": 0}, "kth() needs k >= 1 or a fraction in [0, 1], found k=0, fraction=None"),
        ({"fraction": 1.01}, "kth() needs k >= 1 or a fraction in [0, 1], found k=None, fraction=1.01"),
        ({"fraction": -0.01}, "kth() needs k >= 1 or a fraction in [0, 1], found k=None, fraction=-0.01"),
    ):
        with pytest.raises(ValueError) as refused:
            kth(x, **more)
        assert str(refused.value) == sentence
    for q in (-0.01, 1.01):
        with pytest.raises(ValueError, match=r"quantile\(\) needs q in \[0, 1\], found"):
            quantile(x, q)
    assert [kth(x, k=1).at, kth(x, fraction=0.0).at, kth(x, fraction=1.0).at] == [1.0, 0.0, 1.0]
    assert [quantile(x, q).at for q in (0.0, 1.0)] == [0.0, 1.0]


def test_a_file_is_no_part_of_a_mixture(tmp_path):
    (tmp_path / "mine.py").write_text("from algs.grpo import GRPO\n\nclass Mine(GRPO):\n    pass\n")
    with pytest.raises(UserError) as refused:
        load_nested({"file": str(tmp_path / "mine.py")}, "by_source.a")
    assert str(refused.value) == "alg.by_source.a.file: only modules of algs/ may be mixed: set a name instead"
