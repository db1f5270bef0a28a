"""Agents that print without end, and agents that kill what has started them: the other episodes do not notice."""

from __future__ import annotations

from driver.records.sample_files import make_sample_record
from rollouts.agents import output
from unit_tests.helpers.scripted_policy import Policy
from unit_tests.rollouts.test_agents import _marked, find_processes, play, write_agent

__all__ = ["_marked"]  # every test here needs this fixture too

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
