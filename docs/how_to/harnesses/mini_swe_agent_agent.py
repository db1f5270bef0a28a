"""Agent command: one episode with mini-swe-agent."""

import json
import os
import pathlib
import sys
import tempfile

os.environ |= {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1"}
import minisweagent
import yaml
from litellm import BadRequestError
from minisweagent.agents.default import AgentConfig, DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

task = json.load(sys.stdin)
file = pathlib.Path(minisweagent.__file__).parent / "config" / "mini.yaml"
written = yaml.safe_load(file.read_text())["agent"]
settings = {name: value for name, value in written.items() if name in AgentConfig.model_fields}
where = {"api_base": task["base_url"], "api_key": task["api_key"]}
model = LitellmModel(model_name="openai/" + task["model"], model_kwargs=where, cost_tracking="ignore_errors")
agent = DefaultAgent(model, LocalEnvironment(cwd=tempfile.mkdtemp()), **settings | {"step_limit": task["max_turns"]})
try:
    found = agent.run(task["messages"][-1]["content"])
except BadRequestError:  # a limit of the episode, which the policy has reached
    found = ""
os.write(3, json.dumps({"solved": float("Submitted" in str(found))}).encode())
