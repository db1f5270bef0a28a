"""The memory that --explain states, against the tensors of a trainer in this process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.schema import RLConfig
from driver.checks.explain import GIB, count_bytes, estimate_memory
from driver.load_recipe import load_recipe
from trainers.local import LocalTrainer, TorchLearner

MIXED = {"model.dtype": "bfloat16"}
CASES = {
    "float32": {},
    "bfloat16": MIXED,
    "no moments": MIXED | {"trainer.optimizer": "sgd"},
    "one moment": {"trainer.optimizer": "torch.optim.Adagrad"},
    "frozen layer": MIXED | {"trainer.freeze": ["model.layers.0"]},
}


def count(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each once."""
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def sum_files(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.rglob(pattern))


BYTES: list[tuple[dict[str, object], tuple[float, ...]]] = [
    # changes; bytes of weight, idle weight, weight of a frozen model and of one that moves, gradient, optimizer
    ({}, (4, 4, 4, 4, 4, 8)),
    (MIXED, (2, 2, 2, 4, 4, 12)),  # the master weight and two moments
    (MIXED | {"trainer.optimizer": "sgd"}, (2, 2, 2, 4, 4, 4)),
    (MIXED | {"backend": "ray", "trainer.zero_stage": 1}, (2, 2, 2, 1, 4, 3)),
    (MIXED | {"backend": "ray", "trainer.zero_stage": 2}, (2, 2, 2, 1, 1, 3)),
    (MIXED | {"backend": "ray", "trainer.zero_stage": 3}, (0.5, 0.5, 2, 1, 1, 3)),
    ({"backend": "ray", "trainer.zero_stage": 0}, (4, 4, 4, 4, 4, 8)),
    ({"backend": "ray", "trainer.zero_stage": 3}, (1, 1, 4, 1, 1, 2)),
    (MIXED | {"backend": "ray", "trainer.strategy": "fsdp2"}, (1, 0.5, 0.5, 1, 1, 2)),
    (MIXED | {"backend": "ray", "trainer.strategy": "fsdp2", "model.lora": {}}, (4, 0.5, 0.5, 4, 4, 8)),
]


@pytest.mark.parametrize(("changes", "each"), BYTES, ids=str)
def test_a_rank_of_four_holds_its_share_of_each_parameter(changes, each, recipe):
    ranks = {"trainer.ranks": 4} if "backend" in changes else {}
    found = count_bytes(load_recipe(RLConfig, recipe(changes | ranks), []).cfg)
    assert (
        *(found.weights, found.idle, found.reference, found.moving),
        *(found.gradients, found.optimizer),
    ) == each


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_a_trainer_holds_and_writes(case, recipe, tmp_path):
    loaded = load_recipe(RLConfig, recipe(CASES[case]), [])
    said = estimate_memory(loaded)
    cfg = loaded.cfg
    trainer = LocalTrainer(cfg.model, cfg.trainer, loaded.alg, temperature=1.0, total_updates=2)
    learner = trainer.policy
    assert isinstance(learner, TorchLearner)
    copies = [master for p, master in zip(learner.parameters, learner.master, strict=True) if p is not master]
    for master in learner.master:
        master.grad = torch.zeros_like(master)
    learner.optimizer.step()
    gradients = [master.grad for master in learner.master if master.grad is not None]
    # moments, and not the numbers of updates
    moments = [t for kept in learner.optimizer.state.values() for t in kept.values() if t.ndim]
    assert not trainer.frozen and not trainer.references
    found = [*map(count, (learner.model.parameters(), gradients, [*copies, *moments], []))]
    for estimate, nbytes in zip((said.weights, said.gradients, said.optimizer, said.frozen), found, strict=True):
        assert estimate * GIB == pytest.approx(nbytes, rel=1e-9)
    (tmp_path / "state").mkdir()
    trainer.save_state(tmp_path / "state")
    # beside numbers, files have the names of tensors
    assert said.checkpoint * GIB == pytest.approx(sum_files(tmp_path, "*.pt"), rel=0.1, abs=2**16)
    trainer.save_model(tmp_path / "model")
    assert said.saved * GIB == pytest.approx(sum_files(tmp_path / "model", "*.safetensors"), rel=0.1, abs=2**13)
