"""Engines that somebody else started: `vllm serve` takes the trainer's weights over HTTP and gloo, with their proof."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import httpx
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from configs.schema import RLConfig
from core.errors import UserError
from driver.evaluation.suites.generations import WHOLE
from driver.load_recipe import load_recipe
from rollouts.engines.http import EXTENSION, TRANSFER, HttpEngine
from trainers.weight_sync.broadcast import WeightSender
from trainers.weight_sync.fingerprint import fingerprint
from unit_tests.helpers.engines import PROMPTS, engine_config, several
from unit_tests.helpers.processes import find_free_port
from unit_tests.helpers.runs import LUCK, file_of, folder_of, metrics_of, program
from unit_tests.helpers.vllm_lab import TIMEOUT_S, buckets_of, gap, in_thread, logp

ROOT = Path(__file__).parent.parent.parent
SETTINGS = {
    "model_config": {
        "model": "/there/m",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "dtype": "torch.float32",
        "max_model_len": 256,
    },
    "parallel_config": {
        **{"tensor_parallel_size": 1, "data_parallel_size": 1, "pipeline_parallel_size": 1},
        "worker_extension_cls": EXTENSION,
    },
    "weight_transfer_config": {"backend": TRANSFER},
}
WRONG = {
    ("model_config", "logprobs_mode", "raw_logprobs"): "has --logprobs-mode 'raw_logprobs' where 'processed_logprobs'",
    ("model_config", "dtype", "torch.bfloat16"): "has --dtype 'bfloat16' where 'float32' is needed",
    ("model_config", "max_model_len", 128): "has --max-model-len 128, and 256 is needed",
    ("parallel_config", "data_parallel_size", 2): "has --data-parallel-size 2 where 1 is needed",
    ("parallel_config", "worker_extension_cls", ""): "has --worker-extension-cls ''",
    ("weight_transfer_config", "backend", "nccl"): "has --weight-transfer-config 'nccl'",
}


def make_client(**settings) -> SimpleNamespace:
    """The engine before it connects."""
    engine = SimpleNamespace(config=engine_config("here/m", **settings), address="http://there")
    engine._refuse = lambda why: HttpEngine._refuse(engine, why)
    return engine


def test_frozen_weights_must_be_of_the_recipes_model():
    HttpEngine._check_settings(make_client(), SETTINGS)
    with pytest.raises(UserError, match="has --model 'other' where 'm' is needed"):
        other = SETTINGS["model_config"] | {"model": "other"}
        HttpEngine._check_settings(make_client(), SETTINGS | {"model_config": other})


@pytest.mark.parametrize("wrong", WRONG)
def test_a_server_with_other_settings_is_refused_with_the_command(wrong):
    section, name, value = wrong
    engine = make_client(starts_empty=True)
    HttpEngine._check_settings(engine, SETTINGS)
    with pytest.raises(
        UserError, match=f"{re.escape(WRONG[wrong])}.*: start it with VLLM_SERVER_DEV_MODE=1 vllm serve"
    ):
        HttpEngine._check_settings(engine, SETTINGS | {section: SETTINGS[section] | {name: value}})


class Portal(BaseHTTPRequestHandler):
    """A server that is not vLLM: a page, and JSON of other keys."""

    said = b""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.said)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("said", [b"<html>log in</html>", b"{}", b'{"vllm_config": {"model_config": []}}', b"[]"])
def test_a_server_that_is_not_vllm_is_one_sentence(said):
    with HTTPServer(("127.0.0.1", 0), type("Own", (Portal,), {"said": said})) as there:
        Thread(target=there.handle_request, daemon=True).start()
        with pytest.raises(UserError, match="does not tell its settings as vLLM does: start it with"):
            HttpEngine(engine_config("m", server=f"http://127.0.0.1:{there.server_port}"))


def test_servers_that_do_not_answer_or_do_not_fit_are_one_sentence(recipe):
    with pytest.raises(UserError, match="http://there:80OO does not answer: InvalidURL"):
        HttpEngine(engine_config("m", server="http://there:80OO"))
    with pytest.raises(UserError, match="does not answer: ConnectError"):
        HttpEngine(engine_config("m", server=f"http://127.0.0.1:{find_free_port()}"))
    with pytest.raises(UserError, match="servers has 1 addresses, and engine=hf with num_engines=1 needs 0"):
        load_recipe(RLConfig, recipe({"rollout.servers": ["http://there"]}), [])
    with pytest.raises(UserError, match="servers has 0 addresses, and engine=http with num_engines=1 needs 1"):
        load_recipe(RLConfig, recipe({"rollout.engine": "http"}), [])


@contextmanager
def serve(model: str, log: Path, *own: str) -> Iterator[str]:
    """Start `vllm serve` as its documentation says, and yield the address before it answers."""
    port = find_free_port()
    words = ["--enable-scale-out", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    words += ["--worker-extension-cls", EXTENSION, "--weight-transfer-config", f'{{"backend": "{TRANSFER}"}}']
    words += ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--no-enable-chunked-prefill"]
    words += ["--block-size", "32", "--host", "127.0.0.1", "--port", str(port), *own]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    # as `vllm serve`, whose script looks for a package of that name, and the build for CPUs has another
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *words]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, cwd=log.parent)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:  # it is still importing, on a busy machine
                process.kill()
                process.wait()


def wait_for(address: str, log: Path) -> None:
    until = time.monotonic() + 400
    while not is_up(address):
        assert time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.5)


@pytest.fixture
def server(tiny_path, tmp_path) -> Iterator[str]:
    log = tmp_path / "server.txt"
    with serve(tiny_path, log, "--load-format", "dummy") as address:
        wait_for(address, log)
        yield address


def is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_server_samples_from_the_weights_that_it_was_sent(server, tiny_path):
    def make_model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    async def body() -> None:
        engine = HttpEngine(engine_config(tiny_path, server=server, starts_empty=True, timeout_s=TIMEOUT_S))
        sender = WeightSender(timeout_s=TIMEOUT_S)
        joined = engine.join_broadcast(address="127.0.0.1", port=sender.open(), first_rank=1, members=2)
        await asyncio.gather(in_thread(sender.join, members=2), joined)
        running: asyncio.Task[list] | None = None
        for version, seed in ((0, 0), (1, 1)):
            model = make_model(seed)
            await engine.pause()
            sent, _ = await asyncio.gather(in_thread(sender.send, buckets_of(model)), engine.receive_weights(version))
            assert sent == fingerprint(model.named_parameters()) and [sent] == await engine.read_fingerprint()
            assert gap(await engine.probe(PROMPTS[2]), logp(model, PROMPTS[2])) < 1e-3
            done = await several(engine, PROMPTS, range(4))
            for prompt, one in zip(PROMPTS, done, strict=True):
                assert gap(logp(model, prompt + one.token_ids, 0.7)[-len(one.token_ids) :], one.logp) < 1e-3
                assert {*one.versions} == {version} and (one.stop == "eos") == (one.token_ids[-1] == 1)
            again = await several(engine, PROMPTS[:1], [0])
            assert again[0].token_ids == done[0].token_ids
            if running is not None:  # begun under the weights before
                [interrupted] = await running
                assert {*interrupted.versions} <= {0, 1}
            running = asyncio.create_task(several(engine, PROMPTS[:1], [9], n=200))
            await asyncio.sleep(0.05)
        await running
        await engine.close()

    asyncio.run(body())


@pytest.mark.verify
@pytest.mark.timeout(1500)
def test_two_servers_evaluate_a_model_and_follow_a_trainer_on_ray(recipe, sums, tiny_path, tmp_path):
    logs = [tmp_path / "first.txt", tmp_path / "second.txt"]
    with serve(tiny_path, logs[0]) as first, serve(tiny_path, logs[1]) as second:
        for address, log in zip((first, second), logs, strict=True):
            wait_for(address, log)
        servers = {"engine": "http", "servers": [first, second], "num_engines": 2}
        luck = file_of(tmp_path / "luck.py", LUCK)

        def evaluate(name: str, **changes: object) -> list[tuple[int, str]]:
            raw = {
                **{"name": name, "samples": 1, "run_dir": str(tmp_path / "runs")},
                "model": {"path": tiny_path, "dtype": "float32"},
                "data": {"sets": [{"path": str(sums / "eval.parquet"), "name": "sums"}], "max_prompt_tokens": 32},
                "reward": {"function": luck, "workers": 1},
                "rollout": {"temperature": 0.0, "max_new_tokens": 8} | changes,
                "backend": "ray" if "servers" in changes else "local",
            }
            (tmp_path / "eval.yaml").write_text(yaml.safe_dump(raw))
            done = program(str(tmp_path / "eval.yaml"), main="main_eval.py")
            assert done.returncode == 0, done.stderr
            rows = pq.read_table(folder_of(tmp_path, name) / WHOLE).to_pylist()
            return sorted((row["index"], row["completion"]) for row in rows)

        assert evaluate("served", **servers) == evaluate("ours", engine="hf")
        to_servers = {f"rollout.{key}": value for key, value in servers.items()}
        for transport in ("gloo", "direct", "disk"):
            by = {"name": transport, "weight_sync.transport": transport, "weight_sync.delta": transport == "disk"}
            by |= {"weight_sync.folder": str(tmp_path / "store")} if transport == "disk" else {}
            common = {"backend": "ray", "steps": 3, "trainer.lr": 1e-2, "reward.function": luck}
            done = program(recipe(common | to_servers | by))
            assert done.returncode == 0, done.stderr
            found = metrics_of(folder_of(tmp_path, transport))
            assert len(found) == 3 and all(row["sync/probe_gap"] < 1e-3 for row in found)
            assert [row.get("sync/changed", 0) > 0 for row in found] == [transport == "disk"] * 3
        assert [*(tmp_path / "store").iterdir()] == []
        # their weights are those of a run now
        raw = yaml.safe_load((tmp_path / "eval.yaml").read_text())
        raw |= {"backend": "ray", "rollout": raw["rollout"] | servers}
        (tmp_path / "eval.yaml").write_text(yaml.safe_dump(raw))
        done = program(str(tmp_path / "eval.yaml"), main="main_eval.py")
        assert done.returncode != 0 and "has weights of a run in place of model.path" in done.stderr, done.stderr
