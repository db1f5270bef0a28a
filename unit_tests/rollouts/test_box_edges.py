"""Edges of bubblewrap's boxes that need no sandbox: folders, paths, links, limits, and a start that is cancelled."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rewards.sandbox import SandboxUnavailable
from rewards.sandbox.base import Limits
from rollouts.boxes import BoxSpec, bubblewrap, check_boxes, open_box
from rollouts.boxes.base import WRITABLE, Box, is_below
from rollouts.boxes.bubblewrap import remove_tree
from unit_tests.helpers.boxes import within
from unit_tests.helpers.sentences import tell


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder with the files of an image."""
    for name in ("bin/sh", "bin/prlimit", "bin/env", "bin/setpriv", "app/given"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).touch()
    return tmp_path / "root"


@pytest.fixture
def places(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files."""
    (tmp_path / "places").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "places"))
    return tmp_path / "places"


SYSTEM = ["bin", "boot", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr", "var"]


@pytest.mark.parametrize("name", SYSTEM)
def test_no_folder_of_the_system_is_a_working_folder(root, places, name):
    call = open_box("bubblewrap", BoxSpec(image=str(root), folder=f"/{name}/x"))
    assert tell(lambda: asyncio.run(call)) == (
        f"the working folder /{name}/x is read-only in a box of bubblewrap: choose /app or /workspace, or use podman"
    )
    assert [*places.iterdir()] == []


@pytest.mark.parametrize(("folder", "more"), [("", []), ("/opt/x/y", ["opt"]), ("/app/x", [])])
def test_a_box_has_the_folders_that_it_may_write_and_no_other(root, places, folder, more):
    async def look(box: Box) -> None:
        [home] = places.iterdir()
        assert home.name.startswith("box-") and not home.name.startswith("box-removed-")
        assert sorted(path.name for path in home.iterdir()) == sorted([*WRITABLE, *more])
        assert (home / folder.lstrip("/")).is_dir() and (home / "app/given").is_file()

    within(BoxSpec(image=str(root), folder=folder), look)
    assert [*places.iterdir()] == []


def test_a_path_through_a_link_to_the_policys_files_comes_last(root, places):
    (root / "opt").mkdir()
    (root / "opt" / "venv").symlink_to("/app/venv")

    async def look(box: Box) -> str:
        return box.path

    spec = BoxSpec(image=str(root), environment={"PATH": "/opt/venv/bin:/opt/tools:/usr/bin"})
    early = "/opt/tools:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin:/bin"
    assert within(spec, look) == f"{early}:/opt/venv/bin"


def test_an_empty_folder_may_be_deep_and_links_and_pipes_are_not_read(root, places):
    async def use(box: Box) -> list[bytes | None]:
        await box.put("/tests", {"x/y/": b"", "a": b"12"})
        [home] = places.iterdir()
        (home / "tests" / "l").symlink_to("a")
        (home / "tests" / "d").symlink_to("x")
        os.mkfifo(home / "tests" / "p")
        (home / "tests" / "x" / "z").write_bytes(b"3")
        assert (home / "tests" / "x" / "y").is_dir()
        return [await box.get(f"/tests/{name}", most=1) for name in ("a", "x/z", "l", "d/z", "p", "p/x", "x/y")]

    assert within(BoxSpec(image=str(root)), use) == [b"1", b"3", None, None, None, None, None]


class Held(ThreadPoolExecutor):
    """Threads for calls, of which the second one waits for `go`."""

    def __init__(self) -> None:
        super().__init__(4)
        self.n_calls, self.go = 0, threading.Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.n_calls += 1
        return super().submit(self.call_late if self.n_calls == 2 else self.call, fn, *args, **kwargs)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def call_late(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.go.wait(60)
        return fn(*args, **kwargs)


def test_a_box_whose_start_is_cancelled_is_removed_once_it_is_filled(root, places):
    async def go() -> None:
        asyncio.get_running_loop().set_default_executor(held := Held())
        opening = asyncio.create_task(open_box("bubblewrap", BoxSpec(image=str(root))))
        while held.n_calls < 2:
            await asyncio.sleep(0.001)
        opening.cancel()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not opening.done(), "a thread still fills its folder"
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(go())
    assert [*places.iterdir()] == []


def test_a_tree_is_removed_without_a_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    for name in ("top/a/b", "top/c/d", "top/e"):
        (tmp_path / name).mkdir(parents=True)
    remove_tree(tmp_path / "top")
    assert [*tmp_path.iterdir()] == []


def test_a_box_has_these_limits_unless_its_task_has_others():
    spec = BoxSpec(image="x")
    sizes = {"memory_mib": 2048, "disk_mib": 1024, "file_mib": 256, "output_bytes": 2**20}
    numbers = {"files": 50_000, "processes": 128, "open_files": 1024}
    assert spec.limits == Limits(seconds=10.0, **sizes, **numbers)
    assert (spec.cpus, spec.network, spec.environment, spec.folder) == (1, False, {}, "")


@pytest.mark.parametrize(
    ("folder", "below"),
    [
        ("/opt/a/../app/x", False),
        ("/opt/a/../../app/x", True),
        ("/opt/a/../b/../app", False),
        ("/opt/a/../..", True),
        ("/opt/./app", False),
        ("/./app", True),
    ],
)
def test_a_step_up_leaves_one_folder(folder, below):
    assert is_below(folder, ["app"]) is below


@pytest.mark.parametrize("backend", ["bubblewrap", "podman"])
def test_variables_of_a_box_are_checked_before_its_start(backend):
    call = open_box(backend, BoxSpec(image="i", environment={"A=": "x"}))
    told = tell(lambda: asyncio.run(call))
    assert told.startswith("a box sets the variable A= to x: a name may not be empty nor have =")


def test_a_machine_without_bubblewrap_is_told_what_to_install(places, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    told = tell(lambda: check_boxes("bubblewrap"))
    assert told.startswith("bubblewrap, the sandbox for code, is not installed: `apt install bubblewrap`")
    assert [*places.iterdir()] == []


def test_a_machine_that_cannot_start_a_box_is_told_why(places, monkeypatch):
    class Refusing:
        async def check(self) -> None:
            pass

        async def open(self, *command: Any, **how: Any) -> Any:
            raise SandboxUnavailable("no room")

    monkeypatch.setattr(bubblewrap, "Bubblewrap", Refusing)
    told = tell(lambda: check_boxes("bubblewrap"))
    assert told.startswith("bubblewrap is installed and cannot make a sandbox here (no room): allow user namespaces")
    assert [*places.iterdir()] == []
