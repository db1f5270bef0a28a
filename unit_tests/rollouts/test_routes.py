"""Routes of engines: the hf engine's are those of its passes, and vLLM's are read in the form that vLLM returns."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.rollout_schema import RolloutConfig
from core.errors import RunStopped, UserError
from core.types.routes import extend, find_unknown
from core.types.samples import Prompt
from modeling.experts import list_blocks
from modeling.forward import forward
from modeling.layout_probe import layout_for
from modeling.load import load_model
from modeling.route_counts import RouteReplay
from rollouts.engines.base import Capabilities, Completion
from rollouts.engines.hf import HfEngine
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.routes import RouteReports
from rollouts.engines.vllm_support.settings import engine_args
from rollouts.transcript import Conversation, check_completion
from unit_tests.helpers.engines import engine_config, engine_of, several
from unit_tests.helpers.models import packed, random_model

EXPERTS, LAYERS = 8, 3
PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 8, 7, 6, 5]]
NEW = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """A model whose first layer is dense, and in which a bias is added to the scores for the choice only."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"moe_intermediate_size": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    more = {"q_lora_rank": None, "v_head_dim": 32, "head_dim": 16, "num_key_value_heads": 2, "n_group": 2}
    routed = {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "topk_group": 1}
    model = random_model("deepseek_v3", num_hidden_layers=LAYERS, **sizes, **more, **routed)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


def as_sample(prompt: list[int], *replies: Completion):
    """The conversation of the replies, with two tokens of an environment between them."""
    conversation = Conversation()
    conversation.append_context(prompt)
    for number, done in enumerate(replies):
        conversation.append_context([3, 4] if number else [])
        conversation.append_reply(done)
    return conversation.make_sample(Prompt(id="0", messages=[]))


def test_replay_of_a_perturbed_routers_choices_leaves_only_rounding(path):
    engine = engine_of(path, routes=True, temperature=1.0, stop_token_ids=[])
    model = load_model(path, dtype="float32", attention="auto")
    with torch.no_grad():
        for block in list_blocks(engine.model):
            block.module.gate.e_score_correction_bias += 0.02 * torch.randn(EXPERTS)
    done = asyncio.run(several(engine, PROMPTS, range(3), n=NEW))
    check_completion(done[0], max_new_tokens=NEW, routed=3)
    samples = [as_sample(prompt, one) for prompt, one in zip(PROMPTS, done, strict=True)]
    assert [s.routes.shape for s in samples] == [(n + NEW, LAYERS - 1, 2) for n in (3, 3, 5)]
    assert all(find_unknown(s.routes)[-1].all() and not find_unknown(s.routes)[:-1].any() for s in samples)
    replay = RouteReplay(model, model, forces=True, device="cpu")
    batch, rollout = packed(samples), torch.cat([torch.tensor(one.logp) for one in done])
    given = {"layout": layout_for("auto", model), "temperature": 1.0}
    without = (forward(model, model, batch, **given).logp - rollout).abs()
    replayed = (forward(model, model, batch, **given, replay=replay).logp - rollout).abs()
    changed = replay.counts.read(replay.counts.flatten())["moe/changed_choices"]
    assert 0.03 < changed < 0.15
    assert without.mean() > 1e-3 and replayed.max() < 1e-5, (without.mean(), replayed.max())


def test_recording_changes_no_sample_and_an_update_keeps_routes(path):
    plain = asyncio.run(several(engine_of(path, stop_token_ids=[]), PROMPTS, range(3), n=10))
    engine = engine_of(path, routes=True, stop_token_ids=[])
    own = list_tensors(engine.model)

    async def run() -> list[Completion]:
        tasks = asyncio.create_task(several(engine, PROMPTS, range(3), n=10))
        for _ in range(8):
            await asyncio.sleep(0)
        for name, tensor in own:  # an update that changes every router
            if "gate.weight" in name:
                tensor.copy_(-tensor)
        engine.n_updates += 1
        return await tasks

    done = asyncio.run(several(engine, PROMPTS, range(3), n=10))
    assert [(c.token_ids, c.logp) for c in done] == [(c.token_ids, c.logp) for c in plain]
    cut = asyncio.run(run())
    same = [(a.routes == b.routes).all((1, 2)) for a, b in zip(done, cut, strict=True)]
    assert all(s[:5].all() for s in same), "the prompt was computed again, and keeps its first routes"
    assert not all(s.all() for s in same)


def test_tokens_of_a_turn_keep_their_routes_of_sampling():
    def completion(prefix: int, number: int) -> Completion:
        routes = extend(np.full((prefix + 1, 1, 2), number, dtype=np.uint8), prefix + 2)
        return Completion(token_ids=[7, 8], logp=[-1.0, -1.0], versions=[0, 0], stop="eos", routes=routes)

    sample = as_sample([5, 6], completion(2, 0), completion(6, 1))
    # prompt and first token of turn 0; its last token and what follows are inputs of turn 1 only
    assert sample.routes[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1, 1, 255]
    with pytest.raises(RunStopped, match=r"returned no routes, and rollout.router_replay is set"):
        check_completion(replace(completion(2, 0), routes=None), max_new_tokens=2, routed=2)
    with pytest.raises(RunStopped, match=r"routes \[4, 1, 2\] in uint8 for 5 tokens of prompt and reply"):
        check_completion(completion(2, 0), max_new_tokens=2, routed=3)
    assert completion(2, 0).cut(1).routes.shape == (3, 1, 2)


def test_vllms_array_is_read_without_its_dense_layers(path):
    """vLLM returns all decoder layers, zeros for dense ones, of every token but the last."""
    config = engine_config(path, routes=True)
    assert engine_args(config, on_cpu=False)["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in engine_args(replace(config, routes=False), on_cpu=False)
    reports = RouteReports(config)
    array = np.random.default_rng(0).integers(0, EXPERTS, (5, LAYERS, 2)).astype(np.uint8)
    array[:, 0] = 0

    def read(found, length=6, known=None):
        return reports.read(SimpleNamespace(routed_experts=found), length, known)

    routes = read(array)
    assert (routes[:5] == array[:, 1:]).all() and find_unknown(routes).tolist() == [[False] * 2] * 5 + [[True] * 2]
    again = np.full((7, LAYERS, 2), 3, dtype=np.uint8)
    longer = read(again, 8, routes)
    assert (longer[:5] == routes[:5]).all() and (longer[5:7] == 3).all() and find_unknown(longer)[7].all()
    wrong = {
        "no routes (routed_experts)": None,
        "routes [4, 3, 2] for 5 input tokens": array[:4],
        "routes [5, 2, 2] for 5 input tokens": array[:, 1:],
        "the expert 8 in uint8, and the model has 8": np.full_like(array, 8),
    }
    for message, found in wrong.items():
        with pytest.raises(RunStopped, match=re.escape(message)):
            read(found)
    assert RouteReports(replace(config, routes=False)).read(SimpleNamespace(), 6) is None


def test_what_vllm_cannot_return_is_refused_before_the_start():
    given = {"on_gpu": True, "aborts": False}
    asked = RolloutConfig(router_replay="replay")
    VllmEngine.check_routes(asked, **given)
    cases = {
        "vLLM returns routes on a GPU only": (asked, given | {"on_gpu": False}),
        "leave out rollout.stop": (asked.model_copy(update={"stop": ["x"]}), given),
        "weight_sync.pause_mode: abort": (asked, given | {"aborts": True}),
        "enable_prefix_caching out": (asked.model_copy(update={"vllm": {"enable_prefix_caching": False}}), given),
    }
    for message, (rollout, where) in cases.items():
        with pytest.raises(UserError, match=message):
            VllmEngine.check_routes(rollout, **where)

    class Mine(HfEngine):
        capabilities = Capabilities()

    with pytest.raises(UserError, match="does not report routes"):
        Mine.check_routes(asked, **given)


def list_tensors(model):
    return [(name, tensor.data) for name, tensor in model.named_parameters()]
