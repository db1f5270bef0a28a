"""What a run leaves behind is ended and removed: at its end, after its driver's death, and by the next run."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from core.cluster import guardian, scratch
from core.cluster.scratch import Scratch, find_scratch, name_shared_memory, remove_abandoned
from unit_tests.helpers.examples import is_running
from unit_tests.helpers.processes import wait_until

ROOT = Path(__file__).parent.parent.parent
DRIVER = """
import os, subprocess, sys, time
from core.cluster.scratch import Scratch
home = Scratch()
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
below = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], " \\
    "env={}, start_new_session=True); print(p.pid, flush=True); time.sleep(600)"
one = subprocess.Popen(sleeper, start_new_session=True)
two = subprocess.Popen([sys.executable, "-c", below], stdout=subprocess.PIPE, text=True)
stranger = subprocess.Popen(sleeper, env={}, start_new_session=True)
open(home.folder / "tmp" / "file", "w").close()
print(home.folder, home._guardian.pid, one.pid, two.pid, two.stdout.readline().strip(), stranger.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def base(monkeypatch, tmp_path):
    """A place for scratch folders: short, and this test's own."""
    monkeypatch.delenv(guardian.MARK, raising=False)
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "LONGEST_BASE", 4096)
    return tmp_path


def is_ready(guardian_id: int) -> bool:
    """Whether the guardian ignores what ends others: a new process needs a moment for that."""
    [ignored] = [line for line in Path(f"/proc/{guardian_id}/status").read_text().splitlines() if "SigIgn" in line]
    return bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.fixture
def driver(base):
    """A driver with processes below it; its scratch folder; and the ids of guardian, processes and a stranger."""
    code = f"from core.cluster import scratch; scratch.LONGEST_BASE = 4096\n{DRIVER}"
    environment = os.environ | {"TMPDIR": str(base)}
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    folder, *pids = run.stdout.readline().split()
    yield run, Path(folder), [int(pid) for pid in pids]
    run.kill()
    run.wait()
    for pid in map(int, pids):  # where the test failed; all but the stranger are gone
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    Path(f"/dev/shm/{Path(folder).name}-test").unlink(missing_ok=True)


def test_a_killed_driver_takes_everything_with_it(driver):
    run, folder, [guardian_id, one, two, below, stranger] = driver
    assert folder.stat().st_mode & 0o777 == 0o700
    named = Path(f"/dev/shm/{folder.name}-test")
    named.write_bytes(b"0")
    wait_until(lambda: is_ready(guardian_id))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guardian_id, number)
    assert all(map(is_running, (guardian_id, one, two, below)))
    run.kill()
    run.wait()
    wait_until(lambda: not any(map(is_running, (one, two, below))))
    wait_until(lambda: not folder.exists() and not named.exists())
    wait_until(lambda: not is_running(guardian_id))
    assert is_running(stranger), "it does not carry the mark"


def test_what_lost_its_guardian_too_is_removed_by_the_next_run(driver, base):
    run, folder, [guardian_id, one, two, below, stranger] = driver
    remove_abandoned(base)
    assert folder.is_dir() and is_running(one), "its owner lives"
    os.kill(guardian_id, signal.SIGKILL)
    run.kill()
    run.wait()
    wait_until(lambda: not is_running(guardian_id))
    assert is_running(one)
    named = Path(f"/dev/shm/{folder.name}-test")
    named.write_bytes(b"0")
    with Scratch() as mine:
        assert mine.folder.parent == base and mine.folder.is_dir()
        assert not any(map(is_running, (one, two, below))) and is_running(stranger)
        assert not folder.exists() and not named.exists()


def test_a_folder_of_somebody_else_stays_and_a_run_that_ended_goes(base):
    theirs = [base / f"{scratch.PREFIX}a{i}" for i in range(4)]  # without a lock: no run has made them
    ended = [base / f"{scratch.PREFIX}b{i}" for i in range(4)]
    for one, other in zip(theirs, ended, strict=True):
        one.mkdir()
        other.mkdir()
        (other / "lock").touch()
    (base / "other").mkdir()
    (base / "other" / "lock").touch()
    remove_abandoned(base)
    assert sorted(left.name for left in base.iterdir()) == [*(one.name for one in theirs), "other"]


def test_a_run_ends_with_its_folder_gone_and_the_environment_as_before(base):
    before = dict(os.environ)
    with Scratch() as home:
        assert find_scratch() == home.folder
        assert os.environ["TMPDIR"] == str(home.folder / "tmp")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert child.wait() == -signal.SIGKILL
    assert not home.folder.exists() and os.environ == before and find_scratch() is None
    assert home._guardian.returncode == 0


def test_what_a_terminal_sends_to_the_run_does_not_reach_its_guardian(base):
    with Scratch() as home:
        assert os.getsid(home._guardian.pid) == os.getpgid(home._guardian.pid) == home._guardian.pid


def test_the_logs_of_ray_are_kept(base, tmp_path):
    (tmp_path / "run").mkdir()
    with Scratch(logs=tmp_path / "run" / "logs") as home:
        logs = home.folder / "ray" / "session_2030-01-01_00-00-00_000000_1" / "logs"
        logs.mkdir(parents=True)
        (logs / "worker-1.err").write_text("out of memory")
        (logs / "worker-2.err").touch()
    assert [(file.name, file.read_text()) for file in (tmp_path / "run" / "logs").iterdir()] == [
        ("worker-1.err", "out of memory")
    ]


def test_shared_memory_is_named_after_the_run(base, monkeypatch):
    usual = shared_memory.SharedMemory
    monkeypatch.setattr(shared_memory, "SharedMemory", usual)
    name_shared_memory()
    assert shared_memory.SharedMemory is usual, "not in a run"
    with Scratch() as home:
        name_shared_memory()
        memory = shared_memory.SharedMemory(create=True, size=8)
        file = Path("/dev/shm") / memory.name
        (home.folder / "tmp" / "vllm_dist_0f").touch()
        ranks = Path("/dev/shm/vllm_dist_0f-test")
        ranks.touch()
        assert file.is_file() and set(guardian.list_shared_memory(home.folder)) == {file, ranks}
    assert not file.exists() and not ranks.exists()
    memory.close()


def test_sockets_have_room_for_their_names(monkeypatch):
    monkeypatch.setattr(scratch.tempfile, "tempdir", "/a/folder/for/temporary/files")
    session = "ray/session_2030-12-31_23-59-59_999999_4194304"
    base = "/" + "b" * (scratch.LONGEST_BASE - 1)
    with Scratch() as home:
        assert home.folder.parent == Path("/tmp")
        assert len(f"{base}/{home.folder.name}/{session}/sockets/plasma_store") <= 107
        assert len(f"{home.folder}/tmp/{'u' * 36}") <= 107


def test_what_a_run_starts_finds_its_folder_and_the_usual_kernels(base, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    for given, kernels in ((None, default_cache_dir()), ("/kernels", "/kernels")):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        with Scratch() as home:
            own = str(home.folder / "tmp")
            told = {"TMPDIR": own, "VLLM_RPC_BASE_PATH": own, "SPT_NOENV": "1", "TORCHINDUCTOR_CACHE_DIR": kernels}
            assert {name: os.environ.get(name) for name in told} == told
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == given


def test_a_socket_below_the_longest_folder_has_a_path_that_linux_takes():
    """The longest path of Ray's has 88 bytes below the temporary folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as one:
        for more, fits in ((1, False), (0, True)):
            path = folder + "/".ljust(scratch.LONGEST_BASE + 88 + more - len(folder), "x")
            if fits:
                one.bind(path)
            else:
                with pytest.raises(OSError, match="too long"):
                    one.bind(path)
