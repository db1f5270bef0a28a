"""Text, files, messages and the command line, whole: what is read and written, and the sentence of each failure."""

from __future__ import annotations

import bdb
import errno
import gzip
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.cache_folder import find_cache_folder
from core.cli import run_guarded
from core.cluster.addresses import find_interface, listen_at, use_interface_of
from core.cluster.failures import DIED, GONE, explain_death, explain_import, is_collective_failure
from core.errors import RunStopped, UserError
from core.text.addresses import is_http_address
from core.text.atomic_write import append_lines, measure_sizes, replacing
from core.text.json_text import dump_json
from core.text.plain_text import escape_controls, print_line, shorten_middle
from core.text.secrets import has_secret, hide_secrets, hide_settings, refuse_secret
from core.text.summary import Summary
from core.text.text_files import describe_format, parse_json, read_bytes, read_ends, read_packed_text, read_text
from core.types.episodes import join_episodes, list_episodes, needs_joining, number_episodes, split_players
from core.types.images import ImageRefused, PlacedImage, check_places, list_written, read_data_uri
from core.types.messages import describe_message, find_images, with_text
from unit_tests.helpers.examples import six_tokens
from unit_tests.helpers.sentences import tell

EXPECTED = "and text in UTF-8 is expected: "
FORMATS: dict[bytes, str] = {
    b"\x1f\x8b\x08": f"x is a gzip file, {EXPECTED}unpack it with gunzip",
    b"PK\x03\x04": f"x is a zip archive, {EXPECTED}unpack it with unzip",
    b"\x28\xb5\x2f\xfd": f"x is a zstd file, {EXPECTED}unpack it with unzstd",
    b"\xfd7zXZ\x00": f"x is an xz file, {EXPECTED}unpack it with unxz",
    b"PAR1": f"x is a Parquet file, {EXPECTED}give it a name that ends in .parquet",
    b"ARROW1": f"x is an Arrow file, {EXPECTED}give it a name that ends in .arrow",
    "a".encode("utf-32"): f"x is text in UTF-32, {EXPECTED}convert it with iconv -f UTF-32 -t UTF-8",
    "a".encode("utf-16"): f"x is text in UTF-16, {EXPECTED}convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff\0a": f"x is text in UTF-16, {EXPECTED}convert it with iconv -f UTF-16 -t UTF-8",
    "ab".encode("utf-16-le"): f"x is text in UTF-16, {EXPECTED}convert it with iconv -f UTF-16LE -t UTF-8",
    "ab".encode("utf-16-be"): f"x is text in UTF-16, {EXPECTED}convert it with iconv -f UTF-16BE -t UTF-8",
    b"ab\0c": f"x is a binary file, {EXPECTED}name the file that was meant",
    b"a\0": f"x is a binary file, {EXPECTED}name the file that was meant",
    "a\r\nb\n\n\xe9".encode("latin-1"): "x, line 4 is not UTF-8 (byte 0xe9): convert the file; if it is Latin-1, with "
    "iconv -f LATIN1 -t UTF-8",
}


@pytest.mark.parametrize("content", FORMATS, ids=[sentence[:30] for sentence in FORMATS.values()])
def test_a_file_that_is_no_text_is_told_with_the_fix(content, tmp_path):
    (file := tmp_path / "x").write_bytes(content)
    assert tell(lambda: read_text(file, "x")) == FORMATS[content]


def test_text_is_read_whatever_wrote_it(tmp_path):
    file = tmp_path / "x"
    for content, text in ((b"\xef\xbb\xbfa\r\nb\rc\n", "a\nb\nc\n"), (b"a" * 64 + b"\0", "a" * 64 + "\0")):
        file.write_bytes(content)
        assert read_text(file, "x") == text
    assert describe_format(b"") is None and describe_format(b"abc") is None
    file.write_bytes(b"0123456789")
    assert [read_ends(file, n) for n in (3, 10, 20)] == [b"012789", b"0123456789" * 2, b"0123456789" * 2]
    assert tell(lambda: read_bytes(tmp_path, "x")) == "x cannot be read: Is a directory"
    file.write_bytes(packed := gzip.compress("é\r\n".encode()))
    assert read_packed_text(file, "x") == "é\n"
    file.write_bytes(packed[:-4])
    assert tell(lambda: read_packed_text(file, "x")) == (
        "x is a broken gzip file (Compressed file ended before the end-of-stream marker was reached); write it again"
    )
    file.write_bytes(b"abc")
    assert tell(lambda: read_packed_text(file, "x")) == (
        "x is not a gzip file, though its name ends in .gz; rename it, or pack it with gzip"
    )
    assert tell(lambda: parse_json("{", "x")) == ("x is not JSON: Expecting property name enclosed in double quotes")
    assert tell(lambda: parse_json("[" * 100_000, "x")) == "x is nested too deeply; reduce the nesting"
    assert tell(lambda: parse_json("1" * 5000, "x")).startswith("x cannot be read: Exceeds the limit (4300 digits)")
    assert parse_json('{"a": [1]}', "x") == {"a": [1]}


def test_a_full_file_keeps_the_lines_that_fit(tmp_path):
    class Full:
        """File on a disk with room for some bytes, of which each write takes at most two."""

        def __init__(self, room: int) -> None:
            self.text, self.room = b"old\n", room

        def tell(self) -> int:
            return len(self.text)

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "full")
            taken = data[: min(2, self.room)]
            self.text, self.room = self.text + taken, self.room - len(taken)
            return len(taken)

        def truncate(self, size: int) -> None:
            self.text = self.text[:size]

    kept: dict[int, bytes] = {}
    for room in (2, 4, 6, 7):
        file: Any = Full(room)
        try:
            append_lines(file, b"abc\nde\n")
        except OSError:
            assert room < 7
        kept[room] = file.text
    assert kept == {2: b"old\n", 4: b"old\nabc\n", 6: b"old\nabc\n", 7: b"old\nabc\nde\n"}
    with pytest.raises(KeyError), replacing(tmp_path / "a") as partial:
        partial.write_text("half")
        raise KeyError
    with replacing(tmp_path / "b") as partial:
        partial.write_text("whole")
        assert partial == tmp_path / "b.partial"
    assert measure_sizes(tmp_path) == {"b": 5}


def test_addresses_and_secrets():
    fine = ("http://a", "https://a:1/b", "http://[::1]:65535")
    bad = ("http://a:0", "http://a:65536", "ftp://a", "http://", "http://a b", "a", "http://[a")
    assert [is_http_address(text) for text in (*fine, *bad)] == [True] * 3 + [False] * 7
    hidden = {
        "ftp://token@host/x": "ftp://***@host/x",
        "http://h/?my_api_key=1&page=2#x": "http://h/?my_api_key=***&page=2#x",
        "http://h/?SIG=1&st=2&state=3": "http://h/?SIG=***&st=***&state=3",
        "('http://h/?pwd=1')": "('http://h/?pwd=***')",
        "http://h/a@b": "http://h/a@b",
    }
    assert {text: hide_secrets(text) for text in hidden} == hidden
    assert [has_secret(text) for text in hidden] == [True] * 4 + [False]
    for address in (None, "http://h"):
        refuse_secret(address, "it")
    assert tell(lambda: refuse_secret("http://a@h", "it into X"), ValueError) == (
        "the address holds a user, a password or a token, and a recipe is copied into the run folder: put it into X"
    )
    given = {"api_key": ["a", 3, ("b",)], "x": {"token": "", 5: "http://a@h"}, "n": None}
    assert hide_settings(given) == {"api_key": ["***", 3, ["***"]], "x": {"token": "", 5: "http://***@h"}, "n": None}


def test_text_of_others_is_plain_and_short(capsys):
    assert escape_controls("a\tb\nc\u202e") == "a\\tb\nc\\u202e" and escape_controls("a\nb", keep="") == "a\\nb"
    for keep in ("", "\n"):
        print_line("a\nb", keep=keep)
    assert capsys.readouterr().out == "a\\nb\na\nb\n"
    assert [shorten_middle("abcdefghij", n) for n in (10, 9, 4)] == [
        *("abcdefghij", "abcdef [1 characters] hij", "abc [6 characters] j")
    ]
    assert dump_json({"a": [1.5, float("nan"), (float("-inf"), Path("x"))]}, default=str) == (
        '{"a": [1.5, null, [null, "x"]]}'
    )
    summary = Summary(lines=["a<b", "c"], headings=("x", "long", ""), rows=[("r", "1", "&"), ("row 2", "10", "")])
    assert summary.to_text() == "a<b\nc\nx      long\nr         1  &\nrow 2    10"
    assert summary.to_html() == (
        "<div>a&lt;b</div><div>c</div><table><thead><tr><th>x</th><th>long</th><th></th></tr></thead><tbody>"
        "<tr><td>r</td><td>1</td><td>&amp;</td></tr><tr><td>row 2</td><td>10</td><td></td></tr></tbody></table>"
    )
    empty = Summary(lines=["a"], headings=("x",), rows=[])
    assert (empty.to_text(), empty.to_html()) == ("a", "<div>a</div>")


ENDS: list[tuple[BaseException | None, int, str]] = [
    (None, 7, ""),
    (UserError("a\nb"), 2, "error: a\\nb\n"),
    (RunStopped("why"), 1, "stopped: why\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
    (bdb.BdbQuit(), 130, "interrupted: the debugger was left with q\n"),
]


@pytest.mark.parametrize(("error", "code", "said"), ENDS, ids=[said or "done" for *_, said in ENDS])
def test_a_program_ends_with_a_code_and_a_sentence(error, code, said, capsys, monkeypatch):
    monkeypatch.setattr("core.cluster.signals.end_on_signals", lambda first: None)

    def run() -> int:
        if error is not None:
            raise error
        return 7

    assert (run_guarded(run), capsys.readouterr().err) == (code, said)


def test_a_terminal_that_lacks_a_character_gets_its_number(monkeypatch):
    monkeypatch.setattr("core.cluster.signals.end_on_signals", lambda first: None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown := io.BytesIO(), encoding="ascii"))

    def run() -> int:
        print_line("3 \u2264 4")
        return 0

    assert (run_guarded(run), shown.getvalue()) == (0, b"3 \\u2264 4\n")


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    for name in ("FEYNRL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache_folder("a") == tmp_path / ".cache/feynrl/a"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert find_cache_folder("a") == Path("/x/feynrl/a")
    monkeypatch.setenv("FEYNRL_CACHE", "/y")
    assert find_cache_folder("a") == Path("/y/a")


def test_failures_of_ray_are_told_from_those_of_our_code():
    gone = ("The node was terminated", "its node has died", "actor x is unavailable: no route")
    assert [explain_death(RuntimeError(words)) for words in (*gone, "exit code 1")] == [GONE, GONE, GONE, DIED]
    assert explain_import(RuntimeError("Actor failed to import on the worker.\nTraceback\n ImportError: x \n")) == (
        "ImportError: x"
    )
    assert explain_import(RuntimeError("no torch")) == explain_import(None) == ""
    errors = (ConnectionResetError(), RuntimeError("[gloo/x] closed"), RuntimeError("x"), NotImplementedError("gloo"))
    assert [is_collective_failure(error) for error in errors] == [True, True, False, False]


def test_a_process_uses_the_interface_of_its_address(monkeypatch):
    interfaces = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7", "fe80::1%eth0"]}
    wanted = {"127.0.1.1": "lo", "::1": "lo", "10.0.0.7": "eth0", "fe80::1": "eth0", "10.0.0.8": None}
    assert {address: find_interface(address, interfaces) for address in wanted} == wanted
    monkeypatch.setattr("core.cluster.addresses.list_interfaces", lambda: interfaces)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "VLLM_HOST_IP")

    def use(address: str, **given: str) -> list[str | None]:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        use_interface_of(address)
        return [os.environ.get(name) for name in names]

    own = {"GLOO_SOCKET_IFNAME": "mine", "VLLM_HOST_IP": "mine"}
    assert use("10.0.0.7") == ["eth0", "=eth0", "eth0", "10.0.0.7"]
    assert use("10.0.0.7", **own) == ["mine", "=eth0", "eth0", "mine"]
    assert use("127.0.0.1", **own) == ["lo", "=lo", "lo", "127.0.0.1"]
    assert use("10.0.0.8") == [None] * 4
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with listen_at("127.0.0.1") as here, listen_at("203.0.113.9") as everywhere:
        assert here.getsockname()[0] == "127.0.0.1" and everywhere.getsockname()[0] == "0.0.0.0"
        with pytest.raises(OSError, match="in use"):
            listen_at("127.0.0.1", here.getsockname()[1])


def test_messages_and_images_keep_their_order():
    image: Any = SimpleNamespace(hash="h", width=2, height=3)
    part: Any = {"type": "image", "image": image}
    text: Any = {"type": "text", "text": "x"}
    message: Any = {"role": "user", "content": "xx", "parts": [part, text, part, text, part, part]}
    assert with_text(message, "y")["parts"] == [part, {"type": "text", "text": "y"}, part, part]  # type: ignore[typeddict-item]
    assert with_text({"role": "user", "content": "", "parts": [part, part]}, "y") == {
        **{"role": "user", "content": "y", "parts": [part, part, {"type": "text", "text": "y"}]}
    }
    assert with_text({"role": "user", "content": "x"}, "y") == {"role": "user", "content": "y"}
    assert len(find_images([message, message])) == 8
    shown = {"type": "image", "sha256": "h", "width": 2, "height": 3}
    assert describe_message(message)["parts"] == [shown, text, shown, text, shown, shown]
    places: Any = [PlacedImage(image, 1, 2), PlacedImage(image, 2, 4)]
    check_places(places, 4)
    assert list_written(6, places) == [4, 5] and "3 tokens" in tell(lambda: check_places(places, 3))
    assert [read_data_uri(uri) for uri in ("data:x;base64,aGk%2B", "data:,a%20b")] == [b"hi>", b"a b"]
    assert tell(lambda: read_data_uri("data:x"), ImageRefused) == (
        "a data URI must be data:image/png;base64,..., found 'data:x'"
    )
    assert tell(lambda: read_data_uri("data:x;base64,a"), ImageRefused).startswith(
        "the base64 text of a data URI is damaged ("
    )


def test_episodes_that_contradict_themselves_are_one_sentence():
    def join(*branches: dict[str, Any]) -> str:
        return tell(lambda: join_episodes([six_tokens(episode=3, **one) for one in branches]), RunStopped)

    who, all_or_none = "of episode 3 of p", "set them on all or none"
    assert join({"reward": 1.0}, {"reward": 0.5}) == (
        f"the samples {who} have the rewards 0.5, 1.0; all samples of an episode must have the same reward"
    )
    assert join({}, {"origin": "other"}) == (
        f"the samples {who} have several origins; all samples of an episode must have the same"
    )
    assert join({}, {"failure": "no"}) == (
        f"some samples {who} failed and some did not; set failure on all or none of them"
    )
    assert join({}, {"chosen": "101101"}) == (
        f"a sample {who} begins with a token that the policy chose; nothing predicts that token"
    )
    assert join({}, {"turn_numbers": (0, 1)}) == (
        f"some samples {who} have turn_numbers and some do not; {all_or_none}"
    )
    assert join({"turn_numbers": (0, 1)}, {"turn_numbers": (1, 2)}) == (
        f"two turns {who} have the same number in turn_numbers; each turn may be trained on once"
    )
    group = [six_tokens(episode=one) for one in (0, None, 0, None)]
    assert number_episodes(group) == [0, 1, 0, 2]
    players = [six_tokens(player=one) for one in (1, 0, 1)]
    assert [[s.player for s in part] for part in split_players(players)] == [[1, 1], [0]]
    assert [needs_joining(one) for one in (group, players, group[1:], players[:1])] == [True, True, False, False]
    joined = join_episodes(group)
    assert [place is None for place in joined.places] == [False, True, False, True] and len(joined.samples) == 3
    alone = [six_tokens(), six_tokens()]
    assert list_episodes(alone) is alone and len(list_episodes(group)) == 3
    both = [six_tokens(episode=1), six_tokens(episode=1)]
    [one] = list_episodes(both)
    assert one.n_sampled == 6 and one.turns == ((2, 4), (5, 6), (8, 10), (11, 12))
