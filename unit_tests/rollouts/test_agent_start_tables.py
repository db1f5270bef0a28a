"""Start of agents' episodes to the letter: options of a host, requests to it, and what a process is given."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from core.errors import UserError
from core.loading import FileSpec
from rollouts.agents import host as hosting
from rollouts.agents.bounded_json import Unreadable, read_json
from rollouts.agents.host import check_options, read_options, read_start
from rollouts.agents.launcher import Launcher, choose_serving, find_run, load_agent
from rollouts.agents.launching import LauncherClient, check_agent, check_ready
from rollouts.agents.processes import name_endpoint, write_memory, write_task
from rollouts.agents.results import AgentResult
from rollouts.agents.run_file import describe_error, make_task, run_agent
from rollouts.agents.served import ServedAgent, share_endpoint
from rollouts.agents.task import HOST_KEY, AgentPlan, Task
from rollouts.agents.verifiers_agent import is_policy_limit
from unit_tests.helpers.sentences import tell

GIVEN = {"base_url": "http://h:1/s/7/v1", "api_key": "k", "model": "policy", "messages": []}
START = {"id": "e", "task": GIVEN, "timeout_s": 2}
OPEN = "--listen 10.0.0.2"


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ("--file f", "", None),
        ("--port 0 --most 1 -- program --with it", "", None),
        ("--file f --port 65535 --listen ::1", "k", None),
        (f"--file f {OPEN} --insecure", "k", None),
        ("--file f --listen there", "", "--listen there must be an IP address, such as 127.0.0.1"),
        ("--file f --port=-1", "", "--port -1 must be from 0 to 65535; 0 is any free port"),
        ("--file f --port 65536", "", "--port 65536 must be from 0 to 65535; 0 is any free port"),
        ("--file f --most 0", "", "--most 0 must be at least 1"),
        (
            f"--file f {OPEN} --insecure",
            "",
            f"{OPEN} lets anybody start episodes: set FEYNRL_AGENT_KEY here and for the run",
        ),
        (
            f"--file f {OPEN}",
            "k",
            f"{OPEN} is plain HTTP on an address that other machines reach, where keys and texts can be read: listen "
            "on 127.0.0.1 behind a proxy with TLS, or give --insecure",
        ),
        (
            "--file f --insecure",
            "k",
            "--insecure has no effect, because only this machine reaches 127.0.0.1: leave it out",
        ),
        ("", "", "give --file or a command, and not both"),
        ("--file f -- program", "", "give --file or a command, and not both"),
    ],
)
def test_options_that_open_a_machine_or_cannot_be_used_are_refused(given, key, said):
    options = read_options(given.split())
    if said is None:
        return check_options(options, key)
    with pytest.raises(UserError) as refused:
        check_options(options, key)
    assert str(refused.value) == said


def test_a_request_for_an_episode_is_read_or_refused():
    assert read_start(START) == ("e", Task(**GIVEN), 2.0)
    texts, seconds = "id, base_url and api_key must be texts", "timeout_s must be a number of seconds above 0"
    for changes, said in (
        ({"id": 3}, texts),
        ({"task": GIVEN | {"base_url": 3}}, texts),
        ({"task": GIVEN | {"api_key": None}}, texts),
        *(({"timeout_s": value}, seconds) for value in (0, -1, float("inf"), float("nan"), "2", None)),
    ):
        with pytest.raises((TypeError, ValueError)) as refused:
            read_start(START | changes)
        assert str(refused.value) == said, changes


def test_a_process_is_given_its_task_and_one_endpoint(monkeypatch):
    task = Task(**GIVEN, id="7", extra={"x": 1})
    handle = write_memory(write_task(task) + "é")
    with open(handle, encoding="utf-8") as file:
        text = file.read()
    assert json.loads(text.removesuffix("é")) == task.as_json() and "report" not in text
    with pytest.raises(UserError, match=r"^row 7: a column cannot be given to an agent as JSON \(.*\): leave the col"):
        write_task(Task(**GIVEN, id="7", extra={"x": b""}))
    for upper, lower, before in ((None, None, ""), ("a", "b", "a,"), ("", "b", "b,")):
        for name, value in (("NO_PROXY", upper), ("no_proxy", lower)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        direct = f"{before}127.0.0.1,localhost,h"
        given = name_endpoint(task)
        assert given == {
            **{"OPENAI_BASE_URL": "http://h:1/s/7/v1", "OPENAI_API_BASE": "http://h:1/s/7/v1", "OPENAI_API_KEY": "k"},
            **{"ANTHROPIC_BASE_URL": "http://h:1/s/7", "ANTHROPIC_API_KEY": "k", "ANTHROPIC_AUTH_TOKEN": "k"},
            **{"NO_PROXY": direct, "no_proxy": direct},
        }
    shared = share_endpoint(given | {"MORE": "1"})
    assert shared["OPENAI_BASE_URL"] == "http://h:1/s/use-base_url-of-the-task/v1"
    assert (shared["MORE"], shared["NO_PROXY"]) == ("1", direct)
    assert shared["OPENAI_API_KEY"].startswith("use-api_key-of-the-task-")
    assert shared["OPENAI_API_KEY"] != share_endpoint(given)["OPENAI_API_KEY"], "the key marks the processes"


def test_a_launcher_says_whether_it_serves_or_why_not():
    plan = AgentPlan(command=("program", "x"))
    assert check_ready(b'{"serves": true}', plan) is True and check_ready(b'{"serves": false}', plan) is False
    for given, said in (
        (b"", "rollout.agent.file: program ended the process that imported it"),
        (b'{"refusal": "no run()", "serves": true}', "no run()"),
    ):
        with pytest.raises(UserError) as refused:
            check_ready(given, plan)
        assert str(refused.value) == said
    assert AgentPlan(address=("http://a", "http://b")).name == "http://a"


def test_errors_of_an_agent_name_its_line():
    assert describe_error(SystemExit("x"), "f") == "the agent ended its process by sys.exit('x')"
    assert describe_error(ValueError("a\n b"), "f") == "ValueError: a b"
    group = ExceptionGroup("g", [ExceptionGroup("h", [KeyError("k")]), ValueError("v")])
    assert describe_error(group, "f") == "KeyError: 'k'"
    source = "def run():\n    import json\n    json.loads('x')\n"
    names: dict[str, Any] = {}
    exec(compile(source, "/there/mine.py", "exec"), names)
    with pytest.raises(ValueError) as raised:
        names["run"]()
    said = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert describe_error(raised.value, "/there/mine.py") == f"{said} (mine.py, line 3)"
    assert describe_error(raised.value, "other").startswith(f"{said} (decoder.py, line ")


def test_numbers_so_far_are_written_or_refused():
    lines: list[dict[str, Any]] = []
    task = make_task(GIVEN, lines.append)
    task.report({"a": 1})
    with pytest.raises(ValueError, match=r"^task\.report\(\) must return numbers"):
        task.report({"a": "x"})  # type: ignore[dict-item]
    assert lines == [{"so_far": {"a": 1.0}}]


def test_json_is_bounded_in_depth_and_digits():
    deep, long = "[" * 64 + "]" * 64, "9" * 400
    assert json.dumps(read_json(deep)) == deep and read_json(long) == int(long) and read_json("1.5") == 1.5
    for text, said in (
        (f"[{deep}]", "has more than 64 lists and objects in each other"),
        (f"{long}9", "has a number of more than 400 digits"),
        ('{"a": ["\\ud800"]}', "has a text that holds half of a character"),
        ('{"\\udfff": 1}', "has a text that holds half of a character"),
        ("{", "must be JSON"),
    ):
        with pytest.raises(Unreadable) as refused:
            read_json(text)
        assert str(refused.value) == said
    assert read_json('"\\ud83d\\ude00\\ue000"') == "\U0001f600\ue000"


def test_the_policys_limits_are_no_failure_of_the_environment():
    limit, other = "max_turns_exceeded", "boom"
    for turns, last, calls, want in (
        (1, limit, [], True),
        (0, limit, [], False),
        (1, other, [], False),
        (1, other, [None, "context_length_exceeded"], True),
        (1, other, [limit, None], False),
    ):
        errors = [None if call is None else SimpleNamespace(message=call) for call in calls]
        trace = SimpleNamespace(
            num_turns=turns,
            last_error=SimpleNamespace(message=last),
            calls=[SimpleNamespace(error=error) for error in errors],
        )
        assert is_policy_limit(trace) is want, (turns, last, calls)


def test_a_task_is_written_with_all_that_an_agent_may_see():
    task = Task(**GIVEN)
    assert (task.tools, task.id, task.source, task.extra, task.max_turns, task.seed) == ([], "", "", {}, 1, 0)
    task.report({"a": 1.0})  # nobody plays it, and nobody hears
    tool: Any = {"type": "function", "function": {"name": "f"}}
    full = {
        **{"base_url": "http://h:1/v1", "api_key": "k", "model": "policy", "tools": [tool], "id": "7"},
        **{"source": "sums", "extra": {"x": [1]}, "max_turns": 5, "seed": 3},
        "messages": [{"role": "user", "content": "?"}, {"role": "tool", "content": "3", "tool_call_id": "c"}],
    }
    reported: list[Any] = []
    given = Task(**full, report=reported.append)
    assert given.as_json() == full and given == Task(**full), "what it reports to is no part of it"
    assert given.as_json()["messages"][0] is not given.messages[0] and "report" not in repr(given)


def make_plan(**changes: Any) -> AgentPlan:
    spec = FileSpec(module="a", path="/there/a.py", sha256="0", in_package=False)
    return AgentPlan(**{"file": spec, "command": ("b", "c"), "address": ("http://d", "http://e")} | changes)


def test_an_agent_is_called_by_its_file_program_or_first_host():
    assert make_plan().name == "/there/a.py"
    assert make_plan(file=None).name == "b"
    assert make_plan(file=None, command=()).name == "http://d"
    empty = AgentPlan()
    assert (empty.folder, empty.serve, empty.timeout_s, empty.on_timeout, empty.key) == (".", None, None, None, "")


def plain(task: Task) -> None: ...


async def later(task: Task) -> None: ...


@pytest.mark.parametrize(
    ("serve", "run", "serves"),
    [
        (None, None, False),
        (None, plain, False),
        (None, later, True),
        (False, None, False),
        (False, plain, False),
        (False, later, False),
        (True, None, True),
        (True, later, True),
    ],
)
def test_one_process_plays_all_episodes_where_it_is_asked_or_run_is_async(serve, run, serves):
    assert choose_serving({"serve": serve, "file": None}, run) is serves


def test_a_plain_run_is_not_served_and_a_file_without_one_is_refused():
    assert tell(lambda: choose_serving({"serve": True, "file": {"path": "/there/a.py"}}, plain)) == (
        "rollout.agent.serve: /there/a.py must define run(task) by `async def`, since many episodes share a process: "
        "do so, or leave serve out"
    )
    module = ModuleType("a")
    for run in (None, 3, "run"):
        vars(module)["run"] = run
        said = "rollout.agent.file: a.py must define a function run(task) that returns named numbers"
        assert tell(lambda: find_run(module, "a.py")) == said
    vars(module)["run"] = plain
    assert find_run(module, "a.py") is plain and load_agent(None) is None


@pytest.mark.parametrize(
    ("run", "serve", "has_threads", "expected"),
    [
        (plain, False, False, True),
        (None, False, False, False),
        (later, True, False, False),
        (plain, False, True, False),
    ],
)
def test_lazy_imports_are_for_forks_that_play_one_episode(run, serve, has_threads, expected):
    own, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, worker:
        launcher = Launcher(worker, {"serve": serve}, run, has_threads=has_threads)
        assert (launcher.lazy is not None) == expected and launcher.guards == {}


def test_a_served_agent_whose_process_cannot_be_started_fails_its_episode():
    async def start(open_given: Any, environment: Any, make_output: Any) -> None:
        os.close(open_given())

    launcher: Any = SimpleNamespace(plan=make_plan(), start=start)

    async def run() -> list[AgentResult]:
        agent = ServedAgent(launcher)
        found = [await agent.run("{}", name_endpoint(Task(**GIVEN)), timeout_s=20.0, log=bytearray()) for _ in range(2)]
        await agent.close()
        return found

    why = "the process that starts the agents was killed 3 times in a row"
    assert asyncio.run(run()) == [AgentResult(failure=why)] * 2


@pytest.mark.parametrize(
    ("options", "risk"),
    [
        ([], ""),
        (["--listen", "0.0.0.0", "--insecure"], ", in plain HTTP: keys and texts can be read on the way"),
    ],
)
def test_a_host_says_where_it_serves_and_what_can_be_read(options, risk, monkeypatch, capsys):
    monkeypatch.setenv(HOST_KEY, "secret")
    monkeypatch.setattr(hosting, "say", lambda text: (print(text), os.kill(os.getpid(), signal.SIGTERM)))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert hosting.main([*options, "--port", "0", "--", "cat"]) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    listen = options[1] if options else "127.0.0.1"
    assert re.fullmatch(rf"episodes of cat at http://{listen}:\d+{risk}\n", capsys.readouterr().out)


def test_a_file_that_is_not_imported_in_time_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("rollouts.agents.launching.AGENT_START_TIMEOUT_S", 0.001)  # Python takes longer to start
    (tmp_path / "mine.py").write_text("def run(task): ...\n")
    path = str(tmp_path / "mine.py")
    plan = AgentPlan(file=FileSpec(module="mine", path=path, sha256="0", in_package=False))
    said = f"rollout.agent.file: {path} takes too long to import"
    assert tell(lambda: check_agent(plan)) == said

    async def open_once() -> None:
        launcher = LauncherClient(plan)
        try:
            await launcher.serves()
        finally:
            launcher.kill()

    assert tell(lambda: asyncio.run(open_once())) == said


def test_a_host_does_not_start_on_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            said = tell(lambda: hosting.main(["--port", str(port), "--", "cat"]))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert re.fullmatch(rf"--listen 127\.0\.0\.1 --port {port}: .*address already in use.*; choose another", said)


def test_a_function_of_an_agent_brings_numbers_or_one_sentence():
    source = (
        "def scores(task): return {'a': 1}\n"
        "async def later(task): return {'b': task.model == 'policy'}\n"
        "def fails(task):\n    raise ValueError('x\\ny')\n"
        "async def fails_later(task):\n    raise OSError('gone')\n"
        "def leaves(task):\n    raise SystemExit(3)\n"
    )
    names: dict[str, Any] = {}
    exec(compile(source, "/there/mine.py", "exec"), names)
    found = {name: run_agent(run, GIVEN, "/there/mine.py", print) for name, run in names.items() if name[0] != "_"}
    assert {name: one["parts"] for name, one in found.items() if one["parts"]} == {
        "scores": {"a": 1.0},
        "later": {"b": 1.0},
    }
    assert {name: one["failure"] for name, one in found.items() if one["failure"]} == {
        "fails": "ValueError: x y (mine.py, line 4)",
        "fails_later": "OSError: gone (mine.py, line 6)",
        "leaves": "the agent ended its process by sys.exit(3)",
    }
