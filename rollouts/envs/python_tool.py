"""Python as a tool over several turns: what the policy runs in one turn is there in the next, in a sandbox.

The environment offers one tool, `python`. Its process begins with the first call and is killed with the episode.
Without a sandbox no run begins: rewards/sandbox/bubblewrap.py.
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
    """Environment with a Python that remembers. A subclass may have other limits, and more tools."""

    limits: ClassVar[Limits] = Limits()
    """Of each piece of code, and of the whole session's memory and files."""
    parallel_calls = False

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.session = PythonSession(self.limits)

    @classmethod
    def check(cls) -> None:
        check_sandbox("bubblewrap")

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
