"""Agent command: one episode with LangGraph."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


task = json.load(sys.stdin)
model = ChatOpenAI(model=task["model"], base_url=task["base_url"], api_key=task["api_key"])
limit = {"recursion_limit": 2 * task["max_turns"] + 1}
state = create_agent(model, [add]).invoke({"messages": task["messages"]}, limit)
os.write(3, json.dumps({"solved": float("7" in state["messages"][-1].content)}).encode())
