"""Runs over two hosts with own addresses, whose names resolve to loopback; and what happens on a bad network."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import transformers

from core.cluster.capacity import SLOT
from core.timing.deadlines import GROUP_TIMEOUT_GRACE_S, HEALTH_CHECK_TIMEOUT_S, SYNC_TIMEOUT_GRACE_S
from unit_tests.helpers.two_hosts import ADDRESS, HEAD, NODE_B, ROOT, Hosts, needs_two_hosts

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900), needs_two_hosts]
SHARED = {"backend": "ray", "ray_address": HEAD, "timeout_s": 90.0}
"""With two slots on nodea and one on nodeb: two trainers are on nodea, and the engine or a third trainer on nodeb."""
RL = SHARED | {"trainer.ranks": 2, "weight_sync.timeout_s": 20.0}
SL = SHARED | {"trainer.ranks": 3, "rows_per_step": 6}
NODE_A = f"nodea ({ADDRESS['nodea']})"
VARIED = """
def score(prompt, messages):
    return {"correct": float(len(set(messages[-1]["content"])))}
"""
FOR_EVER = {"steps": 100_000}
ON_A_BUSY_MACHINE_S = 60.0
"""Beyond the deadlines, for what only takes computing time."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Hosts]:
    """Ray on both hosts, for all tests that leave a cluster whole or cut nodeb off it, which then starts anew."""
    yield from make_hosts(tmp_path_factory.mktemp("hosts"), slots={"nodea": 2, "nodeb": 1})


@pytest.fixture
def hosts(cluster, tmp_path) -> Iterator[Hosts]:
    cluster.logs = tmp_path
    cluster.heal()
    yield cluster
    cluster.end_runs()


@pytest.fixture
def bare_hosts(tmp_path) -> Iterator[Hosts]:
    yield from make_hosts(tmp_path, slots={})


def make_hosts(folder: Path, slots: dict[str, int]) -> Iterator[Hosts]:
    made = Hosts(folder)
    try:
        made.connect()
        made.start_ray(slots)
        yield made
    finally:
        made.close()


def start(hosts: Hosts, config: str, *, main: str = "main_rl.py") -> subprocess.Popen[bytes]:
    return hosts.start_run(main, "--config", config)


def finish(hosts: Hosts, run: subprocess.Popen[bytes], *, within_s: float) -> tuple[int, str]:
    """Exit code and output."""
    code = run.wait(timeout=within_s)
    text = (hosts.logs / "run.log").read_text()
    assert "Traceback" not in text, text
    return code, text


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for path in run_dir.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]


def write_file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def wait_for(happened: Callable[[], bool], run: subprocess.Popen[bytes], hosts: Hosts) -> None:
    until = time.monotonic() + 240.0
    while not happened():
        assert run.poll() is None and time.monotonic() < until, (hosts.logs / "run.log").read_text()
        time.sleep(0.2)


def check_all_is_well(run_dir: Path, steps: int, machines: dict[str, str]) -> None:
    [folder] = run_dir.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["steps_done"] == steps == len(lines_of(run_dir))
    assert {name.split(" on ")[0]: host for name, host in summary["machines"].items()} == machines
    assert (folder / "model" / "config.json").is_file()


def run_to_the_end(hosts: Hosts, config: str, run_dir: Path, machines: dict[str, str], **options: str) -> str:
    code, text = finish(hosts, start(hosts, config, **options), within_s=300)
    assert code == 0, text
    check_all_is_well(run_dir, 2, machines)
    return text


def run_rl(hosts: Hosts, recipe: Callable[..., str], tmp_path: Path) -> str:
    """Weights are broadcast from one host to the other."""
    config = recipe(RL | {"reward.function": write_file(tmp_path / "varied.py", VARIED)})
    machines = {"trainer 0": NODE_A, "trainer 1": NODE_A, "engine 0": NODE_B}
    text = run_to_the_end(hosts, config, tmp_path / "runs", machines)
    metrics = lines_of(tmp_path / "runs")
    assert all(abs(line["train/mismatch/kl"]) < 1e-6 for line in metrics), "engine and trainers have the same weights"
    assert all(line["train/grad_norm"] > 0 for line in metrics)
    return text


def run_sl(hosts: Hosts, recipe: Callable[..., str], tmp_path: Path, **changes: int) -> None:
    """Trainers reduce over gloo between the hosts."""
    config = recipe(SL | {"run_dir": str(tmp_path / "supervised")} | changes, kind="sl")
    machines = {"trainer 0": NODE_A, "trainer 1": NODE_A, "trainer 2": NODE_B}
    run_to_the_end(hosts, config, tmp_path / "supervised", machines, main="main_sl.py")


def test_runs_over_two_hosts_go_to_the_end(hosts, recipe, tmp_path):
    run_sl(hosts, recipe, tmp_path, **{"trainer.zero_stage": 3})
    # engines need no run folder where weights come over the network; a fall-back that cannot work is left out
    (tmp_path / "runs").mkdir()
    with hosts.mounted("nodeb", "-t", "tmpfs", "nothing", str(tmp_path / "runs")):
        text = run_rl(hosts, recipe, tmp_path)
    assert f"engine 0 on {NODE_B}: no weights can go there by files (disk)" in text


def test_a_slow_wire_that_loses_packets_is_survived(hosts, recipe, tmp_path):
    hosts.set_wire(delay_s=0.02, loss=0.01)
    run_rl(hosts, recipe, tmp_path)
    run_sl(hosts, recipe, tmp_path)


SLEEPS = """
import time
from pathlib import Path
def score(prompt, messages):
    if not Path({mark!r}).exists():
        Path({mark!r}).touch()
        time.sleep(600)
    return {{"correct": float(len(set(messages[-1]["content"])))}}
"""
"""It sleeps once."""
WAITS = """
import time
from pathlib import Path
from rollouts.engines.hf import HfEngine
class Waits(HfEngine):
    async def receive_weights(self, version):
        if version == 1:
            Path({mark!r}).touch()
            time.sleep(3)
        await super().receive_weights(version)
"""


def test_a_link_that_is_cut_in_generation_ends_the_run_with_the_hosts_name(hosts, recipe, tmp_path):
    """Restarts are allowed, but there is no other machine on which the engine could begin again."""
    mark, file = tmp_path / "mark", tmp_path / "sleeps.py"
    reward = write_file(file, SLEEPS.format(mark=str(mark)))
    changes = {"reward.function": reward, "reward.timeout_s": 700.0, "rollout.timeout_s": 10.0, "timeout_s": 45.0}
    noticed_s = 10.0 + GROUP_TIMEOUT_GRACE_S + HEALTH_CHECK_TIMEOUT_S
    cut_off(hosts, recipe(RL | changes), when=mark.exists, within_s=noticed_s + 2 * 45.0)


def test_an_engine_whose_host_was_cut_off_and_comes_back_goes_on(hosts, recipe, tmp_path):
    mark, file = tmp_path / "mark", tmp_path / "sleeps.py"
    reward = write_file(file, SLEEPS.format(mark=str(mark)))
    changes = {"reward.function": reward, "reward.timeout_s": 700.0, "rollout.timeout_s": 20.0}
    run = start(hosts, recipe(RL | changes))
    wait_for(mark.exists, run, hosts)
    hosts.cut()
    wait_for(lambda: "restarting it (1 of" in (hosts.logs / "run.log").read_text(), run, hosts)
    hosts.heal()
    code, text = finish(hosts, run, within_s=300)
    assert code == 0 and "engine 0 is back, with the weights after 0 steps" in text, text
    check_all_is_well(tmp_path / "runs", 2, {"trainer 0": NODE_A, "trainer 1": NODE_A, "engine 0": NODE_B})


def test_a_link_that_is_cut_in_training_ends_the_run_with_the_hosts_name(hosts, recipe, tmp_path):
    config = recipe(SL | FOR_EVER | {"timeout_s": 60.0}, kind="sl")

    def has_begun() -> bool:
        return len(lines_of(tmp_path / "runs")) > 2

    cut_off(hosts, config, main="main_sl.py", when=has_begun, within_s=60.0 + HEALTH_CHECK_TIMEOUT_S)


def test_a_link_that_is_cut_in_a_publish_ends_the_run_with_the_hosts_name(hosts, recipe, tmp_path):
    mark = tmp_path / "mark"
    engine = write_file(tmp_path / "waits.py", WAITS.format(mark=str(mark)))
    reward = write_file(tmp_path / "varied.py", VARIED)
    config = recipe(RL | {"rollout.engine": engine, "reward.function": reward, "rollout.restarts": 0})
    cut_off(hosts, config, when=mark.exists, within_s=20.0 + SYNC_TIMEOUT_GRACE_S + HEALTH_CHECK_TIMEOUT_S)


def cut_off(hosts: Hosts, config: str, *, when: Callable[[], bool], within_s: float, main: str = "main_rl.py") -> None:
    """Take nodeb off the network in the middle of a run, which must end with one sentence, within its deadlines."""
    run = start(hosts, config, main=main)
    wait_for(when, run, hosts)
    hosts.cut()
    since = time.monotonic()
    code, text = finish(hosts, run, within_s=within_s + ON_A_BUSY_MACHINE_S)
    said = text.strip().splitlines()[-1]
    print(f"{time.monotonic() - since:.0f} s after the cut: {said}")
    assert code == 1 and said.startswith("stopped: ") and NODE_B in said, text


def test_a_machine_that_does_not_fit_is_named_with_the_mend(hosts, recipe, tmp_path, tiny_path):
    run_dir, loss = tmp_path / "runs", ROOT / "algs" / "sft.py"
    run_dir.mkdir()
    other_loss = write_file(tmp_path / "other_loss.py", loss.read_text() + "\n")
    metadata = Path(transformers.__file__).parent.with_name(f"transformers-{version('transformers')}.dist-info")
    other = (metadata / "METADATA").read_text().replace(f"\nVersion: {version('transformers')}", "\nVersion: 4.1.0", 1)
    other_version = write_file(tmp_path / "METADATA", other)
    empty = ("-t", "tmpfs", "nothing")
    refused(hosts, recipe, "algs/sft.py differs", "--bind", other_loss, str(loss))
    refused(hosts, recipe, "has transformers 4.1.0", "--bind", other_version, str(metadata / "METADATA"))
    refused(hosts, recipe, f"does not see the run folder {run_dir}", *empty, str(run_dir))
    refused(hosts, recipe, f"has no model.path={tiny_path}: share the folder", *empty, tiny_path)
    with hosts.mounted("nodeb", *empty, installed_core()):
        refused(hosts, recipe, "cannot import FeynRL", *empty, str(ROOT / "core"))
        with hosts.mounted("nodeb", *empty, str(ROOT / "core")):
            config = recipe(SL | {"ship_code": True}, kind="sl")
            code, text = finish(hosts, start(hosts, config, main="main_sl.py"), within_s=200)
        assert code == 0, text


def refused(hosts: Hosts, recipe: Callable[..., str], sentence: str, *mount: str) -> None:
    """Run while nodeb has something of its own in the place of what it shares."""
    with hosts.mounted("nodeb", *mount):
        code, text = finish(hosts, start(hosts, recipe(SL, kind="sl"), main="main_sl.py"), within_s=200)
    said = text.strip().splitlines()[-1]
    assert code == 2 and said.startswith(f"error: trainer 2 on {NODE_B}: its machine ") and sentence in said, text


def installed_core() -> str:
    """The folder core/ that is imported where nothing says which; with several clones it is not this one."""
    find = "import importlib.util; print(*importlib.util.find_spec('core').submodule_search_locations)"
    return subprocess.run([sys.executable, "-I", "-c", find], cwd="/", capture_output=True, text=True).stdout.strip()


def test_machines_that_are_missing_are_counted(hosts, recipe):
    config = recipe(SL | {"trainer.ranks": 4, "rows_per_step": 4, "timeout_s": 15.0}, kind="sl")
    code, text = finish(hosts, start(hosts, config, main="main_sl.py"), within_s=200)
    said = text.strip().splitlines()[-1]
    assert code == 2 and "asked for 4 x trainer with 1 feynrl_worker slot each" in said, text
    assert f"{NODE_A}: 2 of 2, {NODE_B}: 1 of 1" in said and "1 feynrl_worker slot is missing" in said, text


SRUN = """#!/bin/bash
# In the place of Slurm's: runs its command on both hosts, each with processes of its own, until both have ended.
while [[ $1 == --* ]]; do shift; done
for host in nodea nodeb; do
    ip netns exec "$MARK-$host" unshare --uts --pid --fork --mount-proc bash -ec '
        [[ $(ls -d /proc/[0-9]* | wc -l) -lt 10 ]]  # `ray stop` must not see the Ray of anybody else
        echo "$0" > /proc/sys/kernel/hostname; exec "$@"' "$host" "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "${code:-0}"
"""


def test_the_script_for_slurm_runs_over_both_hosts_but_for_slurm_itself(bare_hosts, recipe, tmp_path):
    """What it makes Ray do is real: `ray symmetric-run` on two hosts, with a token, and a run on the first."""
    hosts = bare_hosts
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho nodea\necho nodeb\n")):
        Path(write_file(tmp_path / "bin" / name, text)).chmod(0o755)
    of_slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "4242",
        "HEAD_ADDRESS": ADDRESS["nodea"],
        "RAY_OPTIONS": f'--num-cpus=1 --object-store-memory=200000000 --resources={{"{SLOT}":2}}',
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "MARK": hosts.mark,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    changes = {key: value for key, value in RL.items() if key != "ray_address"}
    command = ["bash", str(ROOT / "launch" / "slurm.sh"), "main_rl.py", "--config", recipe(changes)]
    kept = {name: value for name, value in hosts.environment.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, env=kept | of_slurm, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and {*summary["machines"].values()} == {NODE_A, NODE_B}
