"""Programs of this machine for an image."""

from __future__ import annotations

import pytest

from core.errors import UserError
from data_prep.oci_image import collect_programs


def test_a_program_without_libraries_does_not_hide_those_of_others() -> None:
    assert {*collect_programs(["cat"])} < {*collect_programs(["cat", "ldd"])}  # ldd is a script, which it refuses


def test_a_missing_ldd_and_a_missing_library_are_one_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="this machine has no ldd"):
        collect_programs(["cat"])
    (tmp_path / "ldd").write_text('#!/bin/sh\necho "\tliblost.so.1 => not found"\n')
    (tmp_path / "ldd").chmod(0o755)
    with pytest.raises(UserError, match=r"this machine has no liblost\.so\.1, which the image needs"):
        collect_programs(["cat"])
