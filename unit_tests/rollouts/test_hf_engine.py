"""What the engine says it sampled with is what the model says, whatever weights came in between."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from algs.sft import SFT
from configs.schema import RLConfig
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import RunStopped
from core.timing.clock import ActivityTimer
from core.timing.phases import ENGINE_ACTIVITIES
from data_feeds.packing.batches import micro_batches
from driver.load_recipe import load_recipe
from driver.start.rollouts import plan_rollouts
from rollouts.engines.hf import HfEngine
from rollouts.registry import load_engine_class
from trainers.local import LocalTrainer
from trainers.weight_sync.base import Probe
from trainers.weight_sync.publisher import LocalWeightSync
from unit_tests.helpers.engines import PROMPTS, engine_of, several
from unit_tests.helpers.examples import some_groups


def test_log_probabilities_are_those_of_a_forward_pass_at_the_temperature(tiny_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    for prompt, done in zip(PROMPTS, asyncio.run(several(engine_of(tiny_path), PROMPTS, range(4))), strict=True):
        ids = prompt + done.token_ids
        logp = (model(torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
        want = [float(logp[t - 1, ids[t]]) for t in range(len(prompt), len(ids))]
        assert done.logp == pytest.approx(want, abs=1e-5)
        assert (done.stop == "eos") == (done.token_ids[-1] == 1)
        assert done.stop == "eos" or len(done.token_ids) == 12


def test_a_completion_ends_with_the_first_stop_token(tiny_path):
    """A fifth of all tokens end one here, so that completions of every length come up."""
    engine = engine_of(tiny_path)
    engine.stop = set(range(0, 103, 5))
    done = asyncio.run(several(engine, [[5, 6, 7]] * 40, range(40)))
    for completion in done:
        assert not engine.stop & set(completion.token_ids[:-1])
        assert (completion.stop == "eos") == (completion.token_ids[-1] in engine.stop)
        assert completion.stop == "eos" or len(completion.token_ids) == 12
    assert len({len(completion.token_ids) for completion in done}) > 4


def test_a_request_does_not_depend_on_its_neighbours_and_its_seed_decides(tiny_path):
    engine = engine_of(tiny_path)
    together = asyncio.run(several(engine, PROMPTS, range(4)))
    alone = [asyncio.run(several(engine, [p], [i]))[0] for i, p in enumerate(PROMPTS)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    other = asyncio.run(several(engine, PROMPTS, range(10, 14)))
    assert [c.token_ids for c in together] != [c.token_ids for c in other]


def test_the_prompt_of_a_group_is_computed_once(tiny_path):
    prompts = [PROMPTS[0], PROMPTS[2], *[PROMPTS[0]] * 3]
    engine = engine_of(tiny_path)
    alone = [asyncio.run(several(engine, [p], [i]))[0] for i, p in enumerate(prompts)]
    steps = Steps(engine)
    together = asyncio.run(several(engine, prompts, range(5)))
    assert steps.rows[:2] == [2, 5]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in together}) == 5
    for one, other in zip(together, alone, strict=True):
        assert one.logp == pytest.approx(other.logp, abs=1e-5)


def test_the_models_own_generation_config_changes_nothing(tiny_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, top_p=0.1, temperature=0.01, eos_token_id=1)
    model.save_pretrained(tmp_path)
    expected = asyncio.run(several(engine_of(tiny_path), PROMPTS, range(4)))
    got = asyncio.run(several(engine_of(str(tmp_path)), PROMPTS, range(4)))
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


def test_frequencies_are_the_probabilities(tiny_path):
    """4000 draws of the first token: every count within five standard deviations."""
    engine = engine_of(tiny_path, temperature=0.3)
    n = 4000
    done = asyncio.run(several(engine, [[5, 6]] * n, range(n), n=1))
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    p = (model(torch.tensor([[5, 6]])).logits[0, -1] / 0.3).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=len(p))
    assert ((counts - n * p).abs() < 5 * (n * p * (1 - p)).sqrt() + 1).all()


# Weights in mid-generation ---------------------------------------------------------------------------------

BUDGETS = [12, 3, 20, 12]
AT = 5
"""Tokens that are there when an update begins; the second prompt has its three by then."""


def other_weights(path, seed):
    """Far from the ones in the folder, so that a cache of theirs, or a wrong version, is seen."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


class Steps:
    """Counts the engine's forward passes, and wakes who waits for one of them."""

    def __init__(self, engine):
        self.rows = []
        engine.model.register_forward_hook(lambda model, args, out: self.rows.append(len(out.logits)))

    async def until(self, n):
        while len(self.rows) < n:
            await asyncio.sleep(0)


def check_by_forward_pass(models, prompt, done):
    """Each token's log-probability is that of its version's weights, given all that is before it."""
    ids = prompt + done.token_ids
    assert len(done.logp) == len(done.versions) == len(done.token_ids)
    for version in set(done.versions):
        with torch.no_grad():
            logp = (models[version](torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
        for i, token in enumerate(done.token_ids):
            if done.versions[i] == version:
                assert done.logp[i] == pytest.approx(float(logp[len(prompt) + i - 1, token]), abs=1e-4)


def check_ends(done, budget):
    assert 1 not in done.token_ids[:-1]
    assert (done.stop == "eos") == (done.token_ids[-1] == 1)
    assert len(done.token_ids) == budget or (done.stop == "eos" and len(done.token_ids) < budget)


def updated_keep(path, mode):
    """Version 1, and version 2 in the middle: the completions, the late one's, how many steps there were before the
    load, and the models by version."""
    models = {version: other_weights(path, seed=version) for version in (1, 2)}

    async def body():
        engine = engine_of(path, pause_mode=mode)
        await engine.load_weights(1, [list(models[1].named_parameters())])
        steps = Steps(engine)

        async def update():
            await steps.until(AT)
            assert torch.is_grad_enabled(), "a trainer in this process may be at work between two tokens"
            holding = asyncio.create_task(engine.pause())
            await asyncio.sleep(0)
            late = asyncio.create_task(engine.generate([8, 8], max_new_tokens=4, seed=9))
            await holding
            before = len(steps.rows)
            await engine.load_weights(2, [list(models[2].named_parameters())])
            return await late, before

        asking = (
            engine.generate(p, max_new_tokens=n, seed=i) for i, (p, n) in enumerate(zip(PROMPTS, BUDGETS, strict=True))
        )
        *done, (late, before) = await asyncio.wait_for(asyncio.gather(*asking, update()), 60)
        return done, late, before

    return *asyncio.run(body()), models


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_every_token_is_of_the_weights_its_version_names(tiny_path, mode):
    done, late, _, models = updated_keep(tiny_path, mode)
    for prompt, completion, budget in zip([*PROMPTS, [8, 8]], [*done, late], [*BUDGETS, 4], strict=True):
        check_by_forward_pass(models, prompt, completion)
        check_ends(completion, budget)
    assert set(late.versions) == {2}
    assert {len(c.token_ids) for c in done} >= {3, 12, 20}, "or the seeds end them before the load"


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_versions_change_at_the_load(tiny_path, mode):
    done, _, before, _ = updated_keep(tiny_path, mode)
    assert AT <= before < 12
    for completion in done:
        n = len(completion.token_ids)
        assert completion.versions == [1] * min(n, before) + [2] * (n - before)


def test_a_drain_finishes_what_runs_with_the_old_weights(tiny_path):
    done, _, before, _ = updated_keep(tiny_path, "wait")
    assert {v for c in done for v in c.versions} == {1}
    assert before == max(len(c.token_ids) for c in done)


def test_a_request_goes_on_with_its_own_random_numbers(tiny_path):
    held, cut_off = (updated_keep(tiny_path, mode)[0] for mode in ("keep", "abort"))
    assert [c.token_ids for c in held] == [c.token_ids for c in cut_off]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_the_recipe_decides_what_an_update_does(recipe, mode):
    cfg = load_recipe(RLConfig, recipe({"weight_sync.pause_mode": mode}), []).cfg
    plan = plan_rollouts(cfg)
    engine = load_engine_class(plan.engine_spec)(replace(plan.engine, stop_token_ids=(1,)))
    assert isinstance(engine, HfEngine) and engine.request_mode == mode


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_an_update_between_batches_changes_nothing_else(tiny_path, mode):
    new = other_weights(tiny_path, seed=1)

    async def updated(engine, *, hold):
        if hold:
            await engine.pause()
        await engine.load_weights(0, [list(new.named_parameters())])
        return await several(engine, PROMPTS, range(4))

    held = asyncio.run(updated(engine_of(tiny_path, pause_mode=mode), hold=True))
    assert held == asyncio.run(updated(engine_of(tiny_path), hold=False))


def test_a_probe_in_mid_generation_is_of_the_weights_of_the_moment(tiny_path):
    new = other_weights(tiny_path, seed=1)
    ids = [5, 6, 7, 8, 9]

    async def body():
        engine = engine_of(tiny_path)
        steps = Steps(engine)
        running = asyncio.create_task(engine.generate(PROMPTS[0], max_new_tokens=12, seed=0))
        await steps.until(3)
        before = await engine.probe(ids)
        await engine.load_weights(1, [list(new.named_parameters())])
        after = await engine.probe(ids)
        assert not running.done()
        await running
        return before, after

    models = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32), new
    for probed, model in zip(asyncio.run(body()), models, strict=True):
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert probed == pytest.approx([float(logp[i, t]) for i, t in enumerate(ids[1:])], abs=1e-5)


def test_a_sync_in_one_process_is_proven_and_tells_its_bytes(tiny_path):
    """In many buckets, of a trainer that has left the weights that the engine began with."""
    model = ModelConfig(path=tiny_path, dtype="float32", attention="sdpa")
    trainer = LocalTrainer(model, TrainerConfig(lr=0.01), SFT(), temperature=0.7, total_updates=2)
    trainer.step([micro_batches(some_groups(2, 2), "token", 10_000)[0]])
    engine, timer = engine_of(tiny_path), ActivityTimer(*ENGINE_ACTIVITIES)
    probe = Probe(token_ids=[5, 6, 7, 8], bound=1e-4)
    before = asyncio.run(engine.probe(probe.token_ids))
    sync = LocalWeightSync(trainer, engine, (trainer.timer, timer), probe, 1000, "whole")
    told = asyncio.run(sync.publish_weights(1))
    after = asyncio.run(engine.probe(probe.token_ids))
    assert after == pytest.approx(trainer.probe(probe.token_ids), abs=1e-5) != pytest.approx(before, abs=1e-3)
    assert told["sync/bytes"] == sum(p.nbytes for p in trainer.model.parameters())
    assert told["sync/probe_gap"] < 1e-5 and engine.version == 1
    with torch.no_grad():
        engine.model.lm_head.weight.add_(1.0)  # what no sync has put there
    sync.trainer = trainer_that_exports(trainer, leaves_out="lm_head.weight")
    with pytest.raises(RunStopped, match=r"had no values for 1 tensors, such as lm_head.weight"):
        asyncio.run(sync.publish_weights(2))


def trainer_that_exports(trainer: LocalTrainer, *, leaves_out: str):
    """The same trainer, which forgets a tensor."""

    class Forgetful:
        probe = trainer.probe

        def export_weights(self, max_bytes, scope):
            for bucket in trainer.export_weights(max_bytes, scope):
                yield [(name, tensor) for name, tensor in bucket if name != leaves_out]

    return Forgetful()


def test_a_failure_reaches_every_caller_and_the_next_batch_runs(tiny_path):
    no_token = 10**6

    async def body():
        engine = engine_of(tiny_path, max_batch=2)
        asking = (engine.generate([t], max_new_tokens=3, seed=0) for t in (no_token, 5, no_token, 6, 7))
        outcomes = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 60)
        assert [isinstance(o, IndexError) for o in outcomes] == [True] * 4 + [False]
        assert outcomes[4].token_ids == (await engine.generate([7], max_new_tokens=3, seed=0)).token_ids

    asyncio.run(body())


def test_callers_of_a_batch_that_is_cancelled_are_cancelled(tiny_path):
    async def body():
        engine = engine_of(tiny_path)
        steps = Steps(engine)
        asking = [asyncio.create_task(engine.generate([t], max_new_tokens=10**6, seed=2)) for t in (5, 6)]
        await steps.until(1)
        engine.running.cancel()
        await asyncio.wait(asking, timeout=10)
        assert [one.done() and one.cancelled() for one in asking] == [True, True]

    asyncio.run(body())


def test_a_tensor_that_the_model_has_not_is_named_with_its_shape(tiny_path):
    engine = engine_of(tiny_path)
    norm = engine.model.model.norm.weight
    for name, tensor, shape in (
        ("model.norm.bias", norm, [len(norm)]),
        ("model.norm.weight", norm[:3], [3]),
        ("model.norm.weight", norm[None], [1, len(norm)]),
    ):
        with pytest.raises(RunStopped) as raised:
            asyncio.run(engine.load_weights(1, [[("model.norm.weight", norm + 1.0)], [(name, tensor)]]))
        assert str(raised.value) == f"the hf engine's model has no {name} of shape {shape}"
    assert engine.version == -1


def test_a_drain_does_not_wait_for_callers_that_gave_up(tiny_path):
    async def body():
        engine = engine_of(tiny_path, pause_mode="wait")
        steps = Steps(engine)
        running = asyncio.create_task(engine.generate([5], max_new_tokens=10**6, seed=2))
        await steps.until(1)
        running.cancel()
        await asyncio.wait_for(engine.pause(), 10)
        assert len(steps.rows) < 5

    asyncio.run(body())


def test_those_who_are_answered_together_ask_again_together(tiny_path):
    """Else a second turn's batch, and so its last bits, would hang on how long the others' first turns took."""

    async def body():
        engine = engine_of(tiny_path, max_batch=3)
        steps = Steps(engine)

        async def episode(own, n):
            for turn in range(2):
                await engine.generate([5, 10 + own, 20 + turn], max_new_tokens=n, seed=n)

        await asyncio.gather(*(episode(own, n) for own, n in enumerate((1, 2, 3, 1))))
        return steps.rows

    # Three, then the one left over with two of the second turns, then the last of those.
    assert asyncio.run(body()) == [*(3, 2, 1), *(3, 1), *(2, 1, 1)]
