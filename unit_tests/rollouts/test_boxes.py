"""Boxes: files that stay, limits that hold, links that lead nowhere, images that match their digest."""

from __future__ import annotations

import asyncio
import os
import socket
import tarfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from core.errors import UserError
from core.types.samples import Prompt
from data_prep.boxed_tasks import ETC, TASKS, write_harbor_task
from data_prep.boxed_tasks import PROGRAMS as NEEDED
from data_prep.oci_image import LINKS, collect_programs, write_image, write_layer
from rewards.sandbox import Limits, SandboxUnavailable
from rollouts.boxes import BoxSpec, check_boxes
from rollouts.boxes.base import PATH, Box, order_path
from rollouts.boxes.containers import read_archive, run_program, write_archive
from rollouts.boxes.images import prepare_image
from rollouts.boxes.programs import PROGRAMS
from rollouts.envs.harbor import Harbor
from unit_tests.helpers.boxes import sh, within
from unit_tests.helpers.needs_sandbox import needs_sandbox
from unit_tests.helpers.processes import leftovers

pytestmark = pytest.mark.one_core

SMALL = Limits(memory_mib=256, disk_mib=8, file_mib=6, files=60, processes=32)
HIDDEN = f"sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def programs() -> bytes:
    return write_layer(collect_programs(NEEDED) | ETC, LINKS)


@pytest.fixture(scope="module")
def image(tmp_path_factory, programs) -> str:
    folder = tmp_path_factory.mktemp("image")
    layers = [programs, write_layer({"app/given.txt": b"given\n"})]
    return f"{folder}@{write_image(folder, layers, work_folder='/app')}"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@needs_sandbox
def test_files_of_a_box_stay_and_processes_and_boxes_do_not(image, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def use(box: Box) -> list[str]:
        said = [await sh(box, "cat given.txt; echo mine > given.txt; (sleep 613 &) ; pwd; umask")]
        await box.put("/tests", {"deep/a.sh": b"echo tested", "empty/": b""})
        said += [await sh(box, "cat given.txt; sh /tests/deep/a.sh; ls /tests; echo no > /usr/bin/x; mkdir /new")]
        said += [await sh(box, "mkdir -p /app/shut/in; touch /app/shut/in/x; chmod 000 /app/shut; echo $A")]
        assert await box.get("/app/given.txt", most=3) == b"min"
        return said

    first, second, third = within(BoxSpec(image=image, environment={"A": "b c"}), use)
    assert first.startswith("given\n/app\n")
    assert second.startswith("mine\ntested\ndeep\nempty\n") and second.count("ead-only file system") == 2, second
    assert third == "b c\n"
    assert leftovers("613") == [] and [*tmp_path.iterdir()] == []
    # the image has not changed
    assert within(BoxSpec(image=image), lambda box: sh(box, "cat given.txt")) == "given\n"


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize(
    "command, reason, broken",
    [
        ("sleep 60", "time", ""),
        ("for i in 1 2 3; do dd if=/dev/zero of=/tmp/$i bs=1M count=4; done; sleep 60", "disk", "more than 8 MiB"),
        ("for i in $(seq 99); do : > /home/$i; done; sleep 60", "files", "more than 60 files"),
        # ended before anybody looked
        ("for i in $(seq 99); do : > /home/$i; done", "", "more than 60 files"),
        ("seq 9999999", "output", ""),
    ],
)
def test_a_limit_ends_a_command_and_one_that_stays_the_box(image, command, reason, broken):
    async def use(box: Box) -> str:
        said = await sh(box, command, seconds=0.3 if reason == "time" else 20.0)
        assert broken in box.broken and bool(broken) == bool(box.broken)
        return said

    assert within(BoxSpec(image=image, limits=SMALL), use).endswith(f"[{reason}]" if reason else "")


@needs_sandbox
def test_there_is_a_network_only_if_asked(image):
    with socket.create_server(("127.0.0.1", 0)) as server:
        call = f"exec 5<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && echo reached"

        async def use(box: Box) -> bytes:
            return (await box.run(["bash", "-c", call], seconds=20)).stdout

        assert within(BoxSpec(image=image), use) == b""
        assert within(BoxSpec(image=image, network=True), use) == b"reached\n"


@needs_sandbox
def test_links_and_pipes_of_a_policy_lead_nowhere(image, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")

    async def use(box: Box) -> None:
        await box.put("/logs", {"verifier/": b""})
        links = f"ln -s {secret} /logs/a; ln -s {tmp_path} /logs/b; mkfifo /logs/c || exit; mkdir /logs/d; id -u"
        user = await sh(box, links)
        assert int(user.split()[-1]) > 0
        for path in ("/logs/a", "/logs/b/secret", "/logs/c", "/logs/d", "/logs/e", "/logs/e/f"):
            assert await box.get(path, most=9) is None, path
        # a link in the place of a folder is replaced, and what it leads to stays
        await sh(box, f"rm -r /logs/verifier; ln -s {tmp_path} /logs/verifier; ln -s {tmp_path} /tests/x")
        await box.put("/logs", {"verifier/x": b"new"})
        await box.put("/tests", {})
        assert await box.get("/logs/verifier/x", most=9) == b"new" and not (tmp_path / "x").exists()

    within(BoxSpec(image=image), use)
    assert secret.read_text() == "secret"


@needs_sandbox
def test_files_of_the_image_do_not_count_and_hidden_ones_do(programs, tmp_path):
    layers = [programs, write_layer({f"app/{n}": b"" for n in range(99)})]
    spec = BoxSpec(image=f"{tmp_path}@{write_image(tmp_path, layers, work_folder='/app/made')}", limits=SMALL)

    async def use(box: Box) -> None:
        assert await sh(box, "echo a > x; cat /dev/stdin < x; bash -c 'cat <(echo b)'") == "a\nb\n"
        assert box.broken == ""
        # deeper than a path can be
        await sh(box, f"for i in $(seq 30); do mkdir {'d' * 200}; cd {'d' * 200}; done", seconds=20)
        assert "more than" in box.broken
        await box.put("/app", {"y": b"new"})
        assert await box.get("/app/y", most=9) == b"new"

    within(spec, use)


@pytest.mark.parametrize(
    "folder, words", [("app", "absolute path"), ("/app/../../x", "absolute"), ("/app/l/x", "link")]
)
def test_a_working_folder_outside_of_the_box_is_refused(tmp_path, folder, words):
    for name in ("sh", "prlimit", "env", "setpriv"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).touch()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "l").symlink_to("/tmp")
    with pytest.raises(UserError, match=words):
        within(BoxSpec(image=str(tmp_path), folder=folder), lambda box: sh(box, "true"))


@needs_sandbox
def test_a_root_folder_and_this_machine_are_images_too(image, tmp_path):
    root = prepare_image(image).root
    assert root is not None
    assert within(BoxSpec(image=str(root)), lambda box: sh(box, "pwd; ls /app")) == "/\ngiven.txt\n"
    said = within(BoxSpec(image="host", folder="/workspace/a"), lambda box: sh(box, "pwd; awk 'BEGIN {print 7}'; ls /"))
    assert said.startswith("/workspace/a\n7\n") and "etc" in said and "usr" in said


def make_tar(*members: tuple[str, bytes | str]) -> bytes:
    """A layer; text is the target of a link, or of a hard link after "="."""
    written = BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type = tarfile.LNKTYPE if content.startswith("=") else tarfile.SYMTYPE
                entry.linkname = content.removeprefix("=")
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, BytesIO(content))
    return written.getvalue()


BINARIES = [(f"bin/{name}", b"") for name in ("sh", "prlimit", "env", "setpriv")]


def unpacked(folder: Path, *layers: bytes) -> Path:
    root = prepare_image(f"{folder}@{write_image(folder, layers, work_folder='/')}").root
    assert root is not None
    return root


def test_layers_cover_and_delete_what_is_below(tmp_path):
    below = make_tar(("./", b""), *BINARIES, ("a/x", b"1"), ("a/y", b"2"), ("b/z", b"3"), ("c", b"4"), ("d", "a"))
    above = make_tar(("a/.wh.x", b""), ("b/.wh..wh..opq", b""), ("b/new", b"5"), ("c", b"6"), (".wh.d", b""))
    root = unpacked(tmp_path, below, above)
    files = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}
    assert {name: text for name, text in files.items() if text} == {"a/y": "2", "b/new": "5", "c": "6"}
    assert not (root / "d").is_symlink()


@pytest.mark.parametrize(
    "members, words",
    [
        ([("../../x", b"1")], "has the file ../../x, which is outside"),
        ([("l", "/tmp"), ("l/x", b"1")], "has the file l/x, which is outside"),
        ([("a/..", b"")], "has the file a/.., which is outside"),
        ([(".wh.", b"")], "has the file .wh., which is outside"),
        ([(".wh..", b"")], "has the file .wh.., which is outside"),
        ([(".wh...", b"")], "has the file .wh..., which is outside"),
        ([("l", "=../../../../../../../../etc/passwd")], "has the link l to a file outside"),
        ([("bin/sh", b"")], "has no prlimit: add the packages"),
    ],
)
def test_an_image_that_would_write_elsewhere_or_lacks_a_program_is_refused(tmp_path, members, words):
    with pytest.raises(UserError, match=words):
        unpacked(tmp_path, make_tar(*members))


def test_an_image_that_is_not_what_its_digest_says_is_refused(tmp_path):
    digest = write_image(tmp_path, [make_tar(*BINARIES, ("x", b"1"))], work_folder="/")
    for name, words in {
        str(tmp_path): f"must name its digest: write {tmp_path}@DIGEST with one of {digest}",
        f"{tmp_path}@{HIDDEN}": "No such file or directory.: copy it again",
        f"{tmp_path / 'blobs'}@{HIDDEN}": "has no file oci-layout, so it has no digest",
        "debian:13": "is no folder: bubblewrap needs an OCI folder",
    }.items():
        with pytest.raises(UserError, match=words):
            prepare_image(name)
    manifest = (tmp_path / "blobs" / digest.replace(":", "/")).read_text()
    layer = manifest.split('"layers"')[1].split('"digest": "')[1].split('"')[0]
    (tmp_path / "blobs" / layer.replace(":", "/")).write_bytes(make_tar(("x", b"2")))
    with pytest.raises(UserError, match=f"is damaged: .*{layer.partition(':')[2]} has the digest"):
        prepare_image(f"{tmp_path}@{digest}")


SPEC = BoxSpec(image=f"debian@{HIDDEN}", environment={"A": "b"}, folder="/app", limits=SMALL)
IN_CONTAINERS = (
    "--init --name box --label feynrl=box --network none --security-opt no-new-privileges --memory 256m --memory-swap "
    "256m --cpus 1 --pids-limit 32 --ulimit fsize=6291456 --ulimit nofile=256 --ulimit nproc=32768 "
    f"--storage-opt size=8m --env A --workdir /app --entrypoint sleep debian@{HIDDEN} 86400"
)
LINES: dict[str, dict[str, str]] = {
    **{
        name: {
            "start": f"{name} run --detach {IN_CONTAINERS}",
            "run": f"{name} exec --env C --workdir /x box ls -l",
            "remove": f"{name} exec --user 0 --env PATH={PATH} --workdir / box rm -rf /x",
            "put": f"{name} cp - box:/",
            "get": f"{name} cp box:/logs/a -",
            "look": f"{name} container inspect --format {{{{.State.Running}}}} box",
            "restart": f"{name} restart -t 0 box",
            "end": f"{name} kill box; {name} rm --force --volumes box",
        }
        for name in ("podman", "docker")
    },
    "apptainer": {
        "start": "apptainer instance start --containall --no-home --writable-tmpfs --no-privs --net --network none "
        f"--memory 256M --memory-swap 0 --cpus 1 --pids-limit 32 --pwd /app debian@{HIDDEN} box",
        "run": "apptainer exec --cleanenv --pwd /x instance://box ls -l",
        "remove": "apptainer exec --cleanenv --pwd / instance://box rm -rf /x",
        "put": "apptainer exec --cleanenv instance://box tar -xf - -C /",
        "get": "apptainer exec --cleanenv instance://box tar -cf - -C / logs/a",
        "look": "apptainer exec --cleanenv instance://box true",
        "restart": "apptainer exec --cleanenv instance://box sh -c kill -KILL -1 || :",
        "end": "apptainer instance stop --signal KILL box",
    },
}


@pytest.mark.parametrize("name", LINES)
def test_the_command_lines_are_those_of_the_manuals(name, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    program = PROGRAMS[name]
    found = {
        "start": program.start("box", SPEC, limit_disk=True),
        "run": program.run("box", ["ls", "-l"], folder="/x", environment={"C": "d"}),
        "remove": program.remove("box", "/x"),
        "put": program.put("box"),
        "get": program.get("box", "/logs/a"),
        "look": program.look("box"),
        "restart": program.restart("box"),
    }
    lines = {verb: " ".join(words) for verb, words in found.items()}
    assert lines | {"end": "; ".join(" ".join(words) for words in program.end("box"))} == LINES[name]
    assert program.names_digest(SPEC.image) and not program.names_digest("debian:13")


class InPodman(Harbor):
    backend = "podman"


PODMAN = """#!/bin/sh
echo "$*" >> "$STATE/calls"
case "$*" in *storage-opt*) [ -z "$XFS" ] || { echo "Error: --storage-opt needs pquota" >&2; exit 125; } ;; esac
case "$1" in
run) [ -z "$FAIL" ] || { echo "Error: $FAIL" >&2; exit 125; }
     mkdir "$STATE/box"; [ -z "$SLOW" ] || exec sleep 60 ;;
container) [ -d "$STATE/box" ] || { echo "Error: no such container" >&2; exit 125; }
      [ -z "$DOWN" ] || { echo "Error: cannot connect" >&2; exit 125; }
      echo true ;;
restart) [ -d "$STATE/box" ] ;;
kill) rm -rf "$STATE/box" ;;
exec) [ -d "$STATE/box" ] || { echo "Error: no container with name or ID" >&2; exit 125; }
      [ -z "$DOWN" ] || { echo "Error: cannot connect" >&2; exit 125; }
      while [ "$1" != "$NAME" ] && [ "${1#feynrl-}" = "$1" ]; do shift; done; shift
      [ "$1" != rm ] || { rm -rf "$STATE/box$3"; exit 0; }
      cd "$STATE/box" && exec "$@" ;;
cp) [ -z "$GONE" ] || { rm -r "$STATE/box"; exit 1; }
    [ -z "$FULL" ] || { echo "Error: no space left on device" >&2; exit 125; }
    if [ "$2" = - ]; then tar -xf - -C "$STATE/box"; else tar -cf - -C "$STATE/box" "${2#*:/}"; fi ;;
esac
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path) -> Path:
    """A program in the place of podman, whose containers are folders."""
    (tmp_path / "podman").write_text(PODMAN)
    (tmp_path / "podman").chmod(0o755)
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_container_keeps_files_and_is_removed(stand_in):
    async def use(box: Box) -> list[Any]:
        await box.put("/tests", {"a/b": b"b", "c/": b""})
        await box.put("/tests", {"a/b": b"d"})
        found = [await sh(box, "cat tests/a/b; echo e > f; exit 3"), await box.get("/f", most=9)]
        return [*found, await box.get("/none", most=9), box.broken]

    check_boxes("podman")
    assert within(SPEC, use, backend="podman") == ["d", b"e\n", None, ""]
    assert not (stand_in / "box").exists() and "rm --force" in (stand_in / "calls").read_text()


def test_a_containers_path_is_read_from_its_image_and_put_in_order(stand_in, monkeypatch):
    async def use(box: Box) -> str:
        return box.path

    given = f"/app/bin:{stand_in.parent}:/usr/bin:/bin"
    monkeypatch.setenv("PATH", given)
    assert within(BoxSpec(image=SPEC.image), use, backend="podman") == order_path(given) != given
    assert within(replace(SPEC, environment={"PATH": "/x:/app"}), use, backend="podman") == f"/x:{PATH}:/app"


def test_a_container_that_ends_is_the_policys_doing_a_dead_daemon_is_not(stand_in, monkeypatch):
    async def slow(box: Box) -> str:
        assert "[time]" in await sh(box, "echo a > f; exec sleep 60", seconds=0.3)
        # what it left running is ended, and the files stay
        assert (stand_in / "calls").read_text().splitlines()[-1].startswith("restart ")
        return await sh(box, "cat f") + box.broken

    async def vanish(box: Box) -> str:
        await sh(box, f"rm -r {stand_in}/box")
        # that is noticed by what comes before the verifier
        await box.stop_processes()
        await box.put("/tests", {"a": b""})
        return box.broken

    async def die(box: Box) -> None:
        monkeypatch.setenv("DOWN", "1")
        await sh(box, "true")

    assert within(SPEC, slow, backend="podman") == "a\n"
    assert within(SPEC, vanish, backend="podman") == "its container has ended"
    with pytest.raises(SandboxUnavailable, match="podman failed: Error: cannot connect"):
        within(SPEC, die, backend="podman")


def test_a_container_that_cannot_take_the_tests_fails_the_sample(stand_in, monkeypatch, tmp_path):
    async def put(box: Box) -> None:
        monkeypatch.setenv("FULL", "1")
        await box.put("/tests", {"a": b""})

    with pytest.raises(SandboxUnavailable, match=r"`podman cp` failed: Error: no space left on device"):
        within(SPEC, put, backend="podman")
    # one that ends before the policy has run anything is no doing of the policy
    monkeypatch.setenv("GONE", "1")
    write_harbor_task(tmp_path / "task", TASKS["count-lines"])
    env = InPodman(Prompt(id="row", messages=[], extra={"task": str(tmp_path / "task"), "image": SPEC.image}))
    with pytest.raises(SandboxUnavailable, match="a box of task cannot be used: its container has ended"):
        asyncio.run(env.open())
    assert not (stand_in / "box").exists()


def test_values_of_variables_are_in_no_command_line(stand_in):
    async def use(box: Box) -> str:
        ran = await box.run(["sh", "-c", "echo $A $B $http_proxy"], seconds=20, environment={"B": "hidden\nsecret"})
        return ran.stdout.decode()

    spec = BoxSpec(image=SPEC.image, environment={"A": "secret", "http_proxy": "shown"})
    assert within(spec, use, backend="podman").startswith("secret hidden secret")
    calls = (stand_in / "calls").read_text()
    assert "secret" not in calls and calls.count("--env A --env http_proxy=shown") == 2


def test_a_storage_without_limits_is_said_once(stand_in, monkeypatch, capfd):
    monkeypatch.setattr("rollouts.boxes.containers.UNLIMITED", set[str]())
    monkeypatch.setenv("XFS", "1")
    for _ in range(2):
        assert within(SPEC, lambda box: sh(box, "echo a"), backend="podman") == "a\n"
    said = "the disk of containers of podman is not limited: Error: --storage-opt needs pquota"
    assert capfd.readouterr().err.splitlines() == [said]
    runs = [call for call in (stand_in / "calls").read_text().splitlines() if call.startswith("run ")]
    assert ["size=8m" in run for run in runs] == [True, False, False]


@pytest.mark.parametrize("storage, reason", [("", "Disk quota exceeded"), ("1", "no space left")])
def test_a_failed_start_leaves_the_limit_of_the_disk_on(stand_in, monkeypatch, storage, reason):
    unlimited = set[str]()
    monkeypatch.setattr("rollouts.boxes.containers.UNLIMITED", unlimited)
    monkeypatch.setenv("XFS", storage)
    monkeypatch.setenv("FAIL", reason)
    with pytest.raises(SandboxUnavailable, match=reason):
        within(SPEC, lambda box: sh(box, "true"), backend="podman")
    # only a storage that knows no limit is tried without one
    limited = ["size=8m" in call for call in (stand_in / "calls").read_text().splitlines() if call.startswith("run ")]
    assert limited == ([True, False] if storage else [True]) and unlimited == set()


def test_a_child_that_keeps_the_output_of_a_killed_program_ends_with_it():
    ran = asyncio.run(run_program(["sh", "-c", "echo a; sleep 614; :"], seconds=1.0, most=9))
    assert ran.killed_for == "time" and ran.stdout == b"a\n" and leftovers("614") == []


def test_a_container_that_starts_too_slowly_is_removed(stand_in, monkeypatch):
    monkeypatch.setenv("SLOW", "1")
    monkeypatch.setattr("rollouts.boxes.containers.BOX_TIMEOUT_S", 1.0)
    with pytest.raises(SandboxUnavailable, match=r"`podman run` failed: no end after 1"):
        within(SPEC, lambda box: sh(box, "true"), backend="podman")
    assert not (stand_in / "box").exists()


def test_an_unknown_backend_and_an_image_without_a_digest_are_refused(monkeypatch):
    with pytest.raises(UserError, match="no boxes of lxc: choose one of bubblewrap, podman, docker, apptainer"):
        check_boxes("lxc")
    with pytest.raises(UserError, match="debian:13 must name its digest"):
        within(BoxSpec(image="debian:13"), lambda box: sh(box, "true"), backend="docker")
    monkeypatch.setenv("PATH", "/nowhere")
    for backend, words in (("podman", "podman is not installed"), ("bubblewrap", "apt install bubblewrap")):
        with pytest.raises(UserError, match=words):
            check_boxes(backend)


def test_an_archive_holds_folders_before_their_files():
    with tarfile.open(fileobj=BytesIO(write_archive("logs", {"a/b/c": b"1", "d/": b""}))) as tar:
        assert tar.getnames() == ["logs", "logs/a", "logs/a/b", "logs/d", "logs/a/b/c"]
    # archives of Apptainer are made by a program of the policy
    bomb = make_tar(("y", b"1"))
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE  # each describes the next
    chain = header.tobuf() * 3000
    for hostile in (bomb, chain, b"\xff" * 5000):
        assert read_archive(hostile, most=9) is None
    assert read_archive(write_archive("x", {"y": b"1"}), most=9) is None and read_archive(b"what?", most=9) is None
