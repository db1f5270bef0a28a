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

from core.room import SLOT
from unit_tests.two_hosts import ADDRESS, HEAD, NODE_B, ROOT, Hosts, needs_two_hosts

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900), needs_two_hosts]
ON_BOTH = {"backend": "ray", "ray_address": HEAD, "timeout_s": 90.0, "weight_sync.timeout_s": 20.0}
"""With two slots on nodea and one on nodeb: two trainers are on nodea, and the engine or a third trainer on nodeb."""
RL, SL = ON_BOTH | {"trainer.ranks": 2}, ON_BOTH | {"trainer.ranks": 3, "rows_per_step": 6}
VARIED = """
def score(prompt, messages):
    return {"correct": float(len(set(messages[-1]["content"])))}
"""
FOR_EVER = {"steps": 100_000}


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        yield made
    finally:
        made.close()


def start(hosts: Hosts, config: str, *, main: str = "main_rl.py") -> subprocess.Popen[bytes]:
    return hosts.start("nodea", sys.executable, main, "--config", config, log=hosts.logs / "run.log")


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


def test_runs_over_two_hosts_go_to_the_end(hosts, recipe, tmp_path):
    """Trainers reduce over gloo between the hosts, and weights are broadcast from one to the other."""
    hosts.connect()
    hosts.start_ray({"nodea": 2, "nodeb": 1})
    node_a = f"nodea ({ADDRESS['nodea']})"
    changes = RL | {"reward.fn": write_file(tmp_path / "varied.py", VARIED)}
    code, text = finish(hosts, start(hosts, recipe(changes)), within_s=300)
    assert code == 0, text
    check_all_is_well(tmp_path / "runs", 2, {"trainer 0": node_a, "trainer 1": node_a, "engine 0": NODE_B})
    metrics = lines_of(tmp_path / "runs")
    assert all(abs(line["train/mismatch/kl"]) < 1e-6 for line in metrics), "engine and trainers have the same weights"
    assert all(line["train/grad_norm"] > 0 for line in metrics)

    config = recipe(SL | {"run_dir": str(tmp_path / "supervised"), "trainer.zero_stage": 3}, kind="sl")
    code, text = finish(hosts, start(hosts, config, main="main_sl.py"), within_s=300)
    assert code == 0, text
    machines = {"trainer 0": node_a, "trainer 1": node_a, "trainer 2": NODE_B}
    check_all_is_well(tmp_path / "supervised", 2, machines)

    # engines need no run folder where weights come over the network; a fall-back that cannot work is left out
    with hosts.mounted("nodeb", "-t", "tmpfs", "nothing", str(tmp_path / "runs")):
        code, text = finish(hosts, start(hosts, recipe(RL)), within_s=300)
    assert code == 0, text
    assert f"engine 0 on {NODE_B}: no weights can go there by files (disk)" in text


def test_a_slow_wire_that_loses_packets_is_survived(hosts, recipe, tmp_path):
    hosts.connect_slowly(delay_s=0.02, loss=0.01)
    hosts.start_ray({"nodea": 2, "nodeb": 1})
    code, text = finish(hosts, start(hosts, recipe(RL)), within_s=400)
    assert code == 0, text
    config = recipe(SL | {"run_dir": str(tmp_path / "supervised")}, kind="sl")
    code, text = finish(hosts, start(hosts, config, main="main_sl.py"), within_s=400)
    assert code == 0, text


SLEEPS = """
import time
from pathlib import Path
def score(prompt, messages):
    Path({mark!r}).touch()
    time.sleep(600)
"""
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
    mark, file = tmp_path / "mark", tmp_path / "sleeps.py"
    reward = write_file(file, SLEEPS.format(mark=str(mark)))
    changes = RL | {"reward.fn": reward, "reward.timeout_s": 700.0, "rollout.timeout_s": 20.0}
    cut_off(hosts, recipe(changes), when=mark.exists)


def test_a_link_that_is_cut_in_training_ends_the_run_with_the_hosts_name(hosts, recipe, tmp_path):
    config = recipe(SL | FOR_EVER | {"timeout_s": 60.0}, kind="sl")
    cut_off(hosts, config, main="main_sl.py", when=lambda: len(lines_of(tmp_path / "runs")) > 2)


def test_a_link_that_is_cut_in_a_publish_ends_the_run_with_the_hosts_name(hosts, recipe, tmp_path):
    mark = tmp_path / "mark"
    engine = write_file(tmp_path / "waits.py", WAITS.format(mark=str(mark)))
    reward = write_file(tmp_path / "varied.py", VARIED)
    cut_off(hosts, recipe(RL | {"rollout.engine": engine, "reward.fn": reward}), when=mark.exists)


def cut_off(hosts: Hosts, config: str, *, when: Callable[[], bool], main: str = "main_rl.py") -> None:
    """Take nodeb off the network in the middle of a run, which must end with one sentence, within its deadlines."""
    hosts.connect()
    hosts.start_ray({"nodea": 2, "nodeb": 1})
    run = start(hosts, config, main=main)
    wait_for(when, run, hosts)
    hosts.cut()
    since = time.monotonic()
    code, text = finish(hosts, run, within_s=240)
    said = text.strip().splitlines()[-1]
    print(f"{time.monotonic() - since:.0f} s after the cut: {said}")
    assert code == 1 and said.startswith("stopped: ") and NODE_B in said, text


def test_a_machine_that_does_not_fit_is_named_with_the_mend(hosts, recipe, tmp_path, tiny_path):
    hosts.connect()
    hosts.start_ray({"nodea": 2, "nodeb": 1})
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
    hosts.connect()
    hosts.start_ray({"nodea": 2, "nodeb": 1})
    config = recipe(SL | {"trainer.ranks": 4, "rows_per_step": 4, "timeout_s": 15.0}, kind="sl")
    code, text = finish(hosts, start(hosts, config, main="main_sl.py"), within_s=200)
    said = text.strip().splitlines()[-1]
    assert code == 2 and "asked for 4 x trainer with 1 feynrl_worker slot each" in said, text
    assert f"nodea (10.77.0.1): 2 of 2, {NODE_B}: 1 of 1" in said and "1 feynrl_worker slot is missing" in said, text


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


def test_the_script_for_slurm_runs_over_both_hosts_but_for_slurm_itself(hosts, recipe, tmp_path):
    """What it makes Ray do is real: `ray symmetric-run` on two hosts, with a token, and a run on the first."""
    hosts.connect()
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
    assert summary["exit_reason"] == "done" and {*summary["machines"].values()} == {
        f"nodea ({ADDRESS['nodea']})",
        NODE_B,
    }
