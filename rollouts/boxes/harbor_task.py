"""Tasks in Harbor's format: an instruction, a box, and tests that write a reward.

    TASK/instruction.md, task.toml, tests/test.sh, and for people solution/, environment/

Source: https://github.com/laude-institute/harbor, src/harbor/models/task/config.py and verifier/verifier.py of 0.26.
Tasks that ask for more than a box (GPUs, services beside it, several steps) are refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import UserError, quote
from core.text.json_text import decode_json
from core.text.text_files import read_text
from rollouts.boxes.base import check_variables, is_text

LARGEST_REWARD_FILE = 2**16
ROUNDING = 0.01
"""Largest difference of reward.json and reward.txt."""
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
"""Form of a value that is a variable of this machine, with an optional default."""
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG])i?B?", re.IGNORECASE)
UNITS = {"K": 2**-10, "M": 1, "G": 2**10}
"""MiB of the units of a size."""
REFUSED = ("gpus", "mcp_servers", "healthcheck", "skills_dir")
"""Keys of [environment] that ask for more than a box."""
COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


class NoReward(Exception):
    """Verifier without a readable reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """Task in Harbor's format."""

    folder: Path
    instruction: str
    image: str
    """Image of the environment. "": none is named."""
    cpus: int
    memory_mib: int
    disk_mib: int
    work_folder: str
    network: bool
    """allow_internet of [environment]."""
    environment: Mapping[str, str]
    """Variables of the box."""
    agent_s: float | None
    """Seconds for the policy. None: no limit."""
    verifier_s: float
    verifier_environment: Mapping[str, str]

    def list_tests(self) -> dict[str, bytes]:
        """Return the files of tests/ by their name."""
        return list_files(self.folder / "tests")


def read_task(folder: Path) -> HarborTask:
    """Read a task of Harbor's format: instruction.md, task.toml, tests/test.sh.

    Raises UserError for another folder, a link in it, or a task that asks for more than a box.
    """
    if not (folder / "tests" / "test.sh").is_file():
        raise UserError(f"the task {quote(folder)} has no tests/test.sh, so it is no task of Harbor's format")
    check_links(folder)
    found = _read_toml(folder / "task.toml")
    environment, agent, verifier = (_find_table(found, name, folder) for name in ("environment", "agent", "verifier"))
    asked = [f"environment.{name}" for name in REFUSED if environment.get(name)]
    asked += [name for name in COMPOSE if (folder / "environment" / name).exists()]
    asked += ["steps"] if found.get("steps") else []
    asked += ["verifier.environment_mode"] if verifier.get("environment_mode", "shared") != "shared" else []
    if asked:
        raise UserError(f"the task {quote(folder)} asks for {asked[0]}, which boxes do not give: leave the task out")
    read = _Reader(folder)
    return HarborTask(
        folder=folder,
        instruction=read_text(folder / "instruction.md", f"the task {folder}: instruction.md"),
        image=read.text(environment, "environment.docker_image"),
        cpus=math.ceil(read.number(environment, "environment.cpus", 1)),
        memory_mib=read.size(environment, "environment.memory", 2048),
        disk_mib=read.size(environment, "environment.storage", 10240),
        work_folder=read.text(environment, "environment.workdir"),
        network=environment.get("allow_internet") is True,
        environment=read.variables(environment, "environment.env"),
        agent_s=read.number(agent, "agent.timeout_sec", None),
        verifier_s=read.number(verifier, "verifier.timeout_sec", 600.0),
        verifier_environment=read.variables(verifier, "verifier.env"),
    )


def check_links(folder: Path) -> None:
    """Raise UserError for a link in tests/ that leads out of the task: the box would get a file of this machine."""
    tests = folder / "tests"
    for path in (tests, *tests.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"the task {quote(folder)} has the link {path.relative_to(folder)}, which leaves the task")


def check_network(task: HarborTask, *, allowed: bool) -> None:
    """Raise UserError if a task wants the network and does not get it."""
    if task.network and not allowed:
        raise UserError(
            f"the task {quote(task.folder)} has allow_internet = true: leave it out, or subclass Harbor with "
            "network = True (and give --network to data_prep.harbor)"
        )


def list_files(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by their name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def read_rewards(as_json: bytes | None, as_text: bytes | None) -> dict[str, float]:
    """Return the numbers in reward.json, or else in reward.txt. Raises NoReward.

    as_json, as_text: the contents of the files; None for one that is not there.

    >>> read_rewards(b'{"reward": 1, "why": "all passed"}', None), read_rewards(None, b"0.5\\n")
    ({'reward': 1.0}, {'reward': 0.5})
    """
    if as_json is None and as_text is None:
        raise NoReward("it wrote neither reward.json nor reward.txt to /logs/verifier")
    if as_json is None:
        return {"reward": _read_number(as_text or b"")}
    alone = None if as_text is None else _read_number(as_text)
    try:
        found = decode_json(as_json)
        numbers = found if isinstance(found, dict) else {"reward": found}
        # other fields are reports
        rewards = {name: float(value) for name, value in numbers.items() if type(value) in (int, float)}
    except (ValueError, OverflowError):
        rewards = dict[str, float]()
    # code of the policy that the tests execute can write a file too
    if alone is not None and rewards and abs(rewards.setdefault("reward", alone) - alone) > ROUNDING:
        raise NoReward("its reward.json and reward.txt differ")
    if not rewards or not all(map(math.isfinite, rewards.values())):
        raise NoReward(f"its reward.json has no finite numbers, it has {as_json.decode(errors='replace')!r:.80}")
    return rewards


def _read_number(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise NoReward(f"its reward.txt must be a finite number, it has {text.decode(errors='replace')!r:.80}")
    return value


class _Reader:
    """Reader of values in task.toml, which names the task in errors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def number(self, table: dict[str, Any], key: str, default: Any) -> Any:
        """Return a number above 0, or the default."""
        value = table.get(key.partition(".")[2], default)
        if value is not default and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise UserError(f"{self.folder}/task.toml: {key} is {value!r:.60}, where a number above 0 is expected")
        return value

    def size(self, table: dict[str, Any], key: str, default: int) -> int:
        """Return the MiB of a key such as memory_mb = 8192, which older tasks write as memory = "8G"."""
        older = table.get(key.partition(".")[2])
        if older is None:
            return int(self.number(table, f"{key}_mb", default))
        match = SIZE.fullmatch(str(older))
        if match is None or f"{key}_mb".partition(".")[2] in table:
            raise UserError(f"{self.folder}/task.toml: {key} is {older!r:.60}: write {key}_mb alone, a number")
        return max(1, int(float(match.group(1)) * UNITS[match.group(2).upper()]))

    def text(self, table: dict[str, Any], key: str) -> str:
        """Return a text, "" without the key."""
        value = table.get(key.partition(".")[2]) or ""
        if not isinstance(value, str) or not is_text(value):
            raise UserError(f"{self.folder}/task.toml: {key} is {value!r:.60}, where a text without NUL is expected")
        return value

    def variables(self, table: dict[str, Any], key: str) -> dict[str, str]:
        """Return variables, with those of this machine that they name."""
        found = table.get(key.partition(".")[2], {})
        if not isinstance(found, dict):
            raise UserError(f"{self.folder}/task.toml: {key} must be a table, found {json.dumps(found)[:60]}")
        variables = {name: VARIABLE.sub(self._find, str(value)) for name, value in found.items()}
        check_variables(variables, f"{self.folder}/task.toml: {key}")
        return variables

    def _find(self, match: re.Match[str]) -> str:
        name = match.group(1)
        default: str | None = match.group(2)
        value = os.environ.get(name, default)
        if value is None:
            raise UserError(f"{self.folder}/task.toml needs the environment variable {name}: set it")
        return value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, f"the task {path.parent}: task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _find_table(found: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    table = found.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"{folder}/task.toml: {name} must be a table, found {table!r:.60}")
    return table
