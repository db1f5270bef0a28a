"""Agents whose process plays many episodes, and deadlines of episodes; faults of one, and of all."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.agent_schema import AgentConfig
from core.errors import UserError
from core.types.samples import Prompt
from driver.records.episode_metrics import measure_counts
from rollouts.agents import served
from rollouts.agents.episode import judge_timeout
from rollouts.agents.launching import check_agent
from rollouts.agents.processes import AgentProcesses
from rollouts.agents.results import AgentResult, read_message, read_so_far
from rollouts.agents.task import AgentPlan, Task
from rollouts.envs.base import Env
from rollouts.registry import resolve_agent
from unit_tests.helpers.agents import ASK, MARK, PROMPT, find_processes, play, write_agent
from unit_tests.helpers.scripted_policy import Policy


@pytest.fixture(autouse=True)
def _marked(monkeypatch):
    monkeypatch.setenv("TEST_OF_AGENTS", MARK)


SERVE = (
    ASK
    + """
import threading
from types import SimpleNamespace

def write(**line):
    os.write(3, json.dumps(line).encode() + b"\\n")

def run(number, task):
    said = ask(task, task.messages)
    more = ask(task, [*task.messages, said, {"role": "user", "content": "More?"}])
    write(id=number, parts={"solved": 1.0})

def played(line):
    given = json.loads(line)
    return None if "cancel" in given else (given["id"], SimpleNamespace(**given["task"]))
"""
)
MANY = """
for line in sys.stdin:
    threading.Thread(target=run, args=played(line)).start()
"""


def write_server(folder: Path, text: str, **settings: Any) -> AgentPlan:
    file = folder / "server.py"
    file.write_text(SERVE + text)
    return resolve_agent(AgentConfig(command=[sys.executable, str(file)], serve=True, **settings))


class Asks(Env):
    """Asks once more."""

    turns = 0

    async def step(self, reply):
        self.turns += 1
        return [{"role": "user", "content": "More?"}] if self.turns == 1 else None

    def scores(self):
        return {"solved": 1.0}


RUNS = """
{kind} run(task):
    said = ask(task, task.messages)
    ask(task, [*task.messages, said, {{"role": "user", "content": "More?"}}])
    return {{"solved": 1.0}}
"""
COMMAND = """
task = SimpleNamespace(**json.load(sys.stdin))
said = ask(task, task.messages)
ask(task, [*task.messages, said, {"role": "user", "content": "More?"}])
os.write(3, b'{"solved": 1}')
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "async file", "command", "served"])
def test_every_way_samples_the_same_tokens(qwen, tmp_path, way):
    if way == "served":
        plan = write_server(tmp_path, MANY)
    elif way == "command":
        (tmp_path / "once.py").write_text(SERVE + COMMAND)
        plan = resolve_agent(AgentConfig(command=[sys.executable, str(tmp_path / "once.py")]))
    else:
        plan = write_agent(tmp_path, RUNS.format(kind="async def" if way == "async file" else "def"))

    def script(context: str) -> str:
        return f"I read {len(context)}."

    by_env, by_agent = Policy(qwen, script), Policy(qwen, script)
    ours, theirs = play(Asks, by_env, size=2), play(plan, by_agent, size=2)
    assert [sample.failure for sample in theirs] == ["", ""]
    assert sorted(by_env.seeds) == sorted(by_agent.seeds)
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.action_mask.tolist() == other.action_mask.tolist()
        assert one.rollout_logp.tolist() == other.rollout_logp.tolist() and one.spans == other.spans
        assert one.reward == other.reward == 2.0


FAULTS = {
    # what a server does with its first of two episodes: (text, sentence of both samples)
    "dies": ("print('it hurts', flush=True); os._exit(3)", "the agent's process exited with code 3: it hurts"),
    "garbage": ("os.write(3, b'well done\\n')", "the agent wrote 'well done' to file descriptor 3, where one line"),
    "not given": ("write(id=99, parts={})", "the agent wrote a result of an episode 99, which it was not given"),
    "closes": ("os.close(0); time.sleep(60)", "the agent's process closed its standard input"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_breaks_fails_its_episodes_and_another_goes_on(qwen, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(served, "ERROR_GRACE_S", 0.3)
    what, why = FAULTS[fault]
    plan = write_server(
        tmp_path,
        f"""
if not os.path.exists({str(tmp_path / "broke")!r}):
    lines = [sys.stdin.readline(), sys.stdin.readline()]
    os.mkdir({str(tmp_path / "broke")!r})
    {what}
    sys.stdin.read()
"""
        + MANY,
    )
    samples = play(plan, Policy(qwen, lambda _: "Seven."), size=2, groups=2)
    assert [sample.failure.startswith(why) for sample in samples] == [True, True, False, False], samples[0].failure
    assert [sample.reward for sample in samples[2:]] == [2.0, 2.0]


def test_a_second_answer_is_said_and_changes_nothing(qwen, tmp_path, capfd):
    plan = write_server(
        tmp_path,
        """
for line in sys.stdin:
    number, task = played(line)
    run(number, task)
    write(id=number, failure="no, it is wrong")
""",
    )
    samples = play(plan, Policy(qwen, lambda _: "Seven."), size=3)
    assert [sample.reward for sample in samples] == [2.0] * 3
    assert capfd.readouterr().err.count("writes more than one result of an episode: the first counts") == 1


def test_a_server_that_ignores_a_cancel_is_killed(qwen, tmp_path, monkeypatch):
    """Its other episode fails with it, and all that it has started is gone."""
    monkeypatch.setattr(served, "AGENT_CANCEL_TIMEOUT_S", 0.3)
    plan = write_agent(
        tmp_path,
        """
        import asyncio

        async def run(task):
            subprocess.Popen(["sleep", "5" + os.environ["TEST_OF_AGENTS"]], start_new_session=True)
            await asyncio.to_thread(ask, task, task.messages)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(60)
        """,
    )
    samples = play(plan, Policy(qwen, lambda _: "Seven."), size=2, agent_timeout_s=1.0)
    assert {sample.failure for sample in samples} == {"the agent has not ended after 1 s (see rollout.timeout_s)"}
    assert not find_processes("sleep 5")


OBEYS = """
read first; read second; touch {taken}; read cancel
[ "$cancel" = '{{"cancel": 0}}' ] && echo '{{"id": 0, "failure": "cancelled"}}' >&3
echo '{{"id": 1, "parts": {{"solved": 1}}}}' >&3
cat
"""


def test_an_episode_is_cancelled_and_the_others_of_its_process_go_on(tmp_path):
    taken = tmp_path / "taken"
    plan = resolve_agent(AgentConfig(command=["sh", "-c", OBEYS.format(taken=taken)], serve=True))
    task = Task(base_url="http://127.0.0.1:9/s/7/v1", api_key="k", model="policy", messages=[])

    async def run() -> AgentResult:
        agents = AgentProcesses(plan)
        first, second = (asyncio.create_task(agents.run(task, timeout_s=60.0, log=bytearray())) for _ in range(2))
        while not taken.exists():
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first, second])
        await agents.close()
        return second.result()

    assert asyncio.run(run()) == AgentResult(parts={"solved": 1.0})


def test_episodes_of_an_async_file_share_a_process_and_fail_alone(qwen, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    plan = write_agent(
        tmp_path,
        """
        import asyncio

        begun = []

        async def run(task):
            begun.append(task)
            mine = len(begun)
            for client in ("OPENAI", "ANTHROPIC"):
                assert os.environ[f"{client}_API_KEY"].startswith("use-api_key")
                assert "use-base_url" in os.environ[f"{client}_BASE_URL"]
            print("mine", mine, task.api_key)
            await asyncio.to_thread(ask, task, task.messages)
            while len(begun) < 4:
                await asyncio.sleep(0.01)
            if mine == 1:
                raise KeyError("map")
            if mine == 2:
                sys.exit(3)
            if mine == 3:
                return "well done"
            return {"solved": 1.0}
        """,
    )
    samples = play(plan, Policy(qwen, lambda _: "Seven."), size=4)
    said = sorted(sample.failure for sample in samples)
    assert said[0] == "" and said[1].startswith("KeyError: 'map' (my_agent.py, line ")
    assert said[3] == "the agent ended its process by sys.exit(3)" and "must return a dict" in said[2]
    assert all("mine 1" in sample.log and "feynrl-" not in sample.log for sample in samples)


def test_a_plain_run_cannot_be_served_and_an_async_one_need_not_be(qwen, tmp_path):
    with pytest.raises(UserError, match=r"^rollout\.agent\.serve: .*my_agent\.py must define run\(task\) by `async"):
        check_agent(write_agent(tmp_path, "def run(task):\n    return {}", serve=True))
    plan = write_agent(
        tmp_path,
        """
        async def run(task):
            assert os.environ["OPENAI_API_KEY"] == task.api_key
            ask(task, task.messages)
            return {"solved": 1.0}
        """,
        serve=False,
    )
    assert [sample.reward for sample in play(plan, Policy(qwen, lambda _: "Seven."), size=2)] == [2.0, 2.0]


def test_a_deadline_is_a_score_only_for_a_policy_that_was_busy():
    """Unset, the row asks for a score by a deadline of its own. 10 s: busy for 5 s or more is the policy's doing."""
    late, numbers = replace(PROMPT, extra={"timeout_s": 10}), AgentResult(parts={"solved": 0.25}, timed_out=True)

    def judge(prompt: Prompt, busy_s: float, **plan: Any) -> AgentResult:
        return judge_timeout(numbers, AgentPlan(**plan), prompt, busy_s=busy_s, deadline_s=10.0)

    assert judge(late, 5.0) == judge(PROMPT, 9.0, on_timeout="score") == numbers
    idle = judge(late, 4.0)
    assert idle.was_slow and idle.failure == (
        "the agent has not ended after 10 s (see the column timeout_s), and the policy was idle for 6 s of them"
    )
    queued = replace(numbers, waited_s=4.0)
    assert judge_timeout(queued, AgentPlan(), late, busy_s=5.5, deadline_s=10.0).was_slow, "it had 6 s"
    for failed in (judge(PROMPT, 9.0), judge(late, 9.0, on_timeout="fail")):
        assert failed.failure.startswith("the agent has not ended after 10 s") and not failed.was_slow
    assert judge(PROMPT, 9.0, timeout_s=10.0).failure.endswith("(see rollout.agent.timeout_s)")


class Stalls(Policy):
    """Answers once, and is busy for ever after."""

    async def generate(self, token_ids, *, max_new_tokens, seed):
        if self.log:
            await asyncio.sleep(60)
        return await super().generate(token_ids, max_new_tokens=max_new_tokens, seed=seed)


LATE = """
import asyncio

async def run(task):
    said = await asyncio.to_thread(ask, task, task.messages)
    task.report({"steps": 2})
    task.report({"solved": 0.25, "steps": 3})
    await asyncio.to_thread(ask, task, [*task.messages, said, {"role": "user", "content": "More?"}])
"""
LATE_COMMAND = """
task = SimpleNamespace(**json.load(sys.stdin))
said = ask(task, task.messages)
ask(task, [*task.messages, said, {"role": "user", "content": "More?"}])
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["async file", "command"])
def test_an_episode_at_its_deadline_is_scored_by_its_last_numbers(qwen, tmp_path, way):
    """A command that has written none gets 0 for the parts with a weight."""
    if way == "command":
        (tmp_path / "late.py").write_text(SERVE + LATE_COMMAND)
        plan = resolve_agent(AgentConfig(command=[sys.executable, str(tmp_path / "late.py")]))
    else:
        plan = write_agent(tmp_path, LATE)
    late = replace(PROMPT, extra={"timeout_s": 3})
    [sample] = play(plan, Stalls(qwen, lambda _: "Seven."), prompt=late, agent_timeout_s=40.0)
    expected = {"solved": 0.0} if way == "command" else {"solved": 0.25, "steps": 3.0}
    assert sample.failure == "" and sample.reward_parts == expected | {"replies": 1.0}
    assert sample.reward == 2.0 * expected["solved"] and sample.loss_mask.any()
    assert measure_counts([sample])["rollout/timeouts"] == 1 and measure_counts([sample])["rollout/failed/slow"] == 0


@pytest.mark.parametrize("given", ["soon", 0, True, 10**400], ids=["text", "none", "bool", "huge"])
def test_a_deadline_that_is_no_number_names_its_row(given, qwen, tmp_path):
    sentence = re.escape(f"row p: timeout_s is {given!r:.80}: give a number of seconds above 0")
    with pytest.raises(UserError, match=f"^{sentence}$"):
        play(write_agent(tmp_path, ""), Policy(qwen, []), prompt=replace(PROMPT, extra={"timeout_s": given}))


def test_episodes_wait_for_a_place(qwen, tmp_path):
    """rollout.max_concurrency is of the whole run: 5 over 2 engines are 2 each."""
    running, most = 0, 0

    class Counted(Asks):
        async def open(self):
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            await asyncio.sleep(0.01)
            return []

        async def close(self):
            nonlocal running
            running -= 1

    samples = play(Counted, Policy(qwen, lambda _: "Seven."), size=6, max_concurrency=5, num_engines=2)
    assert most == 2 and [sample.reward for sample in samples] == [2.0] * 6


def test_the_last_whole_numbers_of_a_killed_process_count():
    assert read_so_far(b'{"so_far": {"a": 1}}\n{"so_far": {"a": 2}}\n{"so_far": {"a"', is_file=True) == {"a": 2}
    assert read_so_far(b'{"a": 1}\nwhat?\n', is_file=False) == {"a": 1.0}
    assert read_so_far(b'{"a": 1}', is_file=False) == {} == read_so_far(b"", is_file=True)


def test_a_message_is_read_by_its_fields():
    assert read_message(b'{"id": 7, "parts": {"a": 1}}').result.parts == {"a": 1.0}
    assert read_message(b'{"id": 7, "failure": "why"}').result.failure == "why"
    assert read_message(b'{"id": 7, "so_far": {"a": 1}}').so_far == {"a": 1.0}
    assert "must return" in read_message(b'{"id": 7, "parts": {"a": NaN}}').result.failure
    for wrong in (b"", b"[" * 100_000, b"[1]", b'{"id": true, "parts": {}}', b'{"id": 7}', b'{"parts": {}}'):
        with pytest.raises(ValueError, match="file descriptor 3, where one line"):
            read_message(wrong)
