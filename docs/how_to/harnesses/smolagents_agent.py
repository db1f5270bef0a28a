"""Agent command: one episode with smolagents."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


task = json.load(sys.stdin)
model = OpenAIServerModel(task["model"], api_base=task["base_url"], api_key=task["api_key"])
agent = ToolCallingAgent([add], model, max_steps=task["max_turns"], verbosity_level=0)
answer = agent.run(task["messages"][-1]["content"])
os.write(3, json.dumps({"solved": float("7" in str(answer))}).encode())
