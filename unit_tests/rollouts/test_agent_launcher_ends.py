"""Ends of the launcher of agents at awkward moments: the run that closes, and the launcher that dies at once."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from core.cluster.child_process import ROOT, start_module
from core.errors import UserError
from core.loading import FileSpec, resolve
from rollouts.agents import launching
from rollouts.agents.launching import LauncherClient
from rollouts.agents.task import AgentPlan


def name_file(file: Path) -> FileSpec:
    return resolve(str(file), "agents", offers=lambda _: True)


SLOW_IMPORT = """import pathlib, time
pathlib.Path("began").touch()
while not pathlib.Path("closed").exists():
    time.sleep(0.01)
{then}
"""


@pytest.mark.parametrize("then", ["def run(task): return {}", "run = None"])
def test_a_run_that_closes_while_the_agent_is_imported_leaves_no_traceback(tmp_path: Path, then: str):
    file = tmp_path / "agent.py"
    file.write_text(SLOW_IMPORT.format(then=then))
    worker, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with worker, far_end:
        launcher = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollouts.agents.launcher", str(far_end.fileno())],
            pass_fds=[far_end.fileno()],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        far_end.close()
        plan = {"file": asdict(name_file(file)), "command": [], "serve": None}
        worker.send(json.dumps(plan).encode())
        while not (tmp_path / "began").exists():
            assert launcher.poll() is None
    (tmp_path / "closed").touch()
    assert (launcher.communicate(timeout=60)[1], launcher.returncode) == ("", 0)


def test_a_launcher_that_dies_before_it_has_its_plan_is_told_in_a_sentence(tmp_path: Path, monkeypatch):
    def start_and_lose(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started = start_module(*args, **options)
        os.killpg(started.pid, 9)
        started.wait()
        return started

    monkeypatch.setattr(launching, "start_module", start_and_lose)
    file = tmp_path / "agent.py"
    file.write_text("def run(task): return {}")
    client = LauncherClient(AgentPlan(file=name_file(file)))
    try:
        with pytest.raises(UserError, match=r"agent\.py ended the process that imported it$"):
            asyncio.run(client.serves())
    finally:
        client.kill()
