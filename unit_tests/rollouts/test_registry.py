"""Engines, environments and agents by name or path: what is found, and the whole sentence of what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.rollout_schema import AgentConfig
from core.types.messages import ToolSpec
from rollouts.agents.task import HOST_KEY
from rollouts.registry import (
    list_env_tools,
    load_engine_class,
    load_env_class,
    resolve_agent,
    resolve_engine,
    resolve_env,
)
from unit_tests.helpers.episodes import Tool
from unit_tests.helpers.runs import file_of
from unit_tests.helpers.sentences import tell

ADD: ToolSpec = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}},
}
ENV = """
{before}
from rollouts.envs.base import Env

class Mine(Env):
    async def step(self, reply{hint}):
        return None
"""


def test_engines_and_environments_are_found_by_name_and_by_path(tmp_path):
    assert load_engine_class(resolve_engine("hf")).__name__ == "HfEngine"
    assert load_env_class(resolve_env("single_turn")).__name__ == "SingleTurn"
    path = file_of(tmp_path / "mine.py", ENV.format(before="", hint=""))
    assert load_env_class(resolve_env(path)).__name__ == "Mine"
    engine = "from rollouts.engines.base import Engine\n\nclass Own(Engine):\n    pass\n"
    assert load_engine_class(resolve_engine(file_of(tmp_path / "own.py", engine))).__name__ == "Own"
    for resolve, key, one in ((resolve_engine, "rollout.engine", "hf"), (resolve_env, "rollout.env", "calculator")):
        said = tell(lambda resolve=resolve: resolve("nosuch"))
        assert said.startswith(f"{key}") and "nosuch" in said
        offered = said.partition(":")[2].replace(",", " ").split()
        # files beside them that offer none are not offered
        assert one in offered and "base" not in offered


@pytest.mark.parametrize(
    ("before", "hint", "is_text"),
    [
        ("", ": str", True),
        ("from __future__ import annotations", ": str", True),
        ("", ": object", False),
        ("from __future__ import annotations", ": object", False),
        ("", "", False),
    ],
)
def test_a_step_that_takes_text_is_refused(tmp_path, before, hint, is_text):
    path = file_of(tmp_path / "mine.py", ENV.format(before=before, hint=hint))

    def load() -> Any:
        return load_env_class(resolve_env(path))

    if not is_text:
        assert load().__name__ == "Mine"
        return
    assert tell(load) == (
        f"rollout.env: {path}: Mine.step takes the reply as text, and it is given a ParsedReply: read "
        "reply.message['content'], and return a list of messages"
    )


def test_a_step_that_returns_text_by_its_annotation_is_not_refused(tmp_path):
    code = ENV.format(before="", hint="").replace("reply)", "reply) -> str")
    assert load_env_class(resolve_env(file_of(tmp_path / "mine.py", code))).__name__ == "Mine"


def test_tools_of_a_class_are_listed_where_the_policy_sees_their_results():
    class Armed(Tool):
        tools = (ADD,)
        least_turns = 2

    assert list_env_tools(Armed, max_turns=2) == [ADD] and list_env_tools(Tool, max_turns=1) == []
    assert tell(lambda: list_env_tools(Armed, max_turns=1)) == (
        "rollout.max_turns is 1, so the policy would never see what Armed answers, such as the results of its tools: "
        "set it to the number of replies that an episode may have, 2 or more"
    )

    class Later(Tool):
        @property
        def tools(self):
            return [ADD]

    assert list_env_tools(Later, max_turns=1) == []

    class Broken(Tool):
        tools = ({"type": "function"},)

    assert tell(lambda: list_env_tools(Broken, max_turns=1)).startswith("rollout.env: Broken.tools: ")


def test_an_agent_is_a_file_an_address_or_a_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = file_of(tmp_path / "agent.py", "def run(task): return 1\n")
    of_file = resolve_agent(AgentConfig(file=path, timeout_s=7.0, on_timeout="score"))
    assert of_file.file is not None and of_file.file.path == path
    assert (of_file.folder, of_file.timeout_s, of_file.on_timeout) == (str(tmp_path), 7.0, "score")
    assert (of_file.command, of_file.address) == ((), ())
    program = resolve_agent(AgentConfig(command=["python", "x.py"], serve=True))
    assert (program.command, program.file, program.serve) == (("python", "x.py"), None, True)
    for key in ("", "secret"):
        monkeypatch.setenv(HOST_KEY, key)
        hosts = resolve_agent(AgentConfig(address=["http://a:1", "http://b:2"]))
        assert (hosts.address, hosts.key, hosts.command) == (("http://a:1", "http://b:2"), key, ())
    assert tell(lambda: resolve_agent(AgentConfig(command=["nosuchprogram", "x"]))) == (
        "rollout.agent.command: there is no program nosuchprogram: give its path, or install it"
    )
    missing = str(Path(tmp_path / "nosuch.py"))
    assert "rollout.agent.file" in tell(lambda: resolve_agent(AgentConfig(file=missing)))
