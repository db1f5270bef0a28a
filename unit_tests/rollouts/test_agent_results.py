"""What an agent's process writes, and how it ends: each as the numbers or the sentence that a sample gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from configs.agent_schema import AgentConfig
from rollouts.agents.processes import AgentProcesses
from rollouts.agents.results import (
    AgentResult,
    Message,
    describe_exit,
    hide_keys,
    read_fields,
    read_message,
    read_result,
    read_so_far,
)
from rollouts.agents.task import Task
from rollouts.registry import resolve_agent

EXPECTED = ' to file descriptor 3, where one line such as {"solved": 1.0} is expected'
OF_OTHERS = ("3", "x", "[1]", '"parts"', "{}", "[" * 5000)
NO_NUMBERS = "the agent must return a dict of named numbers, it returned "


def written(*lines: Any) -> bytes:
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()


@pytest.mark.parametrize(
    ("found", "result"),
    [
        ({"parts": {"solved": 1}}, AgentResult(parts={"solved": 1.0})),
        ({"failure": "no"}, AgentResult(failure="no")),
        ({"failure": 3, "parts": {"solved": 1.0}}, AgentResult(failure="3")),
        ({"failure": "", "parts": {"solved": 0.5}}, AgentResult(parts={"solved": 0.5})),
        ({"failure": None}, AgentResult(failure=f"{NO_NUMBERS}None")),
        ({"parts": [1]}, AgentResult(failure=f"{NO_NUMBERS}[1]")),
    ],
)
def test_fields_of_a_message_are_numbers_or_a_failure(found, result):
    assert read_fields(found) == result
    assert read_message(json.dumps({"id": 7, **found}).encode()) == Message(id=7, result=result)


def test_a_message_names_the_episode_and_what_it_tells():
    assert read_message(b'{"id": 0, "so_far": {"a": 1}}') == Message(id=0, so_far={"a": 1.0})
    wrong = read_message(b'{"id": 1, "so_far": {"a": "x"}, "parts": {"a": 1}}')
    assert wrong.so_far is None and wrong.result.failure.startswith("the agent must return numbers up to 1e+09")
    for line in (
        "x",
        "[]",
        "{}",
        '{"id": 1}',
        '{"parts": {}}',
        '{"id": true, "parts": {}}',
        '{"id": "1", "parts": {}}',
    ):
        with pytest.raises(ValueError) as refused:
            read_message(line.encode())
        assert str(refused.value) == (
            f"the agent wrote {line!r} to file descriptor 3, where one line such as "
            '{"id": 7, "parts": {"solved": 1.0}} or {"id": 7, "failure": "why"} is expected'
        )


def test_the_last_numbers_of_a_killed_process_are_kept():
    lines = [{"a": 1.0}, {"a": 2.0}]
    assert read_so_far(written(*lines), is_file=False) == {"a": 2.0}
    assert read_so_far(written(*lines) + b'{"a": 3.0}', is_file=False) == {"a": 2.0}, "a line may have been cut"
    assert read_so_far(written(*lines, "oh no"), is_file=False) == {"a": 2.0}
    assert read_so_far(b"", is_file=False) == read_so_far(b'{"a": 3.0}', is_file=False) == {}
    of_file = [{"so_far": {"a": 1.0}}, {"so_far": {"a": 2.0}}, {"other": 3}]
    assert read_so_far(written(*of_file), is_file=True) == {"a": 2.0}
    assert read_so_far(written({"other": 3}), is_file=True) == {}
    assert read_so_far(written(*of_file, {"so_far": "x"}, *OF_OTHERS), is_file=True) == {"a": 2.0}


def test_the_last_line_of_a_process_that_ended_well_is_the_result():
    assert read_result(written({"a": 1.0}, {"a": 2}), is_file=False) == AgentResult(parts={"a": 2.0})
    assert read_result(b"", is_file=False) == AgentResult(failure=f"the agent wrote nothing{EXPECTED}")
    assert read_result(b"oh no\n", is_file=False) == AgentResult(failure=f"the agent wrote 'oh no'{EXPECTED}")
    assert read_result(b"3\n", is_file=False) == AgentResult(failure=f"{NO_NUMBERS}3")
    ended = AgentResult(failure="the agent ended its process before run() had returned")
    assert read_result(b"", is_file=True) == read_result(written({"so_far": {"a": 1.0}}), is_file=True) == ended
    lines = [{"so_far": {}}, {"parts": {"a": 1.0}, "failure": ""}]
    assert read_result(written(*lines), is_file=True) == AgentResult(parts={"a": 1.0})
    assert read_result(written({"parts": {}, "failure": "why"}), is_file=True) == AgentResult(failure="why")


@pytest.mark.parametrize("line", OF_OTHERS, ids=lambda line: line[:5])
def test_a_line_that_the_agents_own_code_writes_is_no_result(line):
    why = f"the agent wrote {line!r:.80} to file descriptor 3, which is for the result of run()"
    assert read_result(written(line), is_file=True) == AgentResult(failure=why)


def test_the_end_of_a_process_is_described_with_its_last_line():
    for status, log, said in (
        (0, b"one\ntwo \n", "the agent's process exited with code 0: two"),
        (3, b" \n", "the agent's process exited with code 3"),
        (-9, b"\xff", "the agent's process was killed by SIGKILL: \ufffd"),
        (-15, b"", "the agent's process was killed by SIGTERM"),
        (None, b"x", "the agent, or a process that it has started, killed the process that watches over the episode"),
    ):
        assert describe_exit(status, bytearray(log)) == said


def test_keys_of_episodes_are_hidden_in_a_text():
    key = f"feynrl-{'aB_-' * 10}xyz"
    assert hide_keys(f"<{key}> and {key}!") == "<***> and ***!"
    assert hide_keys(key[:-1]) == key[:-1]


def test_a_long_line_is_quoted_in_part_and_bad_bytes_are_shown():
    line = "x" * 200
    quoted = repr(line)[:80]
    with pytest.raises(ValueError) as refused:
        read_message(line.encode())
    assert str(refused.value).startswith(f"the agent wrote {quoted} to file descriptor 3, ")
    assert read_result(written(line), is_file=False) == AgentResult(failure=f"the agent wrote {quoted}{EXPECTED}")
    why = f"the agent wrote {quoted} to file descriptor 3, which is for the result of run()"
    assert read_result(written(line), is_file=True) == AgentResult(failure=why)
    with pytest.raises(ValueError, match=r"^the agent wrote '\ufffd' to file descriptor 3"):
        read_message(b"\xff")
    broken = b"\xff\n"
    assert read_result(broken, is_file=False) == AgentResult(failure=f"the agent wrote '\ufffd'{EXPECTED}")
    assert read_result(broken + written({"a": 1.0}), is_file=False) == AgentResult(parts={"a": 1.0})
    assert read_so_far(written({"a": 1.0}) + broken, is_file=False) == {"a": 1.0}


def test_numbers_so_far_that_are_none_are_a_failed_result():
    found = read_message(b'{"id": 3, "so_far": []}')
    assert found == Message(id=3, so_far=None, result=AgentResult(failure=f"{NO_NUMBERS}[]"))
    assert read_message(b'{"id": 3, "so_far": {}}') == Message(id=3, so_far={}), "an empty dict is numbers"
    assert read_message(b'{"id": 3, "so_far": {"a": 2}}').result == AgentResult()


def test_a_result_without_anything_is_that_of_an_episode_that_ended():
    plain = AgentResult()
    assert (plain.parts, plain.failure, plain.timed_out, plain.was_slow) == ({}, "", False, False)
    assert (plain.waited_s, plain.was_lost) == (0.0, False)
    assert AgentResult().parts is not plain.parts


@pytest.mark.parametrize(
    ("script", "timeout_s", "result"),
    [
        ("head -c 1048577 /dev/zero >&3", 60.0, AgentResult(failure="the agent returned more than 1048576 bytes")),
        ("echo '{\"solved\": 1}' >&3", 60.0, AgentResult(parts={"solved": 1.0})),
        ("sleep 60", 0.0, AgentResult(timed_out=True)),  # before the process has started
    ],
)
def test_a_process_that_writes_too_much_or_begins_too_late_has_no_numbers(script, timeout_s, result):
    plan = resolve_agent(AgentConfig(command=["sh", "-c", script]))
    task = Task(base_url="http://127.0.0.1:9/s/7/v1", api_key="k", model="policy", messages=[])

    async def run() -> AgentResult:
        agents = AgentProcesses(plan)
        found = await agents.run(task, timeout_s=timeout_s, log=bytearray())
        await agents.close()
        return found

    assert asyncio.run(run()) == result
