"""Keys of `rollout.agent`."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from core.strict_model import Seconds, StrictModel

SHARE_OF_TIMEOUT = 0.9
"""Share of `rollout.timeout_s` for an agent. That key is the deadline of a whole group; the rest is for rewards."""
TIMEOUTS, SLOW = "agent/timeouts", "agent/slow"
"""Counts of a sample: the episode reached the deadline; and then the policy was idle for more than half of it."""
OnTimeout = Literal["fail", "score"]


class AgentConfig(StrictModel):
    """Keys of `rollout.agent`."""

    file: str | None = None
    """Python file with a function `run(task)`, plain or async, that plays one episode and returns named numbers. Set
    either this, `command` or `address`."""
    command: list[Annotated[str, Field(min_length=1)]] = Field([])
    """Program with arguments that plays one episode, in any language. It reads the task as JSON from standard input,
    and writes the numbers as a line of JSON to file descriptor 3."""
    address: list[str] = Field([])
    """Addresses of other machines that play the episodes, such as http://10.0.0.2:9000, where `python -m
    rollouts.agents.host` serves them. They must reach `rollout.gateway`. An episode of a machine that is gone begins
    again on another, once, if nothing was sampled yet."""
    serve: bool | None = None
    """true: one process per engine plays all episodes, many at a time; a command reads a task per line. false: a
    process per episode. Unset: true for a file with an async `run`."""
    timeout_s: Seconds | None = None
    """Deadline of an episode in seconds, which a row may lower by a column `timeout_s`. Unset: nine tenths of
    `rollout.timeout_s`, which is also the maximum."""
    on_timeout: OnTimeout | None = None
    """Result of an episode that reaches the deadline. score: the last numbers of the agent, 0 for those it lacks; a
    failure if the policy was idle for more than half of the time. fail: a failed sample, which is not trained on.
    Unset: score for rows with a column `timeout_s`, else fail."""

    @model_validator(mode="after")
    def is_one_of_three(self) -> AgentConfig:
        if sum(map(bool, (self.file, self.command, self.address))) != 1:
            raise ValueError("set one of file, command and address")
        if self.address and self.serve is not None:
            raise ValueError("serve has no effect with address: it is an option of rollouts.agents.host")
        if self.file is not None and not self.file.endswith(".py"):
            raise ValueError(f"file must be the path of a Python file (my_agent.py), found {self.file!r:.100}")
        return self

    @field_validator("address")
    @classmethod
    def are_addresses(cls, given: list[str]) -> list[str]:
        for one in given:
            parts = urlsplit(one)
            if "@" in parts.netloc:  # the address is in failures and logs
                raise ValueError("an address must hold no user or password: the key of the hosts is FEYNRL_AGENT_KEY")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise ValueError(f"{one!r:.100} must be like http://10.0.0.2:9000")
            parts.port  # noqa: B018 - raises ValueError above 65,535
        return [one.rstrip("/") for one in given]

    def check_timeout(self, of_group: float) -> None:
        """Raise ValueError if an episode may take longer than its group. of_group: `rollout.timeout_s`."""
        if self.timeout_s is not None and self.timeout_s > SHARE_OF_TIMEOUT * of_group:
            raise ValueError(
                f"agent.timeout_s={self.timeout_s:g} is more than nine tenths of timeout_s={of_group:g}, the deadline "
                "of a group with its rewards: raise rollout.timeout_s"
            )
