"""A model with an adapter: what is trained, what leaves the trainer, what is saved, and what its reference is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from configs.schema import RLConfig
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.errors import UserError
from core.types.samples import Batch
from driver.load_recipe import load_recipe
from modeling.experts import list_expert_weights
from modeling.export import exported_tensors
from modeling.hf_config import check_model_folder, meta_model
from modeling.load import load_model
from modeling.lora import check_lora, merged_experts, merged_weight, name_lora_targets, with_adapter
from modeling.saved_model import check_saved
from trainers.local import LocalTrainer
from trainers.weight_sync.fingerprint import fingerprint
from unit_tests.helpers.examples import columns_of, fill_batch
from unit_tests.helpers.models import random_model
from unit_tests.helpers.small_trained import batches, logits, trained, trainer_of

KINDS = {
    "lora": LoraConfig(r=4),
    "rslora": LoraConfig(r=4, rslora=True),
    "dora": LoraConfig(r=4, dora=True),
    "two targets": LoraConfig(r=4, targets=["q_proj", "mlp.down_proj"]),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def whole(trainer: LocalTrainer) -> dict[str, Tensor]:
    return {name: tensor for bucket in trainer.export_weights(2**20) for name, tensor in bucket}


def as_plain_model(path: str, weights: dict[str, Tensor]) -> nn.Module:
    model = load_model(path, dtype="float32", attention="sdpa")
    model.load_state_dict(weights, strict=True)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_what_leaves_the_trainer_is_the_model_with_its_adapter_merged_in(tiny_path, kind):
    trainer = trained(tiny_path, KINDS[kind])
    start = load_model(tiny_path, dtype="float32", attention="sdpa")
    assert (logits(trainer.model) - logits(start)).abs().max() > 0.1, "it was trained"
    held = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    sent = whole(trainer)
    assert {n: t.shape for n, t in sent.items()} == {n: p.shape for n, p in start.named_parameters()}
    torch.testing.assert_close(logits(as_plain_model(tiny_path, sent)), logits(trainer.model), atol=1e-4, rtol=0)
    assert all(torch.equal(p, held[name]) for name, p in trainer.model.named_parameters()), (
        "nothing was merged in place"
    )
    assert fingerprint(sent.items()) == fingerprint(whole(trainer).items())


def test_only_the_adapter_is_trained_and_never_the_head(tiny_path):
    trainer = trainer_of(tiny_path, LoraConfig(r=4))
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.step([batches()])
    assert all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if not p.requires_grad)
    names = {n.split(".")[-4] for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_starts_as_the_model_itself_and_the_seed_decides_it(tiny_path, kind):
    start = load_model(tiny_path, dtype="float32", attention="sdpa")
    first = trainer_of(tiny_path, KINDS[kind])
    torch.testing.assert_close(logits(first.model), logits(start), atol=1e-5, rtol=0)

    def adapter(trainer: LocalTrainer) -> Tensor:
        return torch.cat([t.flatten() for bucket in trainer.export_weights(2**20, "adapter") for _, t in bucket])

    torch.manual_seed(0)
    torch.randn(7)  # what was drawn before does not matter
    again = load_model(tiny_path, dtype="float32", attention="sdpa", lora=KINDS[kind])
    assert torch.equal(torch.cat([p.flatten() for p in again.parameters() if p.requires_grad]), adapter(first))
    assert not torch.equal(adapter(trainer_of(tiny_path, KINDS[kind], seed=1)), adapter(first))


def test_an_adapter_has_the_dtype_of_its_model(tiny_path):
    trainer = trained(tiny_path, LoraConfig(r=4), dtype="bfloat16")
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert {t.dtype for t in whole(trainer).values()} == {torch.bfloat16}


def test_the_merge_by_hand():
    weight, a, b = torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [0.0]])
    # W + 3 B A = [[1 + 3, 6], [0, 1]]
    torch.testing.assert_close(merged_weight(weight, a, b, scaling=3.0), torch.tensor([[4.0, 6.0], [0.0, 1.0]]))
    # rows of norm sqrt(52) and 1, scaled to 2 and 5
    got = merged_weight(weight, a, b, scaling=3.0, magnitude=torch.tensor([2.0, 5.0]))
    torch.testing.assert_close(got, torch.tensor([[8 / 52**0.5, 12 / 52**0.5], [0.0, 5.0]]))
    got = merged_weight(weight, a, b, scaling=3.0, transposed=True)
    torch.testing.assert_close(got, torch.tensor([[4.0, 0.0], [6.0, 1.0]]))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_stays_tied(tmp_path, tied):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    trainer = trained(str(tmp_path / "base"), LoraConfig(r=4, merge_on_save=True))
    assert ("lm_head.weight" in whole(trainer)) != tied
    trainer.save_model(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(again), logits(trainer.model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("column", ["ref_logp", "prox_logp"])
def test_the_reference_is_the_model_without_its_adapter(tiny_path, column):
    alg = {"name": "grpo", "kl": {"coef": 0.1}}
    plain, trainer = (trainer_of(tiny_path, lora, alg=alg) for lora in (None, LoraConfig(r=4)))
    trainer.step([scored(plain)])
    assert not trainer.frozen and list(plain.frozen) == ["ref_logp"], "no second model is loaded"
    want, got = (torch.cat([s[column] for s in columns_of(t, batches(), column)]) for t in (plain, trainer))
    assert torch.allclose(got, want, atol=1e-6) == (column == "ref_logp"), "the policy itself has moved"
    trainer.step([scored(trainer)])
    after = torch.cat([s["prox_logp"] for s in columns_of(trainer, batches(), "prox_logp")])
    before = torch.cat([s["prox_logp"] for s in columns_of(plain, batches(), "prox_logp")])
    assert not torch.allclose(after, before, atol=1e-3), "and goes on to move after the reference was asked"


def scored(trainer: LocalTrainer) -> list[Batch]:
    """With the columns that a KL in the loss needs."""
    columns = trainer.compute_columns(batches(), frozenset({"ref_logp"}))
    return [fill_batch(b, c) for b, c in zip(batches(), columns, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_has_the_names_of_pefts_files(tiny_path, kind):
    trainer = trainer_of(tiny_path, KINDS[kind])
    names = {name for bucket in trainer.export_weights(2**20, "adapter") for name, _ in bucket}
    assert names == get_peft_model_state_dict(trainer.model).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_loads_with_peft(tiny_path, tmp_path, kind):
    trainer = trained(tiny_path, KINDS[kind])
    trainer.save_model(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == tiny_path
    base = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(base, tmp_path / "out")), logits(trainer.model), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_is_where_the_next_recipe_looks(tiny_path, tmp_path, kind):
    trainer = trained(tiny_path, KINDS[kind].model_copy(update={"merge_on_save": True}))
    trainer.save_model(tmp_path / "out")
    check_model_folder(str(tmp_path / "out"))
    torch.testing.assert_close(
        logits(load_model(str(tmp_path / "out"), dtype="float32", attention="sdpa")),
        logits(trainer.model),
        atol=1e-4,
        rtol=0,
    )
    base = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    torch.testing.assert_close(logits(adapted), logits(trainer.model), atol=1e-6, rtol=0)


def test_an_adapter_alone_is_no_model_path(tiny_path, tmp_path):
    trainer_of(tiny_path, LoraConfig(r=2)).save_model(tmp_path)
    with pytest.raises(UserError, match=r"adapter without its model: .* model\.lora\.merge_on_save"):
        check_model_folder(str(tmp_path))


@pytest.mark.parametrize("target", ["q_prj", "embed_tokens", "lm_head", "self_attn"])
def test_a_target_that_is_no_linear_layer_is_one_sentence(tiny_path, target):
    with pytest.raises(
        UserError, match=f"model.lora.targets names '{target}'.* down_proj, gate_proj, .* or all-linear"
    ):
        load_model(tiny_path, dtype="float32", attention="sdpa", lora=LoraConfig(targets=["q_proj", target]))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_nothing(tiny_path, kind):
    plain, checkpointed = (
        trained(tiny_path, KINDS[kind], optimizer="sgd", lr=1.0, gradient_checkpointing=on) for on in (False, True)
    )
    assert checkpointed.model.is_gradient_checkpointing
    torch.testing.assert_close(logits(checkpointed.model), logits(plain.model), atol=1e-5, rtol=0)


def test_a_value_model_has_no_adapter(tiny_path):
    trainer = trainer_of(tiny_path, LoraConfig(r=4), alg={"name": "ppo"})
    assert trainer.critic is not None
    assert all(p.requires_grad for p in trainer.critic.model.parameters())
    assert not Path(tiny_path, "adapter_config.json").exists()


@pytest.mark.parametrize(("family", "experts"), [("qwen3_moe", True), ("gpt_oss", True), ("qwen2_moe", False)])
def test_an_adapter_of_a_mixture_is_saved_merged_and_loads_again(tmp_path, family, experts):
    """gpt_oss has its experts transposed, and qwen2_moe an expert that all tokens share."""
    sizes = {"num_local_experts": 4} if family == "gpt_oss" else {"num_experts": 4, "moe_intermediate_size": 48}
    sizes |= {"shared_expert_intermediate_size": 40} if family == "qwen2_moe" else {}
    base = random_model(family, "eager", num_experts_per_tok=2, **sizes)
    base.save_pretrained(path := str(tmp_path / "base"))
    lora = LoraConfig(r=3, experts=experts, merge_on_save=True)
    trainer = trained(path, lora, attention="auto")
    start = logits(base)
    sent = whole(trainer)
    assert {n: t.shape for n, t in sent.items()} == {n: p.shape for n, p in base.named_parameters()}
    moved = {n for n, p in base.named_parameters() if not torch.equal(p, sent[n])}
    assert any(".experts." in n for n in moved) == experts and any(".self_attn." in n for n in moved)
    assert not any(".gate." in n or ".router." in n or "shared_expert_gate" in n or "bias" in n for n in moved)

    trainer.save_model(tmp_path / "out")
    check_saved(tmp_path / "out", dtype="float32")
    want = logits(trainer.model)
    assert (start - want).abs().max() > 1e-2, "it was trained"
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    torch.testing.assert_close(logits(adapted), want, atol=1e-4, rtol=0)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(logits(again), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("experts", [False, True])
def test_a_merged_export_holds_the_saved_buffers_and_all_experts(experts):
    """The bias of deepseek_v3's choice is a buffer that files hold."""
    base = random_model("deepseek_v3", **MIXTURE)
    [start] = exported_tensors(base).values()
    of_experts = {id(p) for p in list_expert_weights(base).values()}
    adapted = with_adapter(base, LoraConfig(r=2, targets=["o_proj"], experts=experts), path="mixture")
    whole = exported_tensors(adapted)["whole"]
    assert {t.name: t.shape for t in whole} == {t.name: t.shape for t in start}
    assert any("e_score_correction_bias" in t.name for t in whole)
    assert of_experts and {id(p) for p in list_expert_weights(adapted).values()} == of_experts


def test_the_merge_of_experts_by_hand():
    """Two experts of rank 2. PEFT has A of the experts one below the other, and B of the experts in turns."""
    weight, a = torch.zeros(2, 1, 2), torch.eye(2).repeat(2, 1)
    b = torch.tensor([[1.0, 20.0, 3.0, 40.0]])
    want = torch.tensor([[[2.0, 6.0]], [[40.0, 80.0]]])  # 2 B_e A_e, with B_0 = [1, 3] and B_1 = [20, 40]
    got = merged_experts(weight, a, b, scaling=2.0, transposed=False)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(merged_experts(weight.mT, a, b, scaling=2.0, transposed=True), want.mT)


MIXTURE = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 0},
    **{"n_group": 2, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16},
    **{"qk_nope_head_dim": 16, "v_head_dim": 32, "head_dim": 16, "num_key_value_heads": 2},
}
MIXTURES = {
    # PEFT takes gate, up and down of these for the experts, and would adapt those
    "glm4_moe": ({"n_routed_experts": 4, "first_k_dense_replace": 0}, ["k_proj", "o_proj", "q_proj", "v_proj"]),
    # the router is a linear layer, and so is the gate of qwen2_moe's shared expert
    "llama4_text": (
        {"num_local_experts": 4, "interleave_moe_layer_step": 1},
        ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    ),
    # Mamba's kernel reads the weight of out_proj
    "granitemoehybrid": (
        {"layer_types": ["mamba", "attention"], "num_local_experts": 4}
        | {"hidden_size": 64, "mamba_n_heads": 4, "mamba_d_head": 32},
        ["in_proj", "input_linear", "k_proj", "o_proj", "output_linear", "q_proj", "v_proj"],
    ),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_all_linear_means_linear_layers_for_trainer_and_engine_alike(tmp_path, family):
    from peft.tuners.lora import Linear, LoraLayer

    sizes, names = MIXTURES[family]
    config = AutoConfig.for_model(family, vocab_size=64, num_hidden_layers=2, **sizes)
    config.save_pretrained(path := str(tmp_path))
    assert name_lora_targets(LoraConfig(), path).targets == names
    wrapped = with_adapter(meta_model(path), LoraConfig(r=2), path=path)
    layers = {name.rpartition(".")[2]: type(m) for name, m in wrapped.named_modules() if isinstance(m, LoraLayer)}
    assert layers == dict.fromkeys(names, Linear)


REFUSED = {
    "a dense model": ("llama", {"experts": True}, r"model\.lora\.experts is true, and model\.path=.* has no experts"),
    "a rank": ("qwen3_moe", {"experts": True, "r": 40}, r"model\.lora\.r=40 is above 32"),
    "sharded experts": ("qwen3_moe", {"experts": True}, r"with trainer\.zero_stage=3 PEFT finds the experts sharded"),
    "names of experts": (
        "qwen3_moe",
        {"targets": ["q_proj", "up_proj"]},
        r"names 'up_proj', which PEFT takes for the experts of .* and set model\.lora\.experts to adapt those",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_adapted_is_refused_before_the_start(tmp_path, case):
    family, settings, said = REFUSED[case]
    stage = 3 if case == "sharded experts" else 2
    AutoConfig.for_model(family, hidden_size=32, num_hidden_layers=1, head_dim=32).save_pretrained(
        path := str(tmp_path)
    )
    with pytest.raises(UserError, match=said):
        check_lora(ModelConfig(path=path, lora=LoraConfig(**{"r": 2} | settings)), TrainerConfig(zero_stage=stage))


def test_adapters_of_experts_have_no_dora_and_are_sent_merged(recipe):
    for changes, said in (
        ({"model.lora.dora": True}, r"^model\.lora: experts and dora are set, and PEFT has no DoRA for experts"),
        ({"weight_sync.lora": "adapter"}, r"gate and up of an expert's adapter in another order: .* to merged$"),
    ):
        with pytest.raises(UserError, match=said):
            load_recipe(RLConfig, recipe({"model.lora.experts": True, **changes}), [])
