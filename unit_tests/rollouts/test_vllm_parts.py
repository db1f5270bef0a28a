"""Completions that vLLM samples in parts, and the processes that it starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.cluster.child_process import ROOT
from core.errors import RunStopped
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.architectures import can_import, has_architecture
from rollouts.engines.vllm_support.kept_sets import KeptReports
from rollouts.engines.vllm_support.parts import Parts, continue_seed
from rollouts.engines.vllm_support.routes import RouteReports
from rollouts.engines.vllm_support.sockets import VARIABLE
from rollouts.stops import StopStrings
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.sentences import tell

PROMPT = [*b"a prompt of thirty characters."]


async def nobody(method: str, **asked: Any) -> list[Any]:
    raise NotImplementedError


class Writer:
    """In place of vLLM's requests: writes a text letter by letter, and is aborted after some numbers of letters."""

    def __init__(self, text: str, aborted_after: tuple[int, ...] = (), reason: str = "stop") -> None:
        self.text, self.aborted_after, self.reason = text, [*aborted_after], reason
        self.asked: list[tuple[int, int, int]] = []
        """Of each request: tokens of the prompt, most new ones, and the seed."""
        self.written: list[int] = []

    def make_params(self, *, max_new_tokens: int, seed: int, truncation: Any) -> tuple[int, int]:
        return max_new_tokens, seed

    async def ask(self, prompt: list[int], images: Any, params: Any, ends: Callable[[list[int]], bool] | None) -> Any:
        self.asked.append((len(prompt), *params))
        most = self.aborted_after.pop(0) if self.aborted_after else None
        begin, new = len(prompt) - len(PROMPT), list[int]()
        while begin + len(new) < len(self.text) and len(new) != most:
            new.append(ord(self.text[begin + len(new)]))
            if ends is not None and ends([*new]):
                break
        self.written.append(len(new))
        if not new:
            return None
        span = SimpleNamespace(version=str(len(self.asked)), start=0, end=len(new))
        output = {"token_ids": new, "logprobs": SimpleNamespace(logprobs=[-0.5] * len(new)), "weight_versions": [span]}
        reason = None if len(new) == most else self.reason
        return SimpleNamespace(outputs=[SimpleNamespace(**output, finish_reason=reason, spec_decode_metrics=None)])


def write(writer: Writer, config: EngineConfig, most: int = 40) -> Any:
    reports = KeptReports(config, nobody, on_cpu=True)
    parts = Parts(writer.ask, writer.make_params, reports, RouteReports(config), config)
    return asyncio.run(parts.generate(PROMPT, (), max_new_tokens=most, seed=7))


def test_a_reply_ends_with_the_token_that_completes_a_stop_string():
    strings = StopStrings(["END", "##"], lambda ids: bytes(ids).decode(), range(128))
    config = engine_config("m", stop_strings=strings, pause_mode="abort", stop_token_ids=[])
    for text, aborted_after, written, said, stop in (
        ("so END or not", (), [6], "so END", "eos"),
        ("so END or not", (4,), [4, 2], "so END", "eos"),
        ("so END or not", (0, 1, 0, 4), [0, 1, 0, 4, 1], "so END", "eos"),
        ("## END", (), [2], "##", "eos"),
        ("so it goes", (3,), [3, 7], "so it goes", "eos"),
    ):
        writer = Writer(text, aborted_after)
        done = write(writer, config)
        assert (writer.written, bytes(done.token_ids).decode(), done.stop) == (written, said, stop), (text, written)
        assert len(done.logp) == len(done.versions) == len(said)
    assert done.versions == [1] * 3 + [2] * 7
    assert writer.asked == [(30, 40, 7), (33, 37, continue_seed(7, 3))] and continue_seed(7, 0) == 7


def test_a_reply_that_was_complete_when_aborted_is_not_asked_for_again():
    config = engine_config("m", pause_mode="abort", stop_token_ids=[ord("!")])
    for text, aborted_after, most, stop in (("ab!", (3,), 40, "eos"), ("abc", (3,), 3, "length")):
        writer = Writer(text, aborted_after)
        assert write(writer, config, most).stop == stop and len(writer.asked) == 1


ENDS_WITH_PARENT = """
import multiprocessing, os, threading
from rollouts.engines.vllm_support import plugin

plugin.PARENT_POLL_S = 0.01

def wait():
    plugin._end_with_parent()
    threading.Event().wait(20)
    print("it was not ended")

plugin._end_with_parent()  # this process was started by nobody of ours
fork = multiprocessing.get_context("fork")
ended = fork.Process(target=plugin._end_with_parent)
ended.start()
ended.join(10)
print("exit code", ended.exitcode, flush=True)
ended.kill()
reading, writing = os.pipe()
if not os.fork():
    os.dup2(writing, 1)
    fork.Process(target=wait).start()
    os._exit(0)
os.close(writing)
print(b"".join(iter(lambda: os.read(reading, 100), b"")).decode(), end="")
"""


def test_a_process_of_vllm_ends_by_itself_and_with_its_parent():
    command = [sys.executable, "-c", ENDS_WITH_PARENT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "exit code 0\n", done.stderr


@pytest.mark.parametrize(
    ("body", "loads"), [("", True), ("raise OSError('no operator')", False), ("import no_such", False)]
)
def test_a_package_counts_if_it_loads(tmp_path, monkeypatch, body, loads):
    name = f"package_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    assert can_import(name) is loads and not can_import("no_such_package")


PLACES_SOCKETS = """
import os
from rollouts.engines.vllm_support import sockets
for _ in range(2):
    sockets.place_sockets()
    print(path := os.environ[sockets.VARIABLE], os.path.isdir(path), flush=True)
"""


def test_sockets_lie_where_a_run_says_or_in_a_folder_that_is_removed(tmp_path):
    (usual := tmp_path / ("x" * 60)).mkdir()  # in which a socket's name would be too long
    outside = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"TMPDIR": str(usual)}

    def place(variables: dict[str, str]) -> list[str]:
        command = [sys.executable, "-c", PLACES_SOCKETS]
        return subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True).stdout.splitlines()

    assert place(outside | {VARIABLE: str(tmp_path)}) == [f"{tmp_path} True"] * 2
    first, second = place(outside)
    folder, is_there = first.split()
    assert first == second and is_there == "True", "one for all engines of a process"
    assert Path(folder).parent == Path("/tmp") and not Path(folder).exists()


def test_a_vllm_that_is_not_imported_in_time_ends_the_run(monkeypatch):
    monkeypatch.setattr("rollouts.engines.vllm_support.architectures.VLLM_IMPORT_TIMEOUT_S", 0.001)
    with pytest.raises(RunStopped, match=r"^vLLM could not be imported within 0\.001 s$"):
        has_architecture("LlamaForCausalLM")


REGISTRY = """
class ModelRegistry:
    @staticmethod
    def get_supported_archs():
        return {"Known", "Linear"}
"""


def test_code_of_its_own_needs_an_architecture_of_vllm(tmp_path, monkeypatch):
    """A vLLM of one file is installed, for the import of the real one takes seconds."""
    (models := tmp_path / "vllm" / "model_executor" / "models").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("print('vLLM has it: guessed. INFO')\n")
    (models / "registry.py").write_text(REGISTRY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model: Any = torch.nn.Linear(2, 2)
    for architectures, lacks in ((["Known", "Own"], ""), (None, ""), (["Own", "Known"], "Own")):
        model.config = SimpleNamespace(architectures=architectures)

        def check() -> None:
            VllmEngine.check_user_code(model, path="a/model")

        if not lacks:
            check()
            continue
        assert tell(check) == (
            "model.path=a/model comes with code of its own, and vLLM does not have its architecture Own: set "
            "rollout.engine=hf"
        )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise OSError('no libcudart.so')", "OSError: no libcudart.so"),
        ("import sys; sys.exit(3)", "it says nothing"),
        ("import sys; sys.exit(0)", "it says nothing"),
        ("import os; print('vLLM has it: True', flush=True); os._exit(1)", "it says nothing"),
    ],
)
def test_a_vllm_that_is_broken_is_told_by_its_last_line(tmp_path, monkeypatch, code, said):
    (tmp_path / "vllm.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert tell(lambda: has_architecture("Known"), RunStopped) == f"vLLM cannot be imported: {said}"
