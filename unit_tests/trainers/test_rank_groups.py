"""Process groups of trainer ranks on Ray, and the settings that another start must share to read a rank's files."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from trainers.deepspeed import DeepSpeedTrainer
from trainers.distributed import form_group
from trainers.fsdp2 import FsdpTrainer


def test_files_of_a_rank_name_the_settings_that_can_read_them():
    fsdp2, deepspeed = (kind.__new__(kind) for kind in (FsdpTrainer, DeepSpeedTrainer))
    cfg: Any = SimpleNamespace(zero_stage=2)
    deepspeed.cfg, deepspeed.ranks = cfg, 4
    assert fsdp2.get_file_settings() == {"backend": "ray", "trainer.strategy": "fsdp2"}
    ranks = {"trainer.ranks": 4, "trainer.zero_stage": 2}
    assert deepspeed.get_file_settings() == {"backend": "ray", "trainer.strategy": "deepspeed"} | ranks


def test_a_group_has_the_deadline_of_the_run_and_is_formed_once(monkeypatch):
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    form_group("gloo", timedelta(seconds=7))
    try:
        group = distributed.group.WORLD
        assert group is not None and (group.rank(), group.size()) == (0, 1)
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        form_group("gloo", timedelta(seconds=9))
        assert distributed.group.WORLD is group, "a second trainer of this process shares it"
    finally:
        distributed.destroy_process_group()
