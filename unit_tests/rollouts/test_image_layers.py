"""Layers of images: what replaces what, permissions, links, and who may unpack at a time."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import stat
import tarfile
from pathlib import Path
from threading import Thread

import pytest

from data_prep.oci_image import write_image, write_layer
from rollouts.boxes.images import Image, prepare_image

PROGRAMS = ("sh", "prlimit", "env", "setpriv")
BINARIES = write_layer({f"bin/{name}": b"" for name in PROGRAMS})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of unpacked images."""
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


def write_entries(*entries: tuple[str, bytes, int, bytes | str]) -> bytes:
    """Return a layer of (name, kind, permissions, content or target)."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name, kind, mode, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, mode
            if isinstance(content, str):
                entry.linkname = content
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def file(name: str, content: bytes, mode: int = 0o644) -> tuple[str, bytes, int, bytes | str]:
    return name, tarfile.REGTYPE, mode, content


def folder(name: str, mode: int = 0o755) -> tuple[str, bytes, int, bytes | str]:
    return name, tarfile.DIRTYPE, mode, ""


def unpack(place: Path, *layers: bytes) -> Path:
    """Return the root of an image with the programs that it needs, and these layers."""
    root = prepare_image(f"{place}@{write_image(place, [BINARIES, *layers], work_folder='/')}").root
    assert root is not None
    return root


def test_a_layer_replaces_what_is_of_another_kind_and_keeps_a_folder(tmp_path):
    link = ("l", tarfile.SYMTYPE, 0o777, "a")
    below = write_entries(file("a/x", b"1"), file("d/x", b"2"), link, file("f", b"3"))
    above = write_entries(
        *(folder("a"), file("a/y", b"4"), file("d", b"5")),
        *(folder("l"), file("l/z", b"6"), folder("f"), file("f/w", b"7")),
    )
    root = unpack(tmp_path / "image", below, above)
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    kept = {name: content for name, content in found.items() if not name.startswith("bin/")}
    assert kept == {"a/x": b"1", "a/y": b"4", "d": b"5", "l/z": b"6", "f/w": b"7"}
    assert not (root / "l").is_symlink()


def test_an_image_has_permissions_with_which_a_box_can_use_it(tmp_path):
    files = {0o4777: 0o755, 0o600: 0o600, 0o664: 0o644, 0o111: 0o111}
    folders = {0: 0o700, 0o555: 0o755, 0o2070: 0o750, 0o1777: 0o755}
    layer = write_entries(
        *(file(f"f{mode}", b"", mode) for mode in files), *(folder(f"d{mode}", mode) for mode in folders)
    )
    root = unpack(tmp_path / "image", layer)
    assert {mode: stat.S_IMODE((root / f"f{mode}").stat().st_mode) for mode in files} == files
    assert {mode: stat.S_IMODE((root / f"d{mode}").stat().st_mode) for mode in folders} == folders


def test_devices_and_pipes_of_an_image_are_left_out(tmp_path):
    kinds = {"c": tarfile.CHRTYPE, "b": tarfile.BLKTYPE, "p": tarfile.FIFOTYPE}
    layer = write_entries(*((name, kind, 0o644, "") for name, kind in kinds.items()), file("x", b"1"))
    assert sorted(path.name for path in unpack(tmp_path / "image", layer).iterdir()) == ["bin", "x"]


def test_a_hard_link_to_a_file_of_the_image_has_its_content(tmp_path):
    layer = write_entries(file("a/x", b"1"), ("y", tarfile.LNKTYPE, 0o644, "a/x"))
    assert (unpack(tmp_path / "image", layer) / "y").read_bytes() == b"1"


@pytest.mark.parametrize("place", ["usr/bin", "bin", "usr/sbin", "sbin"])
def test_programs_of_an_image_may_be_in_each_usual_folder(tmp_path, place):
    (tmp_path / "root" / place).mkdir(parents=True)
    for name in PROGRAMS:
        (tmp_path / "root" / place / name).touch()
    assert prepare_image(str(tmp_path / "root")) == Image(root=tmp_path / "root")


@pytest.mark.parametrize(("machine", "name"), [("x86_64", "amd64"), ("aarch64", "arm64"), ("riscv64", "riscv64")])
def test_an_image_of_several_processors_is_that_of_this_one(tmp_path, monkeypatch, machine, name):
    other, mine = (
        write_image(tmp_path, [BINARIES, write_layer({word: b""})], work_folder="/") for word in ("other", "mine")
    )
    rows = [(other, "mips"), (mine, name)]
    listed = [{"digest": one, "platform": {"os": "linux", "architecture": kind}} for one, kind in rows]
    raw = json.dumps({"manifests": listed}).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (tmp_path / "blobs" / "sha256" / digest).write_bytes(raw)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    root = prepare_image(f"{tmp_path}@sha256:{digest}").root
    assert root is not None and sorted(path.name for path in root.iterdir()) == ["bin", "mine"]


def test_an_unpacked_image_can_be_entered_by_every_user(tmp_path):
    before = os.umask(0o077)
    try:
        root = unpack(tmp_path / "image")
    finally:
        os.umask(before)
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


def test_an_image_is_unpacked_by_one_process_at_a_time(tmp_path, cache):
    digest = write_image(tmp_path / "image", [BINARIES], work_folder="/app")
    cache.mkdir(parents=True)
    found: list[Image] = []
    waiting = Thread(target=lambda: found.append(prepare_image(f"{tmp_path / 'image'}@{digest}")), daemon=True)
    with (cache / f"{digest.replace(':', '-')}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive() and found == []
    waiting.join(60)
    assert found == [Image(root=cache / digest.replace(":", "-"), folder="/app")]
