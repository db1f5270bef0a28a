"""What a run takes of this machine's devices, and the sentences where it lacks them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import RLConfig, SLConfig
from core import gpus
from core.cluster.actor import divide_cores
from core.cluster.capacity import Resources
from core.errors import UserError
from core.gpu_checks import Use
from driver.checks import explain_devices, memory_estimate
from driver.checks.engine_memory import check_engine_memory, count_opponents
from driver.checks.explain import describe_memory
from driver.checks.explain_devices import describe_processes
from driver.load_recipe import load_recipe
from driver.sl.run import prepare
from driver.start import devices
from driver.start.devices import check_devices, plan_gpu_use, share_machine
from driver.start.rollouts import plan_engines, share_for_engine
from rollouts.engines.vllm_support import quantized
from unit_tests.helpers.fake_gpus import COMPILER, H100, compile_cuda, pretend, write_nvidia_smi
from unit_tests.helpers.sentences import tell

ROOT = Path(__file__).parent.parent.parent
Recipe = Callable[..., str]
RAY = {"backend": "ray", "rollout.engine": "vllm"}


@pytest.fixture
def rl(recipe: Recipe) -> Callable[..., RLConfig]:
    return lambda **changes: load_recipe(RLConfig, recipe(RAY | changes), []).cfg


def has_gpus(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: n)


@pytest.mark.parametrize(
    ("changes", "n", "fix"),
    [
        ({}, 1, "1 trainer ranks and 1 engine ranks want 2 GPUs, and this machine has 1: set placement=colocate"),
        ({"rollout.num_engines": 2}, 1, "this machine has 1: lower rollout.num_engines"),
        ({"rollout.num_engines": 2}, 2, "has 2: set placement=colocate, or lower rollout.num_engines"),
        (
            {"rollout.num_engines": 2, "rollout.tensor_parallel_size": 2, "trainer.ranks": 4},
            1,
            "has 1: lower trainer.ranks, rollout.num_engines or rollout.tensor_parallel_size",
        ),
        ({"trainer.ranks": 2, "rollout.num_engines": 2, "placement": "colocate"}, 1, "share 2 GPUs, and this machine "),
        ({"device": "cuda"}, 0, "has 0: set device=auto"),
    ],
)
def test_too_few_gpus_name_the_keys_that_help(
    rl: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], n: int, fix: str
) -> None:
    has_gpus(monkeypatch, n)
    said = check_devices(rl(**changes)) or ""
    assert fix in said
    # what is as low as it can be is no advice
    assert all(f"{key}" in str(changes) for key in re.findall(r"(?:trainer|rollout)\.\w+", said))


def test_a_supervised_run_is_refused_a_device_that_is_not_there(recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    has_gpus(monkeypatch, 0)
    monkeypatch.setattr(devices, "check_gpus", lambda cfg: None)
    loaded = load_recipe(SLConfig, recipe({"device": "cuda"}, kind="sl"), [])
    assert tell(lambda: prepare(loaded)) == "device is cuda, and this machine has no GPU: set device=auto"


def test_a_gpu_that_cannot_be_used_ends_the_run_before_its_start(
    rl: Callable[..., RLConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts such a GPU, trainers would take gloo on the CPU, and the engine would find no device."""
    write_nvidia_smi(tmp_path, "echo 580.95.05")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "LIBRARY", "libcuda-of-nobody.so.1")
    gpus.ask_machine.cache_clear()
    try:
        assert "cannot be loaded: start the container with NVIDIA_DRIVER_CAPABILITIES" in (check_devices(rl()) or "")
        assert check_devices(rl(ray_address="127.0.0.1:6379")) is None  # this machine runs none of it
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert check_devices(rl()) is None
    finally:
        gpus.ask_machine.cache_clear()


def test_what_a_run_wants_of_gpus(rl: Callable[..., RLConfig], recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    # of the CPU that runs this test
    monkeypatch.setattr(quantized, "has_int8_products", lambda: True)
    monkeypatch.setattr(quantized, "has_tiles", lambda: False)
    has_torch = {"cuda": plan_gpu_use(rl()).cuda}
    of_rl = Use(**has_torch, triton=True, ranks=2, engine_share=0.85)
    assert plan_gpu_use(rl()) == of_rl
    assert plan_gpu_use(rl(placement="colocate")) == replace(of_rl, ranks=1, colocate=True)
    assert plan_gpu_use(rl(**{"model.dtype": "bfloat16"})).bfloat16
    assert plan_gpu_use(rl(**{"rollout.engine": "hf"})) == replace(of_rl, triton=False, engine_share=None)
    assert plan_gpu_use(rl(**{"rollout.quantization": "int8"})).quantization == "int8"
    assert plan_gpu_use(rl(**{"rollout.engine": "hf", "rollout.quantization": "int8"})).quantization is None
    supervised = load_recipe(SLConfig, recipe({"backend": "ray", "trainer.ranks": 2}, kind="sl"), []).cfg
    assert plan_gpu_use(supervised) == Use(**has_torch, ranks=2)


def test_actors_of_gpus_share_their_machines_cores(
    rl: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray tells an actor that reserves no CPU to use one thread."""
    has_gpus(monkeypatch, 8)
    assert share_machine(rl(), 1, gpus=1) == Resources(gpus=1, threads=None)  # None: shared on the actor's machine
    nodes = [{"NodeID": "a", "Resources": {"GPU": 8.0}}, {"NodeID": "b", "Resources": {"GPU": 2.0}}]
    assert [divide_cores(nodes, here, cores=100) for here in "ab"] == [12, 50]
    assert divide_cores(nodes, "a", cores=4) == 1


def test_engines_take_no_gpus_beside_trainers_that_lend_them(
    rl: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"trainer.ranks": 2, "rollout.tensor_parallel_size": 2}
    apart, shared = rl(**wide), rl(**wide, placement="colocate")
    served = apart.model_copy(update={"rollout": apart.rollout.model_copy(update={"servers": ["http://a:1"]})})
    has_gpus(monkeypatch, 8)
    for cfg, n in ((apart, 2), (shared, 0), (served, 0)):
        assert share_for_engine(cfg) == Resources(gpus=n, ranks=2)
    has_gpus(monkeypatch, 0)
    monkeypatch.setattr(devices.os, "cpu_count", lambda: 9)
    for n, threads in ((1, 9), (2, 4), (20, 1)):
        assert share_for_engine(rl(**{"rollout.num_engines": n})) == Resources(threads=threads)


def test_a_driver_without_gpus_leaves_the_cache_of_remote_gpus_to_vllm(
    rl: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of a CPU would make the cache of a GPU small; a size that the recipe sets is of either."""
    has_gpus(monkeypatch, 0)
    on_gpus = {"ray_address": "10.0.0.1:6379", "device": "cuda"}
    for places, unset in (({}, 1.0), (on_gpus, None)):
        default, chosen = rl(**places), rl(**places, **{"rollout.kv_cache_gib": 3.0})
        assert plan_engines(default, default.model).engine.kv_cache_gib == unset
        assert plan_engines(chosen, chosen.model).engine.kv_cache_gib == 3.0


def places(cfg: RLConfig) -> dict[str, str]:
    return dict(describe_processes(cfg))


def test_a_plan_for_eight_gpus_names_every_process_and_its_device(
    rl: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpus(monkeypatch, 8)
    monkeypatch.setattr(explain_devices, "count_gpus", lambda: 8)
    of_engine = ", and 1 processes of rewards on its CPU cores"
    plan = places(rl(**{"trainer.ranks": 4, "rollout.num_engines": 2, "rollout.tensor_parallel_size": 2}))
    # Ray is asked for the largest first
    assert plan == {
        "the driver": "this machine, no GPU",
        **{f"trainer {i}": f"machine 1, GPU {4 + i}" for i in range(4)},
        "engine 0": "machine 1, GPUs 0, 1" + of_engine,
        "engine 1": "machine 1, GPUs 2, 3" + of_engine,
    }
    shared = {"trainer.ranks": 8, "rollout.num_engines": 4, "rollout.tensor_parallel_size": 2, "placement": "colocate"}
    plan = places(rl(**shared))
    assert [plan[f"trainer {i}"] for i in (0, 7)] == ["machine 1, GPU 0", "machine 1, GPU 7"]
    assert [plan[f"engine {i}"] for i in (0, 3)] == [f"machine 1, GPUs {at}{of_engine}" for at in ("0, 1", "6, 7")]
    too_many = places(rl(**{"trainer.ranks": 8}))
    assert too_many["engine 0"] == "no room on machines of 8 GPUs" + of_engine


def test_a_plan_for_two_machines_of_eight_gpus_splits_no_engine(rl: Callable[..., RLConfig]) -> None:
    """The driver's machine has no GPU."""
    cluster = {"ray_address": "10.0.0.1:6379", "device": "cuda"}
    plan = places(rl(**cluster, **{"trainer.ranks": 8, "rollout.num_engines": 8}))
    assert len(plan) == 17 and plan["the driver"] == "where it was started, no GPU"
    assert [plan[f"trainer {i}"] for i in (0, 7)] == ["machine 1, GPU 0", "machine 1, GPU 7"]
    assert [plan[f"engine {i}"].partition(",")[0] for i in range(8)] == ["machine 2"] * 8
    wide = {"trainer.ranks": 4, "rollout.num_engines": 4, "rollout.tensor_parallel_size": 3}
    plan = places(rl(**cluster, **wide))
    assert [plan[f"engine {i}"].partition(", and")[0] for i in range(4)] == [
        *("machine 1, GPUs 0, 1, 2", "machine 1, GPUs 3, 4, 5"),
        *("machine 2, GPUs 0, 1, 2", "machine 2, GPUs 3, 4, 5"),
    ]
    # two GPUs are left on each
    assert [plan[f"trainer {i}"].partition(",")[0] for i in range(4)] == ["machine 1"] * 2 + ["machine 2"] * 2


@pytest.mark.skipif(COMPILER is None, reason="a CUDA library is compiled for it")
def test_explain_names_the_gpus_of_this_machine(tmp_path: Path) -> None:
    answers = f"13000 0;{H100};NVIDIA A100|8|0|40|9.5|0"
    env = pretend(tmp_path, cuda=compile_cuda(tmp_path), answers=answers, nvidia_smi="echo 580.1; echo 580.1")
    command = [sys.executable, "-c", "from driver.checks.explain_devices import describe_gpus; print(describe_gpus())"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert dict(ast.literal_eval(done.stdout)) == {
        "NVIDIA driver": "580.1 (CUDA 13.0 at most)",
        "GPU 0": "NVIDIA H100, 80.0 GiB, compute capability 9.0",
        "GPU 1": "NVIDIA A100, 40.0 GiB (30.0 in use), compute capability 8.0",
    }


def test_explain_has_no_rows_of_gpus_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpus.Gpu(name="NVIDIA H100", capability=(9, 0), total_gib=80.0, used_gib=2.5)
    for found, rows in (
        (gpus.Gpus(), []),
        (gpus.Gpus(listed=1, driver="580.1"), [("NVIDIA driver", "580.1")]),
        (
            gpus.Gpus(devices=(gpu, gpu), driver="580.1", cuda=(13, 0)),
            [
                ("NVIDIA driver", "580.1 (CUDA 13.0 at most)"),
                *((f"GPU {i}", "NVIDIA H100, 80.0 GiB (2.5 in use), compute capability 9.0") for i in range(2)),
            ],
        ),
    ):
        monkeypatch.setattr(explain_devices, "find_gpus", lambda timeout_s, found=found: found)
        assert explain_devices.describe_gpus() == rows


def test_explain_says_how_much_of_a_gpu_an_engine_takes(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [gpus.Gpu(name="GPU", capability=(9, 0), total_gib=gib, used_gib=0.0) for gib in (80.0, 40.0)]
    monkeypatch.setattr(memory_estimate, "find_gpus", lambda timeout_s: gpus.Gpus(devices=tuple(sizes)))
    loaded = load_recipe(RLConfig, recipe(RAY), [])
    for n in (0, 2):
        for module in (devices, memory_estimate):
            monkeypatch.setattr(module, "count_gpus", lambda n=n: n)
        said = dict(describe_memory(loaded))["memory per engine"]
        # of the smaller one, and a GiB of graphs
        of_gpu = ": 35.0 GiB of a GPU's 40.0 (rollout.gpu_memory_utilization=0.85, and graphs)"
        assert said == "about 0.00 GiB of weights per rank, and its cache" + (of_gpu if n else "")


def test_an_opponent_counts_on_the_gpu_of_an_engine(
    rl: Callable[..., RLConfig], recipe: Recipe, tiny_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = {"rollout.env": "textarena", "rollout.max_turns": 2, "rollout.opponent": tiny_path}
    said = dict(describe_memory(load_recipe(RLConfig, recipe(RAY | game), [])))["memory per engine"]
    assert said.endswith("and its cache; beside it 0.00 GiB of weights of rollout.opponent")
    gpu = gpus.Gpu(name="GPU", capability=(9, 0), total_gib=20.0, used_gib=0.0)
    monkeypatch.setattr(memory_estimate, "find_gpus", lambda timeout_s: gpus.Gpus(devices=(gpu,)))
    for module in (devices, memory_estimate):
        monkeypatch.setattr(module, "count_gpus", lambda: 1)
    check_engine_memory(rl(**game, **{"rollout.gpu_memory_utilization": 0.9}))
    check_engine_memory(rl(**{"rollout.gpu_memory_utilization": 0.95}))
    for more, copies in (
        ({}, 1),
        ({"rollout.opponent": "policy", "rollout.opponent_every": 2}, 2),
        ({"rollout.opponent": "policy", "rollout.opponent_every": 2, "max_staleness": 3}, 3),
    ):
        assert count_opponents(rl(**game | more)) == copies
    with pytest.raises(UserError, match=r"takes 0.75 GiB .* vLLM leaves 0.00 of 20.00 GiB to it"):
        check_engine_memory(rl(**game, **{"rollout.gpu_memory_utilization": 0.95}))
