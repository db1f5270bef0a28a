"""What a trainer passes on of its recipe: to forward passes, the models that it loads, their layouts, and a file."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from algs.grpo import GRPO
from algs.measures import MeasurePlan
from algs.opd import OPD
from algs.ppo import PPO
from algs.sft import SFT
from algs.terms import KL
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.errors import RunStopped, UserError
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.measures import Measure
from data_feeds.packing.batches import micro_batches, pack
from modeling.load import load_scalar_model
from trainers import layouts, models
from trainers import trainer as of_trainers
from trainers.distributed import DistributedTrainer
from trainers.layouts import measure_layouts
from trainers.local import LocalTrainer
from trainers.models import ModelLoader
from trainers.observers import BatchSeen, Observer
from trainers.trainer import Trainer
from unit_tests.helpers.examples import sample_of, some_groups, with_kept, with_routes
from unit_tests.helpers.local_trainers import TEMPERATURE, trainer_of
from unit_tests.helpers.models import random_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_forward_pass_gets_what_the_run_has_set(tiny_path, monkeypatch):
    allowed, measure = AllowedTokens(allowed=tuple(range(70))), Measure(lambda s, at: s.sum(-1))
    made: Any = trainer_of(tiny_path, GRPO(kl=KL(coef=0.1)), logits_mib=3, settings={"allowed_tokens": allowed})
    calls: list[Any] = []
    monkeypatch.setattr(of_trainers, "forward", lambda *args, **settings: calls.append((args, settings)))
    made.layout, made.sequence_group, made.routes = "own", "group", "routes"
    made.measures = MeasurePlan(live={"live": measure}, columns={}, any=True)
    own, frozen = (made.policy.module, made.model, "batch"), made.frozen["ref_logp"]
    made.forward("batch")
    made.forward("batch", as_given=True, measures={})
    made.forward("batch", frozen=frozen, measures={"other": measure})
    of_run = {"logits_mib": 3, "sequence_group": "group", "teachers": {}, "measured": True}
    of_run |= {"temperature": TEMPERATURE, "allowed_tokens": allowed}
    as_given = of_run | {"temperature": 1.0, "allowed_tokens": EVERY_TOKEN}
    assert calls == [
        (own, of_run | {"layout": "own", "measures": {"live": measure}, "replay": "routes"}),
        (own, as_given | {"layout": "own", "measures": {}, "replay": "routes"}),
        ((frozen, frozen, "batch"), of_run | {"layout": "padded", "measures": {"other": measure}, "replay": None}),
    ]
    calls.clear()
    passed = SimpleNamespace(logp=torch.tensor([-1.0, -2.0]))
    monkeypatch.setattr(made, "forward", lambda batch, **settings: calls.append(settings) or passed)
    assert made.probe([5, 6, 7]) == [-1.0, -2.0] and calls == [{"as_given": True, "measures": {}}]


def test_values_are_the_only_row_of_a_value_models_pass(tiny_path, monkeypatch):
    made: Any = trainer_of(tiny_path, SFT())
    calls: list[Any] = []
    monkeypatch.setattr(of_trainers, "compute_values", lambda *args, **how: calls.append((args, how)) or ["the values"])
    made.layout, made.sequence_group = "own", "group"
    critic = SimpleNamespace(module="a callable", model="a model")
    assert made.compute_values_of(critic, "batch") == "the values"
    assert calls == [(("a callable", "batch"), {"layout": "own", "model": "a model", "sequence_group": "group"})]


@pytest.mark.parametrize("compiles", [True, False])
def test_a_trainer_prepares_its_model_for_the_device(tiny_path, monkeypatch, compiles):
    calls: list[Any] = []

    def note(name: str) -> Any:
        return lambda *args, **settings: calls.append((name, args, settings))

    for name in ("keep_freed_memory", "MediaLoader", "measure_layouts", "compile_blocks"):
        monkeypatch.setattr(of_trainers, name, note(name))
    model = ModelConfig(path=tiny_path, attention="sdpa", images="off", trust_remote_code=True)
    cfg = TrainerConfig(compile=compiles)
    made: Any = LocalTrainer(model, cfg, PPO(kl=KL(coef=0.1)), temperature=1.0, total_updates=1)
    reference = made.frozen["ref_logp"]
    kind = {"dtype": torch.bfloat16, "trust_remote_code": True, "images": "off", "device": made.device}
    want: list[Any] = [("keep_freed_memory", (), {})] if made.device == "cpu" else []
    want.append(("MediaLoader", (made.model, tiny_path), kind))
    given = {"agree": made.find_largest, "device": made.device}
    want.append(("measure_layouts", (model, made.policy, made.critic, {"ref_logp": reference}, cfg), given))
    all_models = [made.model, reference, made.critic.model]
    assert calls == want + ([("compile_blocks", (all_models,), {})] if compiles else [])


def test_models_are_loaded_with_the_settings_of_the_recipe(monkeypatch):
    calls: list[Any] = []

    def load(kind: str) -> Any:
        return lambda path, **settings: calls.append((kind, path, settings)) or random_model("llama")

    monkeypatch.setattr(models, "load_model", load("model"))
    monkeypatch.setattr(models, "load_scalar_model", load("scalar"))
    lora = LoraConfig(merge_on_save=True)
    model = ModelConfig(path="here", attention="eager", trust_remote_code=True, quantization="nf4", lora=lora)
    loader = ModelLoader(model, TrainerConfig(gradient_checkpointing=True), OPD(teacher="there"))
    loader.load_policy()
    loader.load_scalar()
    assert [names for names, _ in loader.load_teachers(has_ref_logp=False)] == [["teacher_logp"]]
    kind = {"dtype": "bfloat16", "attention": "eager", "trust_remote_code": True}
    trained = kind | {"gradient_checkpointing": True, "place": None}
    assert calls == [
        ("model", "here", trained | {"lora": lora, "quantization": "nf4"}),
        ("scalar", "here", trained),
        ("model", "there", kind | {"key": "alg, the model of teacher_logp", "place": None}),
    ]


def test_what_is_frozen_is_found_for_the_use_that_the_recipe_says(monkeypatch):
    """A tied weight that is frozen is so by both of its names."""
    calls: list[Any] = []

    def note(name: str, found: Any = None) -> Any:
        return lambda *args, **how: calls.append((name, *args, how)) or found

    loaded = random_model("llama", tie_word_embeddings=True)
    loaded.get_input_embeddings().requires_grad_(False)
    monkeypatch.setattr(models, "load_model", lambda path, **_: loaded)
    monkeypatch.setattr(models, "find_frozen", note("find", found=["a name"]))
    monkeypatch.setattr(models, "freeze", note("freeze"))
    monkeypatch.setattr(models, "check_scales", note("check"))
    cfg = TrainerConfig(freeze=["a pattern"], lr_scales={"another": 0.5})
    assert ModelLoader(ModelConfig(path="here", images="off"), cfg, SFT()).load_policy() is loaded
    used = {"images": "off", "path": "here"}
    frozen = {"model.embed_tokens.weight", "lm_head.weight"}
    assert calls == [
        *(("find", loaded, ["a pattern"], used), ("freeze", loaded, ["a name"], {})),
        ("check", loaded, {"another": 0.5}, frozen, used),
    ]


def test_the_value_model_of_an_adapter_is_frozen_by_patterns_that_it_has(tiny_path):
    """The policy's weights are frozen whatever the patterns are, so no other model has read them."""
    adapted = ModelConfig(path=tiny_path, lora=LoraConfig(r=4))
    with pytest.raises(UserError, match=r"trainer.freeze: 'lm_head' matches no parameter"):
        ModelLoader(adapted, TrainerConfig(freeze=["lm_head"]), PPO()).load_scalar()
    frozen = ModelLoader(adapted, TrainerConfig(freeze=["model.layers.0"]), PPO()).load_scalar()
    assert {".layers.0." in name for name, p in frozen.named_parameters() if not p.requires_grad} == {True}


def model_of(**config: Any) -> Any:
    made: Any = nn.Identity()
    made.config = SimpleNamespace(**config)
    return made


def test_every_model_is_measured_once_under_its_key(monkeypatch):
    """With model.images=off, one with a vision part is used for text only."""
    calls: list[Any] = []
    monkeypatch.setattr(layouts, "probe_layout", lambda *args, **settings: calls.append((args, settings)))
    policy: Any = SimpleNamespace(module="of the policy", model=model_of(vision_config="a tower"))
    critic: Any = SimpleNamespace(module="of the critic", model=model_of())
    shared, other = model_of(), model_of(vision_config="a tower")
    given: dict[str, Any] = {"device": "cpu", "agree": lambda worst: worst}
    cfg, settings = TrainerConfig(layout="packed"), ModelConfig(path="here", images="off")
    measure_layouts(settings, policy, critic, {"a": shared, "b": shared, "ref": other}, cfg, **given)
    given["layout"] = "packed"
    own = ("of the policy", policy.model), given | {"key": "model.path=here", "has_images": False}
    assert calls == [
        own,
        (("of the critic", critic.model), given | {"key": "model.path=here, as a value model", "has_images": True}),
        ((shared, shared), given | {"key": "alg, the model of b", "has_images": True}),
        ((other, other), given | {"key": "alg, the model of ref", "has_images": False}),
    ]
    calls.clear()
    measure_layouts(settings, policy, None, {}, cfg, device="cpu", agree=given["agree"])
    assert calls == [own]


def test_a_trainer_without_a_back_end_makes_sums_and_writes_nothing():
    bare: Any = Trainer.__new__(Trainer)
    ranks: Any = DistributedTrainer.__new__(DistributedTrainer)
    for call in (
        lambda: bare.make_learner(nn.Identity()),
        lambda: bare.sum_over_rows(torch.ones(1)),
        lambda: bare.write_model(None, Path(), ["whole"]),
        lambda: ranks.get_file_settings(),
        lambda: ranks.start_library(None),
    ):
        with pytest.raises(NotImplementedError):
            call()
    assert bare.find_largest(7.0) == 7.0


class Seen(Observer):
    """Notes what depends on a graph, and what does not."""

    def __init__(self, _trainer: object) -> None:
        self.with_graph: set[bool] = set()

    def on_batch(self, seen: BatchSeen) -> None:
        assert seen.policy is not None
        tensors = (*seen.policy.list_tensors(), seen.objective.loss, *seen.objective.metrics.values())
        self.with_graph |= {tensor.requires_grad for tensor in tensors}


def test_observers_see_no_graph(tiny_path):
    made = trainer_of(tiny_path, GRPO(entropy_coef=0.01), settings={"observers": {"seen": Seen}})
    made.step([micro_batches(some_groups(2, 2), "token", 10_000)[0]])
    assert made.observers.seen.with_graph == {False}  # type: ignore[attr-defined]


def test_a_token_that_the_policy_may_not_choose_stops_the_run(tiny_path):
    allowed = AllowedTokens(allowed=(5, 6))
    wrong = pack([sample_of([5, 6, 9], [False, True, True])], [1.0])
    right = pack([sample_of([5, 6, 5], [False, True, True])], [1.0])
    made = trainer_of(tiny_path, SFT(), settings={"allowed_tokens": allowed})
    with pytest.raises(RunStopped, match=r"contains token 9, which the policy may not choose"):
        made.step([[wrong]])
    assert made.step([[right]])["tokens"] == 2
    [samples] = with_kept(some_groups(1))
    inside = pack(samples, [1.0] * len(samples))
    outside = replace(inside, labels=inside.labels.roll(1))
    with pytest.raises(RunStopped, match="not in its own kept set"):
        trainer_of(tiny_path, SFT()).step([[outside]])


def test_a_value_model_is_saved_whole_beside_an_adapter(tiny_path, tmp_path):
    made: Any = trainer_of(tiny_path, PPO(critic_lr=0.5), lora=LoraConfig(r=4))
    made.critic.model.score.weight.data.fill_(0.25)
    made.save_model(tmp_path / "value", "value")
    made.save_model(tmp_path / "model")
    value: Any = load_scalar_model(str(tmp_path / "value"), dtype="float32", attention="sdpa")
    assert (value.score.weight == 0.25).all() and not (tmp_path / "value" / "adapter_config.json").exists()
    assert (tmp_path / "model" / "adapter_config.json").exists()
    numbers = sum(p.numel() for learner in (made.policy, made.critic) for p in learner.model.parameters())
    adapter = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
    assert len(made.flatten_weights()) == numbers - adapter, "the adapter is merged into the policy's weights"


def test_a_full_disk_is_told_what_a_model_and_a_checkpoint_take(tiny_path, tmp_path, monkeypatch):
    made = trainer_of(tiny_path, SFT())

    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(made, "write_model", fill)
    monkeypatch.setattr(of_trainers, "save_state", fill)
    n = sum(p.numel() for p in made.model.parameters())
    for ranks in (1, 2):
        for save, nbytes in ((made.save_model, 4 * n), (made.save_state, (4 + 12) * n // ranks)):
            with pytest.raises(RunStopped, match=f"the disk is full: about {nbytes / 2**20:,.2f} MiB are needed"):
                save(tmp_path / "file")
        made.ranks = 2


def test_a_checkpoint_of_another_optimizer_is_refused(tiny_path, tmp_path):
    trainer_of(tiny_path, SFT()).save_state(tmp_path)
    with pytest.raises(UserError, match=r"^trainer.optimizer is adamw and the checkpoint .* was made with sgd, whose"):
        trainer_of(tiny_path, SFT(), optimizer="adamw").load_state(tmp_path)


def test_choices_of_routers_are_measured_where_the_recipe_asks(mixture_path):
    groups = with_routes(some_groups(2, 2), layers=2, experts=4, k=2)
    update = micro_batches(groups, "token", 10_000)[0]
    for replay, is_measured in (("watch", True), ("off", False)):
        metrics = trainer_of(mixture_path, SFT(), settings={"router_replay": replay}).step([update])
        assert any(name.startswith("moe/") for name in metrics) is is_measured
