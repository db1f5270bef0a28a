"""What an agent is given for one episode, and the plan by which its processes are started. No heavy import here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from core.loading import FileSpec
from core.types.images import write_data_uri
from core.types.messages import Message, ToolSpec

RESULT_FD = 3
"""File descriptor on which a command returns its rewards, as one line of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Episode, as an agent sees it. The answer of the row is not in it: that is for the reward."""

    base_url: str
    """OpenAI-compatible endpoint of this episode."""
    api_key: str
    model: str
    """Name of the policy there."""
    messages: list[Message]
    """The prompt."""
    tools: list[ToolSpec] = field(default_factory=list[ToolSpec])
    """Tools of the row, in OpenAI's form."""
    id: str = ""
    """Unique name of the row."""
    source: str = ""
    """Name of the data set that the row comes from."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other columns of the row."""
    max_turns: int = 1
    """Largest number of replies."""
    seed: int = 0
    """Seed for what the agent draws itself; the same in a run that is repeated."""

    def as_json(self) -> dict[str, Any]:
        """Return the task as a command reads it."""
        return asdict(replace(self, messages=[])) | {"messages": [*map(write_content, self.messages)]}


def write_content(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form, with its images as data URIs."""
    if "parts" not in message:
        return {**message}
    content = [
        {"type": "image_url", "image_url": {"url": write_data_uri(part["image"])}} if part["type"] == "image" else part
        for part in message["parts"]
    ]
    return {**{name: value for name, value in message.items() if name != "parts"}, "content": content}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """Code of an agent: a file with a function `run(task)`, or a command. Small and picklable."""

    file: FileSpec | None = None
    command: tuple[str, ...] = ()
    folder: str = "."
    """Working folder: that of the program which was started, since other processes may have another one."""

    @property
    def name(self) -> str:
        """The agent in a sentence."""
        return self.file.path if self.file is not None else self.command[0]
