"""Programs of this machine for an image, and its layers."""

from __future__ import annotations

import io
import json
import tarfile
from hashlib import sha256
from typing import Any

import pytest

from core.errors import UserError
from data_prep.oci_image import collect_programs, write_image, write_layer


def test_a_program_without_libraries_does_not_hide_those_of_others() -> None:
    assert {*collect_programs(["cat"])} < {*collect_programs(["cat", "ldd"])}  # ldd is a script, which it refuses


def test_programs_that_this_machine_lacks_are_all_named() -> None:
    with pytest.raises(UserError) as refused:
        collect_programs(["no-such-b", "cat", "no-such-a"])
    assert str(refused.value) == "this machine has no no-such-b, no-such-a, which the image needs: install it"


def test_a_missing_ldd_and_a_missing_library_are_one_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="this machine has no ldd"):
        collect_programs(["cat"])
    (tmp_path / "ldd").write_text('#!/bin/sh\necho "\tliblost.so.1 => not found"\n')
    (tmp_path / "ldd").chmod(0o755)
    with pytest.raises(UserError, match=r"this machine has no liblost\.so\.1, which the image needs"):
        collect_programs(["cat"])


def test_a_layer_has_executable_files_in_folders_that_all_may_enter() -> None:
    written = write_layer({"usr/bin/a": b"one", "app/deep/b": b"", "c": b"three"}, {"bin": "usr/bin"})
    with tarfile.open(fileobj=io.BytesIO(written)) as tar:
        found = [(m.name, m.type, m.mode, m.linkname, m.size) for m in tar.getmembers()]
        assert [tar.extractfile(name).read() for name in ("usr/bin/a", "app/deep/b", "c")] == [b"one", b"", b"three"]
    folders, files = ["app", "app/deep", "usr", "usr/bin"], {"app/deep/b": 0, "c": 5, "usr/bin/a": 3}
    assert found == [
        *((name, tarfile.DIRTYPE, 0o755, "", 0) for name in folders),
        *((name, tarfile.REGTYPE, 0o755, "", size) for name, size in files.items()),
        ("bin", tarfile.SYMTYPE, 0o644, "usr/bin", 0),
    ]
    assert write_layer({"c": b"three", "app/deep/b": b"", "usr/bin/a": b"one"}, {"bin": "usr/bin"}) == written


def test_an_image_lists_its_layers_each_with_a_line_of_history(tmp_path) -> None:
    layers = [write_layer({"usr/bin/a": b"one"}), write_layer({"b": b"two"})]
    blobs = tmp_path / "blobs" / "sha256"

    def read(digest: str) -> dict[str, Any]:
        return json.loads((blobs / digest.removeprefix("sha256:")).read_bytes())

    manifest = read(write_image(tmp_path, layers, work_folder="/app"))
    config = read(manifest["config"]["digest"])
    listed = [layer["digest"] for layer in manifest["layers"]]
    assert listed == config["rootfs"]["diff_ids"] == [f"sha256:{sha256(layer).hexdigest()}" for layer in layers]
    assert config["history"] == [{"created_by": "feynrl"}] * 2, "docker build refuses a base with another number"
    assert config["config"] == {"WorkingDir": "/app"}
