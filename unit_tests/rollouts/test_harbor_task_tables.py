"""Tasks in Harbor's format and files of verifiers: what is read, and whole sentences of what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.boxes.harbor_task import NoReward, read_rewards, read_task
from unit_tests.helpers.sentences import tell


@pytest.fixture
def task(tmp_path) -> Path:
    for name, text in {"instruction.md": "Do it.", "task.toml": "", "tests/test.sh": "t", "tests/a/b": "c"}.items():
        (tmp_path / "task" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "task" / name).write_text(text)
    return tmp_path / "task"


REFUSED = [
    *((f"[environment]\n{name} = 1", f"{{}} asks for environment.{name}") for name in ("gpus", "mcp_servers")),
    *((f"[environment]\n{name} = 1", f"{{}} asks for environment.{name}") for name in ("healthcheck", "skills_dir")),
    ("[[steps]]\nname = 'a'", "{} asks for steps"),
    ("[verifier]\nenvironment_mode = 'separate'", "{} asks for verifier.environment_mode"),
    ("[verifier]\nenvironment_mode = 'shared'\n[environment]\ngpus = 0", ""),
]


@pytest.mark.parametrize(("toml", "sentence"), REFUSED)
def test_a_task_that_asks_for_more_than_a_box_is_left_out(task, toml, sentence):
    (task / "task.toml").write_text(toml)
    if not sentence:
        assert read_task(task).instruction == "Do it."
        return
    rest = ", which boxes do not give: leave the task out"
    assert tell(lambda: read_task(task)) == f"the task {sentence.format(task)}{rest}"


@pytest.mark.parametrize("name", ["docker-compose.yaml", "docker-compose.yml"])
def test_a_task_with_services_beside_it_is_left_out(task, name):
    (task / "environment").mkdir()
    (task / "environment" / name).touch()
    asks = f"the task {task} asks for {name}, which boxes do not give: leave the task out"
    assert tell(lambda: read_task(task)) == asks


WRONG = {
    "agent.timeout_sec = 0": "/task.toml: agent.timeout_sec is 0, where a number above 0 is expected",
    "verifier.timeout_sec = 'x'": "/task.toml: verifier.timeout_sec is 'x', where a number above 0 is expected",
    "environment.memory_mb = inf": "/task.toml: environment.memory_mb is inf, where a number above 0 is expected",
    "environment.memory = '5'": "/task.toml: environment.memory is '5': write environment.memory_mb alone, a number",
    "environment.storage = '1G'\nenvironment.storage_mb = 3": "/task.toml: environment.storage is '1G': write "
    "environment.storage_mb alone, a number",
    'environment.workdir = "a\\u0000"': "/task.toml: environment.workdir is 'a\\x00', where a text without NUL is "
    "expected",
    "environment.env = [1]": "/task.toml: environment.env must be a table, found [1]",
    "environment.env.A = '${FEYNRL_NONE}'": "/task.toml needs the environment variable FEYNRL_NONE: set it",
    "verifier.env.'A=' = 3": "/task.toml: verifier.env sets the variable A= to 3: a name may not be empty nor have =, "
    "*, spaces or NUL, and the value may have no NUL and no broken characters",
    "agent = 3": "/task.toml: agent must be a table, found 3",
}


@pytest.mark.parametrize("toml", WRONG)
def test_a_wrong_value_of_a_task_is_a_whole_sentence(task, toml):
    (task / "task.toml").write_text(toml)
    assert tell(lambda: read_task(task)) == f"{task}{WRONG[toml]}"


def test_links_of_a_task_stay_in_it(task, tmp_path, monkeypatch):
    (task / "tests" / "in").symlink_to(task / "instruction.md")
    (task / "solution").symlink_to(tmp_path / "none")  # the box gets none of it
    assert read_task(task).list_tests() == {"a/b": b"c", "in": b"Do it.", "test.sh": b"t"}
    (task / "tests" / "a" / "out").symlink_to(tmp_path / "none")
    leaves = f"the task {task} has the link tests/a/out, which leaves the task"
    assert tell(lambda: read_task(task)) == leaves
    monkeypatch.chdir(tmp_path)
    assert tell(lambda: read_task(Path("task"))) == leaves.replace(str(task), "task")
    assert tell(lambda: read_task(tmp_path)) == (
        f"the task {tmp_path} has no tests/test.sh, so it is no task of Harbor's format"
    )
    (tmp_path / "task" / "tests").rename(tmp_path / "tests")
    task.joinpath("tests").symlink_to(tmp_path / "tests")
    assert tell(lambda: read_task(task)) == f"the task {task} has the link tests, which leaves the task"


NO_NUMBERS = "its reward.json has no finite numbers, it has {}"
NOTHING = "it wrote neither reward.json nor reward.txt to /logs/verifier"


@pytest.mark.parametrize(
    ("as_json", "as_text", "found"),
    [
        (b'{"a": 1, "b": true, "c": "d"}', None, {"a": 1.0}),
        (b'{"a": 1}', b"0.5", {"a": 1.0, "reward": 0.5}),
        (b'{"reward": 0.5}', b"0.509", {"reward": 0.5}),
        (b"2", None, {"reward": 2.0}),
        (None, b"1e2\n", {"reward": 100.0}),
        (None, None, NOTHING),
        (None, b"", "its reward.txt must be a finite number, it has ''"),
        (None, b"nan", "its reward.txt must be a finite number, it has 'nan'"),
        (b"1", b"x\xff", "its reward.txt must be a finite number, it has 'x\ufffd'"),
        (b"0.5", b"0.52", "its reward.json and reward.txt differ"),
        (b"true", None, NO_NUMBERS.format("'true'")),
        (b'{"a": 1, "b": Infinity}', None, NO_NUMBERS.format('\'{"a": 1, "b": Infinity}\'')),
        (b"x" * 99, b"1", NO_NUMBERS.format("'" + "x" * 79)),
    ],
)
def test_files_of_a_verifier_are_numbers_or_a_sentence(as_json, as_text, found):
    if isinstance(found, dict):
        assert read_rewards(as_json, as_text) == found
    else:
        assert tell(lambda: read_rewards(as_json, as_text), NoReward) == found


def test_the_largest_difference_of_the_two_files_is_a_hundredth():
    assert read_rewards(b"0", b"0.01") == {"reward": 0.0}
    assert tell(lambda: read_rewards(b"0", b"0.0101"), NoReward) == "its reward.json and reward.txt differ"


def test_a_number_beyond_the_largest_float_is_none():
    huge = b"1" + b"0" * 400
    assert tell(lambda: read_rewards(huge, None), NoReward) == NO_NUMBERS.format(repr(huge.decode())[:80])
    assert tell(lambda: read_rewards(None, b"1e999"), NoReward) == (
        "its reward.txt must be a finite number, it has '1e999'"
    )
