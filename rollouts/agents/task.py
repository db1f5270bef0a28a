"""Task of an agent's episode, and the plan to start agent processes. No heavy imports here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from core.loading import FileSpec
from core.types.images import write_data_uri
from core.types.messages import Message, ToolSpec

if TYPE_CHECKING:  # pydantic is heavy
    from configs.agent_schema import OnTimeout

# 0 to 2 are the standard streams, which the command uses as it likes.
RESULT_FD = 3
"""File descriptor for a command's rewards, written as one line of JSON."""
HOST_KEY = "FEYNRL_AGENT_KEY"
"""Environment variable with the key of the hosts in `rollout.agent.address`. Agents get none of that name."""
LARGEST_MESSAGE = 2**16
"""Maximum size of a message between worker and launcher, in bytes."""


def ignore_numbers(parts: dict[str, float]) -> None:
    """Default of `Task.report`, for a task that nobody plays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Episode as the agent sees it. The row's answer is excluded; only the reward sees it."""

    base_url: str
    """OpenAI-compatible endpoint of this episode."""
    api_key: str
    model: str
    """Name of the policy at that endpoint."""
    messages: list[Message]
    """Prompt of the row."""
    tools: list[ToolSpec] = field(default_factory=list[ToolSpec])
    """Tools of the row, in OpenAI's format."""
    id: str = ""
    """Unique id of the row."""
    source: str = ""
    """Name of the row's data set."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other columns of the row."""
    max_turns: int = 1
    """Maximum number of replies."""
    seed: int = 0
    """Seed for the agent's own randomness. A repeated run has the same seeds."""
    report: Callable[[dict[str, float]], None] = field(default=ignore_numbers, repr=False, compare=False)
    """Function for numbers so far: those of an episode that reaches the deadline, with `on_timeout: score`."""

    def as_json(self) -> dict[str, Any]:
        """Return the task as JSON for a command."""
        # without messages, whose images asdict would copy
        fields = asdict(replace(self, messages=[]))
        del fields["report"]
        return fields | {"messages": [*map(write_content, self.messages)]}


def write_content(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's format, with images as data URIs."""
    if "parts" not in message:
        return {**message}
    content = [
        {"type": "image_url", "image_url": {"url": write_data_uri(part["image"])}} if part["type"] == "image" else part
        for part in message["parts"]
    ]
    return {**{name: value for name, value in message.items() if name != "parts"}, "content": content}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """Code of an agent: a file with a function `run(task)`, a command, or hosts that have it. Small and picklable."""

    file: FileSpec | None = None
    command: tuple[str, ...] = ()
    address: tuple[str, ...] = ()
    """Addresses of the hosts."""
    key: str = field(default="", repr=False)
    """Key of the hosts, from the environment of the driver, which an engine's process may lack."""
    folder: str = "."
    """Working folder of the started program. Other processes may have another folder."""
    serve: bool | None = None
    """True if one process plays all episodes of an engine. None: it does if `run` is async."""
    timeout_s: float | None = None
    """Deadline of an episode, in seconds. None: from that of its group."""
    on_timeout: OnTimeout | None = None
    """Result of an episode that reaches the deadline. None: by the row."""

    @property
    def name(self) -> str:
        """Name of the agent in messages."""
        return self.file.path if self.file is not None else (self.command or self.address)[0]
