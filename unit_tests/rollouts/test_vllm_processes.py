"""vLLM's processes: none outlives its parent, and the death of each is noticed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from core.cluster.guardian import MARK
from core.errors import ProcessDied
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.sockets import VARIABLE
from unit_tests.helpers.examples import children_named
from unit_tests.helpers.vllm_lab import PROMPT, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder),
        dtype="float32",
        temperature=1.0,
        max_model_len=256,
        stop_token_ids=(),
        kv_cache_gib=0.1,
        timeout_s=60.0,
    )


@pytest.mark.parametrize("idle", [pytest.param(True, marks=pytest.mark.verify), False])
def test_the_death_of_a_rank_is_noticed_and_the_others_end(idle: bool, tmp_path: Path) -> None:
    save("qwen2-tied", tmp_path, seed=0)
    config = replace(config_of(tmp_path), tensor_parallel_size=2)

    async def body() -> list[psutil.Process]:
        engine = VllmEngine(config)
        workers = children_named("VLLM")
        assert len(workers) == 2 and {worker.ppid() for worker in workers} == {os.getpid()}
        await engine.generate(PROMPT[:8], max_new_tokens=2, seed=0)
        asking = asyncio.create_task(engine.generate(PROMPT[:8], max_new_tokens=240, seed=0))
        await (asking if idle else asyncio.sleep(0.05))
        workers[0].kill()
        with pytest.raises(ProcessDied, match="a process of vLLM died"):
            await (engine.read_fingerprint() if idle else asking)
        with pytest.raises(ProcessDied):
            await engine.generate(PROMPT[:8], max_new_tokens=2, seed=0)
        await engine.close()
        return workers

    _, alive = psutil.wait_procs(asyncio.run(body()), timeout=15)
    assert not alive


OUTSIDE = """
import asyncio, os, tempfile
from pathlib import Path
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm import VllmEngine

async def main():
    engine = VllmEngine(EngineConfig(model_path={model!r}, dtype="float32", temperature=1.0, max_model_len=256,
                                     stop_token_ids=(), kv_cache_gib=0.1, tensor_parallel_size=2))
    print(*(path for path in Path(tempfile.gettempdir()).rglob("*") if path.is_socket()))
    await engine.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.verify
def test_an_engine_outside_of_a_run_leaves_no_sockets(tmp_path: Path, tmp_path_factory) -> None:
    save("qwen2-tied", tmp_path, seed=0)
    (tmp_path / "outside.py").write_text(OUTSIDE.format(model=str(tmp_path)))
    own = tmp_path_factory.mktemp("t")  # a socket's path is short
    environment = {name: value for name, value in os.environ.items() if name not in (MARK, VARIABLE)}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(own)}
    command = [sys.executable, str(tmp_path / "outside.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    there = done.stdout.split()
    assert len(there) >= 2 and {Path(path).parent.parent for path in there} == {own}, done.stdout
    assert [path for path in own.rglob("*") if path.is_socket() or path.name.startswith("vllm-")] == []


def test_settings_that_vllm_refuses_leave_no_process(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(Exception, match="config"):
        VllmEngine(config_of(tmp_path))  # a folder without a model
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=60)
    assert not [process for process in alive if "resource_tracker" not in " ".join(process.cmdline())]
