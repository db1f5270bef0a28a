"""What a recipe is once it has been read: with defaults of its algorithm and engine, and what it inherits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from algs.grpo import GRPO
from configs.schema import RLConfig, SLConfig
from core.errors import UserError
from driver.checks import explain_layout
from driver.checks.explain_layout import describe_rows
from driver.checks.explain_texts import describe_texts, find_tokenizer
from driver.load_recipe import load_config_of_run, load_recipe, with_forms, with_length_limit
from modeling.hf_config import ModelUnreadable
from unit_tests.helpers.runs import ROOT, file_of
from unit_tests.helpers.sentences import tell

Recipe = Callable[..., str]
TWICE = """
from algs.grpo import GRPO
from core.types.terms import Term

class Twice(GRPO):
    terms = property(lambda self: (Term("rl", self.loss), Term("rl", self.loss)))
"""


def test_a_recipe_has_its_algorithms_defaults_and_where_keys_are_from(recipe: Recipe, tmp_path: Path):
    base = Path(recipe({"seed": 3}))
    own = file_of(tmp_path / "own.yaml", "base: rl.yaml\nsteps: 5\nrollout: {max_new_tokens: 9}\n")
    loaded = load_recipe(RLConfig, own, ["alg.clip_low=0.1", "rollout={engine: hf, max_new_tokens: 7}", "name=x"])
    cfg, alg = loaded.cfg, loaded.alg
    assert (cfg.steps, cfg.seed, cfg.rollout.max_new_tokens, cfg.name) == (5, 3, 7, "x")
    assert type(alg) is GRPO and cfg.alg == alg.model_dump() and (alg.clip_low, alg.clip_high) == (0.1, 0.28)
    assert loaded.alg_spec.in_package and loaded.alg_spec.path == str(ROOT / "algs" / "grpo.py")
    assert loaded.why_text == "" and cfg.model.images == "auto"
    assert set(loaded.inherited.values()) == {base} and {"seed", "group_size", "alg.name"} <= loaded.inherited.keys()
    assert not {"name", "steps", "rollout.engine", "rollout.max_new_tokens", "alg.clip_low"} & loaded.inherited.keys()
    assert load_recipe(RLConfig, yaml.safe_load(base.read_text()), []).inherited == {}


def test_a_config_of_a_run_may_hold_keys_without_effect(recipe: Recipe, tmp_path: Path):
    path = recipe({"checkpoint.keep": 5})
    said = "checkpoint.keep is set and would not be read, because checkpoint.every is 0: leave it out"
    assert tell(lambda: load_recipe(RLConfig, path, [])) == said
    loaded = load_config_of_run(RLConfig, Path(path), ["seed=4"])
    assert (loaded.cfg.checkpoint.keep, loaded.cfg.seed, loaded.inherited) == (5, 4, {})
    written = file_of(tmp_path / "config.yaml", yaml.safe_dump(loaded.cfg.model_dump(mode="json")))
    assert load_config_of_run(RLConfig, Path(written), []).cfg == loaded.cfg


def test_wrong_values_are_refused_with_the_key(recipe: Recipe, tmp_path: Path):
    twice = file_of(tmp_path / "twice.py", TWICE)
    for changes, said in (
        ({"ray_address": "a"}, "ray_address='a' is not of the form host:port"),
        ({"trackers": ["comet"]}, "trackers: there is no 'comet'"),
        ({"alg.clip_hgih": 1.0}, "alg.clip_hgih"),
        ({"alg.name": "grop"}, "alg.name"),
        ({"alg": {"file": twice}}, "Twice: two terms have the same name, found ["),
        ({"stop_when": {"metric": "reward/maen", "above": 1}}, "stop_when.metric=reward/maen: this run logs no such"),
    ):
        assert tell(lambda changes=changes: load_recipe(RLConfig, recipe(changes), [])).startswith(said)


def test_the_settings_of_a_sampler_are_written_down(recipe: Recipe):
    assert load_recipe(RLConfig, recipe(), []).cfg.data.sampler is None
    given = load_recipe(RLConfig, recipe({"data.sampler": "thompson"}), []).cfg.data.sampler
    assert given is not None and given["name"] == "thompson" and len(given) > 1


def test_the_penalty_of_length_ends_where_the_budget_does():
    penalty = {"overlong": {"mode": "penalty", "buffer": 2}}
    limited = with_length_limit(GRPO(**penalty), 9)
    assert limited == GRPO(overlong={"mode": "penalty", "buffer": 2, "max_tokens": 9})
    for alg in (GRPO(), limited, SimpleNamespace()):
        given: Any = alg
        assert with_length_limit(given, 5) is given


def test_forms_of_rows_are_those_that_were_found(recipe: Recipe):
    loaded = load_recipe(SLConfig, recipe({"data.eval": "x.jsonl"}, kind="sl"), [])

    def feed(form: str, *, is_lazy: bool) -> Any:
        return SimpleNamespace(sources=[SimpleNamespace(form=form, is_lazy=is_lazy)])

    found = with_forms(loaded, feed("alpaca", is_lazy=True), feed("ours", is_lazy=False)).cfg.data
    [train] = found.list_sources("train")
    assert (train.form, train.lazy, found.eval) == ("alpaca", True, "x.jsonl")
    alone = with_forms(loaded, feed("ours", is_lazy=False), None).cfg
    assert alone == loaded.cfg


# Explained ---------------------------------------------------------------------------------------------------


def test_ends_of_a_text_are_explained(recipe: Recipe, tiny_path: str):
    cfg = load_recipe(RLConfig, recipe(), []).cfg
    chat = find_tokenizer(cfg.model, cfg.data)
    assert dict(describe_texts(chat, cfg.data)) == {
        "a reply": "ends with <|end|>, which the chat template writes after it",
        "a text": "no BOS: the tokenizer has none",
    }
    named = cfg.data.model_copy(update={"end_of_turn": "<|end|>"})
    assert dict(describe_texts(find_tokenizer(cfg.model, named), named))["a reply"].startswith(
        "ends with <|end|> (data.end_of_turn), which the chat template writes after it"
    )
    plain = cfg.data.model_copy(update={"template": "plain"})
    said = dict(describe_texts(find_tokenizer(cfg.model, plain), plain))
    assert said["a reply"].startswith("ends with <|end|>, which data.template=plain writes after it")
    assert said["a text"].endswith(" after a document (train_on: everything): the tokenizer's own default")
    later = cfg.model.model_copy(update={"path": "models/made_later"})
    why = find_tokenizer(later, cfg.data)
    assert isinstance(why, str) and why.startswith("model.path=models/made_later does not exist")
    assert describe_texts(why, cfg.data) == [("a reply", f"unknown: {why}")]


def test_the_layout_of_rows_is_explained_as_far_as_it_is_known(recipe: Recipe, tmp_path: Path, monkeypatch):
    def explain(changes: dict[str, Any], measure: Callable[[Any], str]) -> list[tuple[str, str]]:
        monkeypatch.setattr(explain_layout, "measure_rows", measure)
        return describe_rows(load_recipe(RLConfig, recipe(changes), []).cfg)

    def fail(error: Exception) -> Callable[[Any], str]:
        def measure(cfg: Any) -> str:
            raise error

        return measure

    rows = ("rows", "packed; measured again on the model itself when it is loaded")
    assert explain({}, lambda cfg: "packed") == [rows]
    order = "engine and trainer add in one order, in one thread; compared in"
    for updates, where in ((1, "each first pass"), (2, "the pass for prox_logp")):
        changes = {"rollout.batch_invariant": True, "updates_per_step": updates}
        assert explain(changes, lambda cfg: "packed") == [rows, ("batch_invariant", f"{order} {where}")]
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    for images, more in (
        ("off", [("images", "none: a gemma3 model is used for text, with all other parts frozen")]),
        ("auto", []),
    ):
        changes = {"model.path": str(tmp_path), "model.images": images}
        assert explain(changes, lambda cfg: "packed") == [rows, *more]
    assert explain({}, fail(ModelUnreadable("no such model"))) == [("rows", "unknown: no such model")]
    assert explain({}, fail(UserError("no packed rows"))) == [("rows", "refused: no packed rows")]
