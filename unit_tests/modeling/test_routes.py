"""Routes of a mixture of experts: recorded without a change, forced to the bit, and counted."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from configs.trainer_schema import LoraConfig
from core.errors import UserError
from core.types.routes import PADDING, UNKNOWN, dtype_for, extend, fill_unknown, find_unknown
from core.types.samples import Batch
from data_feeds.packing.batches import pack
from modeling.experts import list_blocks
from modeling.forward import forward
from modeling.lora import with_adapter
from modeling.model_inputs import lay_out_part
from modeling.route_counts import RouteReplay
from modeling.routes import ExpertChoice, RouterHook
from unit_tests.helpers.examples import families
from unit_tests.helpers.models import random_model, some_samples

EXPERTS = 8
FAMILIES = {
    # the choice is made by a softmax (and layer 0 is dense), by logits, by sigmoids with a bias and groups
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "attention": "eager"},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "head_dim": 16,
        "num_key_value_heads": 2,
    },
}


def make_mixture(family: str) -> nn.Module:
    model = random_model(family, **FAMILIES[family])
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
            elif "norm" not in name:
                tensor.normal_(std=0.3)
    return model.train()


def hooked(model: nn.Module, *, forces: bool = True) -> RouteReplay:
    return RouteReplay(model, model, forces=forces, device="cpu")


def score(model: nn.Module, batch: Batch, replay: RouteReplay | None = None, layout="padded") -> torch.Tensor:
    return forward(model, model, batch, layout=layout, temperature=1.0, replay=replay).logp


def record(model: nn.Module, batch: Batch, replay: RouteReplay) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities, and the routes of the flat tokens, as one sequence has a row."""
    with replay.hook.recording() as found:
        logp = score(model, batch)
    routes = found.stack().view(len(batch.lengths), -1, len(replay.hook.blocks), replay.hook.k)
    return logp, routes[batch.segment_ids, batch.position_ids].to(torch.int16)


def some_batch() -> Batch:
    return pack(some_samples(9, 17, 5), [1.0] * 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_changes_nothing_and_its_replay_is_exact(family):
    model, batch = make_mixture(family), some_batch()
    plain = score(model, batch)
    replay = hooked(model)
    assert torch.equal(plain, score(model, batch)), "the hooks alone"
    logp, routes = record(model, batch, replay)
    assert torch.equal(plain, logp) and routes.shape[1:] == (len(list_blocks(model)), 2)
    routed = replace(batch, routes=routes)
    again = score(model, routed, replay)
    assert torch.equal(plain, again)
    learnt = list(model.parameters())
    of_own, of_forced = (torch.autograd.grad(x.sum(), learnt, allow_unused=True) for x in (logp, again))
    assert all(a is b or torch.equal(a, b) for a, b in zip(of_own, of_forced, strict=True))
    flipped = score(model, replace(batch, routes=routes.flip(-1)), replay)
    assert (flipped - plain).abs().max() < 1e-5, "every forced expert has its own weight"
    forced = replace(batch, routes=(routes + 1) % EXPERTS)
    assert (score(model, forced, replay) - plain).abs().max() > 0.01


def test_a_mismatch_of_choices_alone_is_gone_to_the_bit():
    """The bias of deepseek_v3 is added for the choice only: engine and trainer differ in nothing else."""
    trainer, batch = make_mixture("deepseek_v3"), pack(some_samples(40, 60, 50), [1.0] * 3)
    engine = copy.deepcopy(trainer)
    for block in list_blocks(engine):
        block.module.gate.e_score_correction_bias += 0.03 * torch.randn(EXPERTS)
    sampled, routes = record(engine, batch, hooked(engine))
    replay = hooked(trainer)
    routed = replace(batch, routes=routes)
    assert torch.equal(sampled, score(trainer, routed, replay))
    changed = replay.counts.read(replay.counts.flatten())["moe/changed_choices"]
    assert 0.05 <= changed <= 0.1, changed
    assert (sampled - score(trainer, batch)).abs().mean() > 1e-3


def test_a_token_without_a_route_uses_its_own_experts():
    model, batch = make_mixture("qwen3_moe"), some_batch()
    replay = hooked(model)
    own, routes = record(model, batch, replay)
    assert torch.equal(own, score(model, replace(batch, routes=torch.full_like(routes, UNKNOWN)), replay))
    some = routes.clone()
    some[3] = some[11] = UNKNOWN
    replay.clear()
    assert torch.equal(own, score(model, replace(batch, routes=some), replay))
    found = replay.counts.read(replay.counts.flatten())
    assert found["moe/missing_routes"] == pytest.approx(2 / len(batch.input_ids))
    assert found["moe/changed_choices"] == found["moe/changed_tokens"] == 0


def test_counts_are_of_tokens_and_watching_forces_nothing():
    model, batch = make_mixture("qwen3_moe"), some_batch()
    replay = hooked(model, forces=False)
    own, routes = record(model, batch, replay)
    other = routes.clone()
    other[:4] = (other[:4] + 1) % EXPERTS
    assert torch.equal(own, score(model, replace(batch, routes=other), replay))
    found = replay.counts.read(replay.counts.flatten())
    load = torch.bincount(routes[:, 0].flatten().long(), minlength=EXPERTS)
    assert load.sum() == 2 * len(batch.input_ids), "no padding, though the rows are padded"
    assert found["moe/load_max"] == pytest.approx(float(load.max() / load.double().mean()))
    assert found["moe/unused_experts"] == pytest.approx(float((load == 0).double().mean()))
    assert found["moe/changed_tokens"] == pytest.approx(4 / len(batch.input_ids))
    assert 0 < found["moe/router_entropy"] < 1
    with torch.no_grad():
        replay.clear()
        score(model, replace(batch, routes=other), replay)
    assert replay.counts.read(replay.counts.flatten()) == {}, "only passes with a gradient are counted"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_entropy_is_of_the_distribution_over_all_experts(family):
    """Of a softmax of the logits, or of their sigmoids over the sum."""
    model, batch = make_mixture(family), pack(some_samples(9, 9), [1.0] * 2)
    replay = hooked(model, forces=False)
    _, routes = record(model, batch, replay)
    logits: list[torch.Tensor] = []

    def keep(gate, given):
        logits.append(functional.linear(given[0].flatten(0, -2), gate.weight, getattr(gate, "bias", None)).detach())

    for block in list_blocks(model):
        (block.module.router if family == "gpt_oss" else block.module.gate).register_forward_pre_hook(keep)
    score(model, replace(batch, routes=routes), replay)
    scores = torch.cat(logits)
    p = functional.normalize(scores.sigmoid(), p=1, dim=-1) if family == "deepseek_v3" else scores.softmax(-1)
    want = -(p * p.log()).sum(-1).mean() / np.log(EXPERTS)
    assert replay.counts.read(replay.counts.flatten())["moe/router_entropy"] == pytest.approx(float(want), rel=1e-5)


def test_gradient_checkpointing_computes_the_forced_routes_again():
    gradients = []
    for is_checkpointed in (False, True):
        model, batch = make_mixture("qwen3_moe"), some_batch()
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        replay = hooked(model)
        _, routes = record(model, batch, replay)
        replay.clear()
        logp = score(model, replace(batch, routes=(routes + 1) % EXPERTS), replay)
        score(model, batch, replay)  # another pass before the backward pass
        logp.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert replay.counts.sums[0] == len(batch.input_ids), "a token is counted once"
    assert torch.equal(*gradients)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_choices_that_are_computed_again_are_counted_once(is_checkpointed):
    """The norm behind the experts of this family makes the backward pass go through the choice again."""
    model, batch = random_model("flex_olmo", num_experts=EXPERTS, num_experts_per_tok=2).train(), some_batch()
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    replay = hooked(model)
    _, routes = record(model, batch, replay)
    replay.clear()
    for n in (1, 2):
        score(model, replace(batch, routes=routes), replay).sum().backward()
        assert replay.counts.load.sum(-1).tolist() == [2.0 * n * len(batch.input_ids)] * 2


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_an_adapter_of_experts_learns_for_the_experts_that_are_forced(is_checkpointed):
    lora = LoraConfig(r=3, targets=["q_proj"], experts=True)
    model, batch = with_adapter(make_mixture("qwen3_moe"), lora, path="mixture"), some_batch()
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.requires_grad * 0.1 * torch.randn_like(p))
    plain, replay = score(model, batch), hooked(model)
    logp, routes = record(model, batch, replay)
    assert torch.equal(plain, logp) and torch.equal(plain, score(model, replace(batch, routes=routes), replay))
    forced = torch.tensor([2, 5], dtype=torch.int16).expand_as(routes)
    score(model, replace(batch, routes=forced), replay).sum().backward()
    for name, p in model.named_parameters():
        if "experts" in name and "lora_A" in name:
            of_expert = p.grad.view(EXPERTS, 3, -1).abs().amax((1, 2))  # PEFT has A of the experts one below the other
            assert (of_expert > 0).nonzero().flatten().tolist() == [2, 5], name


def test_a_shared_prefix_has_the_routes_of_the_first_who_knows():
    model = make_mixture("qwen3_moe")
    first, second = families()[0][:2]
    n, shape = len(first.token_ids), (1, 2)
    known = np.full((n, *shape), 1, dtype=np.uint8)
    later = np.full((len(second.token_ids), *shape), 2, dtype=np.uint8)
    batch = pack(
        [replace(first, routes=np.where(np.arange(n)[:, None, None] < 2, 255, known)), replace(second, routes=later)],
        [1.0, 1.0],
        families=[0, 0],
    )
    prefix = batch.routes[batch.segment_ids == 0, 0, 0].tolist()
    assert prefix[:2] == [2, 2] and set(prefix[2:]) == {1} and len(prefix) > 2
    padded = lay_out_part(model, pack([replace(first, routes=known), second], [1.0, 1.0]), "padded", None)
    assert (padded.routes[:, 0, 0] == PADDING).any() and (padded.routes[:, 0, 0] == UNKNOWN).any()


SOFTMAX = {"functional": functional.softmax, "torch": torch.softmax, "method": torch.Tensor.softmax}
SIGMOID = {"functional": functional.sigmoid, "torch": torch.sigmoid, "method": torch.Tensor.sigmoid}


@pytest.mark.parametrize("written", SOFTMAX)
@pytest.mark.parametrize("top", [torch.topk, torch.Tensor.topk])
def test_a_choice_is_read_however_it_is_written(written, top):
    """The distribution is that before the choice, over all experts."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 1.0, 1.5, 4.0]])
    for normalise in (lambda x: SOFTMAX[written](x, -1), SIGMOID[written]):
        with ExpertChoice(4) as choice:
            normalise(logits[:, :3])
            scores = normalise(logits)
            found, at = top(scores, 2, dim=-1)
            normalise(scores)
            torch.topk(logits[:, :3], 1)
            torch.topk(logits[0], 2)
        assert choice.count == 1 and torch.equal(choice.normalised, normalise(logits))
        assert choice.own is choice.chosen is at and at.tolist() == [[1, 2], [3, 2]]
        assert torch.equal(choice.scores, scores) and torch.equal(found, scores.gather(-1, at))
    with ExpertChoice(4, torch.tensor([[3, 0], [-1, -1]])) as choice:
        found, at = top(logits, 2, dim=-1)
    assert choice.normalised is None and at.tolist() == choice.chosen.tolist() == [[3, 0], [3, 2]]
    assert choice.own.tolist() == [[1, 2], [3, 2]] and found.tolist() == [[0.0, 1.0], [4.0, 1.5]]
    with pytest.raises(UserError) as refused, ExpertChoice(4, torch.zeros(2, 3, dtype=torch.int64)):
        top(logits, 2, dim=-1)
    assert str(refused.value) == (
        "the routes of a sample name 3 experts per token, and this model chooses 2: the engine must run the same model "
        "(model.path)"
    )


def test_models_without_a_single_choice_are_refused():
    dense = random_model("llama")
    with pytest.raises(UserError, match=r"rollout.router_replay is set, and this llama model has no experts"):
        hooked(dense)
    model = make_mixture("qwen3_moe")
    block = list_blocks(model)[0].module
    choose = block.gate.forward

    def choose_twice(hidden):
        torch.zeros(1, EXPERTS).topk(1)
        return choose(hidden)

    block.gate.forward = choose_twice
    with pytest.raises(UserError, match=r"model.layers.1.mlp \(Qwen3MoeSparseMoeBlock\) makes 2 such choices"):
        RouterHook(model, model, device="cpu", key="rollout.router_replay is set")


def test_blocks_that_choose_different_numbers_of_experts_are_refused():
    model = random_model("qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=3)
    blocks = list_blocks(model)
    assert len(blocks) == 2
    blocks[0].module.gate.top_k = 1
    with pytest.raises(UserError) as refused:
        RouterHook(model, model, device="cpu", key="rollout.router_replay is set")
    assert str(refused.value) == (
        "rollout.router_replay is set, and the blocks of this model choose [1, 3] experts: leave it out"
    )


def test_routes_are_merged_by_row_and_no_expert_marks_unknown():
    assert dtype_for(255) == np.uint8 and dtype_for(256) == np.uint16
    first = extend(np.array([[[1, 2]], [[3, 4]]], dtype=np.uint8), 3)
    assert find_unknown(first).tolist() == [[False], [False], [True]]
    later = extend(np.array([[[7, 7]], [[7, 7]], [[5, 6]]], dtype=np.uint8), 4)
    assert fill_unknown(first, later)[:, 0].tolist() == [[1, 2], [3, 4], [5, 6], [255, 255]]
