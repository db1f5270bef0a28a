"""Results of agents' episodes, read from the output of their processes."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from typing import Any

from core.text.secrets import HIDDEN
from rewards.calls import call_user_code
from rollouts.agents.bounded_json import Unreadable, read_json
from rollouts.agents.task import RESULT_FD

KEY = re.compile(r"feynrl-[\w-]{43}")
"""API key of an episode, made by rollouts/agents/session.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """Result of an agent's episode: named numbers or a failure. At the deadline both: the numbers so far."""

    parts: dict[str, float] = field(default_factory=dict[str, float])
    failure: str = ""
    timed_out: bool = False
    """True if the episode reached the deadline."""
    was_slow: bool = False
    """True if the policy was idle for more than half of that time."""
    waited_s: float = 0.0
    """Seconds of that time before a machine had a place for it."""
    was_lost: bool = False
    """True if the machine that played the episode is gone."""


FIELDS = ("so_far", "parts", "failure")
"""Keys of a message, one of which it must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Line of a process that plays many episodes."""

    id: int
    so_far: dict[str, float] | None = None
    """Numbers so far; None for the result of the episode."""
    result: AgentResult = AgentResult()


def read_message(line: bytes) -> Message:
    """Parse a line of a process that plays many episodes. Raises ValueError."""
    try:
        found = read_json(line)
    except Unreadable:
        found = None
    if not isinstance(found, dict) or type(found.get("id")) is not int or not found.keys() & {*FIELDS}:
        raise ValueError(
            f"the agent wrote {line.decode(errors='replace')!r:.80} to file descriptor {RESULT_FD}, where one line "
            'such as {"id": 7, "parts": {"solved": 1.0}} or {"id": 7, "failure": "why"} is expected'
        )
    if "so_far" in found:
        parts, wrong = call_user_code(lambda: found["so_far"], "the agent")
        # numbers that cannot be read are a result, and a failed one
        return Message(id=found["id"], so_far=None if wrong else parts, result=AgentResult(failure=wrong))
    return Message(id=found["id"], result=read_fields(found))


def read_fields(found: dict[str, Any]) -> AgentResult:
    """Return the result in a message's `parts` or `failure`."""
    if found.get("failure"):
        return AgentResult(failure=str(found["failure"]))
    parts, failure = call_user_code(lambda: found.get("parts"), "the agent")
    return AgentResult(parts=parts, failure=failure)


def read_so_far(written: bytes, *, is_file: bool) -> dict[str, float]:
    """Return the last numbers that the process of one episode wrote before it was killed."""
    lines = written.decode(errors="replace").split("\n")[:-1]  # a line without an end may have been cut
    for line in reversed(lines):
        found = read_fields({"parts": _read_object(line).get("so_far")}) if is_file else read_rewards(line)
        if found.parts:
            return found.parts
    return {}


def read_result(written: bytes, *, is_file: bool) -> AgentResult:
    """Return the result of a process that played one episode and ended well: the last line."""
    lines = written.decode(errors="replace").splitlines()
    if not is_file:
        return read_rewards(lines[-1] if lines else "")
    found = _read_object(lines[-1]) if lines else {}
    if "parts" in found:
        return read_fields(found)
    what = "ended its process before run() had returned"
    # its code may write there too
    if lines and "so_far" not in found:
        what = f"wrote {lines[-1]!r:.80} to file descriptor {RESULT_FD}, which is for the result of run()"
    return AgentResult(failure=f"the agent {what}")


def _read_object(line: str) -> dict[str, Any]:
    """Parse a JSON object; {} for any other line."""
    try:
        found = read_json(line)
    except Unreadable:
        return {}
    return found if isinstance(found, dict) else {}


def read_rewards(line: str) -> AgentResult:
    """Parse the numbers written by a command.

    >>> read_rewards('{"solved": 1}').parts
    {'solved': 1.0}
    """
    try:
        found = read_json(line)
    except Unreadable:
        what = f"the agent wrote {line!r:.80} to file descriptor {RESULT_FD}" if line else "the agent wrote nothing"
        where = "" if line else f" to file descriptor {RESULT_FD}"
        return AgentResult(failure=what + where + ', where one line such as {"solved": 1.0} is expected')
    parts, failure = call_user_code(lambda: found, "the agent")
    return AgentResult(parts=parts, failure=failure)


def describe_exit(status: int | None, log: bytearray) -> str:
    """Describe the end of an agent's process. status: None if the guard was killed.

    >>> describe_exit(0, bytearray(b"one\\ntwo \\n")), describe_exit(-9, bytearray())
    ("the agent's process exited with code 0: two", "the agent's process was killed by SIGKILL")
    """
    if status is None:
        return "the agent, or a process that it has started, killed the process that watches over the episode"
    how = f"exited with code {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
    said = log.decode(errors="replace").strip().splitlines()
    return f"the agent's process {how}" + (f": {said[-1].strip()}" if said else "")


def hide_keys(text: str) -> str:
    """Return a text without the API keys of episodes."""
    return KEY.sub(HIDDEN, text)
