"""Every rank of a distributed trainer calls the same collectives, in the same order, or a run would hang."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.llama import modeling_llama

from configs.trainer_schema import LoraConfig
from core.cluster.addresses import listen_at
from data_feeds.packing.batches import micro_batches
from modeling.images.processor import ImageProcessor
from trainers.distributed import DistributedTrainer
from trainers.trainer import Trainer
from unit_tests.helpers import collectives
from unit_tests.helpers.collectives import fake_group, find_disagreement, record_ranks
from unit_tests.helpers.examples import some_groups, with_values
from unit_tests.helpers.models import random_model
from unit_tests.helpers.ray_trainers import FSDP2, OFFLOADED, alg_of, plan_of, sharded
from unit_tests.helpers.seeing import save_model, seeing_groups

ROOT = Path(__file__).parent.parent.parent
EIGHT = 8
KINDS = {
    "plain": {},
    "offloaded": {},
    "values": {"alg": alg_of("ppo")},
    "adapter": {"lora": LoraConfig(r=4)},
    "two to a row": {"sequence_parallel": 2},
    "four to a row": {"sequence_parallel": 4},
}


def check_ranks(path: str, stage: int | str, *, groups=None, max_tokens: int = 60, **more) -> None:
    plan = plan_of(path, dtype="bfloat16", attention="auto", ranks=EIGHT, **sharded(stage), **more)
    ranks = record_ranks(plan, with_values(groups or some_groups(EIGHT)), max_tokens=max_tokens)
    assert find_disagreement(ranks) is None
    assert len(ranks) == EIGHT and all(len(seen) > 20 for seen in ranks)
    size = more.get("sequence_parallel", 1)
    assert {len(c.ranks) for seen in ranks for c in seen} == {EIGHT} | ({size} if size > 1 else set())


LATER = {
    "offloaded": pytest.mark.slow,
    "two to a row": pytest.mark.slow,
    "adapter": pytest.mark.verify,
    "values": pytest.mark.verify,
    "four to a row": pytest.mark.verify,
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[LATER[k]] if k in LATER else []) for k in KINDS])
def test_eight_ranks_of_fsdp2_agree(tmp_path, kind):
    random_model("llama", num_attention_heads=4).save_pretrained(tmp_path)
    check_ranks(str(tmp_path), OFFLOADED if kind == "offloaded" else FSDP2, **KINDS[kind])


@pytest.mark.slow
def test_eight_ranks_of_fsdp2_agree_about_experts_that_some_do_not_use(tmp_path):
    sizes = {"num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    random_model("qwen3_moe", **sizes).save_pretrained(tmp_path)
    check_ranks(str(tmp_path), FSDP2)


class Choosy(modeling_llama.LlamaMLP):
    """Part of a block that leaves a weight out on every other rank, as a router does on ranks without its tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate if torch.distributed.get_rank() % 2 else gate * self.up_proj(x))


def test_eight_ranks_of_fsdp2_agree_about_weights_that_some_do_not_use(tmp_path, monkeypatch):
    random_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Choosy)
    check_ranks(str(tmp_path), FSDP2)


@pytest.mark.parametrize(
    "stage", [pytest.param(s, marks=pytest.mark.slow if s == FSDP2 else pytest.mark.verify) for s in (1, 2, FSDP2)]
)
def test_eight_ranks_agree_about_a_vision_tower_that_some_do_not_use(tmp_path, stage):
    path = save_model(tmp_path, "qwen2_5_vl")
    groups = seeing_groups(ImageProcessor(path))
    most = max(len(s.token_ids) for group in groups for s in group)
    rows = micro_batches(groups, "token", most, ranks=EIGHT, padded=False)
    assert 0 < sum(any(batch.images for batch in rank) for rank in rows) < EIGHT
    check_ranks(path, stage, groups=groups, max_tokens=most)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.verify), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    ["plain", "two to a row", *(pytest.param(kind, marks=pytest.mark.verify) for kind in ("values", "adapter"))],
)
def test_eight_ranks_of_deepspeed_agree(tiny_path, stage, kind):
    check_ranks(tiny_path, stage, **KINDS[kind])


class Exporting:
    """Learner of tensors in a shape that no other test has; it counts those that live after each bucket."""

    def export_weights(self, max_bytes, scope):
        self.alive = []
        for i in range(4):
            yield [(f"weight.{i}", torch.zeros(7, 1013))]
            self.alive.append(sum(type(x) is torch.Tensor and x.shape == (7, 1013) for x in gc.get_objects()))


def test_a_rank_that_writes_no_model_keeps_no_copy_of_it(tmp_path):
    """The ranks of a machine share its memory: eight copies of a model may not fit."""
    trainer, learner = DistributedTrainer.__new__(DistributedTrainer), Exporting()
    trainer.rank = 1
    with fake_group(1, 2):
        assert trainer.write_model(learner, tmp_path, ["whole"]) == []
    assert max(learner.alive) <= 1 and len(learner.alive) == 4
    assert not [*tmp_path.iterdir()]


def test_a_rank_that_leaves_a_collective_out_is_named(tiny_path):
    def skip_on_three(trainer: Trainer, micro: list) -> None:
        if trainer.rank != 3:
            trainer.probe([30, 31, 32])

    plan = plan_of(tiny_path, ranks=4, **sharded(FSDP2))
    said = find_disagreement(record_ranks(plan, some_groups(16), work=skip_on_three))
    assert said is not None and "that ranks 0 and 3 make together is Collective(" in said and said.endswith("and None")


@pytest.mark.verify
@pytest.mark.timeout(180)
def test_four_ranks_of_zero_3_agree_where_torch_compares_every_collective(tiny_path, tmp_path):
    """ZeRO-3 compares values of its own over the ranks, so they must be real."""
    with listen_at("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    alone = os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", collectives.__name__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "4", str(port), tiny_path, str(tmp_path)],
            cwd=ROOT,
            env=alone,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=150)
            assert f"agreed {torch.distributed.DebugLevel.DETAIL}" in out, out + err
            assert "noticed True" in out, out + err
    finally:
        for rank in ranks:
            rank.kill()
