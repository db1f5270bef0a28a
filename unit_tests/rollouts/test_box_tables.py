"""Boxes without a sandbox: their folders, files, commands and variables, by tables."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewards.sandbox.base import Limits, Ran
from rewards.sandbox.bubblewrap import mount_system
from rollouts import boxes
from rollouts.boxes import BoxSpec, bubblewrap, open_box
from rollouts.boxes.base import PATH, check_variables, is_below, order_path
from rollouts.boxes.bubblewrap import BubblewrapBox, make_writable, mount_image, remove_tree
from rollouts.boxes.images import Image, prepare_image
from unit_tests.helpers.sentences import tell

WRITABLE = ["app", "home", "logs", "root", "solution", "tests", "tmp", "workspace"]


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder with the files of an image."""
    top = tmp_path / "root"
    files = {f"bin/{name}": b"" for name in ("sh", "prlimit", "env", "setpriv")}
    files |= {"app/deep/given": b"x" * 5000, "etc/hosts": b"", "etc/passwd": b"", "etc/resolv.conf": b"", "opt/a": b""}
    for name, content in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(content)
    for name in ("dev", "proc", "sys"):
        (top / name).mkdir()
    (top / "lib").symlink_to("usr/lib")
    (top / "home").symlink_to("/elsewhere")
    (top / "etc" / "mtab").symlink_to("/proc/mounts")
    return top


def make_box(root: Path | None, home: Path, **spec: Any) -> BubblewrapBox:
    home.mkdir()
    return BubblewrapBox(
        Image(root=root, folder="/work", environment={"A": "1", "B": "1"}), BoxSpec(image="x", **spec), home
    )


# Bubblewrap ---------------------------------------------------------------------------------------------------


def test_an_images_files_are_shown_one_by_one(root):
    alone = ["--ro-bind", str(root / "app"), "/app", "--ro-bind", str(root / "bin"), "/bin"]
    rest = ["--symlink", "/elsewhere", "/home", "--symlink", "usr/lib", "/lib", "--ro-bind", str(root / "opt"), "/opt"]
    etc = ["--ro-bind", str(root / "etc"), "/etc"]
    assert mount_image(root, set(), network=False) == ["--proc", "/proc", *alone, *etc, *rest]
    empty = ["--perms", "0755", "--dir", "/etc"]
    own = ["--symlink", "/proc/mounts", "/etc/mtab", "--ro-bind", str(root / "etc/passwd"), "/etc/passwd"]
    net = ["--ro-bind-try", *["/etc/resolv.conf"] * 2, "--ro-bind-try", *["/etc/hosts"] * 2]
    shown = mount_image(root, {"app", "home"}, network=True)
    assert shown == ["--proc", "/proc", *alone[3:], *rest[3:], *empty, *own, *net]
    links = ["--ro-bind-try", *["/etc/alternatives"] * 2]
    host = ["--proc", "/proc", *mount_system(), *empty, *links]
    assert mount_image(None, set(), network=False) == host
    assert mount_image(None, set(), network=True) == [*host, *net, "--ro-bind-try", *["/etc/ssl/certs"] * 2]
    bare = root / "opt"
    (bare / "a").unlink()
    assert mount_image(bare, set(), network=True) == ["--proc", "/proc", *empty, *net]
    (bare / "etc").symlink_to("/etc")
    assert tell(lambda: mount_image(bare, set(), network=True)) == (
        f"the image {bare} has a link in the place of /etc, so a box cannot have the network's files there: make it a "
        "folder, or use the box without the network"
    )


def test_a_box_has_copies_of_the_folders_it_may_write(root, tmp_path):
    (root / "app" / "deep" / "given").chmod(0o400)
    (root / "app" / "deep").chmod(0o500)
    (root / "app" / "link").symlink_to("/etc")
    limits = Limits(disk_mib=3, files=5)
    box = make_box(root, home := tmp_path / "home", limits=limits, environment={"B": "2", "PATH": "/work/x:/opt"})
    assert sorted(path.name for path in home.iterdir()) == sorted([*WRITABLE, "work"])
    assert (home / "app/deep/given").read_bytes() == b"x" * 5000 and os.readlink(home / "app/link") == "/etc"
    modes = {name: stat.S_IMODE((home / name).stat().st_mode) for name in ("app", "app/deep", "app/deep/given", "tmp")}
    assert modes == {"app": 0o755, "app/deep": 0o700, "app/deep/given": 0o600, "tmp": 0o1777}
    assert not (home / "home").is_symlink(), "a link of the image is none of the box"
    if os.getuid() == 0:
        assert {path.lstat().st_uid for path in (home, *home.rglob("*"))} == {box._user}
    # nine folders, and deep, given and link
    assert (box._limits.files, box._limits.disk_mib) == (5 + 9 + 3, 4)
    names = sorted([*WRITABLE, "work"])
    binds = [part for name in names for part in ("--bind", str(home / name), f"/{name}")]
    assert [*box._mounts] == [*mount_image(root, {*names}, network=False), *binds]
    assert box._environment == {"PATH": "/work/x:/opt", "HOME": "/root", "LANG": "C.UTF-8", "A": "1", "B": "2"}
    assert box.path == f"/opt:{PATH}:/work/x" and box.broken == ""
    below = make_box(None, tmp_path / "other", folder="/app/a/b")
    assert below._folder == "/app/a/b" and (tmp_path / "other/app/a/b").is_dir() and below.path == PATH


def test_files_go_into_a_box_and_out_of_it(tmp_path):
    box = make_box(None, home := tmp_path / "home")

    async def use() -> None:
        await box.put("/tests", {"old": b"1"})
        await box.put("/tests", {"a/b/c": b"123", "a/d": b"4", "e/": b""})
        assert [str(path.relative_to(home)) for path in sorted((home / "tests").rglob("*"))] == [
            *("tests/a", "tests/a/b", "tests/a/b/c", "tests/a/d", "tests/e")
        ]
        assert stat.S_IMODE((home / "tests/a/b/c").stat().st_mode) == 0o755
        if os.getuid() == 0:
            assert (home / "tests/a/b/c").stat().st_uid == box._user
        (home / "tests/l").symlink_to("a")
        os.mkfifo(home / "tests/p")
        handles = len(os.listdir("/proc/self/fd"))
        found = [await box.get(f"/tests/{name}", most=2) for name in ("a/b/c", "a/d", "a", "l/d", "p", "none", "a/d/x")]
        assert found == [b"12", b"4", None, None, None, None, None] and len(os.listdir("/proc/self/fd")) == handles
        assert tell_wrong(await asyncio.gather(box.put("/tests", {"../x": b""}), return_exceptions=True))
        await box.close()

    def tell_wrong(found: list[Any]) -> bool:
        return str(found[0]) == "'../x' is no name of a file in the sandbox's folder"

    asyncio.run(use())
    assert not home.exists() and [*tmp_path.iterdir()] == []


def test_a_tree_is_removed_whatever_it_holds(tmp_path):
    (outside := tmp_path / "outside").mkdir()
    (outside / "kept").touch()
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "f").touch()
    (top / "link").symlink_to(outside)
    (top / "a" / "b").chmod(0)
    (top / "a").chmod(0)
    for path in (top, tmp_path / "none"):
        remove_tree(path)
    (tmp_path / "l").symlink_to(outside)
    remove_tree(tmp_path / "l")
    assert [*tmp_path.iterdir()] == [outside] and [*outside.iterdir()] == [outside / "kept"]
    (outside / "kept").chmod(0o400)
    outside.chmod(0o500)
    (outside / "l").symlink_to("/etc/passwd")
    before = os.stat("/etc/passwd").st_mode
    make_writable(outside)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (outside, outside / "kept")]
    assert modes == [0o755, 0o600] and os.stat("/etc/passwd").st_mode == before


def test_a_command_starts_in_the_nearest_folder_that_is_left(tmp_path):
    box = make_box(None, home := tmp_path / "home", folder="/app/a/b")
    assert box._find_folder() == "/app/a/b"
    (home / "app/a/b").rmdir()
    assert box._find_folder() == "/app/a"
    (home / "app/a/b").symlink_to("/etc")
    assert box._find_folder() == "/app/a"
    remove_tree(home / "app/a")
    (home / "app/a").touch()
    assert box._find_folder() == "/app"
    remove_tree(home / "app")
    assert box._find_folder() == "/"


class Started:
    """Sandbox that notes what it is to run, and makes a file of this size meanwhile."""

    def __init__(self, home: Path, size: int, stdout: bytes = b"cat\n", stderr: bytes = b"") -> None:
        self.home, self.size, self.asked = home, size, list[Any]()
        self.ran = Ran(exit_code=7, stdout=stdout, stderr=stderr, seconds=1.0, killed_for=None)

    async def open(self, command: list[str], *, limits: Limits, view: Any) -> Started:
        self.asked.append((command, limits, view))
        return self

    async def finish(self, stdin: bytes) -> Ran:
        assert stdin == b""
        if self.size:
            (self.home / "app" / "big").write_bytes(b"x" * self.size)
        return self.ran

    async def check(self) -> None:
        pass


@pytest.mark.parametrize(
    ("size", "files", "broken"),
    [
        (0, 9, ""),
        (3 * 2**20, 9, "the box has more than 2 MiB of files besides the image's"),
        (1, 0, "the box has more than 0 files besides the image's"),
    ],
)
def test_a_command_has_the_boxs_view_and_an_excess_breaks_the_box(tmp_path, monkeypatch, size, files, broken):
    limits, variables = Limits(disk_mib=2, files=files), {"LD_X": "1", "C": "3"}
    box = make_box(None, home := tmp_path / "home", limits=limits, environment={"PATH": "/app"}, network=True)
    sandbox = Started(home, size)
    monkeypatch.setattr(bubblewrap, "Bubblewrap", lambda: sandbox)
    ran = asyncio.run(box.run(["ls", "-l"], seconds=2.5, environment=variables))
    [(command, given, view)] = sandbox.asked
    assert ran is sandbox.ran and command == ["env", "PATH=/app", "LD_X=1", "ls", "-l"] and box.broken == broken
    assert given == replace(box._limits, seconds=2.5) and view.mounts == box._mounts and view.folder == "/work"
    assert view.environment == {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "A": "1", "B": "1", "C": "3"}
    assert view.network is True and view.user == box._user and view.writable == (home,)


@pytest.mark.parametrize(
    ("stdout", "stderr", "said"),
    [(b"cat\n", b"", ""), (b"", b"a\nno\n", "(no)"), (b"dog\n", b"", "(exit code 7)")],
)
def test_a_machine_whose_boxes_say_something_else_is_told(tmp_path, monkeypatch, stdout, stderr, said):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "Bubblewrap", lambda: Started(tmp_path, 0, stdout, stderr))
    if said:
        begin = f"bubblewrap is installed and cannot make a sandbox here {said}: allow user namespaces"
        assert tell(lambda: boxes.check_boxes("bubblewrap")).startswith(begin)
    else:
        boxes.check_boxes("bubblewrap")
    assert [*tmp_path.iterdir()] == []


def test_a_working_folder_that_no_box_can_have_is_a_whole_sentence(root, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (root / "app" / "l").symlink_to("/tmp")
    refused = "the working folder {} of a box must be an absolute path without .."
    for folder, sentence in {
        "app": refused,
        "/app/../x": refused,
        "/usr/x": "the working folder {} is read-only in a box of bubblewrap: choose /app or /workspace, or use podman",
        "/app/l/x": "the working folder {} of a box is below a link of its image",
        "/app/deep/given/x": "the working folder {} of a box cannot be made: File exists",
    }.items():
        call = open_box("bubblewrap", BoxSpec(image=str(root), folder=folder))
        assert tell(lambda call=call: asyncio.run(call)) == sentence.format(folder)
    assert [*(tmp_path / "temporary").iterdir()] == []
    for spec in (BoxSpec(image="a\0"), BoxSpec(image="a", folder="\ud800")):
        told = tell(lambda spec=spec: asyncio.run(open_box("bubblewrap", spec)))
        assert told == (
            f"the image {'a' if spec.folder else repr(spec.image)} or the working folder "
            f"{repr(spec.folder) if spec.folder else ''} is no name of a file"
        )


VARIABLE = (
    "i sets the variable {} to {}: a name may not be empty nor have =, *, spaces or NUL, and the value may have no NUL "
    "and no broken characters"
)


def test_variables_and_paths_of_boxes():
    check_variables({"A": "b c\n=*", "é.-": 3}, "i")
    for name, value in (("", "x"), ("A=", "x"), ("A*", "x"), ("A B", "x")):
        assert tell(lambda name=name, value=value: check_variables({name: value}, "i")) == VARIABLE.format(name, value)
    for value in ("\0", "\ud800"):
        assert tell(lambda value=value: check_variables({"A": value}, "i")) == VARIABLE.format("A", repr(value))
    for folder, below in {
        **{"/": True, "/opt/..": True, "/app": True, "//./app/x": True, "/opt/app": False, "/appx": False},
        **{"/opt/../../app": True, "/a/b/../../c": False},
    }.items():
        assert is_below(folder, ["app"]) is below, folder
    assert order_path("/x:/x:/tmp/a:rel:/y:/tmp/b") == f"/x:/y:{PATH}:/tmp/a:/tmp/b"


@pytest.mark.parametrize(("links", "below"), [(40, False), (41, True)])
def test_links_on_the_way_to_a_folder_are_followed_as_the_kernel_does(tmp_path, links, below):
    for n in range(links):
        (tmp_path / f"l{n}").symlink_to(f"l{n + 1}" if n % 2 else f"/l{n + 1}")
    assert is_below("/l0/bin", ["app"], tmp_path) is below


# Images -------------------------------------------------------------------------------------------------------


def test_an_image_has_the_programs_that_start_a_command(root):
    assert prepare_image(str(root)) == Image(root=root)
    (root / "usr/sbin").mkdir(parents=True)
    for name, needs in (("sh", True), ("env", True), ("prlimit", True), ("setpriv", os.getuid() == 0)):
        (root / "bin" / name).rename(root / "usr" / name)
        if needs:
            lacks = f"the image {root} has no {name}: add the packages dash and util-linux"
            assert tell(lambda: prepare_image(str(root))) == lacks
        (root / "usr/sbin" / name).symlink_to("/usr/busybox")
        assert prepare_image(str(root)).root == root


# Containers ---------------------------------------------------------------------------------------------------
