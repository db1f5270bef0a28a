"""Server in the place of `vllm serve`: it notes requests, and answers from a script."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from core.errors import ProcessDied, RunStopped
from rollouts.engines.http import EXTENSION, TRANSFER, HttpEngine
from unit_tests.helpers.engines import engine_config

CONTEXT = cache(ssl.create_default_context)
"""Certificates, read once: nothing here is encrypted, and each client takes 0.1 s for them."""


class Listening(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


def settings_of(**model: Any) -> dict[str, Any]:
    there = {"model": "/there/m", "logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    parallel = dict.fromkeys(("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"), 1)
    return {
        "model_config": there | {"dtype": "torch.float32", "max_model_len": 256} | model,
        "parallel_config": parallel | {"worker_extension_cls": EXTENSION},
        "weight_transfer_config": {"backend": TRANSFER},
    }


class Server:
    """Server that notes each request, and gives the answers of its paths in their order."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {"server_info": {"vllm_config": settings_of()}} | answers
        self.asked: list[Any] = []
        self.status = dict[str, int]()

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        name = path.partition("?")[0].rpartition("/")[2]
        if name != "server_info":
            self.asked.append((path, body))
        found = self.answers.get(name, {})
        found = found.pop(0) if isinstance(found, list) else found
        return self.status.get(name, 200), found if isinstance(found, bytes) else json.dumps(found).encode()

    @contextmanager
    def running(self) -> Iterator[str]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version, wbufsize = "HTTP/1.1", -1  # an answer is one packet

            def respond(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                status, text = server.answer(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = respond

            def log_message(self, *args: object) -> None:
                pass

        with Listening(("127.0.0.1", 0), Handler) as there:
            Thread(target=there.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{there.server_port}"
            finally:
                there.shutdown()


def play(server: Server, body: Callable[[HttpEngine], Awaitable[Any]], **settings: Any) -> tuple[str, Any]:
    """Return the address, and the result of a client or the sentence of the error."""

    async def run(address: str) -> Any:
        engine = HttpEngine(engine_config("here/m", server=f"{address}/", **settings))
        try:
            return await body(engine)
        except (RunStopped, ProcessDied) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            await engine.close()

    with server.running() as address:
        return address, asyncio.run(run(address))
