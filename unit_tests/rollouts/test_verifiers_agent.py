"""The command for environments of verifiers, over a stand-in for that package: rows, episodes and lines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import UserError
from data_prep import verifiers as prep
from data_prep.rows import Row
from rollouts.agents import task
from rollouts.agents.verifiers_agent import LIMITS, LONGEST_FAILURE, RESULT_FD, SETTINGS, load_tasks, play, print_rows
from rollouts.agents.wire import LIMIT_CODES

GIVEN = {"api_key": "k", "base_url": "http://h/v1", "model": "policy", "max_turns": 5, "extra": {"idx": "2"}}
TASKS = ["zero", "one", "two", "three"]


class Verifiers:
    """Takes the place of verifiers.v1: an agent whose episodes have the same end, a trace or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: Any = None, tasks: Any = ()) -> None:
        self.end, self.tasks = end, tasks
        self.log: list[Any] = []
        loaders = SimpleNamespace(load_taskset=self.load_taskset)
        for name, module in (("verifiers.v1", self), ("verifiers.v1.utils.loaders", loaders)):
            monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]

    def TasksetConfig(self, *, id: str) -> str:
        return f"taskset {id}"

    def load_taskset(self, config: str) -> Any:
        print("noise of the taskset")
        self.log.append(config)
        return iter(self.tasks)

    def AgentConfig(self, **given: Any) -> dict[str, Any]:
        self.log.append(given)
        return given

    def make_agent(self, config: dict[str, Any]) -> Any:
        return self

    async def __aenter__(self) -> None:
        self.log.append("opened")

    async def __aexit__(self, *error: object) -> None:
        self.log.append("closed")

    async def run(self, task: Any) -> Any:
        self.log.append((task, os.environ["MY_KEY"]))
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


def make_trace(message: str | None = None, *, turns: int = 3, calls: tuple[str | None, ...] = ()) -> Any:
    errors = [None if call is None else SimpleNamespace(message=call) for call in calls]
    last = None if message is None else SimpleNamespace(type="BoxError", message=message)
    return SimpleNamespace(
        reward=0.25, num_turns=turns, last_error=last, calls=[SimpleNamespace(error=error) for error in errors]
    )


WON = {"parts": {"return": 0.25, "turns": 3.0}}


@pytest.mark.parametrize(
    ("trace", "found"),
    [
        (make_trace(), WON),
        (make_trace("boom"), {"failure": "BoxError: boom"}),
        (make_trace("x" * 600), {"failure": "BoxError: " + "x" * (LONGEST_FAILURE - len("BoxError: "))}),
        # the policy did that, and keeps its return
        (make_trace("400: max_turns_exceeded"), WON),
        (make_trace("boom", calls=(None, "context_length_exceeded")), WON),
        (make_trace("boom", calls=("context_length_exceeded", None)), {"failure": "BoxError: boom"}),
        (make_trace("max_turns_exceeded", turns=0), {"failure": "BoxError: max_turns_exceeded"}),
    ],
    ids=["won", "failed", "long", "turns", "tokens", "earlier", "no turn"],
)
def test_an_episode_is_its_return_or_the_environments_failure(monkeypatch, trace, found):
    package = Verifiers(monkeypatch, trace)
    settings = {"harness": {"id": "bash"}, "runtime": {"type": "x"}}
    assert asyncio.run(play(GIVEN, TASKS, settings, "MY_KEY")) == found
    client = {"type": "eval", "base_url": "http://h/v1", "api_key_var": "MY_KEY"}
    config = {"model": "policy", "client": client, "max_turns": 5, **settings}
    assert package.log == [config, "opened", ("two", "k"), "closed"]
    assert "MY_KEY" not in os.environ


def test_a_key_leaves_the_environment_also_after_an_error(monkeypatch):
    package = Verifiers(monkeypatch, KeyError("map"))
    with pytest.raises(KeyError, match="map"):
        asyncio.run(play(GIVEN, TASKS, {}, "MY_KEY"))
    assert package.log[-1] == "closed" and "MY_KEY" not in os.environ


def make_row(prompt: Any, system: str | None = None) -> Any:
    return SimpleNamespace(data=SimpleNamespace(prompt=prompt, system_prompt=system))


def test_rows_are_the_prompts_of_a_taskset_and_nothing_that_it_prints(monkeypatch, capsys):
    said = [SimpleNamespace(role="user", content=7), SimpleNamespace(role="assistant", content="Eight.")]
    Verifiers(monkeypatch, tasks=[make_row("1+1="), make_row(None, "Be brief."), make_row(said, "Be long.")])
    print_rows("sums")
    shown = capsys.readouterr()
    assert [json.loads(line) for line in shown.out.splitlines()] == [
        {"idx": 0, "messages": [{"role": "user", "content": "1+1="}]},
        {"idx": 1, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}]},
        {
            "idx": 2,
            "messages": [
                {"role": "system", "content": "Be long."},
                {"role": "user", "content": "7"},
                {"role": "assistant", "content": "Eight."},
            ],
        },
    ]
    assert shown.err == "noise of the taskset\n"


def test_tasks_are_loaded_by_the_name_of_their_taskset(monkeypatch):
    package = Verifiers(monkeypatch, tasks=(1, 2))
    assert load_tasks("sums") == [1, 2] and package.log == ["taskset sums"]


def test_what_the_command_cannot_import_is_what_the_product_has():
    assert tuple(LIMIT_CODES.values()) == LIMITS and task.RESULT_FD == RESULT_FD
    assert SETTINGS == {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


PACKAGE = """
import asyncio, json, os
from types import SimpleNamespace

def TasksetConfig(id):
    return id

def AgentConfig(**given):
    return given

class make_agent:
    def __init__(self, config):
        self.config = config

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def run(self, task):
        if task.word == "hang":
            await asyncio.sleep(600)
        if task.word == "raise":
            raise KeyError("map")
        if task.word == "raise much":
            raise ValueError("x" * 600)
        if task.word == "win":
            return SimpleNamespace(reward=2, num_turns=3, last_error=None, calls=[])
        key = self.config["client"]["api_key_var"]
        told = [os.environ[key], os.environ["PATH"].split(os.pathsep)[0], key]
        told += [self.config["harness"], self.config["runtime"]]
        error = SimpleNamespace(type="Told", message=json.dumps(told))
        return SimpleNamespace(reward=2, num_turns=3, last_error=error, calls=[])
"""
LOADERS = """
from types import SimpleNamespace

def load_taskset(name):
    for i, word in enumerate(("win", "hang", "raise", "raise much", "tell")):
        yield SimpleNamespace(word=word, data=SimpleNamespace(prompt=f"{name} {i}", system_prompt=None))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> None:
    """A stand-in for verifiers on the path of other interpreters."""
    folder = tmp_path / "verifiers/v1/utils"
    folder.mkdir(parents=True)
    for file, text in (("../../__init__", ""), ("../__init__", PACKAGE), ("__init__", ""), ("loaders", LOADERS)):
        (folder / f"{file}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("package")
def test_tasks_of_an_environment_become_rows():
    rows = prep.make("sums", sys.executable)
    assert rows == [
        Row(
            id=f"sums/{i}",
            messages=[{"role": "user", "content": f"sums {i}"}],
            answer="",
            extra=json.dumps({"idx": i}),
        )
        for i in range(5)
    ]


def test_a_python_that_cannot_list_the_tasks_is_told_by_its_last_line(tmp_path: Path):
    tell = "sed -n 's/^#://p' \"$0\" >&2; exit 3"
    for said, sentence in (
        ("#:Traceback\n#:ImportError: no sums\n", "ImportError: no sums"),
        (f"#:{'x' * 301}\n", "x" * 300),
        ("", "it says nothing"),
    ):
        (python := tmp_path / "python").write_text(f"#!/bin/sh\n{tell}\n{said}")
        python.chmod(0o755)
        with pytest.raises(UserError) as refused:
            prep.make("sums", str(python))
        assert str(refused.value) == f"--env sums: {python} cannot list its tasks: {sentence}"
    with pytest.raises(UserError) as refused:
        prep.make("sums", str(tmp_path / "gone"))
    assert str(refused.value) == f"--python {tmp_path / 'gone'}: No such file or directory"


def test_the_script_writes_the_tasks_that_the_named_python_lists(tmp_path: Path):
    (python := tmp_path / "python").write_text(
        "#!/bin/sh\necho noise\n"
        """echo '{"idx": 4, "messages": [{"role": "user", "content": "'"$2 $3"'"}]}'\n"""
    )
    python.chmod(0o755)
    prep.main(["--env", "sums", "--python", str(python), "--out", str(out := tmp_path / "mine.jsonl")])
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert row == {
        "id": "sums/4",
        "messages": [{"role": "user", "content": "rows sums"}],
        "answer": "",
        "extra": '{"idx": 4}',
    }


@pytest.mark.usefixtures("package")
def test_episodes_are_played_at_once_until_the_input_ends():
    # results are those of descriptor 3, and what an environment prints is none
    command = ["sh", "-c", 'exec "$@" 3>&1 >&2', "sh", sys.executable, str(prep.AGENT), "play", "sums"]
    settings = json.dumps({"harness": {"id": "bash"}})
    with subprocess.Popen([*command, settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None

        def tell(*messages: dict[str, Any]) -> None:
            assert server.stdin is not None
            server.stdin.write(b"".join(json.dumps(one).encode() + b"\n" for one in messages))
            server.stdin.flush()

        def ask(number: int, idx: int) -> dict[str, Any]:
            return {"id": number, "task": GIVEN | {"extra": {"idx": idx}}}

        def read() -> dict[str, Any]:
            assert server.stdout is not None
            return json.loads(server.stdout.readline())

        tell(ask(30, 1), ask(40, 0))
        assert read() == {"id": 40, "parts": {"return": 2.0, "turns": 3.0}}
        tell({"cancel": 99}, {"cancel": 40}, {"cancel": 30})
        cancelled = "the episode was cancelled"
        assert read() == {"id": 30, "failure": cancelled}
        tell(ask(50, 2))
        assert read() == {"id": 50, "failure": "KeyError: 'map'"}
        tell(ask(60, 3))
        assert read() == {"id": 60, "failure": f"ValueError: {'x' * 600}"[:LONGEST_FAILURE]}
        tell(ask(70, 1), {"cancel": 70})
        assert read() == {"id": 70, "failure": cancelled}
        tell(ask(80, 4))
        told = ["k", os.path.dirname(sys.executable), "FEYNRL_KEY_80", {"id": "bash"}, {"type": "subprocess"}]
        assert read() == {"id": 80, "failure": f"Told: {json.dumps(told)}"}
        tell(ask(90, 1))
        server.stdin.close()
        assert json.loads(server.stdout.read()) == {"id": 90, "failure": cancelled}
    assert server.returncode == 0
