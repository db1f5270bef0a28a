"""Agents in processes of their own: what they return, how they fail, and that nothing of them is left."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from configs.agent_schema import AgentConfig
from core.errors import UserError
from driver.records.episode_metrics import measure_counts
from driver.records.sample_files import make_sample_record
from rollouts import output
from rollouts.agents.launcher import Launcher
from rollouts.agents.launching import check_agent
from rollouts.agents.run_file import describe_error
from rollouts.registry import resolve_agent
from unit_tests.helpers.agents import ASK, MARK, PROMPT, find_processes, play, write_agent
from unit_tests.helpers.chat_families import ADD, WEATHER
from unit_tests.helpers.processes import wait_until
from unit_tests.helpers.runs import ROOT
from unit_tests.helpers.scripted_policy import Policy


@pytest.fixture(autouse=True)
def _marked(monkeypatch):
    monkeypatch.setenv("TEST_OF_AGENTS", MARK)


def test_an_agent_asks_and_returns_its_rewards(qwen, tmp_path):
    plan = write_agent(
        tmp_path,
        """
        def run(task):
            assert not hasattr(task, "answer") and "secret" not in repr(task)
            assert os.environ["OPENAI_API_KEY"] == task.api_key and task.extra == {"level": 3}
            said = ask(task, task.messages)
            more = ask(task, [*task.messages, said, {"role": "user", "content": "More?"}])
            return {"solved": float(more["content"] == "Eight."), "seed": float(task.seed > 0)}
        """,
    )
    policy = Policy(qwen, ["Seven.", "Eight."])
    [sample] = play(plan, policy)
    assert sample.failure == "" and sample.reward == 2.0
    assert sample.reward_parts == {"solved": 1.0, "seed": 1.0, "replies": 2.0}
    assert sample.episode == 0 and sample.turn_numbers == (0, 1) and sample.stop == "eos"
    assert qwen.hf.decode(sample.token_ids[: sample.turns[0][0]]).endswith("assistant\n")
    assert [m["content"] for m in sample.transcript] == ["Seven.", "More?", "Eight."]
    assert sample.counts["turns"] == 2 and sample.counts["assistant/repeated"] == 1


def test_samples_show_the_tools_that_an_agent_sends(qwen, tmp_path):
    plan = write_agent(
        tmp_path,
        f"""
        def run(task):
            ask(task, task.messages, tools={[ADD]!r})
            ask(task, task.messages)
            return {{"solved": 1.0}}
        """,
    )
    prompt = replace(PROMPT, tools=[WEATHER])
    group = play(plan, Policy(qwen, ["Seven.", "Eight."]), prompt=prompt)
    assert [sample.prompt.tools for sample in group] == [[ADD], []]
    records = [make_sample_record(sample, 0) for sample in group]
    assert [record.get("tools") for record in records] == [[ADD], None]


def test_branches_of_an_episode_have_its_reward_and_its_number(qwen, tmp_path):
    plan = write_agent(
        tmp_path,
        """
        def run(task):
            first = ask(task, task.messages)
            for words in ("a", "b"):
                ask(task, [*task.messages, first, {"role": "user", "content": words}])
            return {"solved": 0.5}
        """,
    )
    policy = Policy(qwen, lambda context: f"It is {len(context)}.")
    group = play(plan, policy, size=2)
    assert [sample.episode for sample in group] == [0, 0, 1, 1]
    assert all(sample.reward == 1.0 and not sample.failure for sample in group)
    assert sum(sample.n_sampled for sample in group) == sum(len(ids) for _, ids in policy.log)
    first, second = group[:2]
    begin, end = first.turns[0]
    assert second.token_ids[begin:end].tolist() == first.token_ids[begin:end].tolist()
    assert not second.action_mask[:end].any() and len(second.turns) == 1
    assert first.counts and not second.counts, "an episode is counted once"
    for sample, own in ((first, [True, True]), (second, [False, True])):
        said = [turn for turn in make_sample_record(sample, 0)["turns"] if turn["role"] == "assistant"]
        ends = [end - begin for begin, end in sample.turns]
        assert [turn.get("tokens") for turn in said] == ([None] * 2 + ends)[-2:] and [
            "tokens" in t for t in said
        ] == own


def test_the_reward_reads_the_branch_that_ended_last(qwen, tmp_path):
    """A sub-agent begins after the main agent and ends before it; the last word is the main agent's."""
    plan = write_agent(
        tmp_path,
        """
        def run(task):
            first = ask(task, task.messages)
            ask(task, [{"role": "user", "content": "You are a helper."}])
            ask(task, [*task.messages, {"role": "assistant", "content": "I asked."}, {"role": "user", "content": "?"}])
            ask(task, [*task.messages, first, {"role": "user", "content": "So?"}])
            return {}
        """,
    )
    reward = tmp_path / "reads_the_end.py"
    reward.write_text("def score(prompt, messages):\n    return {'solved': float(messages[-1]['content'])}\n")
    group = play(plan, Policy(qwen, ["I ask.", "7", "8", "40"]), reward=str(reward))
    assert [sample.transcript[-1]["content"] for sample in group] == ["40", "7", "8"]
    assert [sample.reward for sample in group] == [2.0 * 40] * 3
    assert measure_counts(group)["rollout/rewritten_fraction"] == 1 / 2, "I asked, and I ask as it was"


FAILURES = {
    "raises": ("def run(task):\n    raise KeyError('map')", r"KeyError: 'map' \(my_agent.py, line \d+\)"),
    "exits": ("def run(task):\n    sys.exit(3)", r"ended its process by sys.exit\(3\)"),
    "dies": ("def run(task):\n    os.kill(os.getpid(), 9)", "the agent's process was killed by SIGKILL"),
    "ends": ("def run(task):\n    os._exit(0)", "ended its process before run"),
    "nonsense": ("def run(task):\n    ask(task, task.messages)\n    return 'well done'", "must return a dict"),
    "not a number": (
        "def run(task):\n    ask(task, task.messages)\n    return {'solved': float('nan')}",
        "must return numbers up to",
    ),
    "asks nothing": ("def run(task):\n    return {'solved': 1.0}", "ended without a reply of the policy"),
    "wrong key": (
        "def run(task):\n    object.__setattr__(task, 'api_key', 'x')\n    ask(task, task.messages)",
        "HTTP Error 401",
    ),
    "wrong model": (
        "def run(task):\n    object.__setattr__(task, 'model', 'x')\n    ask(task, task.messages)",
        "HTTP Error 404",
    ),
    "floods": (
        "def run(task):\n    while True:\n        try:\n            ask(task, task.messages, n=2)\n"
        "        except OSError:\n            pass",
        "200 requests that were refused, the last because: n is 2",
    ),
}


def test_a_harness_that_fails_fails_its_sample_and_no_other(qwen, tmp_path):
    """All in one group: each episode takes the next way to fail, and one takes none."""
    ways = [
        *(text for text, _ in FAILURES.values()),
        "def run(task):\n    ask(task, task.messages)\n    return {'solved': 1}",
    ]
    functions = [text.replace("def run(", f"def run_{i}(") for i, text in enumerate(ways)]
    choose = f"""
def run(task):
    for i in range({len(ways)}):
        try:
            os.mkdir({str(tmp_path)!r} + f"/{{i}}")
        except FileExistsError:
            continue
        return globals()[f"run_{{i}}"](task)
"""
    group = play(
        write_agent(tmp_path, "\n\n".join([*functions, choose])), Policy(qwen, lambda _: "Seven."), size=len(ways)
    )
    failures = [sample.failure for sample in group]
    for name, (_, words) in FAILURES.items():
        found = [failure for failure in failures if re.search(words, failure)]
        assert len(found) == 1, (name, failures)
        assert "\n" not in found[0] and "feynrl-" not in found[0], "one sentence, and no key in it"
    assert sorted(sample.reward is None for sample in group) == [False] + [True] * len(FAILURES)
    assert all(not sample.loss_mask.any() and not sample.reward_parts for sample in group if sample.failure)


def test_a_harness_that_hangs_is_killed_with_all_that_it_has_started(qwen, tmp_path):
    plan = write_agent(
        tmp_path,
        f"""
        def run(task):
            subprocess.Popen(["sleep", "1{MARK}"])
            subprocess.Popen(["sleep", "2{MARK}"], start_new_session=True)
            while True:
                time.sleep(60)
        """,
    )
    [sample] = play(plan, Policy(qwen, ["Seven."]), agent_timeout_s=1.5)
    assert sample.failure == "the agent has not ended after 1.5 s (see rollout.timeout_s)"
    assert sample.reward is None and not sample.loss_mask.any()
    assert not find_processes(f"sleep 1{MARK}") and not find_processes(f"sleep 2{MARK}")


def test_an_agent_that_ends_leaves_nothing_it_has_started(qwen, tmp_path):
    plan = write_agent(
        tmp_path,
        f"""
        def run(task):
            ask(task, task.messages)
            import threading
            threading.Thread(target=time.sleep, args=(600,)).start()
            subprocess.Popen(["sleep", "3{MARK}"], start_new_session=True)
            subprocess.Popen(["sleep", "4{MARK}"], start_new_session=True, env=dict(PATH=os.environ["PATH"]))
            return dict(solved=1)
        """,
    )
    [sample] = play(plan, Policy(qwen, ["Seven."]))
    assert sample.reward == 2.0
    assert not find_processes(f"sleep 3{MARK}") and not find_processes(f"sleep 4{MARK}")


@pytest.mark.parametrize("starts_thread", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lazy_imports_of_the_first_episode_are_made_before_later_forks(qwen, tmp_path, monkeypatch, starts_thread):
    """Those of packages that the file has imported: once in the first episode, once in the launcher."""
    (tmp_path / "big").mkdir()
    count = f"open({str(tmp_path)!r} + '/' + __name__, 'a').write('x')\n"
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "big/__init__.py").touch()
    (tmp_path / "big/part.py").write_text(count + thread * starts_thread)
    (tmp_path / "stranger.py").write_text(count)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    plan = write_agent(
        tmp_path,
        """
        import big

        def run(task):
            from big import part
            import stranger
            ask(task, task.messages)
            return {"solved": 1}
        """,
    )
    samples = play(plan, Policy(qwen, lambda context: "Seven."), groups=4)
    assert [sample.failure for sample in samples] == [""] * 4
    assert (tmp_path / "stranger").read_text() == "xxxx"
    # an interpreter of its own for each later episode, if the module starts a thread
    assert (tmp_path / "big.part").read_text() == ("xxxxx" if starts_thread else "xx")


def test_imports_that_start_threads_get_a_fresh_interpreter_per_episode(qwen, tmp_path):
    plan = write_agent(
        tmp_path,
        """
        import threading
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

        def run(task):
            ask(task, task.messages)
            return {"solved": float(threading.active_count())}
        """,
    )
    [sample] = play(plan, Policy(qwen, ["Seven."]))
    assert sample.reward_parts["solved"] == 2.0, "the thread runs there"


COMMAND = """
import sys, os
task = json.load(sys.stdin)
assert task["base_url"] == os.environ["OPENAI_BASE_URL"] and "answer" not in task
print("what a harness prints is its own", flush=True)
from types import SimpleNamespace
said = ask(SimpleNamespace(**task), task["messages"])
mode = sys.argv[1]
if mode == "fails":
    print("it hurts", file=sys.stderr)
    sys.exit(5)
with os.fdopen(3, "w") as file:
    file.write({"good": json.dumps({"solved": 0.25}), "nonsense": "good", "silent": "", "list": "[1]"}[mode])
"""


@pytest.mark.parametrize(
    ("mode", "failure"),
    [
        ("good", ""),
        ("fails", "the agent's process exited with code 5: it hurts"),
        ("nonsense", "the agent wrote 'good' to file descriptor 3, where one line such as"),
        ("silent", "the agent wrote nothing to file descriptor 3"),
        ("list", "the agent must return a dict of named numbers, it returned [1]"),
    ],
)
def test_a_command_gets_its_task_as_json_and_returns_a_line(qwen, tmp_path, mode, failure):
    script = tmp_path / "harness.py"
    script.write_text(ASK + COMMAND)
    plan = resolve_agent(AgentConfig(command=[sys.executable, str(script), mode]))
    [sample] = play(plan, Policy(qwen, ["Seven."]))
    assert sample.failure.startswith(failure) and bool(sample.failure) == bool(failure)
    assert sample.reward == (0.5 if mode == "good" else None)


BROKEN = {
    "no run": ("x = 1", "must define a function run"),
    "no syntax": ("def run(task)", "cannot be imported"),
    "ends the process": ("import os\nos._exit(3)", "ended the process that imported it"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_agent_that_cannot_be_used_is_refused_before_the_run(tmp_path, name):
    file = tmp_path / "my_agent.py"
    file.write_text(BROKEN[name][0])
    with pytest.raises(UserError, match=BROKEN[name][1]):
        check_agent(resolve_agent(AgentConfig(file=str(file))))
    assert not find_processes("rollouts.agents.launcher")


def test_a_program_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"rollout\.agent\.command: there is no program no_such"):
        resolve_agent(AgentConfig(command=["no_such"]))
    with pytest.raises(UserError, match=r"rollout\.agent\.file: there is no file"):
        resolve_agent(AgentConfig(file="no_such.py"))


def test_a_row_that_json_cannot_hold_names_itself(qwen, tmp_path):
    plan = write_agent(tmp_path, "def run(task):\n    return {}")
    with pytest.raises(UserError, match="row p: a column cannot be given to an agent as JSON"):
        play(plan, Policy(qwen, []), prompt=replace(PROMPT, extra={"when": {1, 2}}))


def test_an_error_of_several_tasks_is_named_by_the_first():
    try:
        raise ExceptionGroup("two", [ValueError("inner"), KeyError("x")])
    except ExceptionGroup as group:
        assert describe_error(group, __file__).startswith("ValueError: inner")


TAKE_PLACE = """
    def place(folder):
        for i in range(99):
            try:
                os.mkdir(f"{folder}/{i}")
            except FileExistsError:
                continue
            return i
"""


def test_what_an_agent_prints_is_bounded_and_its_end_is_kept(qwen, tmp_path, capfd):
    plan = write_agent(
        tmp_path,
        r"""
        def run(task):
            ask(task, task.messages)
            print("\x1b]0;owned\x07 red \x1b[31m \x9b \u202e back\rhidden", flush=True)
            os.write(2, b"stopped: \xff\0 half of a character\n")
            os.write(1, b"y" * 2**22)
            for i in range(60_000):
                os.write(2, b"%d: " % i + b"x" * 50 + b"\n")
            print("the end\x1b[0m", task.api_key, file=sys.stderr)
            return {"solved": 1.0}
        """,
    )
    [sample] = play(plan, Policy(qwen, ["Seven."]))
    assert sample.reward == 2.0, sample.failure
    shown = capfd.readouterr().err
    assert r"\x1b]0;owned\x07 red \x1b[31m \x9b \u202e back\rhidden" in shown and r"\xff\x00 half" in shown
    assert "more of this episode is not shown" in shown and len(shown) < output.SHOWN_OF_LOG + 500
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert sample.log.endswith("the end\\x1b[0m ***") and "59999: xxx" in sample.log
    assert len(sample.log) <= output.KEPT_OF_LOG + 100 and make_sample_record(sample, 0)["log"] == sample.log


def test_what_an_agent_printed_is_kept_where_it_had_to_be_killed(qwen, tmp_path, capfd):
    plan = write_agent(
        tmp_path,
        """
        import threading

        def print_for_ever():
            while True:
                os.write(2, b"again and again\\n" * 4096)

        def run(task):
            threading.Thread(target=print_for_ever, daemon=True).start()
            while True:
                try:
                    ask(task, task.messages, n=2)
                except OSError:
                    pass
        """,
    )
    [sample] = play(plan, Policy(qwen, ["Seven."]))
    assert "requests that were refused" in sample.failure
    assert "again and again\n" * 50 in sample.log and len(capfd.readouterr().err) < output.SHOWN_OF_LOG + 500


def test_an_agent_that_kills_its_parent_fails_its_own_episode(qwen, tmp_path, capfd):
    """One kills its parent, one all of its ancestors below the worker; a third comes when they are dead."""
    plan = write_agent(
        tmp_path,
        TAKE_PLACE
        + f"""
    def parent_of(pid):
        return int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])

    def wait_for(n):
        while not os.path.exists({str(tmp_path)!r} + f"/{{n}}"):
            time.sleep(0.01)

    def run(task):
        mine = place({str(tmp_path)!r})
        wait_for(3)
        if mine == 0:
            os.kill(os.getppid(), 9)
        if mine == 1:
            subprocess.Popen(["sleep", "7" + os.environ["TEST_OF_AGENTS"]], start_new_session=True)
            os.kill(os.getppid(), 15)
        if mine == 2:
            os.kill(parent_of(os.getppid()), 9)
            os.mkdir({str(tmp_path)!r} + "/killed")
        if mine == 3:
            wait_for("killed")
        ask(task, task.messages)
        return {{"solved": 1.0}}
        """,
    )
    group = play(plan, Policy(qwen, lambda _: "Seven."), size=4, agent_timeout_s=40.0)
    failures = [sample.failure for sample in group if sample.failure]
    assert len(failures) == 2 and {*failures} == {
        "the agent, or a process that it has started, killed the process that watches over the episode"
    }
    assert sum(sample.reward == 2.0 for sample in group) == 2
    assert not find_processes("sleep 7")


def test_a_launcher_that_was_killed_is_started_again(qwen, tmp_path, capfd):
    plan = write_agent(
        tmp_path,
        TAKE_PLACE
        + f"""
    def run(task):
        if place({str(tmp_path)!r}) == 0:
            stat = open(f"/proc/{{os.getppid()}}/stat").read()
            os.kill(int(stat.rpartition(")")[2].split()[1]), 9)
        ask(task, task.messages)
        return {{"solved": 1.0}}
        """,
    )
    groups = play(plan, Policy(qwen, lambda _: "Seven."), groups=2)
    assert [sample.failure for sample in groups] == ["", ""]
    assert "was killed, and is started again" in capfd.readouterr().err


WORKER = """import asyncio, sys
from configs.rollout_schema import AgentConfig
from rollouts.agents.processes import AgentProcesses
from rollouts.agents.task import Task
from rollouts.registry import resolve_agent

agents = AgentProcesses(resolve_agent(AgentConfig(file=sys.argv[1])))
task = Task(base_url="http://127.0.0.1:9", api_key="k", model="policy", messages=[])
asyncio.run(agents.run(task, timeout_s=60.0, log=bytearray()))
"""


@pytest.mark.slow
def test_agents_end_with_a_worker_that_is_killed(tmp_path):
    write_agent(
        tmp_path,
        f"""
        def run(task):
            subprocess.Popen(["sleep", "9" + os.environ["TEST_OF_AGENTS"]], start_new_session=True)
            os.mkdir({str(tmp_path / "begun")!r})
            time.sleep(60)
        """,
    )
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "my_agent.py")], cwd=ROOT)
    try:
        wait_until((tmp_path / "begun").exists)
        assert find_processes("rollouts.agents.launcher") and find_processes("sleep 9")
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: not find_processes("rollouts.agents.launcher") and not find_processes("sleep 9"), within_s=10.0)


def test_a_launcher_without_an_episode_ends_without_a_traceback():
    own, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.send(b"{}")
    workers.close()  # which has not read it
    with own:
        Launcher(own, {"serve": True}, None, has_threads=False).serve()
