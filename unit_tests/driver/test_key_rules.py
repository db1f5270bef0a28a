"""Each key that has no effect is refused under the one condition, and passes under the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from algs.grpo import GRPO
from configs.data_schema import HoldOutConfig, SourceConfig
from configs.judge_schema import JudgeConfig
from configs.schema import RLConfig, SLConfig
from driver.checks.unused_keys import RULES, TERM_RULES, check_keys
from driver.load_recipe import load_recipe
from unit_tests.helpers.sentences import tell

Recipe = Callable[..., str]
Changes = dict[str, Any]
LATER, HELD_OUT = {"model.path": "models/made_later"}, {"data.eval": "x.parquet"}
SHARED, JUDGE = {"placement": "colocate"}, JudgeConfig(model="m")
TURNS = {"alg": {"credit": "turn"}, "rollout.max_turns": 2}
OF_RECIPES: list[tuple[tuple[str, ...], list[Changes], list[Changes]]] = [
    # keys, settings without effect of these, settings with one
    (("max_resumes",), [{}], [{"on_failure": "resume"}]),
    (("ship_code",), [{}], [{"ray_address": "10.0.0.1:6379"}]),
    (("checkpoint.keep",), [{}], [{"checkpoint.every": 1}]),
    (("data.eval_rows",), [{}, {"data.eval": HoldOutConfig(from_train=3)}], [HELD_OUT]),
    (("trainer.betas", "trainer.eps"), [{"trainer.optimizer": "sgd"}], [{}, {"trainer.optimizer": "muon"}]),
    (("trainer.weight_decay",), [{"trainer.optimizer": "torch.optim.NAdam"}], [{}]),
    (("trainer.optimizer_settings",), [{}, {"trainer.optimizer": "sgd"}], [{"trainer.optimizer": "muon"}]),
    (("trainer.zero_stage", "trainer.deepspeed"), [{"trainer.strategy": "fsdp2"}], [{}]),
    (("trainer.offload",), [{}], [{"trainer.strategy": "fsdp2"}]),
    (("trainer.share_prefixes",), [{"trainer.layout": "padded"}], [{}]),
    (("data.max_image_pixels", "model.lora.vision"), [{}, {**LATER, "model.images": "off"}], [LATER]),
    (("model.images",), [{}], [LATER]),
    (("rollout.max_turns",), [{}], [{"rollout.env": "calculator"}, {"rollout.agent": "an agent"}]),
    (("weight_sync.whole_every",), [{}], [{"weight_sync.delta": True}]),
    (("rollout.sleep_mode",), [{}], [SHARED]),
    (
        ("rollout.restarts",),
        [SHARED, {**SHARED, "judge": JudgeConfig(model="policy")}],
        [{}, {**SHARED, "judge": JUDGE}],
    ),
    (("capture.weights",), [{}], [{"capture.every": 1}, {"capture.on": ["kl"]}]),
    (("capture.most",), [{"capture.every": 1}], [{"capture.on": ["kl"]}]),
    (("capture.kl_above",), [{"capture.on": ["grad_norm"]}], [{"capture.on": ["kl"]}]),
    (("capture.grad_norm_times",), [{"capture.on": ["kl"]}], [{"capture.on": ["grad_norm"]}]),
    (("profile.trace", "profile.memory"), [{}], [{"profile.steps": [0]}]),
    (("eval_samples", "eval_pass_reward"), [{}], [HELD_OUT]),
    (("alg.credit",), [{**TURNS, "rollout.max_turns": 1}], [TURNS, {"alg": {"credit": "episode"}}]),
]
OF_TERMS: list[tuple[tuple[str, ...], list[Changes], list[Changes]]] = [
    (("alg.kl.place", "alg.kl.estimator"), [{}], [{"kl.coef": 0.1}]),
    (("alg.schedules.kl.coef",), [{"kl.target": 0.1}], [{}]),
    (("alg.kl.horizon",), [{}], [{"kl.target": 0.1}]),
    (("alg.adaptive_entropy.delta", "alg.adaptive_entropy.high"), [{}], [{"adaptive_entropy.target": 0.2}]),
    (("alg.entropy_coef", "alg.schedules.entropy_coef"), [{"adaptive_entropy.target": 0.2}], [{}]),
    (
        ("alg.overlong.max_tokens", "alg.overlong.buffer", "alg.overlong.coef"),
        [{}, {"overlong.mode": "filter"}],
        [{"overlong.mode": "penalty"}],
    ),
    (("alg.correction.mode", "alg.correction.high"), [{"correction.level": "none"}], [{}]),
    (("alg.correction.drift_from",), [{}], [{"correction.max_drift": 0.1}]),
    (
        ("alg.correction.low",),
        [{}, {"correction.level": "none", "correction.mode": "clip"}],
        [{"correction.mode": "clip"}, {"correction.mode": "mask"}],
    ),
    (
        ("alg.correction.token_high",),
        [{}, {"correction.mode": "mask"}, {"correction.level": "geometric"}],
        [{"correction.level": "geometric", "correction.mode": "mask"}],
    ),
]


def change(model: Any, changes: Changes) -> Any:
    """Return the settings with some changed by their dotted keys, unchecked."""
    for dotted, value in changes.items():
        key, _, below = dotted.partition(".")
        own = change(getattr(model, key), {below: value}) if below else value
        model = model.model_copy(update={key: own})
    return model


def test_every_key_without_effect_is_refused_and_no_other(recipe: Recipe):
    loaded = load_recipe(RLConfig, recipe(), [])
    assert [keys for keys, _, _ in OF_RECIPES] == [rule.keys for rule in RULES]
    assert [keys for keys, _, _ in OF_TERMS] == [rule.keys for rule in TERM_RULES]

    def check(key: str, of_recipe: Changes, of_terms: Changes) -> None:
        check_keys(change(loaded.cfg, of_recipe), change(loaded.alg, of_terms), frozenset({"steps", key}))

    for table in (OF_RECIPES, OF_TERMS):
        for (keys, without, within), rule in zip(table, RULES if table is OF_RECIPES else TERM_RULES, strict=True):
            for key in keys:
                for settings in without:
                    given = (settings, {}) if table is OF_RECIPES else ({}, settings)
                    said = tell(lambda key=key, given=given: check(key, *given))
                    assert said == f"{key} is set and would not be read, because {rule.why}: leave it out"
                for settings in within:
                    check(key, *((settings, {}) if table is OF_RECIPES else ({}, settings)))


def test_a_supervised_run_has_no_keys_of_engines_and_terms(recipe: Recipe):
    rows = load_recipe(SLConfig, recipe(kind="sl"), [])
    of_engines = {"rollout.max_turns", "rollout.sleep_mode", "rollout.restarts", "weight_sync.whole_every"}
    of_terms = {key for rule in TERM_RULES for key in rule.keys}
    check_keys(rows.cfg, rows.alg, frozenset(of_engines | of_terms | {"alg.credit", "data.train_on"}))
    pairs: Any = SimpleNamespace(rows="pairs", schedules={}, value_lr=None)
    assert tell(lambda: check_keys(rows.cfg, pairs, frozenset({"data.train_on"}))) == (
        "data.train_on is set and would not be read: this algorithm trains on the last reply of each row, whatever "
        "data.train_on is: leave it out"
    )


def test_keys_that_another_key_replaces_are_refused(recipe: Recipe):
    loaded = load_recipe(RLConfig, recipe({"model.lora": {}}), [])
    scheduled = GRPO(schedules={"clip_high": [{"start": 0.1, "end": 0.2, "steps": 3}]})
    with_values: Any = SimpleNamespace(rows="conversations", schedules={}, value_lr=1e-3)
    freeze, budget = frozenset({"trainer.freeze"}), frozenset({"eval_reward.judge_budget.calls"})
    check_keys(loaded.cfg, with_values, freeze)
    check_keys(change(loaded.cfg, {"model.lora": None}), loaded.alg, freeze)
    for alg, given, sentence in (
        (
            scheduled,
            frozenset({"alg.clip_high"}),
            "alg.clip_high is set and would not be read, because alg.schedules has it: leave one of them out",
        ),
        (
            loaded.alg,
            freeze,
            "trainer.freeze is set and would not be read, because with model.lora all weights are frozen anyway, and "
            "model.lora.targets and model.lora.vision choose the layers with an adapter: leave it out",
        ),
        (
            loaded.alg,
            budget,
            "eval_reward.judge_budget is set and would not be read, because reward.judge_budget counts the judges of "
            "both rewards: leave it out",
        ),
    ):
        assert tell(lambda alg=alg, given=given: check_keys(loaded.cfg, alg, given)) == sentence


def test_keys_of_a_source_that_cannot_have_an_effect_are_refused(recipe: Recipe):
    loaded = load_recipe(RLConfig, recipe(), [])

    def check(key: str, *sources: SourceConfig) -> None:
        given = [*sources] if key == "data.train" else sources[0]
        check_keys(change(loaded.cfg, {key: given}), loaded.alg, frozenset())

    plain, saved = SourceConfig(path="b.jsonl"), {"path": "a_folder"}
    check("data.train", SourceConfig(**saved, split="x", lazy=True, replacement=True), plain)
    check("data.train", SourceConfig(**saved, ratio=2), plain)
    check("data.eval", SourceConfig(**saved, split="x"))
    for key, source, sentence in (
        ("data.train", {**saved, "ratio": 2}, "ratio is set and would not be read, because there is no other source"),
        ("data.eval", {**saved, "lazy": True}, "lazy is set and would not be read, because every row is measured"),
        (
            "data.eval",
            {**saved, "replacement": True},
            "replacement is set and would not be read, because every row is measured once",
        ),
        *(
            (
                "data.train",
                {"path": f"a{end}", "split": "x"},
                f"split is set and would not be read, because a{end} is one file",
            )
            for end in (".parquet", ".jsonl", ".csv", ".arrow", ".feather", ".jsonl.gz", ".csv.gz")
        ),
    ):
        assert tell(lambda key=key, source=source: check(key, SourceConfig(**source))) == f"{key}: {sentence}"
