"""Python interpreter as a tool over several turns, in a sandbox. Names persist between calls.

The tool is called `python`. A process starts at the first call and is killed with the episode. Runs without a sandbox
are refused: rewards/sandbox/bubblewrap.py.
"""

from __future__ import annotations

from typing import ClassVar

from core.types.samples import Prompt
from rewards.sandbox import Limits, SandboxUnavailable, check_sandbox
from rewards.sandbox.session import PythonSession
from rollouts.tools.calls import ToolUnavailable
from rollouts.tools.env import ToolEnv
from rollouts.tools.functions import tool


class PythonTool(ToolEnv):
    """Environment with a stateful Python tool. A subclass may set other limits, and add tools."""

    limits: ClassVar[Limits] = Limits()
    """Limits of each call, and of the session's memory and files."""
    parallel_calls = False  # calls share one interpreter

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.session = PythonSession(self.limits)

    @classmethod
    def check(cls) -> None:
        check_sandbox("bubblewrap")

    # The docstring is part of the prompt: the policy reads it as the description of the tool.
    @tool
    async def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last line. Names stay for the next call.

        Args:
            code: The code to run.
        """
        try:
            return await self.session.run(code)
        except SandboxUnavailable as error:
            raise ToolUnavailable(str(error)) from error

    async def close(self) -> None:
        await self.session.close()
