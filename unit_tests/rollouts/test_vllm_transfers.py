"""Weight-transfer engines that the plugin registers, as vLLM's own factory makes them. No engine here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollouts.engines.vllm_support.plugin import register
from unit_tests.helpers.nccl_stand_in import Network, members_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
NAMES = ["feynrl_gloo", "feynrl_ipc", "feynrl_nccl"]


def test_vllm_makes_every_registered_transfer():
    pytest.importorskip("vllm")
    from vllm.config import DeviceConfig, VllmConfig, WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    assert sorted(name for name in WeightTransferEngineFactory._registry if name.startswith("feynrl_")) == NAMES
    config, model = VllmConfig(device_config=DeviceConfig("cpu")), torch.nn.Linear(2, 2)
    for name in NAMES:
        made = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=name), config, torch.device("cpu"), model
        )
        made.start_adapter()
        assert made.consumed == {} and made.parse_update_info({}) is not None
        made.shutdown()


def test_a_worker_that_joins_again_leaves_the_last_group():
    pytest.importorskip("vllm")
    from vllm.config import DeviceConfig, VllmConfig, WeightTransferConfig

    from rollouts.engines.vllm_support.worker import NcclTransfer

    network = Network()
    sender, receiver = members_of(network)

    class Transfer(NcclTransfer):
        receiver_class = receiver

    made = Transfer(
        WeightTransferConfig(),
        VllmConfig(device_config=DeviceConfig("cpu")),
        torch.device("cpu"),
        torch.nn.Linear(2, 2),
    )
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            one = sender(timeout_s=20.0)
            where = {"address": "127.0.0.1", "port": one.open(), "first_rank": 1, "members": 2, "timeout_s": 20.0}
            joins = pool.submit(one.join, members=2)
            made.init_transfer_engine(made.parse_init_info(where))
            joins.result()
    assert [one.destroyed for one in network.made if one.rank == 1] == [1, 0]
    made.shutdown()
    assert [one.destroyed for one in network.made if one.rank == 1] == [1, 1]
