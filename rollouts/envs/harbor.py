"""Tasks in Harbor's format: the policy works in a box with one tool, `bash`, and the task's tests write the reward.

Columns of the row: `task` is the task's folder, `image` the image of its box (else `docker_image` of task.toml), and
`timeout_s` lowers the seconds that the policy's commands may take together. data_prep/harbor.py writes such rows. The
scores are the numbers of the verifier; that of reward.txt is `reward`. Subclass `Harbor` for other boxes or limits.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from configs.agent_schema import TIMEOUTS
from core.errors import UserError
from core.types.messages import Message
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rewards.sandbox.base import Ran, SandboxUnavailable
from rollouts.boxes import Box, BoxSpec, check_boxes, open_box
from rollouts.boxes.base import LIMITS
from rollouts.boxes.harbor_task import (
    LARGEST_REWARD_FILE,
    HarborTask,
    NoReward,
    check_network,
    read_rewards,
    read_task,
)
from rollouts.row_timeout import find_timeout
from rollouts.tools.calls import ToolUnavailable
from rollouts.tools.env import ToolEnv
from rollouts.tools.functions import tool

LOGS = {"verifier/": b"", "agent/": b"", "artifacts/": b""}
"""Folders below /logs."""
VERIFIER = {
    "HOME": "/logs/home",
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    **dict.fromkeys(("BASH_ENV", "ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP"), ""),
}
"""Variables of a verifier besides PATH: none may lead to a file that the policy has written. [verifier.env] goes over
them."""
LONGEST_COMMAND = 120_000
"""Maximum size of a command, in bytes. The kernel takes 128 KiB."""
KILLED = {
    "time": "it took longer than {seconds:g} s",
    "memory": "it took more than {limits.memory_mib} MiB of memory",
    "output": "it printed more than {limits.output_bytes} bytes",
    "files": "the box has more than {limits.files} files",
    "disk": "the box has more than {limits.disk_mib} MiB of files",
}


class Harbor(ToolEnv):
    """Box with a task. A reply without calls ends the episode, and the verifier judges the files of the box."""

    backend: ClassVar[str] = "bubblewrap"
    """Boxes to use: bubblewrap, podman, docker or apptainer."""
    network: ClassVar[bool] = False
    """Allow the network. Boxes of bubblewrap have this machine's resolv.conf, and the image's certificates."""
    command_s: ClassVar[float] = 60.0
    """Maximum time of a command, in seconds."""
    most_characters: ClassVar[int] = 4000
    """Maximum number of characters of a command's output that the policy sees: its beginning and its end."""
    on_timeout: ClassVar[Literal["score", "fail"]] = "score"
    """Result of an episode whose policy used up its time or broke its box: the verifier's numbers, or else 0; or a
    failed sample. One that broke the verifier gets 0."""
    parallel_calls = False  # commands share one box

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.task = find_task(prompt)
        self.left_s = min(self.task.agent_s or float("inf"), find_timeout(prompt))
        self.tool_timeout_s = self.command_s + 60.0  # the box ends a command itself, and says why
        self.earned: dict[str, float] = {}
        self.over = ""
        """Reason why the policy can go on no more, which is its own doing."""
        self._box: Box | None = None
        self._touched = False

    @classmethod
    def check(cls) -> None:
        check_boxes(cls.backend)

    @property
    def box(self) -> Box:
        assert self._box is not None, "the box is made by open()"
        return self._box

    async def open(self) -> list[Message]:
        """Start the box. Raises UserError for a task that wants the network and does not get it."""
        check_network(self.task, allowed=self.network)
        self._box = await self._open_box()
        return []

    async def _open_box(self) -> Box:
        task = self.task
        limits = replace(LIMITS, memory_mib=task.memory_mib, disk_mib=task.disk_mib)
        spec = BoxSpec(
            image=find_image(self.prompt, task),
            limits=limits,
            cpus=task.cpus,
            network=self.network,
            environment=task.environment,
            folder=task.work_folder,
        )
        box = await open_box(self.backend, spec)
        try:
            await box.put("/logs", LOGS)
            # a box that ends by itself is no doing of the policy
            if box.broken:
                raise SandboxUnavailable(f"a box of {task.folder.name} cannot be used: {box.broken}")
        except BaseException:
            await box.close()
            raise
        return box

    # The docstring is part of the prompt: the policy reads it as the description of the tool.
    @tool
    async def bash(self, command: str) -> str:
        """Run a command with bash, and return what it prints. Files stay for the next command.

        Args:
            command: The command to run.
        """
        if self.over:
            return f"error: nothing was run, since {self.over}"
        if reason := find_fault(command):
            return f"error: nothing was run, since {reason}"
        seconds = min(self.command_s, self.left_s)
        self._touched = True
        try:
            ran = await self.box.run(["bash", "-c", command], seconds=seconds)
        except SandboxUnavailable as error:
            raise ToolUnavailable(str(error)) from error
        self.left_s -= ran.seconds
        if self.box.broken:
            self.over = self.box.broken
        elif self.left_s <= 0:
            self.over = "the time of the task is used up"
        return self.describe(ran, seconds)

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        answers = await super().step(reply)
        return None if self.over else answers

    async def end(self) -> None:
        """Run the verifier. Raises NoReward if it writes no reward, and that is not the policy's doing."""
        if self.over and self.on_timeout == "fail":
            raise NoReward(f"the episode ended early: {self.over}")
        # its tests cannot run, and that is the policy's doing
        if self.box.broken:
            if not self._touched:
                raise NoReward(f"the box failed before the first command: {self.box.broken}")
            return
        try:
            self.earned = await verify(self.box, self.task)
        except NoReward as error:
            # else a policy could discard a bad episode: by an endless program, or a pipe, that the tests read
            if not self._touched or not await self._verifies_untouched():
                raise
            self.over = str(error)

    async def _verifies_untouched(self) -> bool:
        """Tell whether the verifier writes a reward in a new box."""
        box = await self._open_box()
        try:
            await verify(box, self.task)
        except NoReward:
            return False
        finally:
            await box.close()
        return True

    def scores(self) -> dict[str, float]:
        return self.earned

    def counts(self) -> dict[str, float]:
        """Return the counts of tools, and whether the episode ended early: numbers that it lacks are then 0."""
        return super().counts() | {TIMEOUTS: float(bool(self.over))}

    async def close(self) -> None:
        if self._box is not None:
            await self._box.close()

    def describe(self, ran: Ran, seconds: float) -> str:
        """Return the result of a command as the policy sees it."""
        shown = shorten_middle((ran.stdout + ran.stderr).decode(errors="replace"), self.most_characters)
        if ran.killed_for is not None:
            limits = replace(LIMITS, memory_mib=self.task.memory_mib, disk_mib=self.task.disk_mib)
            why = KILLED[ran.killed_for].format(seconds=seconds, limits=limits)
            return f"{shown}\nerror: the command was killed, because {why}".lstrip("\n")
        return shown if ran.exit_code == 0 else f"{shown}\n(exit code {ran.exit_code})".lstrip("\n")


async def verify(box: Box, task: HarborTask) -> dict[str, float]:
    """Run a task's tests in its box, and return the numbers that they write. Raises NoReward if there are none."""
    await box.stop_processes()
    await box.put("/tests", await asyncio.to_thread(task.list_tests))
    # logs: rewards that the policy wrote go
    await box.put("/logs", LOGS | {"home/": b""})
    if box.broken:
        raise NoReward(f"the tests cannot be copied into the box: {box.broken}")
    command = ["bash", "/tests/test.sh"]
    variables = VERIFIER | {"PATH": box.path} | {**task.verifier_environment}
    ran = await box.run(command, seconds=task.verifier_s, environment=variables)
    if ran.killed_for is not None:
        raise NoReward(f"the verifier of {task.folder.name} was killed for its {ran.killed_for}")
    found = [await box.get(f"/logs/verifier/reward.{kind}", most=LARGEST_REWARD_FILE) for kind in ("json", "txt")]
    try:
        return read_rewards(*found)
    except NoReward as error:
        said = shorten_middle((ran.stdout + ran.stderr).decode(errors="replace").strip(), 300)
        raise NoReward(f"the verifier of {task.folder.name} failed: {error}; it printed {said!r}") from error


def find_fault(command: str) -> str:
    """Return the reason why the kernel would refuse a command, "" for none."""
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        return "the command is no valid text"
    if size > LONGEST_COMMAND:
        return f"the command is longer than {LONGEST_COMMAND} bytes: write it to a file in pieces"
    return "the command contains a NUL character" if "\0" in command else ""


def find_task(prompt: Prompt) -> HarborTask:
    """Return the task of a row. Raises UserError if it has none."""
    folder = prompt.extra.get("task")
    if not isinstance(folder, str) or not folder:
        raise UserError(
            f"rollout.env=harbor: the row {prompt.id} must have the folder of a task in its column task, found "
            f"{folder!r:.60}; python -m data_prep.harbor writes such rows"
        )
    return read_task(Path(folder))


def find_image(prompt: Prompt, task: HarborTask) -> str:
    """Return the image of a row's box. Raises UserError if none is named."""
    image = prompt.extra.get("image") or task.image
    if not isinstance(image, str) or not image:
        raise UserError(
            f"rollout.env=harbor: the row {prompt.id} names no image, and task.toml no docker_image: build the image "
            "of environment/Dockerfile, and name it in the column image"
        )
    return image


def shorten_middle(text: str, most: int) -> str:
    """Return a text without its middle, if it is longer than `most` characters.

    >>> shorten_middle("a" * 50 + "b" * 50, 10)
    'aaaaa\\n... 90 characters are left out ...\\nbbbbb'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[len(text) - half :]}"
