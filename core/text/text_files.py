"""Read text as UTF-8, whatever the locale. Other formats raise one sentence with the fix."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from core.errors import UserError, first_line

FORMATS = (
    # The mark of UTF-32 starts with that of UTF-16, so it comes first.
    # first bytes, name of the format, the fix
    (b"\x1f\x8b", "a gzip file", "unpack it with gunzip"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it with unzstd"),
    (b"\xfd7zXZ\x00", "an xz file", "unpack it with unxz"),
    (b"PAR1", "a Parquet file", "give it a name that ends in .parquet"),
    (b"ARROW1", "an Arrow file", "give it a name that ends in .arrow"),
    (b"\xff\xfe\x00\x00", "text in UTF-32", "convert it with iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
)
HEAD = 64
"""Number of first bytes that identify a format."""


def read_text(file: Path, where: str) -> str:
    """Read a UTF-8 file. Raises UserError, starting with `where`, if it is unreadable or not UTF-8."""
    return decode_text(read_bytes(file, where), where)


def read_bytes(file: Path, where: str) -> bytes:
    """Read a file. Raises UserError, starting with `where`, if it is unreadable."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror or error}") from error


def read_ends(file: Path, n: int) -> bytes:
    """Read the first and the last `n` bytes of a file: a hash of a large file that takes no minutes."""
    with file.open("rb") as opened:
        first = opened.read(n)
        opened.seek(max(0, file.stat().st_size - n))
        return first + opened.read(n)


def read_packed_text(file: Path, where: str) -> str:
    """Read a gzip file as UTF-8 text. Raises UserError, starting with `where`, for anything else."""
    packed = read_bytes(file, where)
    if not packed.startswith(b"\x1f\x8b"):
        raise UserError(f"{where} is not a gzip file, though its name ends in .gz; rename it, or pack it with gzip")
    try:
        return decode_text(gzip.decompress(packed), where)
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{where} is a broken gzip file ({first_line(error)}); write it again") from error


def decode_text(whole: bytes, where: str) -> str:
    r"""Decode UTF-8 with or without a byte-order mark; convert line ends to \n."""
    # Checked before decoding: some binary formats decode as UTF-8 and would fail later, as a strange row.
    if found := describe_format(whole[:HEAD]):
        raise UserError(f"{where} is {found[0]}, and text in UTF-8 is expected: {found[1]}")
    try:
        text = whole.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = whole.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}, line {line} is not UTF-8 (byte 0x{whole[error.start]:02x}): convert the file; if it is Latin-1, "
            "with iconv -f LATIN1 -t UTF-8"
        ) from error
    # As Python's text mode does, so that a file from Windows gives the same tokens.
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def describe_format(head: bytes) -> tuple[str, str] | None:
    r"""Identify a format that is not UTF-8 text by first bytes, with the fix; None if it may be UTF-8.

    >>> describe_format(b"\x1f\x8b\x08")
    ('a gzip file', 'unpack it with gunzip')
    >>> describe_format('{"a": 1}'.encode("utf-16-le"))
    ('text in UTF-16', 'convert it with iconv -f UTF-16LE -t UTF-8')
    """
    for magic, what, fix in FORMATS:
        if head.startswith(magic):
            return what, fix
    if b"\0" not in head:
        return None
    for order, zeros in (("LE", head[1::2]), ("BE", head[::2])):  # ASCII in UTF-16 without a mark
        if len(head) > 2 and not any(zeros):
            return "text in UTF-16", f"convert it with iconv -f UTF-16{order} -t UTF-8"
    return "a binary file", "name the file that was meant"


def parse_json(text: str, where: str) -> Any:
    """Parse JSON. Raises UserError, starting with `where`, for anything else."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply; reduce the nesting") from error
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{where} cannot be read: {first_line(error)}") from error
