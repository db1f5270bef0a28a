"""Boxes of podman itself: what stays, what ends, limits, and the ten tasks. Skipped where podman cannot run."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from core.types.samples import Prompt
from data_prep import boxed_tasks
from rewards.sandbox import Limits
from rollouts.boxes import BoxSpec, check_boxes, open_box
from rollouts.boxes.base import PATH, Box
from rollouts.envs.harbor import Harbor
from unit_tests.helpers.boxes import sh, within
from unit_tests.helpers.episodes import calls_of
from unit_tests.helpers.processes import leftovers

pytestmark = [pytest.mark.verify, pytest.mark.timeout(400)]
SMALL = Limits(memory_mib=64, file_mib=1, processes=24)
OTHER_USER = """FROM {}
RUN ["chmod", "777", "/app"]
ENV PATH=/app/bin:/usr/bin
USER 1000
"""


class InPodman(Harbor):
    backend = "podman"


def podman(*words: str) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"podman {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def set_up(folder: Path, image: Path, driver: str, runtime: str) -> str:
    """Run a container in a storage of this driver, with another runtime than podman's own. Return the image's name."""
    runtime = f'[engine]\nruntime = "{runtime}"\n' if runtime else ""
    (folder / "containers.conf").write_text(runtime)
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "{driver}"\ngraphroot = "{folder}/{driver}"\nrunroot = "{folder}/{driver}-run"\n'
    )
    podman("pull", "--quiet", f"oci:{image}")
    [name] = podman("images", "--format", "{{.Repository}}@{{.Digest}}").splitlines()
    podman("run", "--rm", "--network", "none", "--ulimit", "nofile=256", "--ulimit", "nproc=1024", name, "true")
    return name


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Generator[dict[str, dict[str, Any]]]:
    """The columns of the ten tasks, whose image is in a storage of its own."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    folder = tmp_path_factory.mktemp("podman")
    rows = {row.id: json.loads(row.extra or "") for row in boxed_tasks.make(folder / "boxed")}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("containers", "storage"):
            patch.setenv(f"CONTAINERS{'_STORAGE' * (name == 'storage')}_CONF", str(folder / f"{name}.conf"))
        refused: list[str] = []
        # with cgroups v1 beside v2, only runc runs; overlay needs a disk below it that is no overlay
        for driver, runtime in (("overlay", ""), ("overlay", "runc"), ("vfs", ""), ("vfs", "runc")):
            try:
                image = set_up(folder, folder / "boxed" / "image", driver, runtime)
                break
            except RuntimeError as error:
                refused.append(f"{driver} {runtime}: {error}")
        else:
            pytest.skip("; ".join(refused))
        yield {name: row | {"image": image} for name, row in rows.items()}
        left = podman("ps", "--all", "--quiet")
        podman("rmi", "--all", "--force")
        subprocess.run(["umount", str(folder / driver / driver)], capture_output=True, check=False)
        assert left == "", "a container was left behind"


@pytest.fixture
def spec(tasks) -> BoxSpec:
    return BoxSpec(image=tasks["count-lines"]["image"], limits=SMALL, environment={"A": "b c"})


def test_files_of_a_container_stay_and_its_processes_end(spec):
    async def use(box: Box) -> list[Any]:
        said = [await sh(box, "echo mine > x; (sleep 617 &) ; pwd; echo $A; wc -l < /proc/net/dev; id -u")]
        await box.put("/tests", {"deep/a.sh": b"echo tested", "empty/": b""})
        said += [await sh(box, "cat x; sh /tests/deep/a.sh; ls /tests; rm -r /tests; ln -s /etc /tests")]
        await box.put("/tests", {"b": b"c"})
        assert len(leftovers("617")) == 1
        await box.stop_processes()
        assert leftovers("617") == []
        said += [await sh(box, "cat x; ls /tests; [ -e /etc/passwd ] && [ ! -e /etc/b ] && echo kept; exit 3")]
        return [*said, await box.get("/app/x", most=3), box.broken, box.path]

    check_boxes("podman")
    # three lines: two of a heading, and the loopback
    said = ["/app\nb c\n3\n0\n", "mine\ntested\ndeep\nempty\n", "mine\nb\nkept\n", b"min", "", PATH]
    assert within(spec, use, backend="podman") == said


@pytest.mark.parametrize(
    "command, words",
    [
        ("sleep 618 & sleep 618", "[time]"),
        ("seq 9999999", "[output]"),
        ("head -c 99m /dev/zero | tail > /app/y; echo ${PIPESTATUS[1]}", "137"),
        ("head -c 2m /dev/zero > /app/y; stat -c %s /app/y", "1048576"),
        ("for i in $(seq 40); do sleep 618 & done", "Resource temporarily unavailable"),
    ],
)
def test_a_limit_ends_a_command_and_its_box_goes_on(spec, command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def use(box: Box) -> str:
        await sh(box, "echo mine > x")
        ran = await box.run(["bash", "-c", command], seconds=2 if words == "[time]" else 60)
        await box.stop_processes()
        assert leftovers("618") == [] and await sh(box, "cat x") == "mine\n" and not box.broken
        return (ran.stdout + ran.stderr).decode() + (f"[{ran.killed_for}]" if ran.killed_for else "")

    assert words in within(spec, use, backend="podman")
    # conmon writes a file when memory runs out
    assert [*tmp_path.iterdir()] == []


def test_links_and_pipes_in_a_container_lead_nowhere(spec, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    links = f"mkdir /logs /logs/d; cd /logs; ln -s {secret} a; mkfifo b; ln -s /dev/zero c; ln -s e e; ln -s / root"

    async def use(box: Box) -> None:
        assert await sh(box, links) == ""
        for path in ("a", "b", "c", "d", "e", "f", f"root{secret}", "root/proc/1/environ"):
            assert await box.get(f"/logs/{path}", most=9) is None, path

    within(spec, use, backend="podman")


@pytest.mark.parametrize("end", ["kill -TERM 1; sleep 9", "rm /usr/bin/sleep"])
def test_a_container_that_ends_is_the_policys_doing(spec, end):
    async def use(box: Box) -> str:
        await sh(box, end)
        await box.stop_processes()
        await box.put("/tests", {"a": b""})
        return box.broken

    assert within(spec, use, backend="podman") == "its container has ended"


async def play(columns: dict[str, Any], *commands: str) -> dict[str, float]:
    env = InPodman(Prompt(id="row", messages=[], extra=columns))
    try:
        await env.open()
        for command in commands:
            await env.step(calls_of(("bash", {"command": command})))
        await env.end()
    finally:
        await env.close()
    return env.scores()


def test_reference_solutions_solve_the_ten_tasks_in_containers(tasks):
    async def run() -> list[float]:
        solutions = [(Path(columns["task"]) / "solution" / "solve.sh").read_text() for columns in tasks.values()]
        played = [play(columns, one) for columns, one in zip(tasks.values(), solutions, strict=True)]
        return [scores["reward"] for scores in await asyncio.gather(*played, play(tasks["count-lines"]))]

    assert asyncio.run(run()) == [1.0] * 10 + [0.0]


def test_an_image_with_a_user_of_its_own_is_verified(tasks, tmp_path):
    """That user cannot remove folders of the root; whoever can must run no program of the policy."""
    columns = tasks["count-lines"]
    (tmp_path / "Dockerfile").write_text(OTHER_USER.format(columns["image"]))
    image = podman("build", "--quiet", "--network", "none", str(tmp_path))
    fake = (
        "mkdir bin; printf '#!/bin/sh\\nid -u > /app/was\\n' > bin/rm; chmod +x bin/rm; id -u > me; rm -f x; cat was me"
    )
    podman("tag", image, "localhost/x")
    digest = podman("image", "inspect", "--format", "{{.Digest}}", image)
    mine = columns | {"image": f"localhost/x@{digest}"}

    async def use(box: Box) -> tuple[str, str]:
        first = await sh(box, fake)
        await box.put("/tests", {"a": b""})
        await box.put("/tests", {"b": b""})
        return first, await sh(box, "cat was; ls /tests; rm -f was; cat was")

    spec = BoxSpec(image=mine["image"], limits=SMALL)
    assert within(spec, use, backend="podman") == ("1000\n1000\n", "1000\nb\n1000\n")
    assert asyncio.run(play(mine, "wc -l < trees.txt > count.txt")) == {"reward": 1.0}


def test_a_cancelled_start_leaves_no_container(spec):
    async def run() -> None:
        opening = asyncio.create_task(open_box("podman", spec))
        await asyncio.sleep(0.3)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(run())
    assert podman("ps", "--all", "--quiet") == ""
