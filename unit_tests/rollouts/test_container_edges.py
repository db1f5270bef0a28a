"""Edges of boxes in containers: storages without limits, words for what is gone, and what each step is given."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewards.sandbox.base import Ran, SandboxUnavailable
from rollouts.boxes import BoxSpec, containers, open_box
from rollouts.boxes.base import PATH
from rollouts.boxes.containers import BOX_TIMEOUT_S, ContainerBox
from unit_tests.helpers.boxes import within
from unit_tests.helpers.sentences import tell

IMAGE = f"debian@sha256:{'0' * 64}"
SPEC = BoxSpec(image=IMAGE, environment={"PATH": "/bin"})


class Program:
    """Program of containers: notes each command line, and gives each verb its answer, or the next of its answers."""

    def __init__(self) -> None:
        self.answers, self.asked, self.starting, self.most_starting = dict[str, Any](), list[Any](), 0, 0

    async def __call__(self, words: Sequence[str], *, seconds: float, most: int, **more: Any) -> Ran:
        self.asked.append(([*words], seconds, most, more))
        found = self.answers.get(words[1], (0, b""))
        code, said = found.pop(0) if isinstance(found, list) else found
        self.starting += words[1] == "run"
        self.most_starting = max(self.starting, self.most_starting)
        for _ in range(3):
            await asyncio.sleep(0)
        self.starting -= words[1] == "run"
        stdout, stderr = (said, b"") if code == 0 else (b"", said)
        return Ran(exit_code=code, stdout=stdout, stderr=stderr, seconds=3.0, killed_for=None)

    def list_verbs(self) -> list[str]:
        return [words[1] for words, *_ in self.asked]


@pytest.fixture
def program(monkeypatch) -> Program:
    made = Program()
    monkeypatch.setattr(containers, "run_program", made)
    monkeypatch.setattr(containers, "UNLIMITED", {"apptainer"})
    monkeypatch.setattr(containers, "STARTING", asyncio.Semaphore(containers.MOST_STARTS))
    return made


async def leave(box: Any) -> None:
    pass


@pytest.mark.parametrize(
    "said", ["--storage-opt", "Storage Option", "pquota", "project quota", "Btrfs Quota", "not enabled quotas"]
)
def test_a_storage_without_limits_is_known_by_what_its_program_says(program, capfd, said):
    program.answers["run"] = [(125, f"Error: {said} x\n".encode()), (0, b"")]
    within(SPEC, leave, backend="podman")
    assert program.list_verbs() == ["run", "kill", "rm", "run", "kill", "rm"], "the name of a refused one may be left"
    assert ["--storage-opt" in words for words, *_ in program.asked if words[1] == "run"] == [True, False]
    assert capfd.readouterr().err == f"the disk of containers of podman is not limited: Error: {said} x\n"


def test_starts_that_fail_at_the_same_time_tell_of_the_storage_once(program, capfd):
    program.answers["run"] = [(125, b"pquota")] * 2 + [(0, b"")] * 2

    async def go() -> None:
        boxes = await asyncio.gather(*(open_box("docker", SPEC) for _ in range(2)))
        for box in boxes:
            await box.close()

    asyncio.run(go())
    assert program.list_verbs().count("run") == 4
    assert capfd.readouterr().err == "the disk of containers of docker is not limited: pquota\n"


def test_apptainer_is_never_asked_to_limit_the_disk(program):
    program.answers["instance"] = [(0, b""), (0, b"")]
    within(replace(SPEC, image="x.sif"), leave, backend="apptainer")
    assert [words[:3] for words, *_ in program.asked] == [
        ["apptainer", "instance", "start"],
        ["apptainer", "instance", "stop"],
    ]


def test_four_containers_start_at_a_time(program):
    async def go() -> None:
        for box in await asyncio.gather(*(open_box("podman", SPEC) for _ in range(9))):
            await box.close()

    asyncio.run(go())
    assert program.most_starting == 4 and program.list_verbs().count("run") == 9


@pytest.mark.parametrize(
    "said",
    [
        b"Error: No such container: x",
        b"no container with name or ID x",
        b"container \xff is not running",
        b"no instance x",
        b"instance not found",
    ],
)
def test_a_container_that_has_ended_is_known_by_what_any_program_says(program, said):
    program.answers |= {"exec": (3, b""), "container": (125, said)}

    async def use(box: Any) -> str:
        await box.run(["ls"], seconds=1.0)
        return box.broken

    assert within(SPEC, use, backend="podman") == "its container has ended"


def test_each_step_of_a_container_has_its_folder_time_and_variables(program, monkeypatch):
    monkeypatch.setenv("FEYNRL_HERE", "here")
    program.answers |= {"exec": [(0, b"/opt/\xff:/x"), (2, b"")], "container": (0, b"true")}

    async def use(box: Any) -> ContainerBox:
        assert box.path == f"/opt/\ufffd:/x:{PATH}", "the image's"
        await box.run(["ls"], seconds=1.5)
        return box

    box = within(BoxSpec(image=IMAGE, environment={"A": "b"}), use, backend="podman")
    usual = BOX_TIMEOUT_S, 65536
    assert [(words[1], seconds, most) for words, seconds, most, _ in program.asked] == [
        *(("run", *usual), ("exec", *usual), ("exec", 1.5, 2**20), ("container", *usual)),
        *(("kill", *usual), ("rm", *usual)),
    ]
    assert {more["folder"] for *_, more in program.asked} == {box.home}
    started = program.asked[0][3]["variables"]
    assert (started["A"], started["FEYNRL_HERE"]) == ("b", "here")
    assert re.fullmatch("feynrl-[0-9a-f]{16}", box.name)
    assert Path(box.home).name.startswith("box-") and not Path(box.home).exists()


def test_a_file_with_a_wrong_name_is_refused_before_anything_is_removed(program):
    async def use(box: Any) -> str:
        program.asked.clear()
        [error] = await asyncio.gather(box.put("/tests", {"../x": b""}), return_exceptions=True)
        assert program.asked == []
        return str(error)

    assert within(SPEC, use, backend="podman") == "'../x' is no name of a file in the sandbox's folder"


def test_a_box_whose_own_folder_is_gone_closes(program):
    async def use(box: Any) -> None:
        shutil.rmtree(box.home)

    within(SPEC, use, backend="podman")
    assert program.list_verbs() == ["run", "kill", "rm"]


def test_a_box_that_cannot_start_leaves_no_folder(program, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program.answers["run"] = (125, b"Error: no such image\n")
    told = tell(lambda: within(SPEC, leave, backend="podman"), SandboxUnavailable)
    assert told == "`podman run` failed: Error: no such image"
    assert program.list_verbs() == ["run", "kill", "rm"] and [*tmp_path.iterdir()] == []
