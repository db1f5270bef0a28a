"""Weight-transfer engines that the plugin registers, as vLLM's own factory makes them. No engine here."""

from __future__ import annotations

import pytest
import torch

from rollouts.engines.vllm_support.plugin import register

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
NAMES = ["feynrl_gloo", "feynrl_ipc", "feynrl_local", "feynrl_nccl"]


def test_vllm_makes_every_registered_transfer():
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    assert sorted(name for name in WeightTransferEngineFactory._registry if name.startswith("feynrl_")) == NAMES
    config, model = VllmConfig(), torch.nn.Linear(2, 2)
    for name in NAMES:
        made = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=name), config, torch.device("cpu"), model
        )
        assert made.model is model and made.parallel_config.rank == 0
        made.shutdown()
