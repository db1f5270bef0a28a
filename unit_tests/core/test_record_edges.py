"""Edges of records and texts that everything is made of: data URIs, sizes in sentences, and terms of an objective."""

from __future__ import annotations

import errno
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from core.errors import RunStopped, writing
from core.types.images import ImageRefused, read_data_uri
from core.types.terms import Term
from unit_tests.helpers.sentences import tell

BASE64 = "data:image/png;base64,"


@pytest.mark.parametrize(
    ("uri", "data"),
    [
        (f"{BASE64}aGk=", b"hi"),
        (f"{BASE64}%2B%2F8%3D", b"\xfb\xff"),
        (f"{BASE64}+/8=", b"\xfb\xff"),
        ("data:,h%69", b"hi"),
        ("data:,a,b", b"a,b"),
    ],
)
def test_the_bytes_of_a_data_uri_are_read(uri, data):
    assert read_data_uri(uri) == data


@pytest.mark.parametrize("body", ["aG$k=", "aGk", "aG k=", "a", "aGk=\n", "é"])
def test_base64_with_anything_else_in_it_is_damaged(body):
    said = tell(lambda: read_data_uri(BASE64 + body), ImageRefused)
    assert said.startswith("the base64 text of a data URI is damaged (")


def test_a_data_uri_without_data_is_told():
    said = tell(lambda: read_data_uri("data:image/png"), ImageRefused)
    assert said == "a data URI must be data:image/png;base64,..., found 'data:image/png'"


def test_sizes_in_sentences_are_in_mebibytes(tmp_path: Path):
    def write() -> None:
        with writing(tmp_path / "x", needs=lambda: 3 * 1024 * 1024):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert "the disk is full: about 3.00 MiB are needed, and there was room for " in tell(write, RunStopped)


def test_all_of_a_term_but_its_name_and_loss_is_given_by_name():
    loss: Any = print
    assert [one.name for one in fields(Term) if not one.kw_only] == ["name", "loss"]
    term = Term("a", loss)
    found = {one.name: getattr(term, one.name) for one in fields(Term)}
    usual = {"on": "sampled", "norm": None, "coef": 1.0, "among": None, "sources": None}
    assert found == {"name": "a", "loss": loss} | usual
    with pytest.raises(TypeError):
        Term("a", loss, "sampled")  # pyright: ignore[reportCallIssue]
