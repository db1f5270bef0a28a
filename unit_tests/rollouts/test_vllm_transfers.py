"""Weight-transfer engines that the plugin registers, as vLLM's own factory makes them. No engine here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

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


def test_experts_of_gpt_oss_are_sent_one_by_one_and_others_as_they_are():
    pytest.importorskip("vllm")
    from rollouts.engines.vllm_support.experts import name_for_loader

    layer = "model.layers.0.mlp.experts"
    model: Any = torch.nn.Linear(2, 2)
    own = ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
    bucket = [(f"{layer}.{name}", torch.tensor([[n, 7.0], [n, 9.0]])) for n, name in enumerate(own)]
    bucket.append(("model.norm.weight", torch.ones(2)))

    def send(family: str) -> list[tuple[str, list[float]]]:
        model.config = SimpleNamespace(model_type=family)
        return [(name, tensor.tolist()) for name, tensor in name_for_loader(model, bucket)]

    assert send("gpt_oss") == [
        *((f"{layer}.0.w13_weight", [0, 7]), (f"{layer}.1.w13_weight", [0, 9])),
        *((f"{layer}.0.w13_bias", [1, 7]), (f"{layer}.1.w13_bias", [1, 9])),
        *((f"{layer}.0.w2_weight", [2, 7]), (f"{layer}.1.w2_weight", [2, 9])),
        *((f"{layer}.0.w2_bias", [3, 7]), (f"{layer}.1.w2_bias", [3, 9])),
        ("model.norm.weight", [1, 1]),
    ]
    assert [name for name, _ in send("qwen3_moe")] == [name for name, _ in bucket]
