"""Images and containers of boxes: what is read, command lines, and whole sentences of what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.oci_image import write_image, write_layer
from rewards.sandbox.base import Limits, Ran, SandboxUnavailable
from rollouts import boxes
from rollouts.boxes import BoxSpec, containers, open_box
from rollouts.boxes.base import PATH
from rollouts.boxes.containers import ContainerBox, find_reason, list_parents, read_archive, write_archive
from rollouts.boxes.images import prepare_image
from rollouts.boxes.programs import PROGRAMS
from unit_tests.helpers.sentences import tell

BINARIES = {f"bin/{name}": b"" for name in ("sh", "prlimit", "env", "setpriv")}


def add(folder: Path, content: object) -> str:
    """Add a table to an OCI folder; return the digest."""
    raw = json.dumps(content).encode()
    name = hashlib.sha256(raw).hexdigest()
    (folder / "blobs" / "sha256" / name).write_bytes(raw)
    return f"sha256:{name}"


@pytest.fixture
def oci(tmp_path, monkeypatch) -> tuple[Path, dict[str, Any]]:
    """An OCI folder, and the manifest of the image in it."""
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "image"
    digest = write_image(folder, [write_layer(BINARIES | {"app/x": b"1"})], work_folder="/app")
    return folder, json.loads((folder / "blobs" / digest.replace(":", "/")).read_text())


def test_an_image_of_several_processors_is_the_one_of_this_machine(oci):
    folder, manifest = oci
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    config = add(folder, {"config": {"Env": ["A=b=c", "D"], "WorkingDir": "/w"}})
    mine, other = add(folder, manifest | {"config": {"digest": config}}), f"sha256:{'0' * 64}"
    of = {"os": "linux", "architecture": machine}
    rows = [of | {"os": "windows"}, of | {"architecture": "vax"}, {"os": "linux"}]
    wrong = [{"digest": other, "platform": one} for one in rows] + [{"digest": other}]
    several = add(folder, {"manifests": [*wrong, {"digest": mine, "platform": of}]})
    image = prepare_image(f"{folder}@{several}")
    assert (image.folder, dict(image.environment)) == ("/w", {"A": "b=c", "D": ""})
    assert image.root is not None and stat.S_IMODE(image.root.stat().st_mode) == 0o755
    (image.root / "app" / "x").write_text("seen")
    assert prepare_image(f"{folder}@{several}").root == image.root, "made once"
    assert (image.root / "app" / "x").read_text() == "seen"
    nothing = add(folder, {"manifests": wrong})
    assert tell(lambda: prepare_image(f"{folder}@{nothing}")) == (
        f"the image {folder}@{nothing} has nothing for linux on {machine}: copy it with skopeo --all"
    )
    plain = add(folder, manifest | {"config": {"digest": add(folder, {})}})
    left = folder.parent / "cache" / "images" / f"{plain.replace(':', '-')}.partial"
    (left / "half").mkdir(parents=True)
    image = prepare_image(f"{folder}@{plain}")
    assert (image.folder, dict(image.environment)) == ("/", {}) and image.root is not None
    assert sorted(path.name for path in image.root.iterdir()) == ["app", "bin"], "nothing of a killed run"


def test_a_damaged_image_is_a_whole_sentence(oci):
    folder, manifest = oci
    kind = manifest["layers"][0]["mediaType"]
    no_layer = add(folder, {"a": 1})

    def of(**changes: Any) -> str:
        return f"{folder}@{add(folder, {**manifest, **changes})}"

    lacks = f"the image {folder} is damaged: one of its tables has no {{}}; copy it again"
    zstd = "application/vnd.oci.image.layer.v1.tar+zstd"
    for name, sentence in {
        of(config={}): lacks.format("digest"),
        of(config=3): lacks.format("digest"),
        of(layers=[{"digest": no_layer}]): lacks.format("mediaType"),
        of(layers=[{"mediaType": kind}]): lacks.format("digest"),
        of(layers=[{"mediaType": zstd}]): f"the image {folder} has a layer of the kind {zstd}: copy it with skopeo "
        "--dest-compress-format gzip",
        of(layers=[{"mediaType": kind, "digest": "md5:1"}]): f"the image {folder} names the digest md5:1, where "
        "sha256:... is expected",
        of(layers=[{"mediaType": kind, "digest": no_layer}]): f"the image {folder} cannot be unpacked: file could not "
        "be opened successfully:",
        f"{folder}@{add(folder, [1])}": f"{folder}/blobs/{add(folder, [1]).replace(':', '/')} of an image cannot be "
        "read: it is no table; copy it again",
    }.items():
        assert tell(lambda name=name: prepare_image(name)).removesuffix(" - method gz: ReadError") == sentence
    (folder / "index.json").write_text("[")
    bad = tell(lambda: prepare_image(str(folder)))
    assert (
        bad
        == f"{folder}/index.json of an image cannot be read: Expecting value: line 1 column 2 (char 1); copy it again"
    )
    assert tell(lambda: prepare_image("debian:13")) == (
        "the image debian:13 is no folder: bubblewrap needs an OCI folder, or one with a root"
    )
    assert tell(lambda: prepare_image(f"{folder.parent}@x")) == (
        f"the image {folder.parent}@x has no file oci-layout, so it has no digest: leave out @..."
    )


class Program:
    """Program of containers: answers each command line by its verb, and notes it."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, list[Any]()

    async def __call__(self, words: Any, *, seconds: float, most: int, **more: Any) -> Ran:
        self.asked.append((words[1], seconds, most, more))
        code, said = self.answers.get(words[1], (0, b""))
        out = said if code == 0 else b""
        return Ran(exit_code=code, stdout=out, stderr=b"" if code == 0 else said, seconds=3.0, killed_for=None)


DIGEST = f"debian@sha256:{'0' * 64}"


def use(monkeypatch: pytest.MonkeyPatch, function: Any, *, spec: BoxSpec | None = None, **answers: Any) -> Any:
    program = Program(**{"exec": (0, b"/opt:/usr/bin"), "container": (0, b"true\n")} | answers)
    monkeypatch.setattr(containers, "run_program", program)

    async def go() -> Any:
        box: Any = await open_box("podman", spec or BoxSpec(image=DIGEST, limits=Limits(output_bytes=77)))
        program.asked.clear()
        try:
            return await function(box, program)
        finally:
            await box.close()
            assert not os.path.exists(box.home)

    return asyncio.run(go())


def test_each_step_of_a_container_has_its_time_and_its_most_bytes(monkeypatch):
    async def go(box: ContainerBox, program: Program) -> Any:
        await box.run(["ls"], seconds=1.5, environment={"B": "c"})
        await box.put("/a/", {"b": b"c"})
        await box.get("/a/b", most=3)
        await box.stop_processes()
        home = {"folder": box.home}
        run, remove, put, *rest = program.asked
        assert run[:3] == ("exec", 1.5, 77) and run[3]["folder"] == box.home
        assert run[3]["variables"] == os.environ | {"B": "c"}
        assert remove == ("exec", containers.BOX_TIMEOUT_S, 2**16, {"stdin": b"", **home})
        assert put == ("cp", containers.BOX_TIMEOUT_S, 2**16, {"stdin": write_archive("a", {"b": b"c"}), **home})
        assert rest == [
            ("cp", containers.BOX_TIMEOUT_S, 64 * 2**20, home),
            ("restart", containers.BOX_TIMEOUT_S, 2**16, {"stdin": b"", **home}),
        ]
        assert box.path == f"/opt:/usr/bin:{PATH.replace('/usr/bin:', '')}" and box.broken == ""
        box.broken = "gone"
        program.asked.clear()
        await box.stop_processes()
        assert program.asked == []

    use(monkeypatch, go)
    assert tell(lambda: asyncio.run(open_box("podman", BoxSpec(image="debian:13")))) == (
        "the image debian:13 must name its digest (NAME@sha256:...), or it may be another tomorrow"
    )


@pytest.mark.parametrize(
    ("looked", "broken"),
    [
        ((0, b"true"), ""),
        ((0, b" false\n"), "its container has ended"),
        ((125, b"Error: No such container"), "its container has ended"),
        ((1, b"instance not found"), "its container has ended"),
        ((125, b"a\nno daemon\n"), SandboxUnavailable("podman failed: no daemon")),
        ((125, b""), SandboxUnavailable("podman failed: it said nothing")),
    ],
)
def test_a_command_that_fails_asks_whether_its_container_is_there(monkeypatch, looked, broken):
    async def run(box: ContainerBox, program: Program) -> str:
        assert (await box.run(["ls"], seconds=1)).exit_code == 0 and len(program.asked) == 1
        program.answers |= {"exec": (3, b""), "cp": (1, b"no space")}
        assert (await box.run(["ls"], seconds=1)).exit_code == 3
        assert await box.get("/x", most=9) is None
        if box.broken:
            await box.put("/a", {})
        else:
            program.answers["exec"] = (0, b"")
            call = box.put("/a", {})
            [failed] = await asyncio.gather(call, return_exceptions=True)
            assert str(failed) == "`podman cp` failed: no space"
        return box.broken

    if isinstance(broken, str):
        assert use(monkeypatch, run, container=looked) == broken
    else:
        found = tell(lambda: use(monkeypatch, run, container=looked), SandboxUnavailable)
        assert found == str(broken)


def test_a_container_that_cannot_start_is_a_whole_sentence(monkeypatch):
    async def nothing(box: Any, program: Any) -> str:
        return box.path

    for code, said, sentence in (
        (125, b"x\nError: no image\n\nSee 'docker run'", "`podman run` failed: Error: no image"),
        (None, b"", "`podman run` failed: no end after 3 s"),
    ):
        answers = {"run": (code, said)}
        assert tell(lambda answers=answers: use(monkeypatch, nothing, **answers), SandboxUnavailable) == sentence
    failed = tell(lambda: use(monkeypatch, nothing, exec=(1, b"no sh")), SandboxUnavailable)
    assert failed == "`podman exec` failed: no sh"
    assert use(monkeypatch, nothing, exec=(0, b" \n")) == PATH
    given = BoxSpec(image=DIGEST, environment={"PATH": "/app:/x"})
    assert use(monkeypatch, nothing, spec=given, exec=(1, b"not asked")) == f"/x:{PATH}:/app"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        assert tell(lambda: boxes.check_boxes("docker")) == (
            "docker is not installed: install it, or use the boxes of bubblewrap"
        )
    assert tell(lambda: boxes.check_boxes("lxc")) == (
        "there are no boxes of lxc: choose one of bubblewrap, podman, docker, apptainer"
    )


def test_a_program_is_asked_whether_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for name, word in (("docker", "info"), ("apptainer", "--version")):
        (tmp_path / name).write_text('#!/bin/sh\necho a >&2; echo "no $*" >&2; echo "Run \'docker x" >&2; exit $CODE\n')
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("CODE", "0")
        boxes.check_boxes(name)
        monkeypatch.setenv("CODE", "2")
        assert tell(lambda name=name: boxes.check_boxes(name)) == f"`{name} {word}` failed: no {word}"


def test_options_of_a_container_follow_its_specification(monkeypatch, tmp_path):
    podman, apptainer = PROGRAMS["podman"], PROGRAMS["apptainer"]
    monkeypatch.setattr("resource.getrlimit", lambda _: (10, 100))
    spec = BoxSpec(image="i", network=True, cpus=3, environment={"A": "b", "http_proxy": "p", "LD_X": "l", "GOX": "g"})
    words = podman.start("box", spec, limit_disk=False)
    variables = [word for name in ("A", "http_proxy=p", "LD_X=l", "GOX=g") for word in ("--env", name)]
    variables += ["--entrypoint", "sleep", "i", "86400"]
    assert words[words.index("--env") :] == variables and "--storage-opt" not in words and "nproc=100" in words
    assert [words[words.index(name) + 1] for name in ("--network", "--cpus")] == ["bridge", "3"]
    assert podman.pass_on(spec.environment) == {"A": "b"}
    assert apptainer.pass_on({"A": "b", "PATH": "c"}) == {"APPTAINERENV_A": "b", "APPTAINERENV_PATH": "c"}
    assert podman.run("box", ["ls"], folder="", environment={}) == ["podman", "exec", "box", "ls"]
    assert apptainer.run("box", ["ls"], folder="", environment={}) == [
        *("apptainer", "exec", "--cleanenv", "instance://box", "ls")
    ]
    monkeypatch.chdir(tmp_path)
    for image, shown in (("a.sif", str(tmp_path / "a.sif")), ("none.sif", "none.sif")):
        (tmp_path / "a.sif").touch()
        started = apptainer.start("box", replace(spec, image=image), limit_disk=True)
        assert started[-2:] == [shown, "box"] and "--net" not in started and "--pwd" not in started
    names = {
        "a.sif": (False, True),
        DIGEST: (True, True),
        DIGEST.partition("@")[2]: (True, True),
        "a@x": (False, False),
    }
    for image, known in names.items():
        assert (podman.names_digest(image), apptainer.names_digest(image)) == known
    for hard, most in ((-1, 32768), (2**15 + 1, 32768), (2**15 - 1, 32767)):
        monkeypatch.setattr("resource.getrlimit", lambda _, hard=hard: (1, hard))
        assert f"nproc={most}" in podman.start("box", spec, limit_disk=False)


def test_archives_are_written_and_read():
    assert list_parents("a") == [] and list_parents("/a/b") == ["", "/a"]
    assert find_reason(b"a\nb\nRun 'docker x'\nSee 'docker y'\n") == "b"
    for most, found in ((2, b"12"), (9, b"123")):
        inner = write_archive("d", {"f": b"123"})[512:]  # without the folder
        assert read_archive(inner, most=most) == found


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        (b"", "no end after 3.14 s"),
        (b"one\ntwo\n", "two"),
        (b"no such image\n\nRun 'docker run --help' for more information\n", "no such image"),
    ],
)
def test_a_command_of_a_container_that_fails_is_told_with_its_reason(stderr, why):
    ran = Ran(exit_code=None, stdout=b"out", stderr=stderr, seconds=3.14159, killed_for="time")
    said = tell(lambda: containers.raise_failure(["docker", "start", "x"], ran), SandboxUnavailable)
    assert said == f"`docker start` failed: {why}"
