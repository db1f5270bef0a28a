"""Boxes whose policy spoils its own folders, and images and tasks that no process can start with."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import UserError
from data_prep import boxed_tasks, harbor
from data_prep.boxed_tasks import ETC
from data_prep.boxed_tasks import PROGRAMS as NEEDED
from data_prep.oci_image import LINKS, collect_programs, write_image, write_layer
from rewards.sandbox import Limits
from rewards.sandbox.usage import measure_folders
from rollouts.boxes import BoxSpec
from rollouts.boxes.base import PATH, order_path
from rollouts.boxes.bubblewrap import mount_image
from rollouts.boxes.harbor_task import read_task
from rollouts.boxes.images import prepare_image
from rollouts.envs.harbor import verify
from tools.mutants import ROOT
from unit_tests.helpers.boxes import sh, within
from unit_tests.helpers.needs_sandbox import needs_sandbox


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@needs_sandbox
@pytest.mark.skipif(not os.path.exists("/etc/resolv.conf"), reason="this machine has no /etc/resolv.conf")
def test_a_box_has_names_for_its_output_and_the_networks_addresses():
    async def use(box) -> list[str]:
        return [await sh(box, "echo a > /dev/stderr; echo b > /dev/stdout"), await sh(box, "cat /etc/resolv.conf")]

    outputs, addresses = within(BoxSpec(image="host", network=True), use)
    assert sorted(outputs.split()) == ["a", "b"]
    assert addresses == Path("/etc/resolv.conf").read_text()


SYSTEM_PYTHON = "/usr/bin/python3"
"""Python that every user can start. That of the tests may be in a closed folder."""
SPOILS = """
import asyncio, sys
from rewards.sandbox import Limits
from rollouts.boxes import BoxSpec, open_box

async def run():
    spec = BoxSpec(image="host", folder="/app/sub", limits=Limits(memory_mib=256, processes=64, disk_mib=8))
    for spoil in sys.argv[1:]:
        box = await open_box("bubblewrap", spec)
        try:
            await box.run(["sh", "-c", spoil], seconds=20)
            await box.put("/tests", {"a.sh": b"pwd"})
            ran = await box.run(["sh", "/tests/a.sh"], seconds=20)
            print((ran.stdout + ran.stderr).decode().strip(), box.broken)
        finally:
            await box.close()

asyncio.run(run())
"""
SPOILT = {
    # what the policy does: the working folder of the next command
    "rm -r ../sub": "/app",
    "rm -r ../sub; echo > ../sub": "/app",
    "rm -r ../sub; ln -s /etc ../sub": "/app",
    "mkdir -p a/b; echo > a/b/c; chmod 000 a/b a; chmod 000 /tests": "/app/sub",
}
SHUT = "chmod 000 /app/sub /app"


def is_recent(python: str) -> bool:
    """Tell whether a Python is there, and can run the product."""
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    return os.path.exists(python) and subprocess.run([python, "-c", code], check=False).returncode == 0


@needs_sandbox
@pytest.mark.parametrize("user", ["this", "another"][: 2 if os.getuid() == 0 else 1])
def test_a_policy_that_spoils_its_folders_does_not_end_its_box(user):
    """Else it would discard a bad episode."""
    command = [sys.executable]
    if user == "another":
        if not all(place.stat().st_mode & 0o005 == 0o005 for place in (ROOT, *ROOT.parents)):
            pytest.skip("another user cannot read this checkout")
        if not is_recent(SYSTEM_PYTHON):
            pytest.skip(f"another user needs a {SYSTEM_PYTHON} of at least 3.11")
        command = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", SYSTEM_PYTHON]
    variables = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*command, "-P", "-B", "-c", SPOILS, *SPOILT, SHUT], capture_output=True, text=True, env=variables, cwd="/"
    )
    # a root that starts boxes can enter every folder; others start at the next one above
    shut = "/app/sub" if user == "this" and os.getuid() == 0 else "/"
    assert done.stdout.splitlines() == [f"{folder} " for folder in (*SPOILT.values(), shut)], done.stderr[-2000:]


@pytest.fixture
def shut() -> Iterator[Path]:
    """A folder of another user."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    home = Path(tempfile.mkdtemp(dir="/tmp"))  # a folder of pytest is closed to others
    os.chown(home, 12345, 12345)
    yield home
    shutil.rmtree(home)


def run_as_another(code: str, home: Path) -> str:
    # it imports as root
    begin = (
        "import os, sys; from pathlib import Path; from rewards.sandbox.usage import measure_folders\n"
        "os.setuid(12345); top = Path(sys.argv[1])\n"
    )
    command = [sys.executable, "-P", "-B", "-c", begin + code, str(home)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, cwd="/")
    return done.stdout + done.stderr


def test_files_in_folders_that_another_user_has_shut_are_counted(shut):
    code = (
        "(top / 'a/b').mkdir(parents=True)\n"
        "for n in range(5): (top / 'a/b' / str(n)).write_bytes(bytes(8192))\n"
        "os.chmod(top / 'a/b', 0o300); os.chmod(top / 'a', 0); print(*measure_folders([top]))\n"
        "print(oct(os.stat(top / 'a').st_mode), end='')"
    )
    said = run_as_another(code, shut)
    size, files = measure_folders([shut])  # root sees all
    assert said == f"{size} {files}\n0o40000" and files == 7 and size >= 5 * 8192


def test_the_work_for_shut_folders_grows_with_their_number_only(shut):
    code = (
        "for n in range(200): (top / str(n)).mkdir(mode=0)\n"
        "calls = []; sys.setprofile(lambda *_: calls.append(1)); found = measure_folders([top])\n"
        "sys.setprofile(None); print(found[1], len(calls) < 200 * 100, len(calls))"
    )
    assert run_as_another(code, shut).startswith("200 True ")


def write_config(folder: Path, config: object, *layers: bytes) -> str:
    """Write an image with a configuration of its own, and return its name."""
    digest = write_image(folder, layers, work_folder="/app")
    manifest = json.loads((folder / "blobs" / digest.replace(":", "/")).read_text())
    for content in (json.dumps({"config": config}), None):
        text = (content or json.dumps(manifest)).encode()
        name = hashlib.sha256(text).hexdigest()
        (folder / "blobs" / "sha256" / name).write_bytes(text)
        manifest["config"]["digest"] = f"sha256:{name}"
    return f"{folder}@sha256:{name}"


BINARIES = {f"bin/{name}": b"" for name in ("sh", "prlimit", "env", "setpriv")}


@pytest.mark.parametrize(
    "config, words",
    [
        ({"Env": ["PATH=/bin\0x"]}, "sets the variable PATH to '/bin.x00x': a name may"),
        ({"Env": ["LD_A=\ud800"]}, "sets the variable LD_A to "),
        ({"Env": 3}, "is damaged: its Env is no list"),
        ({"WorkingDir": "/a\0b"}, "is damaged: .* or its WorkingDir no text without NUL"),
        ({"WorkingDir": "/\ud800"}, "is damaged: .* or its WorkingDir no text without NUL"),
        ([1], "is damaged: its config is no table"),
    ],
)
def test_an_image_whose_variables_no_process_can_have_is_refused(tmp_path, config, words):
    with pytest.raises(UserError, match=words):
        prepare_image(write_config(tmp_path, config, write_layer(BINARIES)))


@pytest.mark.parametrize(
    "toml, words",
    [
        ('[environment.env]\nA = "a\\u0000b"', r"environment\.env sets the variable A to 'a.x00b': a name may"),
        ('[environment.env]\n"AWS*" = ""', r"environment\.env sets the variable AWS. to "),
        ('[verifier.env]\n"A=B" = "c"', r"verifier\.env sets the variable A=B to c: "),
        ("[environment]\nworkdir = 3", r"environment\.workdir is 3, where a text"),
        ("[environment]\ndocker_image = ['a']", r"environment\.docker_image is \['a'\], where a text"),
    ],
)
def test_a_task_that_no_process_could_start_with_is_named(tmp_path, toml, words):
    boxed_tasks.write_harbor_task(tmp_path / "task", boxed_tasks.TASKS["count-lines"])
    (tmp_path / "task" / "task.toml").write_text(toml)
    with pytest.raises(UserError, match=words):
        harbor.make_row(tmp_path / "task", "row", "", network=False)


def test_an_image_whose_etc_is_a_link_shows_nothing_of_this_machine(tmp_path):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").touch()
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "etc").symlink_to(tmp_path / "secrets")
    with pytest.raises(UserError, match="has a link in the place of /etc"):
        mount_image(tmp_path / "image", set(), network=True)
    shown = mount_image(tmp_path / "image", set(), network=False)
    assert shown[-3:] == ["--symlink", str(tmp_path / "secrets"), "/etc"]


def test_a_verifiers_path_is_the_images_but_for_folders_of_the_policy():
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert order_path(f"/opt/conda/bin:{system}") == f"/opt/conda/bin:{system}"
    assert order_path(f"/root/.local/bin:.::/usr/../app:{system}") == f"{system}:/root/.local/bin:/usr/../app"


def test_a_folder_that_is_a_link_to_one_of_the_policy_comes_last(tmp_path):
    for name, target in {"venv": "/app/.venv", "up": "..", "circle": "circle", "conda": "../usr/conda"}.items():
        (tmp_path / "opt").mkdir(exist_ok=True)
        (tmp_path / "opt" / name).symlink_to(target)
    # of this folder, nothing may be asked outside of the image
    (tmp_path / "app").symlink_to("/usr")
    late = "/opt/venv/bin:/opt/up/root/bin:/opt/circle/bin:/app/bin"
    found = order_path(f"{late}:/opt/conda/bin:/opt/up/usr/sbin", root=tmp_path)
    assert found == f"/opt/conda/bin:/opt/up/usr/sbin:{PATH}:{late}"


@needs_sandbox
def test_a_verifier_finds_the_programs_of_its_image(tmp_path):
    tools = {"opt/conda/bin/judge": b"#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"}
    layers = [write_layer(collect_programs(NEEDED) | ETC, LINKS), write_layer(tools)]
    image = write_config(tmp_path / "image", {"WorkingDir": "/app", "Env": ["PATH=/opt/conda/bin:/app:/bin"]}, *layers)
    boxed_tasks.write_harbor_task(tmp_path / "task", boxed_tasks.TASKS["count-lines"])
    (tmp_path / "task" / "tests" / "test.sh").write_text("judge; seq 1 > /app/said\n")
    task = read_task(tmp_path / "task")

    async def use(box) -> tuple[dict[str, float], bytes | None]:
        await sh(box, "printf '#!/bin/sh\\necho forged' | tee judge seq > bash; chmod +x judge seq bash")
        return await verify(box, task), await box.get("/app/said", most=9)

    assert within(BoxSpec(image=image, limits=Limits(memory_mib=256)), use) == ({"reward": 1.0}, b"1\n")
