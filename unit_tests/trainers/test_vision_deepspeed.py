"""DeepSpeed and FSDP2 with models that see: ranks with images and without make one update, that of one process."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from configs.trainer_schema import LoraConfig
from data_feeds.packing.batches import micro_batches
from modeling.images.processor import ImageProcessor
from modeling.load import load_model
from modeling.saved_model import check_saved
from trainers.trainer import Trainer
from unit_tests.helpers.examples import with_values
from unit_tests.helpers.ray_trainers import (
    FSDP2,
    LATER,
    SMALL,
    check_update,
    sharded,
)
from unit_tests.helpers.seeing import Reply, join_parts, save_model, seeing_groups, some_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("family", "stage", "freeze"),
    [
        *(("idefics3", 0, []), ("idefics3", 3, []), ("qwen3_vl", 3, ["vision"])),
        pytest.param("qwen2_5_vl", 2, [], marks=pytest.mark.usual),
        ("qwen3_vl", FSDP2, ["vision"]),
        *(pytest.param(f, FSDP2, [], marks=LATER) for f in ("idefics3", "qwen2_5_vl", "qwen3_vl", "qwen3_5")),
        *(pytest.param(f, FSDP2, [], marks=LATER) for f in ("gemma3", "gemma4")),
        *(pytest.param(f, 3, [], marks=LATER) for f in ("qwen3_5", "gemma3", "gemma4")),
    ],
)
def test_two_ranks_make_the_update_of_one_process(ranks, tmp_path, family, stage, freeze):
    """Somewhere one rank has images where the other has text alone, and gathers the tower's weights all the same."""
    path = save_model(tmp_path / "model", family)
    processor = ImageProcessor(path)
    groups = seeing_groups(processor)
    most, rng = max(len(s.token_ids) for g in groups for s in g), random.Random(0)
    long = [some_text(rng, 4), Reply(some_text(rng, most - 6))]  # no room for an image beside it
    groups.append([join_parts(processor, long, group=3)])
    how = {"attention": "auto", "layout": "packed", "freeze": freeze}
    rows = zip(*micro_batches(groups, "token", most, ranks=2, padded=False, share_prefixes=True), strict=True)
    assert any(bool(one.images) != bool(other.images) for one, other in rows), "or nothing is seen here"
    here = sharded(stage) | {"gradient_checkpointing": stage in (3, FSDP2), "deepspeed": SMALL if stage == 3 else {}}
    got, _ = check_update(ranks, path, groups, max_tokens=most, same=how, tolerance=1e-4, ranks=2, **here)
    asyncio.run(ranks[2].call_all(Trainer.save_model, tmp_path / "saved"))
    check_saved(tmp_path / "saved", dtype="float32")
    saved = load_model(str(tmp_path / "saved"), dtype="float32", attention="auto")
    # Gemma 4 keeps a scalar of each layer as a buffer
    kept = [buffer for name, buffer in saved.named_buffers() if name in saved.state_dict()]
    assert torch.equal(torch.cat([t.flatten() for t in (*saved.parameters(), *kept)]), got)


@pytest.mark.verify
@pytest.mark.parametrize("stage", [3, FSDP2])
@pytest.mark.parametrize(
    "settings",
    [{"alg": {"name": "ppo", "critic_lr": 0.5}}, {"lora": LoraConfig(r=4, vision=True)}],
    ids=["a value model", "an adapter"],
)
def test_what_is_trained_beside_a_model_that_sees_is_sharded_with_it(ranks, tmp_path, stage, settings):
    path = save_model(tmp_path / "model", "qwen2_5_vl")
    groups = with_values(seeing_groups(ImageProcessor(path)))
    most = max(len(s.token_ids) for g in groups for s in g)
    same = settings | {"attention": "auto", "layout": "packed"}
    how = sharded(stage) | {"ranks": 2, "deepspeed": SMALL if stage == 3 else {}}
    check_update(ranks, path, groups, max_tokens=most, same=same, tolerance=1e-4, **how)
