"""The client of `vllm serve`: which settings it needs there, how long it waits, and how much it asks at once."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from typing import Any

import pytest

from rollouts.engines.http import COMMAND, HttpEngine
from unit_tests.helpers.engine_server import CONTEXT, Server, play, settings_of
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.sentences import tell


@pytest.fixture(autouse=True)
def one_ssl_context(monkeypatch):
    """Read the certificates once."""
    monkeypatch.setattr(ssl, "create_default_context", CONTEXT)


def refuse(server: Server, **settings: Any) -> str:
    """Return why a client refuses a server, without address and command."""
    with server.running() as address:
        told = tell(lambda: HttpEngine(engine_config("here/m", server=address, **settings)))
    begin, end = f"rollout.servers: {address} ", f": start it with {COMMAND}"
    assert told.startswith(begin) and told.endswith(end)
    return told.removeprefix(begin).removesuffix(end)


WRONG: list[tuple[str, str, Any, str]] = [
    ("model_config", "logprobs_mode", "raw_logits", "--logprobs-mode 'raw_logits' where 'processed_logprobs'"),
    ("model_config", "generation_config", "auto", "--generation-config 'auto' where 'vllm'"),
    ("model_config", "dtype", "torch.float16", "--dtype 'float16' where 'float32'"),
    ("parallel_config", "tensor_parallel_size", 2, "--tensor-parallel-size 2 where 1"),
    ("parallel_config", "data_parallel_size", 3, "--data-parallel-size 3 where 1"),
    ("parallel_config", "pipeline_parallel_size", 4, "--pipeline-parallel-size 4 where 1"),
]


@pytest.mark.parametrize(("section", "name", "value", "said"), WRONG)
def test_each_setting_of_a_server_must_be_the_recipes(section, name, value, said):
    found = settings_of()
    found[section][name] = value
    assert refuse(Server(server_info={"vllm_config": found})) == f"has {said} is needed"


@pytest.mark.parametrize("transfer", [None, {}, {"backend": None}])
def test_a_server_that_takes_no_weights_is_none_for_a_run(transfer):
    found = settings_of() | {"weight_transfer_config": transfer}
    said = "has --weight-transfer-config None where 'feynrl_gloo' is needed"
    assert refuse(Server(server_info={"vllm_config": found}), starts_empty=True) == said
    assert play(Server(server_info={"vllm_config": found}), nothing)[1] is None, "its own weights stay"


async def nothing(engine: HttpEngine) -> None:
    pass


def test_a_server_of_several_ranks_and_more_positions_fits():
    found = settings_of(max_model_len=257)
    found["parallel_config"]["tensor_parallel_size"] = 2
    assert play(Server(server_info={"vllm_config": found}), nothing, tensor_parallel_size=2)[1] is None


class Late(Server):
    """Server that takes its time."""

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        time.sleep(0.3)
        return super().answer(path, body)


def test_a_server_has_the_recipes_seconds_to_tell_its_settings():
    with Late().running() as address:
        told = tell(lambda: HttpEngine(engine_config("here/m", server=address, timeout_s=0.05)))
    assert told.startswith(f"rollout.servers: {address} does not answer: ReadTimeout")


def test_a_call_of_a_server_has_longer_than_the_deadline_inside_it():
    server = Server(collective_rpc={"results": [{"a": 1}]})
    assert play(server, lambda engine: engine.read_fingerprint(), timeout_s=1.5)[1] == [{"a": 1}]


def test_a_closed_client_sends_nothing_more():
    async def go(engine: HttpEngine) -> None:
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await engine.pause()

    server = Server()
    assert play(server, go)[1] is None and server.asked == []


AT_ONCE = 101
"""One more than the library's own limit."""


class Full(Server):
    """Server that answers once it has so many requests."""

    here = threading.Barrier(AT_ONCE)

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        if path.startswith("/pause"):
            self.here.wait(10)
        return super().answer(path, body)


def test_requests_wait_in_the_server_however_many_there_are():
    async def go(engine: HttpEngine) -> None:
        await asyncio.gather(*(engine.pause() for _ in range(AT_ONCE)))

    server = Full()
    assert play(server, go)[1] is None and len(server.asked) == AT_ONCE
