"""Harbor's environment in a box that plays a script: what it asks of the box, and what each end means."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.agent_schema import TIMEOUTS
from core.types.samples import Prompt
from rewards.sandbox.base import SandboxUnavailable
from rollouts.boxes.base import LIMITS, BoxSpec
from rollouts.boxes.harbor_task import NoReward, check_network, read_task
from rollouts.envs import harbor
from rollouts.envs.harbor import Harbor, find_fault, find_image, find_task, shorten_middle
from rollouts.row_timeout import find_timeout
from rollouts.tools.calls import ToolUnavailable
from unit_tests.helpers.episodes import calls_of, said
from unit_tests.helpers.scripted_box import Scripted, ran
from unit_tests.helpers.sentences import tell

TOML = """[environment]
docker_image = "debian@sha256:1"
cpus = 3
memory_mb = 100
storage_mb = 7
workdir = "/src"
[environment.env]
A = "b"
[agent]
timeout_sec = 12
[verifier]
timeout_sec = 34
[verifier.env]
PATH = "/mine"
ENV = "x"
"""


@pytest.fixture
def task(tmp_path) -> Path:
    for name, text in {"instruction.md": "Do it.", "task.toml": TOML, "tests/test.sh": "t", "tests/a/b": "c"}.items():
        (tmp_path / "task" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "task" / name).write_text(text)
    return tmp_path / "task"


@pytest.fixture
def opened(monkeypatch):
    """Return a function that makes an environment of boxes, and the list of what was opened."""
    specs: list[tuple[str, BoxSpec]] = []

    def make(task: Path, *boxes: Scripted, of: type[Harbor] = Harbor, **extra: Any) -> Harbor:
        left = list(boxes)

        async def open_box(backend: str, spec: BoxSpec) -> Any:
            specs.append((backend, spec))
            return left.pop(0)

        monkeypatch.setattr(harbor, "open_box", open_box)
        return of(Prompt(id="r", messages=[], extra={"task": str(task), **extra}))

    return make, specs


def play(env: Harbor, *commands: str) -> list[Any]:
    async def go() -> list[Any]:
        try:
            assert await env.open() == []
            told = [await env.step(calls_of(("bash", {"command": one}))) for one in commands]
            await env.end()
            return [one and one[0]["content"] for one in told]
        finally:
            await env.close()

    return asyncio.run(go())


LOGS = {"verifier/": b"", "agent/": b"", "artifacts/": b""}
QUIET = {"HOME": "/logs/home", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"} | dict.fromkeys(
    ["BASH_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP"], ""
)
VERIFIED = [
    "stop",
    ("/tests", {"test.sh": b"t", "a/b": b"c"}),
    ("/logs", LOGS | {"home/": b""}),
    ("bash", "/tests/test.sh", 34, QUIET | {"PATH": "/mine", "ENV": "x"}),
    ("/logs/verifier/reward.json", 65536),
    ("/logs/verifier/reward.txt", 65536),
]
REWARD = {"/logs/verifier/reward.json": b'{"reward": 1, "n": 2}'}


def test_an_episode_asks_the_box_for_this_and_nothing_else(task, opened):
    make, specs = opened
    box = Scripted(ran(b"a\n", seconds=2.0), ran(b"b\n", code=3, seconds=9.5), ran(), files=REWARD)
    env = make(task, box, timeout_s=99)
    assert play(env, "ls", "cat") == ["a\n", "b\n\n(exit code 3)"]
    assert box.asked == [("/logs", LOGS), ("bash", "-c", "ls", 12), ("bash", "-c", "cat", 10.0), *VERIFIED]
    limits = replace(LIMITS, memory_mib=100, disk_mib=7)
    spec = BoxSpec(image="debian@sha256:1", limits=limits, cpus=3, environment={"A": "b"}, folder="/src")
    assert specs == [("bubblewrap", spec)] and box.closed == 1
    assert env.scores() == {"reward": 1.0, "n": 2.0} and env.tool_timeout_s == 120.0
    assert env.counts()[TIMEOUTS] == 0.0 and env.counts()["tool_calls"] == 2.0
    assert asyncio.run(env.step(said("Done."))) is None


class Mine(Harbor):
    backend, network, command_s, most_characters, on_timeout = "podman", True, 5.0, 10, "fail"


def test_a_subclass_has_its_own_boxes_times_and_lengths(task, opened):
    make, specs = opened
    box = Scripted(ran(b"x" * 11), ran(b"y" * 10), ran(), files={"/logs/verifier/reward.txt": b"0.5"})
    env = make(task, box, of=Mine, image="other")
    assert play(env, "ls", "ls") == ["xxxxx\n... 1 characters are left out ...\nxxxxx", "y" * 10]
    assert [specs[0][0], specs[0][1].image, specs[0][1].network] == ["podman", "other", True]
    assert box.asked[1] == ("bash", "-c", "ls", 5.0) and env.tool_timeout_s == 65.0 and env.scores() == {"reward": 0.5}


USED_UP = "the time of the task is used up"


def test_a_policy_that_has_used_its_time_is_scored_or_fails(task, opened):
    make, _ = opened
    for seconds in (12.0, 13.0):
        box = Scripted(ran(b"late", seconds=seconds), ran(), files=REWARD)
        env = make(task, box)
        assert play(env, "sleep") == [None] and env.over == USED_UP
        assert env.scores() == {"reward": 1.0, "n": 2.0} and env.counts()[TIMEOUTS] == 1.0
        assert asyncio.run(env.bash("ls")) == f"error: nothing was run, since {USED_UP}"
    failing = make(task, Scripted(ran(seconds=12.0)), of=Mine)
    assert tell(lambda: play(failing, "x"), NoReward) == f"the episode ended early: {USED_UP}"
    for lower in (4, 12.5):
        box = Scripted(ran(seconds=3.9), ran(), files=REWARD)
        play(make(task, box, timeout_s=lower), "x")
        assert box.asked[1] == ("bash", "-c", "x", min(lower, 12))


def test_a_box_that_breaks_is_the_policys_doing_once_it_has_run_a_command(task, opened):
    make, _ = opened
    env = make(task, box := Scripted("too many files"))
    assert play(env, "x") == [None] and env.scores() == {} and env.over == "too many files"
    assert box.asked[-1] == ("bash", "-c", "x", 12) and env.counts()[TIMEOUTS] == 1.0, "no verifier"
    begun = make(task, box := Scripted(broken_by_put="gone"))
    assert tell(lambda: play(begun), SandboxUnavailable) == "a box of task cannot be used: gone" and box.closed == 1
    env = make(task, box := Scripted())

    async def end_broken() -> None:
        await env.open()
        box.broken = "gone"
        await env.end()

    early = "the box failed before the first command: gone"
    assert tell(lambda: asyncio.run(end_broken()), NoReward) == early
    # a command that is refused is none that was run
    assert asyncio.run(env.bash("a\0")) == "error: nothing was run, since the command contains a NUL character"
    assert tell(lambda: asyncio.run(env.end()), NoReward) == early
    down = make(task, Scripted(SandboxUnavailable("no daemon")))
    assert tell(lambda: play(down, "x"), ToolUnavailable) == "no daemon"


LATE = "the verifier of task was killed for its time"
SILENT = "it wrote neither reward.json nor reward.txt to /logs/verifier; it printed 'so'"


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (Scripted(ran(), ran(killed_for="time")), LATE),
        (Scripted(ran(), ran(b" so\n")), f"the verifier of task failed: {SILENT}"),
    ],
)
def test_a_policy_that_spoils_the_verifier_gets_nothing(task, opened, spoilt, why):
    make, specs = opened
    again = Scripted(ran(), files=REWARD)
    env = make(task, spoilt, again)
    play(env, "x")
    assert env.scores() == {} and env.over == why and env.counts()[TIMEOUTS] == 1.0
    assert specs[0] == specs[1] and (spoilt.closed, again.closed) == (1, 1)
    assert again.asked == [("/logs", LOGS), *VERIFIED]


def test_a_verifier_that_fails_by_itself_fails_the_sample(task, opened):
    make, _ = opened
    boxes = Scripted(ran(), ran(killed_for="time")), Scripted(ran(killed_for="output"))
    assert tell(lambda: play(make(task, *boxes), "x"), NoReward) == LATE
    assert [box.closed for box in boxes] == [1, 1]
    for results, why in (
        ((ran(killed_for="time"),), LATE),
        ((ran(b" so\n"),), f"the verifier of task failed: {SILENT}"),
    ):
        untouched = make(task, box := Scripted(*results))
        assert tell(lambda env=untouched: play(env), NoReward) == why and box.closed == 1
    full = make(task, box := Scripted(ran(), broken_by_put=""), Scripted(broken_by_put="full"))
    box.results.append(ran())

    async def spoil() -> None:
        await full.open()
        await full.bash("x")
        box.broken_by_put = "full"
        await full.end()

    assert tell(lambda: asyncio.run(spoil()), SandboxUnavailable) == "a box of task cannot be used: full"


KILLED = [
    ("time", "it took longer than 2.5 s"),
    ("memory", "it took more than 100 MiB of memory"),
    ("output", "it printed more than 1048576 bytes"),
    ("files", "the box has more than 50000 files"),
    ("disk", "the box has more than 7 MiB of files"),
]


def test_a_result_is_shown_with_the_reason_of_its_end(task):
    env = Harbor(Prompt(id="r", messages=[], extra={"task": str(task)}))
    for reason, why in KILLED:
        for stdout, before in ((b"", ""), (b"a", "a\n")):
            shown = env.describe(ran(stdout, code=None, killed_for=reason), 2.5)
            assert shown == f"{before}error: the command was killed, because {why}"
    result = replace(ran(b"a\xff", code=1), stderr=b"b")
    assert env.describe(result, 1.0) == "a\ufffdb\n(exit code 1)"
    assert [env.describe(ran(code=code), 1.0) for code in (0, 2)] == ["", "(exit code 2)"]
    cut = "\n... {} characters are left out ...\n"
    for text, most, found in (("abcd", 4, "abcd"), ("abcde", 4, f"ab{cut}de".format(1)), ("abc", 1, cut.format(3))):
        assert shorten_middle(text, most) == found


def test_commands_that_the_kernel_refuses_are_told():
    longer = "the command is longer than 120000 bytes: write it to a file in pieces"
    for command, why in (("é" * 60_000, ""), ("é" * 60_000 + "a", longer), ("\ud800", "the command is no valid text")):
        assert find_fault(command) == why


def test_columns_of_a_row_are_read_or_refused_whole(task):
    def of(**extra: Any) -> Prompt:
        return Prompt(id="r", messages=[], extra=extra)

    bare = replace(read_task(task), image="")
    assert find_image(of(image="x"), read_task(task)) == "x" and find_image(of(), read_task(task)) == "debian@sha256:1"
    for image in (None, 3):
        assert tell(lambda image=image: find_image(of(image=image), bare)) == (
            "rollout.env=harbor: the row r names no image, and task.toml no docker_image: build the image of "
            "environment/Dockerfile, and name it in the column image"
        )
    for folder in (None, "", 3, ["a" * 99]):
        assert tell(lambda folder=folder: find_task(of(task=folder))) == (
            "rollout.env=harbor: the row r must have the folder of a task in its column task, found "
            f"{folder!r:.60}; python -m data_prep.harbor writes such rows"
        )
    assert [find_timeout(of(timeout_s=one)) for one in (None, 3, 0.5)] == [float("inf"), 3.0, 0.5]
    for wrong in (0, -1, True, float("inf"), "1"):
        assert tell(lambda wrong=wrong: find_timeout(of(timeout_s=wrong))) == (
            f"row r: timeout_s is {wrong!r}: give a number of seconds above 0"
        )
    wants = replace(bare, network=True)
    check_network(wants, allowed=True)
    check_network(bare, allowed=False)
    assert tell(lambda: check_network(wants, allowed=False)) == (
        f"the task {task} has allow_internet = true: leave it out, or subclass Harbor with network = True (and give "
        "--network to data_prep.harbor)"
    )


def test_a_task_that_wants_the_network_is_refused_by_boxes_without_it(task, opened):
    make, specs = opened
    (task / "task.toml").write_text(TOML.replace("[environment]\n", "[environment]\nallow_internet = true\n"))
    refused = tell(lambda: play(make(task)))
    assert refused.startswith(f"the task {task} has allow_internet = true: leave it out") and specs == []
    play(make(task, Scripted(ran(), files=REWARD), of=Mine))
    assert [spec.network for _, spec in specs] == [True]


def test_boxes_that_do_not_exist_are_told_before_the_run():
    class Elsewhere(Harbor):
        backend = "lxc"

    told = "there are no boxes of lxc: choose one of bubblewrap, podman, docker, apptainer"
    assert tell(Elsewhere.check) == told


def test_a_verifier_without_a_path_of_its_own_has_that_of_the_box(task, opened):
    make, _ = opened
    (task / "task.toml").write_text(TOML.partition("[verifier.env]")[0])
    play(make(task, box := Scripted(ran(), files=REWARD)))
    assert ("bash", "/tests/test.sh", 34, QUIET | {"ENV": "", "PATH": "/bin"}) in box.asked


def test_tests_that_do_not_fit_into_the_box_are_the_policys_doing(task, opened):
    make, _ = opened
    env = make(task, box := Scripted(ran()), again := Scripted(ran(), files=REWARD))

    async def spoil() -> None:
        await env.open()
        await env.bash("fill")
        box.broken_by_put = "full"
        await env.end()

    asyncio.run(spoil())
    assert env.over == "the tests cannot be copied into the box: full"
    assert env.scores() == {} and again.closed == 1


HALVES = "\ufffd" + "b" * 149 + "\n... 1 characters are left out ...\n" + "b" * 150


@pytest.mark.parametrize(("printed", "shown"), [(b"a" * 300, "a" * 300), (b"\xff" + b"b" * 300, HALVES)])
def test_of_what_a_failed_verifier_printed_300_characters_are_shown(task, opened, printed, shown):
    make, _ = opened
    told = tell(lambda: play(make(task, Scripted(ran(printed)))), NoReward)
    assert told == f"the verifier of task failed: {SILENT.replace(repr('so'), repr(shown))}"


class Slow(Scripted):
    """Box that notes when a command begins and ends."""

    async def run(self, command: Any, *, seconds: float, environment: Any = None) -> Any:
        self.asked.append(f"begin {command[-1]}")
        await asyncio.sleep(0)
        self.asked.append(f"end {command[-1]}")
        return ran()


def test_the_commands_of_one_reply_run_one_after_the_other(task, opened):
    make, _ = opened
    env = make(task, box := Slow())

    async def go() -> None:
        await env.open()
        await env.step(calls_of(("bash", {"command": "a"}), ("bash", {"command": "b"})))

    asyncio.run(go())
    assert box.asked[1:] == ["begin a", "end a", "begin b", "end b"]


def test_a_policy_sees_4000_characters_of_what_a_command_prints(task):
    env = Harbor(Prompt(id="r", messages=[], extra={"task": str(task)}))
    assert env.describe(ran(b"x" * 4000), 1.0) == "x" * 4000
    half = "x" * 2000
    assert env.describe(ran(b"x" * 4001), 1.0) == f"{half}\n... 1 characters are left out ...\n{half}"
