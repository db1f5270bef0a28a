"""Stages of the zoo: what FeynRL does with a model, by the product's own code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.trainer_schema import LoraConfig
from core.timing.clock import ActivityTimer
from core.timing.phases import ENGINE_ACTIVITIES
from core.types.routes import find_unknown
from core.types.weights import ExportScope
from modeling.experts import list_blocks
from modeling.export import saved_buffers
from modeling.load import check_weights, load_model
from modeling.lora import check_lora, name_lora_targets
from modeling.model_files import read_headers
from modeling.saved_model import check_saved
from rollouts.engines.base import Completion, Engine
from tools.zoo.ranks import check_ranks
from tools.zoo.subject import (
    BUCKET_BYTES,
    StageFailed,
    Subject,
    make_groups,
    make_reply,
    make_tokens,
    mean_gap,
    perturb,
)
from trainers.local import LocalTrainer
from trainers.trainer import Trainer
from trainers.weight_sync.publisher import LocalWeightSync

Numbers = Mapping[str, float | str]
"""Measurements of a stage, by name."""
LORA = LoraConfig(r=4, alpha=8.0, merge_on_save=True)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_b_proj")
"""Linear layers that get an adapter, where a family has them."""
PACKED_BOUND = 1e-4
"""Largest difference of a log-probability in a row with others from that of the sequence alone, in nats, in float32."""


def check_load(subject: Subject) -> Numbers:
    """Load the folder that transformers has written: all of its tensors, and no others."""
    check_weights(subject.path)
    model = load_model(subject.path, dtype=subject.dtype, attention="auto")
    return {"parameters": sum(p.numel() for p in model.parameters()), "class": type(model).__name__}


def check_layout(subject: Subject) -> Numbers:
    """Compare sequences in the rows that a trainer makes with each sequence alone, by the family's own attention."""
    # In bfloat16 an expert chosen by a hair may change, and with it a token by more than a wrong layout does.
    trainer, alone = subject.make_trainer(dtype="float32"), subject.make_trainer(dtype="float32", attention="eager")
    layout = trainer.describe_layout()
    level = "padded" if layout.padded else "shared" if layout.shares_prefixes else "packed"
    [batches] = subject.make_batches(trainer, groups=make_groups(alone))
    with torch.no_grad():
        logp = [trainer.forward(batch, as_given=True, measures={}).logp for batch in batches]
    want = [batch.tokens.rollout_logp for batch in batches]
    gap = float((torch.cat(logp) - torch.cat(want)).abs().max())
    if not gap <= PACKED_BOUND:
        raise StageFailed(f"{level} rows change a log-probability by {gap:.1e} nats")
    return {"layout": level, "gap": gap}


def check_names(subject: Subject) -> Numbers:
    """Compare the export under names of files with the files that transformers has written, in names and values."""
    from safetensors.torch import load_file

    trainer = subject.make_trainer()
    found: dict[str, Tensor] = {}
    buckets = 0
    for bucket in trainer.export_weights(BUCKET_BYTES, "files"):
        found |= dict(bucket)
        buckets += 1
        if len(bucket) > 1 and sum(t.nbytes for _, t in bucket) > BUCKET_BYTES:
            raise StageFailed(f"a bucket of {len(bucket)} tensors is larger than {BUCKET_BYTES} bytes")
    refuse_other_tensors(found, load_file(Path(subject.path) / "model.safetensors"))
    return {"tensors": len(found), "buckets": buckets}


def refuse_other_tensors(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Raise StageFailed unless names, shapes, dtypes and values are equal."""
    if odd := sorted(found.keys() ^ want.keys()):
        where = "exported only" if odd[0] in found else "in the files only"
        raise StageFailed(f"{odd[0]} is {where} ({len(odd)} names differ)")
    for name, tensor in want.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            raise StageFailed(f"{name} differs from the files: {list(found[name].shape)}, {found[name].dtype}")


def check_update(subject: Subject) -> Numbers:
    """Update of GRPO: return the share of the weights that changed, and the gradient's norm."""
    trainer = subject.make_trainer()
    before = trainer.flatten_weights()
    metrics = trainer.step(subject.make_batches(trainer))
    moved = float((trainer.flatten_weights() != before).float().mean())
    if not moved > 0.1 or not metrics["grad_norm"] > 0:
        raise StageFailed(f"an update changed {moved:.0%} of the weights")
    return {"changed": moved, "grad_norm": metrics["grad_norm"]}


def check_engine(subject: Subject, make: Callable[[Any], Engine]) -> Numbers:
    """Start an engine as a run does, without weights, and send it two different sets, each with proof."""
    return asyncio.run(_check_engine(subject, make))


async def _check_engine(subject: Subject, make: Callable[[Any], Engine]) -> Numbers:
    # the trainer first: for some families vLLM changes the class of transformers in its process
    trainer, tokens = subject.make_trainer(), subject.probe.token_ids
    engine = make(subject.engine_config(starts_empty=True))
    try:
        start = trainer.probe(tokens)
        gaps: list[float] = []
        for version in (1, 2):
            perturb(trainer, seed=version)
            gaps.append(await publish(subject, trainer, engine, version))
        moved = mean_gap(trainer.probe(tokens), start)
        if not moved > 2 * subject.bound:  # else an engine with the old weights would pass
            raise StageFailed(f"the weights were changed, and the log-probabilities by {moved:.1e} nats only")
        return {"gap": max(gaps), "moved": moved}
    finally:
        await engine.close()


async def publish(
    subject: Subject, trainer: Trainer, engine: Engine, version: int, scope: ExportScope | None = None
) -> float:
    """Send the weights with proof; return the gap of the probe in nats."""
    names: ExportScope = "files" if engine.capabilities.file_names else "whole"
    timers = trainer.timer, ActivityTimer(*ENGINE_ACTIVITIES)
    sync = LocalWeightSync(trainer, engine, timers, subject.probe, BUCKET_BYTES, scope or names)
    return (await sync.publish_weights(version))["sync/probe_gap"]


def make_hf(config: Any) -> Engine:
    from rollouts.engines.hf import HfEngine

    return HfEngine(config)


def make_vllm(config: Any) -> Engine:
    from rollouts.engines.vllm import VllmEngine

    return VllmEngine(config)


def save_trained(subject: Subject) -> tuple[LocalTrainer, str]:
    """Train, change and save a model; return the trainer and the folder."""
    trainer, folder = subject.make_trainer(), subject.folder / "saved"
    trainer.step(subject.make_batches(trainer))
    perturb(trainer, seed=5)
    trainer.save_model(folder)
    return trainer, str(folder)


def check_save(subject: Subject) -> Numbers:
    """Save a trained model, and compare the model that transformers loads from the folder, and the trainer does."""
    trainer, folder = save_trained(subject)
    check_saved(Path(folder), dtype=subject.dtype)
    want, again = trainer.probe(subject.probe.token_ids), subject.make_trainer(path=folder)
    gap = mean_gap(again.probe(subject.probe.token_ids), want)
    refuse_other_weights(again, trainer)
    lost = set(read_headers(Path(subject.path))) ^ set(read_headers(Path(folder)))
    if lost or not gap <= 1e-6:
        raise StageFailed(f"names that differ from the first folder's: {sorted(lost)[:2]}; {gap:.1e} nats apart")
    return {"gap": gap}


def refuse_other_weights(found: Trainer, want: Trainer) -> None:
    """Raise StageFailed unless parameters and saved buffers are equal."""
    theirs = dict([*found.model.named_parameters(), *saved_buffers(found.model)])
    for name, tensor in [*want.model.named_parameters(), *saved_buffers(want.model)]:
        if not torch.equal(theirs[name], tensor):
            raise StageFailed(f"{name} was saved with other values")


def check_saved_vllm(subject: Subject) -> Numbers:
    """Save a trained model, and compare vLLM when it loads the folder."""
    trainer, folder = save_trained(subject)
    tokens = subject.probe.token_ids
    want = trainer.probe(tokens)  # before vLLM may change the class of transformers

    async def compare() -> float:
        engine = make_vllm(subject.engine_config(path=folder))
        try:
            return mean_gap(await engine.probe(tokens), want)
        finally:
            await engine.close()

    gap = asyncio.run(compare())
    if not gap <= subject.bound:
        raise StageFailed(f"vLLM differs by {gap:.1e} nats from the trainer whose model it has loaded")
    return {"gap": gap}


def check_lora_of(subject: Subject) -> Numbers:
    """Train an adapter, send it merged to the engine hf, save it merged, and load what was saved."""
    linear = name_lora_targets(LORA, subject.path).targets
    lora = LORA.model_copy(update={"targets": [name for name in linear if name in ATTENTION]})
    trainer = subject.make_trainer(lora=lora)
    check_lora(*subject.make_settings(lora=lora)[:2])
    trainer.step(subject.make_batches(trainer))
    engine = make_hf(subject.engine_config())
    gap = asyncio.run(publish(subject, trainer, engine, 1))
    folder = subject.folder / "adapted"
    trainer.save_model(folder)
    again = subject.make_trainer(path=str(folder))
    tokens = subject.probe.token_ids
    saved = mean_gap(again.probe(tokens), trainer.probe(tokens))
    if not saved <= subject.bound:
        raise StageFailed(f"the merged model differs by {saved:.1e} nats from the trainer's")
    return {"gap": gap, "saved": saved}


def check_routes(subject: Subject) -> Numbers:
    """Replay the choices of the engine hf in a trainer, and then others, under which log-probabilities are others.

    Raises NoExperts for a model without routers.
    """
    if not list_blocks(subject.make_trainer().model):
        raise NoExperts("no experts")
    trainer = subject.make_trainer(router_replay="replay")
    assert trainer.routes is not None
    prompt = make_tokens(40, seed=7)
    done = asyncio.run(generate(make_hf(subject.engine_config(routes=True)), prompt))
    if done.routes is None:
        raise StageFailed("the engine reported no routes")
    known = ~find_unknown(done.routes)
    others = np.where(known[..., None], (done.routes + 1) % trainer.routes.hook.experts, done.routes)
    as_sampled, otherwise = (
        score_reply(subject, trainer, prompt, replace(done, routes=routes.astype(done.routes.dtype)))
        for routes in (done.routes, others)
    )
    gap, moved = mean_gap(as_sampled, done.logp), mean_gap(otherwise, done.logp)
    if not gap <= subject.bound:
        raise StageFailed(f"with the engine's choices the trainer differs by {gap:.1e} nats")
    if not moved > 2 * subject.bound:  # else nothing was forced
        raise StageFailed(f"with other experts the log-probabilities change by {moved:.1e} nats only")
    return {"gap": gap, "moved": moved}


async def generate(engine: Engine, prompt: list[int]) -> Completion:
    """Return a completion, and close the engine."""
    try:
        return await engine.generate(prompt, max_new_tokens=24, seed=0)
    finally:
        await engine.close()


def score_reply(subject: Subject, trainer: LocalTrainer, prompt: list[int], done: Completion) -> list[float]:
    """Return the trainer's log-probabilities of a completion under the routes that it has."""
    sample = make_reply("0", prompt + done.token_ids, done.logp, advantage=1.0, routes=done.routes)
    [[batch]] = subject.make_batches(trainer, groups=[[sample]])
    [columns] = trainer.compute_columns([batch], frozenset({"prox_logp"}))
    return columns["prox_logp"].tolist()


class NoExperts(Exception):
    """Stage that is of no use to a model without experts."""


STAGES: dict[str, Callable[[Subject], Numbers]] = {
    "load": check_load,
    "layout": check_layout,
    "names": check_names,
    "update": check_update,
    "ranks": check_ranks,
    "hf": partial(check_engine, make=make_hf),
    "vllm": partial(check_engine, make=make_vllm),
    "save": check_save,
    "saved_vllm": check_saved_vllm,
    "lora": check_lora_of,
    "routes": check_routes,
}
"""Stages by name, in order."""
OF_RANKS = ("ranks",)
"""Stages that start processes."""
