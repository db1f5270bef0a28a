"""Whole runs of main_rl.py, from the command line to the run folder."""

import asyncio
import ctypes
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

import main_rl
import main_sl
from configs.schema import RLConfig, SLConfig
from core.cluster.guardian import MARK
from core.types.samples import Policy
from driver.context import RunContext, run_in_context
from driver.load_recipe import load_recipe
from unit_tests.helpers.examples import command_of, is_running, run_here
from unit_tests.helpers.runs import (
    LEARN,
    MY_LOSS,
    ROOT,
    SEVENS,
    descendants,
    evaluations_of,
    file_of,
    folder_of,
    metrics_of,
    program,
)

pytestmark = pytest.mark.timeout(600)  # in a new environment vLLM first compiles for a minute and more


@pytest.mark.one_core
@pytest.mark.slow
@pytest.mark.usual
def test_a_local_run_learns_and_leaves_everything_behind(recipe, tmp_path, sums):
    reward = file_of(tmp_path / "sevens.py", SEVENS)
    done = program(recipe(LEARN | {"reward.function": reward, "data.eval": str(sums / "eval.parquet")}))
    assert done.returncode == 0, done.stderr
    folder = folder_of(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["steps_done"] == 16
    assert summary["before"]["reward/mean"] < 0.2 and summary["after"]["reward/mean"] > 0.9
    assert set(summary["seconds"]) >= {"start", "wait_for_data", "train", "sync", "save", "rest", "all"}
    metrics = metrics_of(folder)
    assert [m["step"] for m in metrics] == list(range(16))
    assert all(m["rollout/staleness_max"] == 0 for m in metrics), "synchronous: every sample is on-policy"
    assert all(abs(m["train/mismatch/kl"]) < 1e-6 for m in metrics), "engine and trainer agree on what was sampled"
    for m in metrics:
        phases = [v for k, v in m.items() if k.startswith("time/") and k.count("/") == 1 and k != "time/step_s"]
        assert sum(phases) == pytest.approx(m["time/step_s"], rel=1e-6)
    row = json.loads((folder / "samples" / "step_00003.jsonl").read_text().splitlines()[0])
    assert (
        row["prompt"][0]["role"] == "user" and row["versions"] == [3] and "advantage" in row and "reward_parts" in row
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(folder / "model")
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template


FAILURES = """
import os
def score(prompt, messages):
    last = int(prompt.answer) % 5
    if last == 0:
        raise RuntimeError("no luck")
    if last == 1:
        os._exit(3)
    if last == 2:
        while True: pass
    return {"correct": 1.0}
"""


@pytest.mark.one_core
@pytest.mark.slow
def test_a_reward_that_fails_costs_its_samples_not_the_run(trained, tmp_path):
    changes = {
        "reward.function": file_of(tmp_path / "unlucky.py", FAILURES),
        "reward.timeout_s": 1.0,
        "reward.workers": 4,
        "reward.max_failed_fraction": 1.0,
        "groups_per_step": 6,
        "group_size": 2,
        "steps": 1,
    }
    folder = trained(changes)
    rows = [json.loads(r) for r in (folder / "samples" / "step_00000.jsonl").read_text().splitlines()]
    failed = [r for r in rows if int(r["answer"]) % 5 < 3]
    assert failed and all(r["reward"] is None and r["failure"] and r["advantage"] is None for r in failed)
    assert all(r["reward"] == 1.0 for r in rows if r not in failed)
    [metrics] = metrics_of(folder)
    assert metrics["rollout/failed"] == len(failed) and metrics["reward/mean"] == 1.0, "not counted as zero"


@pytest.mark.one_core
@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_one_sentence(recipe):
    done = program(recipe({"backend": "ray", "ray_address": "127.0.0.1:1"}))
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "ray_address=127.0.0.1:1" in line and "Traceback" not in done.stderr, done.stderr


@pytest.mark.one_core
@pytest.mark.slow
def test_too_many_failures_stop_the_run_with_the_first_ones_words(recipe, tmp_path):
    code, err = run_here(
        main_rl,
        "--config",
        recipe({"reward.function": file_of(tmp_path / "r.py", "def score(p, m):\n    return 1 / 0\n")}),
    )
    assert code == 1
    assert "ZeroDivisionError: division by zero" in err and "max_failed_fraction=0.1" in err
    assert len(err.splitlines()) == 1
    assert json.loads((folder_of(tmp_path) / "summary.json").read_text())["exit_reason"].startswith("stopped")


@pytest.mark.one_core
@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code"), [("continue", 0), pytest.param("q", 130, marks=pytest.mark.verify)])
def test_a_breakpoint_in_a_loss_stops_in_the_terminal(recipe, tmp_path, answer, code):
    loss = MY_LOSS.replace("        return -self", "        breakpoint()\n        return -self")
    path = recipe({"alg": {"file": file_of(tmp_path / "mine.py", loss)}, "steps": 1})
    terminal, inner = pty.openpty()
    # not pty.fork: a fork of this process would run the handlers of every library that it has imported
    command = [sys.executable, "main_rl.py", "--config", path]
    child = subprocess.Popen(command, cwd=ROOT, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
    os.close(inner)
    said = ""

    def prompt(reply: str) -> str:
        """Return what was said up to pdb's next prompt, which is given `reply`."""
        nonlocal said
        while "(Pdb) " not in said:
            try:
                said += os.read(terminal, 4096).decode(errors="replace")
            except OSError:
                pytest.fail(f"the run ended with exit code {child.wait()} before it asked for {reply!r}: {said}")
        before, _, said = said.partition("(Pdb) ")
        os.write(terminal, reply.encode() + b"\n")
        return before

    prompt("p policy.logp.shape == tokens.weight.shape")
    assert "True" in prompt("where")
    stack = prompt(answer)
    assert "main_rl.py" in stack and "trainers/trainer.py" in stack, "the stack is whole, from the loop to the loss"
    with pytest.raises(OSError):  # the terminal's other end is closed
        while os.read(terminal, 4096):
            pass
    os.close(terminal)
    assert child.wait() == code
    reason = json.loads((folder_of(tmp_path) / "summary.json").read_text())["exit_reason"]
    assert reason == ("done" if code == 0 else "interrupted in the debugger")


HICCUP = """
from algs.grpo import GRPO
calls = []
class Hiccup(GRPO):
    def loss(self, policy, tokens):
        calls.append(1)
        loss, metrics = super().loss(policy, tokens)
        return loss * (float("inf") if len(calls) == 2 else 1.0), metrics
"""


@pytest.mark.one_core
@pytest.mark.slow
def test_an_update_that_is_not_finite_is_skipped_and_said_so(trained, tmp_path):
    metrics = metrics_of(trained({"alg": {"file": file_of(tmp_path / "hiccup.py", HICCUP)}, "steps": 3}))
    assert [m["train/updates_skipped"] for m in metrics] == [0, 1, 0]
    assert ["train/loss" in m for m in metrics] == [True, False, True], "no number of an update that was not made"


@pytest.mark.one_core
@pytest.mark.slow
def test_groups_without_signal_are_drawn_again_and_never_for_ever(trained, recipe, tmp_path):
    changes = {"alg.dynamic_sampling": True, "steps": 1, "trainer.lr": 1e-3}
    luck = "import random\ndef score(p, m): return {'correct': float(hash(m[-1]['content']) % 3 == 0)}\n"
    [metrics] = metrics_of(trained(changes | {"reward.function": file_of(tmp_path / "luck.py", luck)}))
    assert metrics["rollout/zero_std_groups"] == 0
    assert metrics["rollout/groups_drawn"] >= 4 and 0 < metrics["reward/mean_drawn"] < 1
    same = "def score(p, m): return {'correct': 1.0}\n"
    code, err = run_here(
        main_rl, "--config", recipe(changes | {"reward.function": file_of(tmp_path / "same.py", same)})
    )
    assert code == 1
    assert "of 80 groups, the algorithm accepts 0 of the groups_per_step=4" in err


TALKATIVE = '''
from rollouts.envs.base import Env
class Talkative(Env):
    """Asks once more, whatever was said."""
    def __init__(self, prompt):
        self.turns = 0
    async def step(self, reply):
        self.turns += 1
        return [{"role": "user", "content": "9"}] if self.turns == 1 else None
    def scores(self):
        return {"turns": float(self.turns)}
'''
MY_ENGINE = '''
from rollouts.engines.hf import HfEngine
class Engine(HfEngine):
    """Ends every turn after two tokens at the latest."""
    async def generate(self, token_ids, *, max_new_tokens, seed):
        done = await super().generate(token_ids, max_new_tokens=min(2, max_new_tokens), seed=seed)
        return type(done)(token_ids=done.token_ids, logp=done.logp, versions=done.versions, stop="eos")
'''


@pytest.mark.one_core
@pytest.mark.slow
def test_environments_and_engines_of_ones_own_are_found_by_path(trained, tmp_path):
    changes = {
        "rollout.env": file_of(tmp_path / "talkative.py", TALKATIVE),
        "rollout.engine": file_of(tmp_path / "my_engine.py", MY_ENGINE),
        "rollout.max_turns": 3,
        "rollout.max_new_tokens": 24,
        "reward.weights": {"correct": 1.0, "turns": 0.5},
        "steps": 1,
    }
    [metrics] = metrics_of(trained(changes))
    assert metrics["reward/turns"] == 2 and metrics["reward/mean"] >= 1.0
    assert metrics["rollout/tokens_max"] == 4, "two turns of two tokens; what the environment said is not counted"
    assert metrics["train/tokens"] == metrics["rollout/tokens"]
    assert metrics["train/mismatch/abs_logp"] < 1e-4, "the second turn is scored in the context it was sampled in"


@pytest.mark.verify
def test_a_loss_outside_the_repository_trains_to_mastery_on_ray_actors(recipe, tmp_path):
    assert len(MY_LOSS.strip().splitlines()) <= 40
    changes = LEARN | {
        "backend": "ray",
        "alg": {"file": file_of(tmp_path / "my_loss.py", MY_LOSS), "temper": 1.5},
        "reward.function": file_of(tmp_path / "sevens.py", SEVENS),
    }
    done = program(recipe(changes))
    assert done.returncode == 0, done.stderr
    assert metrics_of(folder_of(tmp_path))[-1]["reward/mean"] > 0.9


DRO = '''
"""DRO: a quadratic pull towards the policy of the step's beginning instead of a clip."""
from algs.base import GroupRelative

class DRO(GroupRelative):
    beta: float = 0.2

    def loss(self, policy, tokens):
        gap = policy.logp - tokens.prox_logp
        return self.beta / 2 * gap.square() - tokens.advantage * policy.logp, {"pull": gap.detach().square()}
'''


@pytest.mark.one_core
@pytest.mark.slow
def test_a_paper_that_the_library_lacks_is_one_file_and_its_recipe(trained, tmp_path):
    """Its gradient is the oracle's, and its recipe trains; nothing else is edited."""
    from algs import find_algorithm
    from unit_tests.helpers.golden import GOLDEN, RL, batch_of, live

    settings = {"file": file_of(tmp_path / "dro.py", DRO), "correction": {"level": "none"}}
    alg = find_algorithm(settings)[1](**settings)
    logp = live(RL["logp"], torch.float64).requires_grad_()
    tokens = batch_of("dro/quadratic", alg, torch.float64).tokens
    (alg.objective(Policy(logp=logp), tokens)[0] * tokens.weight).sum().backward()
    want = live(GOLDEN["cases"]["dro/quadratic"]["grad"]["logp"], torch.float64)
    torch.testing.assert_close(logp.grad, want, rtol=1e-9, atol=1e-11)
    changes = LEARN | {"alg": settings | {"beta": 0.05}, "updates_per_step": 2}
    metrics = metrics_of(trained(changes | {"reward.function": file_of(tmp_path / "sevens.py", SEVENS)}))
    assert metrics[-1]["reward/mean"] > 0.9 and "train/pull" in metrics[-1]


@pytest.mark.verify
def test_the_same_run_gives_the_same_numbers_on_ray_and_in_one_process(recipe, tmp_path):
    reward = file_of(tmp_path / "sevens.py", SEVENS)
    runs = []
    for backend in ("local", "ray"):
        changes = LEARN | {
            "steps": 4,
            "reward.function": reward,
            "backend": backend,
            "run_dir": str(tmp_path / backend),
        }
        done = program(recipe(changes))
        assert done.returncode == 0, done.stderr
        [folder] = (tmp_path / backend).iterdir()
        runs.append(metrics_of(folder))
    for local, ray in zip(*runs, strict=True):
        assert ray["reward/mean"] == pytest.approx(local["reward/mean"], abs=0.02)
        assert ray["train/grad_norm"] == pytest.approx(local["train/grad_norm"], rel=0.05)


@pytest.mark.verify
def test_two_trainer_ranks_two_engines_and_zero_3(recipe, tmp_path):
    changes = LEARN | {
        "backend": "ray",
        "steps": 3,
        "trainer.ranks": 2,
        "trainer.zero_stage": 3,
        "rollout.num_engines": 2,
        "reward.function": file_of(tmp_path / "sevens.py", SEVENS),
    }
    done = program(recipe(changes))
    assert done.returncode == 0, done.stderr
    metrics = metrics_of(folder_of(tmp_path))
    assert metrics[2]["reward/mean"] > metrics[0]["reward/mean"]
    assert all(abs(m["train/mismatch/kl"]) < 1e-6 for m in metrics)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder_of(tmp_path) / "model")
    assert sum(p.numel() for p in model.parameters()) > 100_000, "the partitions were gathered"


def listening(pids: set[int]) -> set[tuple[str, str]]:
    """Where processes listen: their names and addresses."""
    found: set[tuple[str, str]] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            sockets = process.net_connections("inet")
            found |= {(process.name(), s.laddr.ip) for s in sockets if s.status == psutil.CONN_LISTEN}
    return found


@contextmanager
def held_still(pids: set[int]) -> Iterator[None]:
    """Stop the run's actors and engine ranks meanwhile: two ranks that wait in turns leave a third process no core."""
    busy = [p for p in psutil.process_iter(["name"]) if p.pid in pids and p.info["name"].startswith(("ray::", "VLLM"))]
    assert busy
    for process in busy:
        process.suspend()
    try:
        yield
    finally:
        for process in busy:
            process.resume()


def refuses_strangers(port: int) -> bool:
    """Whether Ray's gcs_server at this port refuses a call without the run's token."""
    ask = "from ray._raylet import GcsClient; import sys; GcsClient(address=sys.argv[1]).internal_kv_keys(b'', b'')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-c", ask, f"127.0.0.1:{port}"], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode != 0 and "auth" in done.stderr.lower()


def port_of_gcs(pids: set[int]) -> int:
    [gcs] = [p for p in psutil.process_iter(["name"]) if p.pid in pids and "gcs_server" in p.info["name"]]
    return next(s.laddr.port for s in gcs.net_connections("inet") if s.status == psutil.CONN_LISTEN)


@pytest.mark.parametrize(
    ("engine", "end"),
    [
        pytest.param("hf", signal.SIGTERM, marks=pytest.mark.verify),
        pytest.param("vllm", signal.SIGKILL, marks=[pytest.mark.slow, pytest.mark.usual]),
        pytest.param("hf", signal.SIGINT, marks=pytest.mark.verify),
        pytest.param("vllm", signal.SIGTERM, marks=pytest.mark.verify),
    ],
)
def test_a_run_listens_on_loopback_only_and_always_leaves_nothing_behind(recipe, tmp_path, engine, end):
    changes = {"backend": "ray", "steps": 100_000, "rollout.engine": engine, "rollout.kv_cache_gib": 0.25}
    if engine == "vllm":
        changes["rollout.tensor_parallel_size"] = 2  # one rank computes in the actor, without shared memory
    run = start(recipe(changes))
    try:
        lines = iter(run.stdout.readline, "")
        assert any(re.match(r"\s+0 ", line) for line in lines), run.stderr.read()
        while len(metrics_of(folder_of(tmp_path))) < 3:
            time.sleep(0.2)
        below = descendants(run.pid)
        doors = listening({run.pid, *below})
        assert len(doors) > 3 and {ip.removeprefix("::ffff:") for _, ip in doors} <= {"127.0.0.1", "::1"}, doors
        if end == signal.SIGKILL:
            with held_still(below):
                assert refuses_strangers(port_of_gcs(below))
        [scratch] = {entry for pid in below for entry in marks_of(pid)}
        of_vllm = {path for path in map(str, Path("/dev/shm").iterdir()) if Path(path).name.startswith(scratch.name)}
        assert scratch.stat().st_mode & 0o777 == 0o700 and bool(of_vllm) == (engine == "vllm")
        if end == signal.SIGINT:
            os.killpg(run.pid, end)  # what a terminal does: the whole foreground group
        else:
            run.send_signal(end)  # what kill, a cluster's scheduler and a container's host do
        _, err = run.communicate(timeout=60)
    finally:
        run.kill()  # where the test failed
    folder = folder_of(tmp_path)
    assert len(metrics_of(folder)) >= 2
    if end != signal.SIGKILL:
        assert run.returncode == 130
        assert "interrupted" in err and "Traceback" not in err and "SIGTERM" not in err, err
        assert json.loads((folder / "summary.json").read_text())["exit_reason"] == "interrupted"
    until = time.monotonic() + 15.0
    while (left := leftovers(below, scratch, of_vllm)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    assert any(file.name.startswith("worker-") for file in (folder / "logs").iterdir()), "Ray's logs are kept"


def marks_of(pid: int) -> set[Path]:
    """The scratch folder that a process is marked with."""
    with suppress(psutil.NoSuchProcess):
        environment = psutil.Process(pid).environ()
        return {Path(environment[MARK])} if MARK in environment else set()
    return set()


def leftovers(pids: set[int], scratch: Path, shared_memory: set[str]) -> list[str]:
    """List what is left of a run: processes, its folder, shared memory."""
    alive = [command for pid in pids if (command := command_of(pid)) is not None]
    return alive + [path for path in [str(scratch), *shared_memory] if os.path.exists(path)]


def start(recipe_path: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "main_rl.py", "--config", recipe_path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def catches_sigterm(pid: int) -> bool:
    """Tell whether a process has a handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["importing", "starting Ray", "starting Ray, three times"])
def test_a_signal_before_the_first_step_ends_the_run_too(recipe, tmp_path, when):
    run = start(recipe({"backend": "ray", "steps": 100_000}))
    try:
        while not catches_sigterm(run.pid):
            time.sleep(0.01)
        if when != "importing":
            assert "run folder" in run.stdout.readline()
            # before Ray's first process the run would end before the second signal arrives
            while run.poll() is None and not any("gcs_server" in str(command_of(pid)) for pid in descendants(run.pid)):
                time.sleep(0.01)
        run.terminate()
        if "three" in when:
            run.send_signal(signal.SIGINT)
            assert "the run is ending; once more, and it ends at once" in run.stderr.readline()
            run.send_signal(signal.SIGINT)
        below = descendants(run.pid)
        _, err = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 130 and err.splitlines()[-1] == "interrupted" and "Traceback" not in err, err
    if when == "importing":
        assert not (tmp_path / "runs").exists()
        return
    assert json.loads((folder_of(tmp_path) / "summary.json").read_text())["exit_reason"] == "interrupted"
    while any(map(is_running, below)):
        time.sleep(0.1)


@pytest.mark.one_core
@pytest.mark.slow
def test_a_reader_that_closes_the_output_is_told_so(recipe, tmp_path):
    run = start(recipe({"steps": 100_000}))
    assert "run folder" in run.stdout.readline()
    run.stdout.close()
    err = run.stderr.read()
    assert run.wait() == 1 and "the output was closed" in err and "Traceback" not in err, err
    assert (folder_of(tmp_path) / "summary.json").is_file()


def test_a_run_ends_with_its_outcome_on_the_terminal(recipe, tmp_path, capsys):
    cfg = load_recipe(SLConfig, recipe(kind="sl"), []).cfg

    async def body(context: RunContext) -> None:
        context.facts |= {"before": {"eval/loss": 4.5}, "after": {"eval/loss": 1.25}}

    result = run_in_context(cfg, body)
    said = f"run folder: {folder_of(tmp_path)}"
    first, *table, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (said, said) and table[0].strip() == "on held-out data"
    assert any(re.search(r"eval/loss\W+4\.500\W+1\.250", line) for line in table), table
    assert (result.exit_reason, result.before, result.after) == ("done", {"eval/loss": 4.5}, {"eval/loss": 1.25})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["sl", "rl"])
def test_a_signal_ends_a_run_in_one_process_at_once(recipe, tmp_path, kind, number):
    """In supervised learning nothing gives way to the event loop, which would hear of it at the end."""
    cfg = load_recipe({"sl": SLConfig, "rl": RLConfig}[kind], recipe(kind=kind), []).cfg

    async def body(context: RunContext) -> None:
        os.kill(os.getpid(), number)
        if kind == "rl":
            await asyncio.sleep(1.0)
        time.sleep(1.0)
        raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt):
        run_in_context(cfg, body)
    assert json.loads((folder_of(tmp_path) / "summary.json").read_text())["exit_reason"] == "interrupted"


class TakesSigterm:
    """A cluster whose start takes SIGTERM below Python, from any thread, as the start of Ray does."""

    def __init__(self, address: str | None, *, ship_code: bool) -> None:
        ctypes.CDLL(None).signal(ctypes.c_int(signal.SIGTERM), ctypes.c_void_p(signal.SIG_IGN))

    def close(self) -> None:
        """Nothing was started."""


def test_a_signal_ends_a_run_also_after_ray_has_taken_it(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("driver.context.Cluster", TakesSigterm)
    cfg = load_recipe(RLConfig, recipe({"backend": "ray"}), []).cfg

    async def body(context: RunContext) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(1.0)
        raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt):
        run_in_context(cfg, body)
    assert json.loads((folder_of(tmp_path) / "summary.json").read_text())["exit_reason"] == "interrupted"


@pytest.mark.one_core
@pytest.mark.slow
@pytest.mark.usual
def test_supervised_loss_falls_and_is_a_token_mean(trained, sums):
    changes = {"steps": 12, "trainer.lr": 3e-3, "data.eval": str(sums / "sft.parquet"), "eval_every": 6}
    folder = trained(changes, kind="sl")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["before"]["eval/loss"] == pytest.approx(torch.log(torch.tensor(103.0)).item(), abs=0.3)
    assert summary["after"]["eval/loss"] < 0.6 * summary["before"]["eval/loss"]
    assert [*evaluations_of(folder)] == [0, 6, 12]


@pytest.mark.one_core
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sl"])
def test_a_mixture_tells_what_it_drew_from_whom(recipe, tmp_path, sums, kind, capsys):
    first = "train" if kind == "rl" else "sft"
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}][: 1 if kind == "rl" else 2]
    small = file_of(tmp_path / "small.jsonl", json.dumps({"messages": turns, "answer": "2"}) + '\n{"messages": []}\n')
    sources = [{"path": str(sums / f"{first}.parquet"), "ratio": 3}, {"path": small}]
    config = recipe({"data.train": sources, "data.max_invalid_fraction": 0.5}, kind=kind)
    code, err = run_here(main_rl if kind == "rl" else main_sl, "--config", config)
    assert code == 0, err
    per_step = 4 if kind == "rl" else 5
    last = metrics_of(folder_of(tmp_path))[-1]
    assert last[f"data/{first}/rows"] + last["data/small/rows"] == 2 * per_step
    assert last["data/small/epoch"] == last["data/small/rows"] == 2.0
    assert ("reward/small" in last) == (kind == "rl")
    assert "data.train: of small, 1 rows are used and 1 are invalid: 1 " in capsys.readouterr().out
    summary = json.loads((folder_of(tmp_path) / "summary.json").read_text())
    assert summary["data.train"]["small"]["used"] == 1
