"""Real vLLM on a CPU: its log-probabilities are the trainer's, before and after a sync, and a bad sync is caught."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.sync_schema import PauseMode
from core.errors import RunStopped, TransportFailed
from core.types.allowed_tokens import AllowedTokens
from core.types.weights import Bucket
from rollouts.engines.base import Completion
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.sockets import VARIABLE
from trainers.weight_sync.base import Sent
from trainers.weight_sync.broadcast import WeightReceiver, WeightSender
from trainers.weight_sync.chunks import ChunkWriter
from trainers.weight_sync.fingerprint import fingerprint, verify_sync
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.vllm_lab import (
    BOUND,
    FAMILIES,
    PROMPT,
    STOP,
    TEMPERATURE,
    TIMEOUT_S,
    VOCABULARY,
    Lab,
    Scripted,
    Tamper,
    TamperingSender,
    buckets_of,
    count_cached,
    gap,
    gap_of_samples,
    in_thread,
    logp,
    random_model,
    sample,
    save,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

DOWN = "model.layers.1.mlp.down_proj.weight"
HALF = "model.layers.1.mlp.up_proj.weight"
"""vLLM has it in one parameter with gate_proj, which comes a bucket earlier."""


async def check_allowed_tokens(engine: VllmEngine, model: PreTrainedModel) -> None:
    """Ban the tokens that the model loves most after the prompt; or allow forty of them, among them the least loved."""
    config = engine.config
    with torch.no_grad():
        order = model(torch.tensor([PROMPT])).logits[0, -1].argsort(descending=True).tolist()
    assert {c.token_ids[0] for c in await sample(engine, range(20), 1)} & {*order[:100]}, "it loves them"
    for allowed_tokens in (
        AllowedTokens(banned=tuple(sorted(order[:100]))),
        AllowedTokens(allowed=tuple(sorted(order[200:240]))),
    ):
        outside = torch.tensor(allowed_tokens.find_outside(range(VOCABULARY)))
        for temperature in (TEMPERATURE, 0.0):
            engine.prepare_requests(replace(config, allowed_tokens=allowed_tokens, temperature=temperature))
            for c in await sample(engine, range(12)):
                assert not allowed_tokens.find_outside(c.token_ids)
                ids = torch.tensor([PROMPT + c.token_ids])
                with torch.no_grad():
                    scores = model(ids).logits[0, len(PROMPT) - 1 : -1] / (temperature or 1.0)
                scores[:, outside] = -torch.inf
                ours = scores.log_softmax(-1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
                assert gap(ours.tolist(), c.logp) < BOUND
                assert temperature or scores.argmax(-1).tolist() == c.token_ids
    engine.prepare_requests(config)


async def agrees_before_and_only_after_a_sync(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel, sync: Coroutine[Any, Any, Any]
) -> None:
    assert gap(await engine.probe(PROMPT), logp(old, PROMPT)) < BOUND
    samples = await sample(engine)
    assert gap_of_samples(old, samples) < BOUND
    # Without a sync the new model's bound would be missed by far more than tenfold.
    assert gap_of_samples(new, samples) > 100 * BOUND
    assert gap(await engine.probe(PROMPT), logp(new, PROMPT)) > 100 * BOUND

    sent = await sync
    samples = await sample(engine)
    assert gap_of_samples(new, samples) < BOUND
    verify_sync(
        sent,
        [await engine.read_fingerprint()],
        expected_logp=logp(new, PROMPT),
        probe_logp=[await engine.probe(PROMPT)],
        bound=BOUND,
    )


# In this process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        "qwen2-tied",
        *(pytest.param(f, marks=pytest.mark.verify) for f in ("qwen3-untied", "llama-tied", "mistral-untied")),
    ],
)
def test_in_process_engine_follows_the_trainer(family: str, tmp_path: Path) -> None:
    old, new = save(family, tmp_path, seed=0), random_model(family, seed=1)
    engine = VllmEngine(engine_config(tmp_path, temperature=TEMPERATURE, stop_token_ids=STOP))

    async def load(version: int, model: PreTrainedModel) -> dict[str, int]:
        await engine.pause()
        await engine.load_weights(version, buckets_of(model))
        return fingerprint(model.named_parameters())

    async def body() -> None:
        await agrees_before_and_only_after_a_sync(engine, old, new, load(1, new))
        # The second update starts from what the first one left behind.
        await load(2, old)
        completions = await sample(engine, range(20), max_new_tokens=4)
        assert gap_of_samples(old, completions) < BOUND
        for c in completions:
            assert set(c.versions) == {2}
            *before, last = [token in STOP for token in c.token_ids]
            assert not any(before)
            assert last == (c.stop == "eos")
            assert last or len(c.token_ids) == 4
        assert {c.stop for c in completions} == {"eos", "length"}
        if family == "qwen2-tied":
            await check_allowed_tokens(engine, old)
        await engine.close()

    asyncio.run(body())
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2  # vLLM disables this function, the engine gives it back


# Two tensor-parallel ranks, in processes of their own --------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab("qwen2-tied", tmp_path_factory.mktemp("qwen2"), tensor_parallel_size=2, stop=[])
    yield lab
    lab.close()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two threads")
def test_batches_keep_their_logp_when_the_same_weights_come_again(tiny_path: str) -> None:
    """oneDNN on AVX2 packs weights of this size in one way for one thread, in another for two."""
    torch.set_num_threads(2)  # the fixture sets it back
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)

    async def body() -> None:
        engine = VllmEngine(engine_config(tiny_path, temperature=TEMPERATURE, stop_token_ids=[]))
        first = [await engine.generate([5, 20 + n], max_new_tokens=8, seed=n) for n in range(2)]
        await engine.pause()
        await engine.load_weights(0, buckets_of(model))
        again = [await engine.generate([5, 20 + n], max_new_tokens=8, seed=n) for n in range(2)]
        await engine.close()
        for n, (one, other) in enumerate(zip(first, again, strict=True)):
            assert one.token_ids == other.token_ids and gap(one.logp, other.logp) < 1e-5
            assert gap(one.logp, logp(model, [5, 20 + n, *one.token_ids], TEMPERATURE)[1:]) < BOUND

    asyncio.run(body())


def test_two_ranks_follow_the_trainer_over_gloo(lab: Lab) -> None:
    new = random_model(lab.family, seed=1)
    lab.run(agrees_before_and_only_after_a_sync(lab.engine, lab.model, new, lab.publish(1, new)))


def test_samples_of_one_short_prompt_compute_it_once(lab: Lab) -> None:
    async def body() -> None:
        prompt = [(7 * i) % VOCABULARY for i in range(45)]
        assert [await count_cached(lab.engine, prompt) for _ in range(2)] == [0, 32]  # whole blocks

    lab.run(body())


def test_an_update_clears_the_prefix_cache(lab: Lab) -> None:
    async def body() -> None:
        await lab.publish(2, lab.model)
        assert await count_cached(lab.engine, PROMPT) == 0
        assert await count_cached(lab.engine, PROMPT) == 128  # the control: the same prompt again is served
        await lab.publish(3, lab.model)
        assert await count_cached(lab.engine, PROMPT) == 0

    lab.run(body())


def test_the_probe_is_never_served_from_the_cache(lab: Lab) -> None:
    async def body() -> None:
        await lab.publish(4, lab.model)
        first = await lab.engine.probe(PROMPT)
        assert len(first) == len(PROMPT) - 1
        assert gap(await lab.engine.probe(PROMPT), first) < 1e-6

    lab.run(body())


def test_a_seed_decides_a_completion_whatever_else_runs(lab: Lab) -> None:
    async def body() -> None:
        together = [c.token_ids for c in await sample(lab.engine)]
        alone = (await lab.engine.generate(PROMPT, max_new_tokens=24, seed=3)).token_ids
        assert together[3] == alone
        assert len(set(map(tuple, together))) == len(together)

    lab.run(body())


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.0}, {"pause_mode": "abort"}],
    ids=["one request", "greedy", "aborts"],
)
def test_a_group_is_what_its_seeds_sample_one_by_one(settings: dict[str, Any], lab: Lab) -> None:
    """vLLM takes a group in one request where it can; the samples are the same where it cannot."""

    async def body() -> None:
        asked = {"max_new_tokens": 24, "seed": 2}
        group = await lab.engine.generate_group(PROMPT, size=4, **asked)
        each = await sample(lab.engine, range(2, 6))
        assert [(c.token_ids, c.stop, c.versions) for c in group] == [(c.token_ids, c.stop, c.versions) for c in each]
        assert all(gap(c.logp, alone.logp) < 1e-5 for c, alone in zip(group, each, strict=True))
        assert len({tuple(c.token_ids) for c in group}) == (4 if settings.get("temperature", 1.0) else 1)

    with lab.changed(**settings):
        lab.run(body())


def test_a_group_goes_on_with_the_new_weights(lab: Lab) -> None:
    """Requests of a group are held during an update, and labelled token by token as those of a single sample."""
    new = random_model(lab.family, seed=5)

    async def body() -> None:
        await lab.publish(30, lab.model)
        asking = asyncio.create_task(lab.engine.generate_group(PROMPT, size=3, max_new_tokens=300, seed=1))
        await asyncio.sleep(0.3)
        await lab.publish(31, new)
        for c in await asking:
            assert c.versions == sorted(c.versions) and {*c.versions} == {30, 31} and len(c.token_ids) == 300
            for version, model in ((30, lab.model), (31, new)):
                expected = logp(model, PROMPT + c.token_ids, TEMPERATURE)[-300:]
                at = [i for i, v in enumerate(c.versions) if v == version]
                assert gap([expected[i] for i in at], [c.logp[i] for i in at]) < BOUND
        await lab.publish(32, lab.model)

    lab.run(body())


def test_a_group_that_is_given_up_leaves_vllm(lab: Lab) -> None:
    async def body() -> None:
        asking = asyncio.create_task(lab.engine.generate_group(PROMPT, size=3, max_new_tokens=800, seed=1))
        await asyncio.sleep(0.2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await lab.engine.generate(PROMPT, max_new_tokens=1, seed=0)
        assert not lab.engine._loop.llm.has_unfinished_requests()

    lab.run(body())


def test_it_sleeps_and_wakes_in_order_and_samples_from_what_came_between(lab: Lab) -> None:
    """On a CPU vLLM frees no memory, but its own scheduler knows that it sleeps, and so do its workers."""
    engine, new = lab.engine, random_model(lab.family, seed=5)

    async def body() -> None:
        await lab.publish(20, lab.model)
        asking = asyncio.create_task(engine.generate(PROMPT, max_new_tokens=200, seed=0))
        await asyncio.sleep(0)
        with pytest.raises(RunStopped, match="was to sleep while it had 1 requests"):
            await engine.sleep()
        await asking
        await engine.sleep()
        assert await engine._loop.call(engine._loop.llm.is_sleeping)
        for call in (sample(engine, range(1)), engine.probe(PROMPT), engine.begin_chunks(), engine.sleep()):
            with pytest.raises(RunStopped, match="while it was asleep"):
                await call
        with pytest.raises(RunStopped, match="was sent weights while it was asleep: wake its weights first"):
            await engine.receive_weights(21)
        with pytest.raises(RunStopped, match="was to wake its kv_cache while it was asleep"):
            await engine.wake("kv_cache")
        await engine.wake("weights")
        sent = await lab.publish(21, new)
        assert await engine._loop.call(engine._loop.llm.is_sleeping), "the weights are there, and the cache is not"
        with pytest.raises(RunStopped, match="awake only with its weights"):
            await engine.probe(PROMPT)
        await engine.wake("kv_cache")
        assert not await engine._loop.call(engine._loop.llm.is_sleeping) and await count_cached(engine, PROMPT) == 0
        loaded = [await engine.read_fingerprint()]
        probed = [await engine.probe(PROMPT)]
        verify_sync(sent, loaded, expected_logp=logp(new, PROMPT), probe_logp=probed, bound=BOUND)
        completions = await sample(engine)
        assert gap_of_samples(new, completions) < BOUND and {v for c in completions for v in c.versions} == {21}
        await lab.publish(22, lab.model)

    lab.run(body())


def test_it_samples_from_its_support_and_says_the_probabilities_of_that(lab: Lab) -> None:
    """At once in one engine: requests of another allowed_tokens, which vLLM must not mix up, cannot be there."""

    async def body() -> None:
        await lab.publish(10, lab.model)
        await check_allowed_tokens(lab.engine, lab.model)

    lab.run(body())


def test_more_prompts_than_one_batch_holds_are_all_answered(lab: Lab) -> None:
    prompts = [[(31 * i + j) % VOCABULARY for j in range(150)] for i in range(40)]  # 6000 tokens; a batch has 2048

    async def body() -> None:
        await lab.publish(11, lab.model)
        answers = await asyncio.gather(*[lab.engine.generate(p, max_new_tokens=2, seed=7) for p in prompts])
        assert [len(c.token_ids) for c in answers] == [2] * len(prompts)

    lab.run(body())


BUDGETS = (700, 5, 500)
"""The second is answered before the update begins."""


async def update_keep(lab: Lab) -> tuple[list[Completion], Completion]:
    """Version 7, and version 8 under requests: their completions, and that of a request asked while they are held.

    All is checked here but how the versions are spread.
    """
    new = random_model(lab.family, seed=5)
    await lab.publish(7, lab.model)
    asking = [
        asyncio.create_task(lab.engine.generate(PROMPT, max_new_tokens=n, seed=seed)) for seed, n in enumerate(BUDGETS)
    ]
    await asking[1]
    holding = asyncio.create_task(lab.engine.pause())
    await asyncio.sleep(0.1)
    asking_late = asyncio.create_task(lab.engine.generate(PROMPT, max_new_tokens=20, seed=9))
    await holding
    await asyncio.sleep(0.3)
    assert not asking_late.done()
    sent = await lab.send(8, new)
    *done, late = await asyncio.gather(*asking, asking_late)
    for c, budget in zip([*done, late], [*BUDGETS, 20], strict=True):
        assert (len(c.token_ids), c.stop) == (budget, "length")
        assert len(c.versions) == budget and c.versions == sorted(c.versions)
        for version, model in ((7, lab.model), (8, new)):
            # With the new weights all before a token was computed anew: nothing of the old model is left in it.
            expected = logp(model, PROMPT + c.token_ids, TEMPERATURE)[-budget:]
            if at := [i for i, v in enumerate(c.versions) if v == version]:
                assert gap([expected[i] for i in at], [c.logp[i] for i in at]) < BOUND
    probe = [await lab.engine.probe(PROMPT)]
    verify_sync(
        sent, [await lab.engine.read_fingerprint()], expected_logp=logp(new, PROMPT), probe_logp=probe, bound=BOUND
    )
    return done, late


def test_requests_keep_go_on_with_the_new_weights(lab: Lab) -> None:
    done, late = lab.run(update_keep(lab))
    assert [set(c.versions) for c in [*done, late]] == [{7, 8}, {7}, {7, 8}, {8}]


def test_a_drain_finishes_what_runs_and_holds_what_comes(lab: Lab) -> None:
    with lab.changed(pause_mode="wait"):
        done, late = lab.run(update_keep(lab))
    assert [set(c.versions) for c in [*done, late]] == [{7}, {7}, {7}, {8}]


def test_what_an_update_cuts_off_is_asked_again_from_its_tokens(lab: Lab) -> None:
    with lab.changed(pause_mode="abort"):
        cut_off_and_asked_again(lab)


def cut_off_and_asked_again(lab: Lab) -> None:
    done, late = lab.run(update_keep(lab))
    assert [set(c.versions) for c in [*done, late]] == [{7, 8}, {7}, {7, 8}, {8}]

    async def cut_twice_before_the_first_token() -> Completion:
        await lab.engine.pause()
        asking = asyncio.create_task(lab.engine.generate(PROMPT, max_new_tokens=8, seed=9))
        await asyncio.sleep(0.2)  # it is in vLLM's queue by then
        await lab.engine.pause()
        await lab.send(9, lab.model)
        return await asking

    c = lab.run(cut_twice_before_the_first_token())
    assert c.versions == [9] * 8 and gap_of_samples(lab.model, [c]) < BOUND


@pytest.mark.parametrize(
    ("answers", "versions", "stop"),
    [
        ([([], None), ([40, 3], "stop")], [2, 2], "eos"),
        ([([40], None), ([], None), ([41, 42], None), ([43], "length")], [1, 3, 3, 4], "length"),
        ([([40, 41, 42, 43], None)], [1, 1, 1, 1], "length"),  # cut off with nothing left to say
        ([([40, 3], None)], [1, 1], "eos"),
    ],
)
def test_nothing_is_lost_or_doubled_where_a_request_is_cut(
    answers: list[tuple[list[int], str | None]], versions: list[int], stop: str, tiny_path: str
) -> None:
    engine = Scripted(tiny_path, "abort", *answers)
    c = asyncio.run(engine.generate([50, 51], max_new_tokens=4, seed=7))
    ids = [token for part, _ in answers for token in part]
    assert c == Completion(token_ids=ids, logp=[-t / 10 for t in ids], versions=versions, stop=stop)
    assert not engine.answers
    for token_ids, max_tokens, _ in engine.asked:
        assert token_ids == [50, 51, *ids][: len(token_ids)] and len(token_ids) + max_tokens == 6
    # Another seed for each number of tokens so far, or the same random numbers would come again.
    assert len({seed for *_, seed in engine.asked}) == len({n for _, n, _ in engine.asked})
    assert engine.asked[0][2] == 7


@pytest.mark.parametrize("update", ["keep", "wait", "abort"])
def test_an_abort_that_is_not_ours_stops_the_run(update: PauseMode, tiny_path: str) -> None:
    with pytest.raises(RunStopped, match="ended a request with 'abort'"):
        asyncio.run(Scripted(tiny_path, update, ([40], "abort")).generate([50], max_new_tokens=4, seed=7))


def changed(name: str) -> Tamper:
    def tamper(bucket: Bucket) -> Bucket:
        return [(n, t + (n == name) * 1e-6 * t.abs().max()) for n, t in bucket]

    return tamper


def dropped(name: str) -> Tamper:
    return lambda bucket: [(n, t) for n, t in bucket if n != name]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (changed("model.layers.1.mlp.down_proj.weight"), "ranks 0 to 1 .* model.layers.1.mlp.down_proj.weight"),
        (changed("model.layers.0.self_attn.k_proj.bias"), "ranks 0 to 1 .* model.layers.0.self_attn.k_proj.bias"),
        (changed("model.norm.weight"), "model.norm.weight"),
        (dropped("model.layers.0.self_attn.k_proj.weight"), "did not load model.layers.0.self_attn.k_proj.weight"),
        (dropped("model.layers.1.mlp.down_proj.weight"), "no values for 1 param.* model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_a_tampered_sync_stops_the_run_in_the_same_step(lab: Lab, fault: Tamper, says: str) -> None:
    async def body() -> None:
        sent = await lab.publish(9, lab.model, tamper=fault)
        loaded = [await lab.engine.read_fingerprint()]
        verify_sync(sent, loaded, expected_logp=[], probe_logp=[], bound=BOUND)

    with pytest.raises(RunStopped, match=says):
        lab.run(body())


def test_an_engine_left_out_stops_the_run(lab: Lab) -> None:
    new = random_model(lab.family, seed=6)
    sender = WeightSender(timeout_s=TIMEOUT_S)
    port = sender.open()

    def other_engine() -> dict[str, int]:
        receiver = WeightReceiver(address="127.0.0.1", port=port, rank=1, members=2, timeout_s=TIMEOUT_S)
        return fingerprint(pair for bucket in receiver.receive() for pair in bucket)

    lab.run(lab.publish(10, lab.model))
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(other_engine)
        sender.join(members=2)
        sent = sender.send(buckets_of(new))
    with pytest.raises(RunStopped, match="engine 1 are not the trainer's after the sync: ranks 0 to 1 together"):
        verify_sync(
            sent,
            [[heard.result()], lab.run(lab.engine.read_fingerprint())],
            expected_logp=[],
            probe_logp=[],
            bound=BOUND,
        )


# The same ranks, with weights in chunks --------------------------------------------------------------------


async def feed(lab: Lab, stream: Iterator[Bucket], folder: Path | None, most: int | None = None) -> Sent:
    """The chunks of a sync, or the first few of them; `receive_weights` is to follow."""
    packer = ChunkWriter(stream, writes=True, folder=None if folder is None else str(folder))
    await lab.engine.pause()
    await lab.engine.begin_chunks()
    count = 0
    while count != most and packer.write_chunk():
        await lab.engine.load_chunk(packer.chunk)
        count += 1
    return packer.summarize()


async def holds(lab: Lab, version: int, model: PreTrainedModel, sent: Sent) -> None:
    loaded, probe = [await lab.engine.read_fingerprint()], [await lab.engine.probe(PROMPT)]
    verify_sync(sent.checksums, loaded, expected_logp=logp(model, PROMPT), probe_logp=probe, bound=BOUND)
    samples = await sample(lab.engine)
    assert gap_of_samples(model, samples) < BOUND
    assert {v for c in samples for v in c.versions} == {version}


class CutSender(TamperingSender):
    """Over a cable that is cut in the middle of a layer."""

    def _send_bucket(self, bucket: Bucket) -> None:
        if HALF in dict(bucket):
            raise OSError("the cable is cut")
        super()._send_bucket(bucket)


async def broken_broadcast(lab: Lab, version: int, stream: Iterator[Bucket]) -> None:
    lab.sender = CutSender(timeout_s=TIMEOUT_S)
    lab.sender.tamper = lambda bucket: bucket
    await lab._join()
    await lab.engine.pause()
    began = time.monotonic()
    sends, receives = await asyncio.gather(
        in_thread(lab.sender.send, stream), lab.engine.receive_weights(version), return_exceptions=True
    )
    assert time.monotonic() - began < TIMEOUT_S / 2, "who waits is told, and does not wait for its deadline"
    assert isinstance(sends, TransportFailed) and "over gloo: the cable is cut" in str(sends)
    assert isinstance(receives, TransportFailed) and "did not get through over gloo" in str(receives)


def test_chunks_bring_what_a_stream_brings_even_after_a_broken_update(lab: Lab, tmp_path: Path) -> None:
    models = [random_model(lab.family, seed=seed) for seed in (1, 2, 3)]

    async def body() -> None:
        await lab.publish(21, lab.model)
        sent = await feed(lab, buckets_of(models[0]), None)
        await lab.engine.receive_weights(22)
        await holds(lab, 22, models[0], sent)

        await feed(lab, buckets_of(models[0]), None, most=4)  # the last brings layer 0's gate_proj
        sent = await feed(lab, buckets_of(models[1]), tmp_path)
        await lab.engine.receive_weights(23)
        await holds(lab, 23, models[1], sent)

        await broken_broadcast(lab, 24, buckets_of(models[0]))
        sent = await feed(lab, buckets_of(models[2]), None)
        await lab.engine.receive_weights(24)
        await holds(lab, 24, models[2], sent)

        await feed(lab, (dropped(DOWN)(bucket) for bucket in buckets_of(models[1])), None)
        with pytest.raises(RunStopped, match=f"no values for 1 param.* {DOWN}"):
            await lab.engine.receive_weights(25)
        with pytest.raises(TransportFailed, match=r"did not get through over disk: .*No such file"):
            await lab.engine.begin_chunks()
            await lab.engine.load_chunk(f"{tmp_path}/nowhere#7-00")

        lab.sender = TamperingSender(timeout_s=TIMEOUT_S)
        await lab._join()

    lab.run(body())


# Long evidence ---------------------------------------------------------------------------------------------


@pytest.mark.verify
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_follows_the_trainer_over_gloo(family: str, tensor_parallel_size: int, tmp_path: Path) -> None:
    lab = Lab(family, tmp_path, tensor_parallel_size=tensor_parallel_size, stop=STOP)
    new = random_model(family, seed=1)
    lab.run(agrees_before_and_only_after_a_sync(lab.engine, lab.model, new, lab.publish(1, new)))
    lab.close()


@pytest.mark.verify
def test_nothing_outlives_a_killed_engine(tmp_path: Path, tmp_path_factory) -> None:
    save("qwen2-tied", tmp_path, seed=0)
    script = f"""
        import sys, time
        from rollouts.engines.vllm import VllmEngine
        from rollouts.engines.base import EngineConfig
        if __name__ == "__main__":
            VllmEngine(EngineConfig(model_path={str(tmp_path)!r}, dtype="float32", temperature=1.0, max_model_len=256,
                       stop_token_ids=[], kv_cache_gib=0.1, tensor_parallel_size=2))
            print("ready", flush=True)
            time.sleep(600)
    """
    (tmp_path / "engine.py").write_text(textwrap.dedent(script))
    sockets = tmp_path_factory.mktemp("s")  # nobody removes them after a kill
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), VARIABLE: str(sockets)}
    command = [sys.executable, str(tmp_path / "engine.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as actor:
        assert actor.stdout is not None
        assert any(line.strip() == "ready" for line in actor.stdout)
        children = psutil.Process(actor.pid).children(recursive=True)
        assert len(children) >= 2
        actor.kill()
    began = time.monotonic()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, f"still there {time.monotonic() - began:.0f} s after the kill: {alive}"
