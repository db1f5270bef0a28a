"""Files of object stores and web servers: downloaded once per version, or refused with the remedy."""

import hashlib
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from core.errors import UserError
from data_feeds.feed import Feed, load_groups, load_prompts
from data_feeds.rows.remote_files import fetch, put_in_place
from driver.run_inputs import hash_rows
from unit_tests.helpers.prompt_files import rows_of, write


@pytest.fixture
def tokenizer(qwen):
    return qwen


def load(path: str, tokenizer, *, lazy: bool) -> Feed:
    data = PromptDataConfig(train=[{"path": path, "lazy": lazy}])
    return load_prompts(data, "train", tokenizer, seed=3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory(tmp_path):
    """A function that puts a file or folder into the memory store, and returns its address."""
    store = fsspec.filesystem("memory")

    def put(path: str) -> str:
        name = f"{tmp_path.name}/{Path(path).name}"
        store.put(path, f"/{name}", recursive=True)
        return f"memory://{name}"

    yield put
    store.rm(f"/{tmp_path.name}", recursive=True)


class Quiet(SimpleHTTPRequestHandler):
    """Server of a folder that counts downloads. `tells`: whether it says when a file changed."""

    gets: list[str]
    tells = True

    def do_GET(self) -> None:
        self.gets.append(self.path)
        super().do_GET()

    def send_header(self, keyword: str, value: str) -> None:
        if self.tells or keyword != "Last-Modified":
            super().send_header(keyword, value)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path):
    handler = type("Served", (Quiet,), {"gets": []})
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{found.server_address[1]}", handler
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows"])
@pytest.mark.parametrize("lazy", [False, True])
def test_rows_of_a_store_are_those_of_the_file(tmp_path, tokenizer, memory, name, lazy):
    path = write(tmp_path / name, rows_of(9))
    feed, local = load(memory(path), tokenizer, lazy=lazy), load(path, tokenizer, lazy=lazy)
    assert [feed.draw(t) for t in range(20)] == [local.draw(t) for t in range(20)]
    assert feed.sources[0].name == "rows" and feed.sources[0].digest == local.sources[0].digest


def test_a_file_is_downloaded_once_and_again_when_it_changed(tmp_path, tokenizer, memory, capfd):
    url = memory(write(tmp_path / "rows.jsonl", rows_of(9)))
    first = hash_rows(load(url, tokenizer, lazy=False).all())
    assert "downloading" in capfd.readouterr().err
    assert hash_rows(load(url, tokenizer, lazy=False).all()) == first
    assert "downloading" not in capfd.readouterr().err
    memory(write(tmp_path / "rows.jsonl", rows_of(9, first=1)))  # of the same size
    assert hash_rows(load(url, tokenizer, lazy=False).all()) != first


def test_a_run_that_was_faster_keeps_its_copy(tmp_path):
    mine, theirs = tmp_path / "partial", tmp_path / "copy"
    for folder, text in ((mine, "b"), (theirs, "a")):
        folder.mkdir()
        (folder / "rows.jsonl").write_text(text)
    put_in_place(mine, theirs)
    assert (theirs / "rows.jsonl").read_text() == "a"
    put_in_place(mine, tmp_path / "new")
    assert (tmp_path / "new" / "rows.jsonl").read_text() == "b"


def test_a_copy_that_gets_no_name_is_an_error(tmp_path):
    (mine := tmp_path / "partial").mkdir()
    with pytest.raises(FileNotFoundError):
        put_in_place(mine, tmp_path / "missing" / "copy")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, memory, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path / "file"))
    url = memory(write(tmp_path / "rows.jsonl", rows_of(2)))
    with pytest.raises(UserError, match=r"no copy can be written to .*; set FEYNRL_CACHE to another folder"):
        fetch(url, "data.train=x")


def test_a_web_server_is_read_and_asked_for_changes(tmp_path, tokenizer, server):
    folder, address, handler = server
    write(folder / "rows.jsonl", rows_of(9))
    for _ in range(2):
        feed = load(f"{address}/rows.jsonl?token=a/b", tokenizer, lazy=False)
    assert len(feed.all()) == 9 and feed.sources[0].name == "rows"
    assert len(handler.gets) == 1
    handler.tells = False
    for n in (2, 3):
        fetch(f"{address}/rows.jsonl", "data.train=x")
        assert len(handler.gets) == n, "a file without time and hash may have changed"


def test_a_copy_that_no_later_start_reads_goes_with_the_process(tmp_path, cache, server):
    folder, address, handler = server
    write(folder / "rows.jsonl", rows_of(9))
    code = (
        "import sys; from data_feeds.rows.remote_files import fetch\n"
        "print(fetch(sys.argv[1], 'data.train=x').stat().st_size)"
    )
    for tells, kept in ((False, 0), (True, 1)):
        handler.tells = tells
        done = subprocess.run([sys.executable, "-c", code, f"{address}/rows.jsonl"], capture_output=True, text=True)
        assert int(done.stdout) == (folder / "rows.jsonl").stat().st_size, done.stderr
        assert len([*cache.rglob("rows.jsonl")]) == kept


def test_a_copy_that_is_gone_before_the_end_is_no_error(tmp_path, cache, server):
    folder, address, handler = server
    write(folder / "rows.jsonl", rows_of(9))
    handler.tells = False
    code = (
        "import shutil, sys; from data_feeds.rows.remote_files import fetch\n"
        "shutil.rmtree(fetch(sys.argv[1], 'data.train=x').parent)"
    )
    done = subprocess.run([sys.executable, "-c", code, f"{address}/rows.jsonl"], capture_output=True, text=True)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr


def test_what_cannot_be_read_is_one_sentence(tmp_path, tokenizer, server, monkeypatch):
    _, address, _ = server
    wrong = [
        ("s3://bucket/rows.jsonl", r"s3:// needs a package that is not installed: pip install s3fs"),
        ("nope://rows.jsonl", r"fsspec knows no protocol nope://"),
        (f"{address}/gone.jsonl", r"data.train=.*/gone.jsonl: there is no such file in the store"),
        ("memory://gone.jsonl", r"there is no such file in the store"),
        ("http://127.0.0.1:9/rows.jsonl", r"cannot be reached"),
    ]
    for url, why in wrong:
        with pytest.raises(UserError, match=why):
            load(url, tokenizer, lazy=False)
    assert not (tmp_path / "cache").exists()


def test_a_download_that_is_cut_off_leaves_no_copy(tmp_path, memory, cache, monkeypatch):
    url = memory(write(tmp_path / "rows.jsonl", rows_of(9)))

    def cut(self, remote, local, **others):
        Path(local).write_bytes(b"{")

    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.filesystem("memory")), "get_file", cut)
        with pytest.raises(UserError, match=r"1 of .* bytes came, so it changed"):
            fetch(url, "data.train=x")
    assert not [file for file in cache.rglob("*") if file.is_file()]
    assert fetch(url, "data.train=x").read_bytes() == (tmp_path / "rows.jsonl").read_bytes()


def test_supervised_rows_come_from_a_store_too(tmp_path, tokenizer, memory):
    rows = [{"messages": [*row["messages"], {"role": "assistant", "content": "yes"}]} for row in rows_of(5)]
    url = memory(write(tmp_path / "rows.jsonl", rows))
    assert len(load_groups(RowDataConfig(train=url), "train", tokenizer, rows="conversations", seed=0).all()) == 5


@pytest.mark.parametrize("missing", ["rows.jsonl", "empty"])
def test_a_file_or_folder_without_rows_is_not_there(cache, missing):
    store = fsspec.filesystem("memory")
    store.makedirs("/nothing/empty", exist_ok=True)
    try:
        with pytest.raises(UserError, match=r"^data\.train=x: there is no such file in the store$"):
            fetch(f"memory://nothing/{missing}", "data.train=x")
    finally:
        store.rm("/nothing", recursive=True)


def test_a_later_start_finds_a_copy_by_address_and_version(tmp_path, memory, cache, capsys):
    url = memory(write(tmp_path / "rows.jsonl", rows_of(2)))
    files, of_url, version, name = fetch(url, "data.train=x").relative_to(cache).parts
    assert (files, of_url, name) == ("files", hashlib.sha256(url.encode()).hexdigest()[:16], "rows.jsonl")
    assert re.fullmatch("[0-9a-f]{16}", version)
    assert fetch(url, "data.train=x") == cache / files / of_url / version / name
    folder = cache / files / of_url / version
    said = [f"downloading 0.0 MiB to {folder}", f"read from the copy in {folder}"]
    assert capsys.readouterr().err.splitlines() == [f"data.train=x: {one}" for one in said]


def test_a_download_that_breaks_off_leaves_no_copy(tmp_path, memory, cache, monkeypatch):
    url = memory(write(tmp_path / "rows.jsonl", rows_of(2)))

    def fail(*_: object, **__: object) -> None:
        raise OSError("no route\nmore")

    with monkeypatch.context() as broken:
        broken.setattr(type(fsspec.filesystem("memory")), "get_file", fail)
        with pytest.raises(UserError, match=r"^data\.train=x cannot be downloaded: .*no route$"):
            fetch(url, "data.train=x")
    assert [*cache.rglob("*.jsonl")] == [] == [*cache.rglob("partial-*")]
    assert fetch(url, "data.train=x").is_file()


def test_a_store_that_tells_no_version_is_asked_at_every_start(tmp_path, memory, monkeypatch, capsys):
    url = memory(write(tmp_path / "rows.jsonl", rows_of(2)))
    monkeypatch.setattr("data_feeds.rows.remote_files.VERSION_KEYS", ())
    first, second = (fetch(url, "data.train=x") for _ in range(2))
    assert first != second and first.read_bytes() == second.read_bytes()
    told = "data.train=x: the store tells neither time nor hash of the file, so this copy is for this start only"
    assert capsys.readouterr().err.splitlines().count(told) == 2
