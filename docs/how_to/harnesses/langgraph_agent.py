"""Agent command: one episode with LangGraph."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from openai import BadRequestError


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


task = json.load(sys.stdin)
model = ChatOpenAI(model=task["model"], base_url=task["base_url"], api_key=task["api_key"])
limit = {"recursion_limit": 2 * task["max_turns"] + 1}
solved = 0.0
try:
    state = create_agent(model, [add]).invoke({"messages": task["messages"]}, limit)
    solved = float("7" in state["messages"][-1].content)
except (GraphRecursionError, BadRequestError):  # a limit of the episode, which the policy has reached
    pass
os.write(3, json.dumps({"solved": solved}).encode())
