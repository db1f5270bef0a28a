"""Tasks in Harbor's format: ten that run here, what verifiers may write, and whose fault an episode's end is."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.agent_schema import TIMEOUTS
from core.errors import UserError
from core.types.samples import Prompt
from data_prep import boxed_tasks, harbor
from rollouts.boxes.harbor_task import HarborTask, NoReward, read_rewards, read_task
from rollouts.envs.harbor import Harbor, find_fault
from unit_tests.helpers.agents import play as play_policy
from unit_tests.helpers.episodes import calls_of
from unit_tests.helpers.needs_sandbox import needs_sandbox
from unit_tests.helpers.scripted_policy import Policy, say_calls

pytestmark = pytest.mark.one_core


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The columns of each task."""
    return {row.id: json.loads(row.extra or "") for row in boxed_tasks.make(tmp_path_factory.mktemp("boxed"))}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


async def play(extra: dict[str, Any], *commands: str, of: type[Harbor] = Harbor) -> tuple[Harbor, list[str]]:
    """Play an episode; return the environment and the messages."""
    env, told = of(Prompt(id="row", messages=[], extra=extra)), list[str]()
    try:
        await env.open()
        for command in commands:
            answers = await env.step(calls_of(("bash", {"command": command})))
            told += [message["content"] for message in answers or []]
            if answers is None:
                break
        await env.end()
    finally:
        await env.close()
    return env, told


@needs_sandbox
@pytest.mark.slow
def test_reference_solutions_solve_all_ten_and_empty_ones_none(rows):
    async def run() -> dict[str, list[float]]:
        found = {}
        for name, extra in rows.items():
            solution = (Path(extra["task"]) / "solution" / "solve.sh").read_text()
            found[name] = [(await play(extra, *commands))[0].scores()["reward"] for commands in ([solution], [])]
        return found

    assert asyncio.run(run()) == {name: [1.0, 0.0] for name in boxed_tasks.TASKS} and len(rows) == 10


@needs_sandbox
def test_the_policy_sees_bounded_output_and_cannot_write_its_own_reward(rows):
    fake = "cd /logs/verifier; echo 1 | tee reward.txt > reward.json; echo 'echo 1' > /tests/test.sh; false"
    env, told = asyncio.run(play(rows["count-lines"], "seq 99999", fake, "cat /solution/solve.sh; kill -9 $$"))
    assert len(told[0]) < 4100 and told[0].startswith("1\n2\n") and told[0].endswith("99999\n")
    assert "characters are left out" in told[0] and told[1] == "(exit code 1)"
    assert "No such file" in told[2] and "exit code 137" in told[2]
    for command, why in (("#" * 130_000, "longer than"), ("a\0b", "NUL"), ("\ud800", "no valid text")):
        assert why in find_fault(command)
    assert env.scores() == {"reward": 0.0} and env.counts()[TIMEOUTS] == 0.0
    assert asyncio.run(play(rows["set-port"], "sed -i s/80/8080/ server.conf"))[0].scores() == {
        **{"reward": 1.0, "port": 1.0, "kept": 1.0}
    }


@needs_sandbox
@pytest.mark.slow
def test_an_episode_of_a_policy_is_exact(rows, qwen):
    """What is trained on is what the policy saw and said, to the token, and the verifier's number is the reward."""
    policy = Policy(qwen, [say_calls("", ("bash", {"command": "wc -l < trees.txt | tee count.txt"})), "Done."])
    prompt = Prompt(id="row", messages=[{"role": "user", "content": "How many?"}], extra=rows["count-lines"])
    [sample] = play_policy(Harbor, policy, prompt=prompt, part="reward", max_prompt_tokens=600)
    assert sample.failure == "" and sample.reward_parts["reward"] == 1.0 and sample.reward == 2.0
    (_, first), (context, last) = policy.log
    assert sample.token_ids.tolist() == [*context, *last]
    assert [sample.token_ids[begin:end].tolist() for begin, end in sample.spans] == [first, last]
    told = "<tool_response>\n7\n\n</tool_response>"
    assert f"<|im_end|>\n<|im_start|>user\n{told}<|im_end|>\n<|im_start|>assistant\n" in qwen.hf.decode(context)


class Failing(Harbor):
    on_timeout = "fail"


BROKEN = {
    # what the policy does: (command, columns, scores, reason)
    "time": (
        "wc -l < trees.txt > count.txt; sleep 60",
        {"timeout_s": 0.5},
        {"reward": 1.0},
        "time of the task is used",
    ),
    "disk": (
        "for i in $(seq 9); do head -c 20000000 /dev/zero > $i; done; sleep 9",
        {},
        {},
        "more than 64 MiB of files",
    ),
}


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN)
def test_a_policy_that_uses_up_its_time_or_breaks_its_box_is_scored(rows, kind):
    command, columns, scores, reason = BROKEN[kind]
    extra = rows["count-lines"] | columns
    env, told = asyncio.run(play(extra, command, "echo never > /app/count.txt"))
    # the answer is not shown, for the episode is over
    assert told == [] and reason in env.over and env.scores() == scores and env.counts()[TIMEOUTS] == 1.0
    with pytest.raises(NoReward, match=f"the episode ended early: .*{reason}"):
        asyncio.run(play(extra, command, of=Failing))


def change(extra: dict[str, Any], folder: Path, **files: str) -> dict[str, Any]:
    """A copy of a task with other files."""
    shutil.copytree(extra["task"], folder / "task")
    for name, text in files.items():
        (folder / "task" / {"test": "tests/test.sh", "toml": "task.toml"}[name]).write_text(text)
    return extra | {"task": str(folder / "task")}


FAULTS = {
    # of the verifier: (its script, the sentence)
    "hang": ("sleep 60", "the verifier of task was killed for its time"),
    "no reward": ("echo oh no", "wrote neither reward.json nor reward.txt to /logs/verifier; it printed 'oh no'"),
    "death": ("kill -9 $$", "wrote neither"),
    "garbage": ("echo '{\"reward\": ' > /logs/verifier/reward.json", "reward.json has no finite numbers"),
    "wrong schema": ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json', "reward.json has no finite numbers"),
    "no number": ("echo yes > /logs/verifier/reward.txt", "reward.txt must be a finite number, it has 'yes"),
}


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_verifier_that_fails_is_a_sentence_and_no_score(rows, tmp_path, fault):
    script, sentence = FAULTS[fault]
    settings = boxed_tasks.SETTINGS.replace("60.0", "0.3" if fault == "hang" else "60.0")
    extra = change(rows["count-lines"], tmp_path, test=script, toml=settings)
    with pytest.raises(NoReward, match=sentence):
        asyncio.run(play(extra, "true"))


DODGES = {
    # what the policy's program does when the tests run it
    "forge": "echo 1 > /logs/verifier/reward.json; false",
    "garbage": "echo x > /logs/verifier/reward.json",
    "kill": "kill -9 $PPID",
    "hang": "exec sleep 60",
}


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("dodge", DODGES)
def test_a_policy_that_breaks_the_verifier_gets_0_and_not_another_try(rows, tmp_path, dodge):
    test = "if bash greet.sh; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
    extra = change(rows["mend-script"], tmp_path, test=test, toml=boxed_tasks.SETTINGS.replace("60.0", "3.0"))
    env, _ = asyncio.run(play(extra, f"echo '{DODGES[dodge]}' > greet.sh"))
    assert env.scores() == {} and env.counts()[TIMEOUTS] == 1.0 and env.over


@needs_sandbox
def test_a_verifier_starts_no_program_and_reads_no_settings_of_the_policy(rows, tmp_path):
    test = "echo ${#BASH_ENV} $PYTHONSAFEPATH $(ls -A ~ | wc -l) > /app/said; echo 0 > /logs/verifier/reward.txt"
    toml = boxed_tasks.SETTINGS + "[environment.env]\nPATH = '/app:/usr/bin'\nBASH_ENV = '/app/rc'\n"
    extra = change(rows["count-lines"], tmp_path, test=test, toml=toml)

    async def run() -> bytes | None:
        env = Harbor(Prompt(id="row", messages=[], extra=extra))
        await env.open()
        try:
            assert await env.bash("echo $PATH") == "/app:/usr/bin\n"
            await env.bash("echo 'echo 1 > /logs/verifier/reward.json' | tee rc bash > ~/.bashrc; chmod +x bash")
            await env.end()
            assert env.scores() == {"reward": 0.0}
            return await env.box.get("/app/said", most=99)
        finally:
            await env.close()

    assert asyncio.run(run()) == b"0 1 0\n"


def test_what_a_verifier_may_write():
    assert read_rewards(b"0.25", b"0.2500") == {"reward": 0.25}
    assert read_rewards(b'{"a": 2, "ok": true}', b"1") == {"a": 2.0, "reward": 1.0}
    for wrong in (b"NaN", b"[1]", b"{}", b"[" * 9999, b"9" * 9999, b"1e999", b"\xff"):
        with pytest.raises(NoReward):
            read_rewards(wrong, None)
    with pytest.raises(NoReward, match="finite number"):
        read_rewards(None, b"inf")
    with pytest.raises(NoReward, match=r"reward\.json and reward\.txt differ"):
        read_rewards(b"1", b"0")


def test_a_difference_of_the_two_files_is_borne_up_to_a_hundredth():
    assert read_rewards(b"0.5", b"0.5099") == {"reward": 0.5}
    for text in (b"0.5101", b"0.4899"):
        with pytest.raises(NoReward, match="differ"):
            read_rewards(b"0.5", text)
    assert read_rewards(None, b" 0.5\n") == read_rewards(b'{"reward": 0.5}', None) == {"reward": 0.5}


ALL_SETTINGS = """[environment]
docker_image = "debian@sha256:1"
cpus = 1.5
memory = "1.5G"
storage_mb = 64.0
workdir = "/src"
allow_internet = true
env = {A = "${FEYNRL_GIVEN}/a", B = "${FEYNRL_LACKING:-b}", C = 3}
[agent]
timeout_sec = 12
[verifier]
timeout_sec = 0.5
env = {D = "${FEYNRL_GIVEN:-d}"}
"""
DEFAULTS = {
    **{"image": "", "cpus": 1, "memory_mib": 2048, "disk_mib": 10240, "work_folder": "", "network": False},
    **{"environment": {}, "agent_s": None, "verifier_s": 600.0, "verifier_environment": {}},
}
READ = {
    **{"image": "debian@sha256:1", "cpus": 2, "memory_mib": 1536, "disk_mib": 64, "work_folder": "/src"},
    **{"network": True, "environment": {"A": "here/a", "B": "b", "C": "3"}, "agent_s": 12, "verifier_s": 0.5},
    **{"verifier_environment": {"D": "here"}},
}


def write_task(folder: Path, instruction: str, toml: str) -> None:
    for name, text in {"instruction.md": instruction, "task.toml": toml, "tests/test.sh": "t"}.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(("toml", "settings"), [("", DEFAULTS), (ALL_SETTINGS, READ)], ids=["none", "all"])
def test_the_settings_of_a_task_are_read(tmp_path, monkeypatch, toml, settings):
    monkeypatch.setenv("FEYNRL_GIVEN", "here")
    (tmp_path / "tests" / "data").mkdir(parents=True)
    for name, text in {
        "instruction.md": "Do it.",
        "task.toml": toml,
        "tests/test.sh": "t",
        "tests/data/x": "y",
    }.items():
        (tmp_path / name).write_text(text)
    task = read_task(tmp_path)
    assert task == HarborTask(folder=tmp_path, instruction="Do it.", **settings)
    assert task.list_tests() == {"data/x": b"y", "test.sh": b"t"}


@pytest.mark.parametrize(
    ("size", "mib"),
    [("2048K", 2), ("512 MB", 512), ("1.5GiB", 1536), ("1g", 1024), ("1k", 1), ("5", None), ("5T", None)],
)
def test_sizes_of_older_tasks_are_read(tmp_path, size, mib):
    (tmp_path / "tests").mkdir()
    for name, text in {
        "instruction.md": "",
        "tests/test.sh": "",
        "task.toml": f"environment.memory = {size!r}",
    }.items():
        (tmp_path / name).write_text(text)
    if mib is None:
        with pytest.raises(UserError, match=f"environment.memory is '{size}': write environment.memory_mb alone"):
            read_task(tmp_path)
    else:
        assert read_task(tmp_path).memory_mib == mib


WRONG_TASKS = [
    ("[environment]\ngpus = 1", "asks for environment.gpus, which boxes do not give"),
    ("[verifier]\nenvironment_mode = 'separate'", "asks for verifier.environment_mode"),
    ("[[steps]]\nname = 'a'", "asks for steps"),
    ("[agent]\ntimeout_sec = -1", "agent.timeout_sec is -1, where a number above 0"),
    ("[environment.env]\nA = '${NO_SUCH_VARIABLE}'", "needs the environment variable NO_SUCH_VARIABLE"),
    ("[environment]\nmemory = '1G'\nmemory_mb = 1", "environment.memory is '1G': write environment.memory_mb alone"),
    ("[environment]\nworkdir = 3", "environment.workdir is 3, where a text without NUL is expected"),
    ("[environment]\nenv = 3", "environment.env must be a table, found 3"),
    ("[environment]\ncpus = true", "environment.cpus is True, where a number above 0"),
    ("[environment]\ncpus = inf", "environment.cpus is inf, where a number above 0"),
    ("[environment]\ndocker_image = 'debian:13'", "docker_image debian:13 has no digest"),
    ("[environment]\nallow_internet = true", "has allow_internet = true: leave it out"),
    ("environment = 3", "environment must be a table"),
    ("what?", "task.toml cannot be read"),
]


@pytest.mark.parametrize("toml, words", WRONG_TASKS)
def test_a_task_that_boxes_cannot_run_is_named(rows, tmp_path, toml, words):
    extra = change(rows["count-lines"], tmp_path, toml=toml)
    with pytest.raises(UserError, match=words):
        harbor.make_row(Path(extra["task"]), "row", "", network=False)
    made, invalid = harbor.make(tmp_path)
    assert made == [] and words in str(invalid) and invalid.looked_at == 1


def test_rows_without_a_task_or_an_image_are_refused(rows, tmp_path):
    for extra, words in (
        ({}, "must have the folder of a task in its column task"),
        (rows["count-lines"] | {"timeout_s": "1"}, "timeout_s is '1': give a number"),
        (rows["count-lines"] | {"timeout_s": 10**400}, "timeout_s is 1000"),
        ({"task": str(tmp_path)}, "has no tests/test.sh"),
        ({"task": rows["count-lines"]["task"]}, "names no image, and task.toml no docker_image"),
    ):
        with pytest.raises(UserError, match=words):
            asyncio.run(play(extra))
    task = read_task(Path(rows["count-lines"]["task"]))
    assert (task.memory_mib, task.disk_mib, task.agent_s, task.verifier_s) == (512, 64, 120.0, 60.0)
    task = read_task(Path(change(rows["count-lines"], tmp_path)["task"]))
    (task.folder / "tests" / "l").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="has the link tests/l, which leaves the task"):
        read_task(task.folder)
    with pytest.raises(UserError, match=r"there is no task\.toml below it"):
        harbor.make(tmp_path / "none")
