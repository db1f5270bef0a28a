"""Agent command: one episode with openai-agents."""

import asyncio
import json
import os
import sys

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, BadRequestError

set_tracing_disabled(True)  # else it sends traces to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main():
    task = json.load(sys.stdin)
    client = AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"])
    model = OpenAIChatCompletionsModel(model=task["model"], openai_client=client)
    agent = Agent(name="adder", model=model, tools=[add])
    solved = 0.0
    try:
        result = await Runner.run(agent, task["messages"][-1]["content"], max_turns=task["max_turns"])
        solved = float("7" in result.final_output)
    except (MaxTurnsExceeded, BadRequestError):  # a limit of the episode, which the policy has reached
        pass
    os.write(3, json.dumps({"solved": solved}).encode())


asyncio.run(main())
