"""Names of parameters and layers: what is frozen, what text never reaches, and what an adapter is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from configs.trainer_schema import LoraConfig, ModelConfig
from core.errors import UserError
from modeling.experts import list_blocks, list_expert_weights
from modeling.freeze import add_tied, check_patterns, find_frozen, freeze, match_names
from modeling.lora import check_targets, is_plain_linear, linear_names, merged_weight, modules_in_reach, with_adapter
from modeling.nf4 import check_quantization
from modeling.route_counts import RouteCounts, RouteReplay
from modeling.routes import check_mixture
from modeling.text_use import list_unused
from unit_tests.helpers.models import random_model


def with_parameters(*names: str, **config: Any) -> Any:
    """A module with parameters of these names."""
    model: Any = nn.Module()
    for name in names:
        *parts, last = name.split(".")
        module = model
        for part in parts:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.zeros(1)))
    model.config = SimpleNamespace(**config)
    return model


def make_tied() -> Any:
    model = with_parameters("layers.1.a.weight", "layers.1.a.bias", "layers.11.a.weight", "norm", "head.weight")
    model.head.weight = model.layers.get_submodule("11.a").weight
    return model


A, TIED = {"layers.1.a.weight", "layers.1.a.bias"}, {"layers.11.a.weight", "head.weight"}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.1", A),
        ("layers.1.a", A),
        ("layers.1.a.bias", {"layers.1.a.bias"}),
        ("*.bias", {"layers.1.a.bias"}),
        ("layers.1?", TIED),
        ("head", TIED),
        ("*.11.*", TIED),
        ("norm", {"norm"}),
        ("nor", set()),
        ("a", set()),
        ("layers", A | TIED),
        ("LAYERS", set()),
    ],
)
def test_a_pattern_is_of_whole_names_and_of_tied_ones_together(pattern, names):
    model = make_tied()
    assert match_names(model, pattern) == find_frozen(model, [pattern]) == names
    if names:
        assert find_frozen(model, [pattern], path="p") == names
        freeze(model, names)
        trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        assert trained == (A | TIED | {"norm"}) - names


def test_patterns_add_up_and_must_leave_something():
    model = make_tied()
    assert find_frozen(model, []) == find_frozen(model, [], path="p") == set()
    assert find_frozen(model, ["norm", "head"], path="p") == {"norm"} | TIED
    assert add_tied(model, {"head.weight", "norm"}) == {"norm"} | TIED and add_tied(model, set()) == set()
    every = ["layers", "norm"]
    assert find_frozen(model, every) == A | TIED | {"norm"}, "as of a value model, whose head is trained"
    with pytest.raises(UserError) as refused:
        find_frozen(model, every, path="p")
    assert str(refused.value) == (
        "trainer.freeze=['layers', 'norm'] freezes every parameter of model.path=p, and nothing would be trained: name "
        "fewer"
    )
    with pytest.raises(UserError) as refused:
        find_frozen(model, ["norm", "nrm"], path="p")
    assert str(refused.value).startswith("trainer.freeze: 'nrm' matches no parameter of model.path=p: ")
    assert str(refused.value).endswith("such as norm, layers.*.a.bias, layers.*.a.weight")


VISION = ("model.visual.a.weight", "model.visual.merger.weight", "model.language_model.gate.weight")


def test_words_name_routers_and_towers():
    seeing = with_parameters(*VISION, vision_config={}, model_type="qwen2_vl", name_or_path="p")
    assert match_names(seeing, "vision") == {"model.visual.a.weight"}
    assert match_names(seeing, "vision", "off") == set()
    mixture = with_parameters("mlp.gate.weight", "mlp.experts.weight", "gate.weight")
    assert match_names(mixture, "router") == {"mlp.gate.weight"} and match_names(mixture, "vision") == set()
    assert [block.experts for block in list_blocks(mixture)] == [0], "their number is not known"
    wrapped = with_parameters("base_model.model.a.weight", "base_model.model.b.weight")
    assert match_names(wrapped, "a") == {"base_model.model.a.weight"}
    for model, word, told in (
        (seeing, "router", "has no router of experts"),
        (mixture, "vision", "has no vision tower, or is used for text only, where the tower is frozen anyway"),
    ):
        with pytest.raises(UserError) as refused:
            check_patterns(model, ["*gate*", word], key="k", images="auto", path="p")
        assert str(refused.value) == f"k names {word}, and model.path=p {told}: leave it out"
    check_patterns(seeing, ["vision"], key="k", images="auto", path="p")
    with pytest.raises(UserError, match="k names vision"):
        check_patterns(seeing, ["vision"], key="k", images="off", path="p")


def make_seeing(**config: Any) -> Any:
    """A model of an unknown family that also sees and hears, with a buffer in each part."""
    names = ("tower.weight", "audio_tower.weight", "text.weight", "head.weight")
    model = with_parameters(*names, **{"vision_config": {}, "model_type": "unknown", "name_or_path": "p", **config})
    for part in (model.tower, model.audio_tower, model.text):
        part.register_buffer("seen", torch.zeros(1))
    model.get_decoder, model.get_output_embeddings = (lambda: model.text), (lambda: model.head)
    return model


OUTSIDE = ["tower.weight", "audio_tower.weight", "tower.seen", "audio_tower.seen"]


def test_what_no_input_reaches_is_listed():
    known = {"model_type": "gemma4", "audio_config": {}}
    sound = ["audio_tower.weight", "audio_tower.seen"]
    for config, images, unused in (
        ({}, "auto", OUTSIDE),
        (known, "off", OUTSIDE),
        (known, "auto", sound),
        (known | {"audio_config": None}, "auto", []),
        ({"vision_config": None}, "auto", []),
    ):
        model: Any = make_seeing(**config)
        assert list_unused(model, images) == unused
        wrapped = nn.Module()
        wrapped.peft_config, wrapped.get_base_model = {}, lambda model=model: model
        assert list_unused(wrapped, images) == unused
    headless = make_seeing()
    headless.get_output_embeddings = lambda: None
    assert list_unused(headless) == ["tower.weight", "audio_tower.weight", "head.weight", *OUTSIDE[2:]]
    assert find_frozen(make_seeing(), ["text"], path="p") == {"tower.weight", "audio_tower.weight", "text.weight"}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
OF_ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_an_adapter_of_linear_layers_leaves_names_of_experts_out():
    """PEFT takes the names of the dense layer's matrices for the experts of the other layer."""
    model = random_model("qwen3_moe", **EXPERTS)
    assert linear_names(model, LoraConfig()) == check_targets(model, LoraConfig(), path="p") == OF_ATTENTION
    assert check_targets(model, LoraConfig(targets=["q_proj"]), path="p") == ["q_proj"]
    for target in ("up_proj", "down_proj", "mlp.gate_proj"):
        with pytest.raises(UserError) as refused:
            check_targets(model, LoraConfig(targets=["q_proj", target]), path="p")
        assert str(refused.value) == (
            f"model.lora.targets names {target!r}, which PEFT takes for the experts of model.path=p: leave it out, and "
            "set model.lora.experts to adapt those"
        )
    with pytest.raises(UserError) as refused:
        check_targets(model, LoraConfig(targets=["mlp"]), path="p")
    assert str(refused.value).startswith("model.lora.targets names 'mlp', which is no linear layer below the head")
    assert linear_names(random_model("llama", num_hidden_layers=1), LoraConfig()) == sorted(
        [*OF_ATTENTION, "down_proj", "gate_proj", "up_proj"]
    )


def make_linear() -> Any:
    """Mixers with and without Mamba's D, a router, a gate of one output, and a head."""
    model = with_parameters("mixer.D", "mlp.experts.weight", vision_config=None)
    model.mixer.out_proj, model.mixer.in_proj = nn.Linear(2, 2), nn.Linear(2, 2)
    model.other = nn.Module()
    model.other.out_proj = nn.Linear(2, 2)
    model.mlp.gate, model.mlp.router, model.mlp.one = nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(2, 1)
    model.head = nn.Linear(2, 2)
    model.get_output_embeddings = lambda: model.head
    return model


def test_a_layer_that_cannot_be_adapted_is_no_plain_linear_one():
    model = make_linear()
    plain = [name for name, _ in model.named_modules() if name and is_plain_linear(model, name)]
    assert plain == ["mixer.in_proj", "other.out_proj"]
    assert linear_names(model, LoraConfig()) == ["in_proj", "other.out_proj"]


def test_an_adapter_is_of_the_language_part_unless_asked_otherwise():
    def in_reach(model: Any, **lora: Any) -> list[str]:
        return [name for name, _ in modules_in_reach(model, LoraConfig(**lora)) if name]

    seeing = with_parameters(*VISION, vision_config={}, model_type="qwen2_vl", name_or_path="p")
    every = [name for name, _ in seeing.named_modules() if name]
    language = ["model.language_model", "model.language_model.gate"]
    assert in_reach(seeing) == language and in_reach(seeing, vision=True) == every
    unknown = make_seeing()
    assert in_reach(unknown) == in_reach(unknown, vision=True) == ["text"]
    text = make_seeing(vision_config=None)
    assert in_reach(text) == ["tower", "audio_tower", "text", "head"]


def test_an_adapter_begins_by_the_seed_whatever_was_drawn_before():
    def make(seed: int, drawn: int) -> list[Tensor]:
        model = random_model("llama", num_hidden_layers=1)
        torch.manual_seed(seed)
        torch.randn(drawn)
        state = torch.get_rng_state()
        adapter = with_adapter(model, LoraConfig(r=2, targets=["q_proj", "up_proj"]), path="p")
        assert torch.equal(torch.get_rng_state(), state), "it draws numbers of its own"
        return [p.detach() for p in adapter.parameters() if p.requires_grad]

    first, again, other = make(0, 0), make(0, 7), make(1, 0)
    assert len(first) == 4 and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_merged_weight_is_rounded_once():
    draw = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(*shape, generator=draw).bfloat16() for shape in ((8, 6), (2, 6), (8, 2)))
    want = (weight.float() + 0.01 * (b.float() @ a.float())).bfloat16()
    got = merged_weight(weight, a, b, scaling=0.01)
    assert torch.equal(got, want) and got.dtype == torch.bfloat16 and not torch.equal(got, weight)
    turned = merged_weight(weight.mT, a, b, scaling=0.01, transposed=True)
    assert torch.equal(turned, want.mT) and turned.is_contiguous()


def test_what_cannot_be_kept_in_four_bits_is_refused(tmp_path):
    pytest.importorskip("bitsandbytes")
    lora = LoraConfig(merge_on_save=True)

    def check(family: str, **config: Any) -> str:
        path = str(tmp_path / family)
        AutoConfig.for_model(family, **config).save_pretrained(path)
        with pytest.raises(UserError) as refused:
            check_quantization(ModelConfig(path=path, lora=lora, quantization="nf4"))
        return str(refused.value).replace(path, "p")

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1}
    assert check("qwen3_moe", **sizes, num_experts=4, moe_intermediate_size=16) == (
        "model.quantization=nf4 is of linear layers, and the experts of model.path=p are tensors of three dimensions, "
        "which would stay as they are: leave it out"
    )
    assert check("gpt2", vocab_size=64, n_embd=32, n_layer=1, n_head=2) == (
        "model.quantization=nf4, and model.path=p has no linear layers below its head: leave it out"
    ), "its layers are transposed"


def test_routes_of_other_blocks_are_refused():
    model = random_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    engine, passes = nn.Sequential(model), list[Any]()
    engine.forward = lambda **inputs: passes.append(inputs) or model(**inputs)
    replay = RouteReplay(engine, model, forces=True, device="cpu")
    assert (replay.hook.k, replay.hook.experts, len(passes)) == (2, 4, 1), "its first pass is the engine's"
    assert [block.name for block in replay.hook.blocks] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    routes = torch.zeros(1, 3, 2, dtype=torch.int16)
    told = r"^routes of 3 blocks, and the model has 2$"
    with pytest.raises(ValueError, match=told), replay.over(routes, counted=True):
        pass
    with pytest.raises(UserError) as refused:
        check_mixture([], "this toy", key="k is set")
    assert str(refused.value) == "k is set, and this toy has no experts: leave it out"


def test_counts_of_routes_are_on_the_device_of_the_model():
    hook: Any = SimpleNamespace(blocks=[0, 1], experts=4)
    counts = RouteCounts(hook, "meta")
    assert all(x.is_meta for x in (counts.sums, counts.entropy, counts.load, counts.flatten()))
    assert counts.flatten().shape == (6 + 2 + 2 * 4,)


def test_weights_of_all_experts_are_those_of_the_module_itself():
    model = with_parameters("mlp.experts.plain", "mlp.experts.inner.plain", "mlp.others.plain")
    for module in (model.mlp.experts, model.mlp.experts.inner, model.mlp.others):
        module.register_parameter("weight", nn.Parameter(torch.zeros(4, 2, 3)))
    assert [*list_expert_weights(model)] == ["mlp.experts.weight"]
