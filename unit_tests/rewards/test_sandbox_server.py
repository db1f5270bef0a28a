"""A sandbox behind an address: each answer is a result, or a sentence about a sandbox that failed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from core.errors import UserError
from rewards.sandbox import Bubblewrap, HttpSandbox, Limits, Ran, SandboxUnavailable, make_sandbox
from unit_tests.helpers.posts import serve_posts


@pytest.fixture
def server():
    """Return the address of a server, and what it answers: status and body."""
    says: dict[str, Any] = {"status": 200, "body": b"", "asked": []}

    def answer(path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        says["asked"].append((path, headers["Content-Type"], json.loads(body)))
        return says["status"], says["body"]

    with serve_posts(answer) as says["url"]:
        yield says


def result(status: str = "Finished", code: Any = 0, **more: Any) -> dict[str, Any]:
    return {"status": "Success", "run_result": {"status": status, "return_code": code, "execution_time": 0.5} | more}


RESULTS: list[tuple[Any, Any]] = [
    (result(), Ran(exit_code=0, stdout=b"", stderr=b"", seconds=0.5, killed_for=None)),
    (
        result(code=3, stdout="ä", stderr="b"),
        Ran(exit_code=3, stdout="ä".encode(), stderr=b"b", seconds=0.5, killed_for=None),
    ),
    (result(code=-9), Ran(exit_code=137, stdout=b"", stderr=b"", seconds=0.5, killed_for=None)),
    (
        result("TimeLimitExceeded", None, stdout="12"),
        Ran(exit_code=None, stdout=b"12", stderr=b"", seconds=0.5, killed_for="time"),
    ),
    (result(stdout="1" * 10), Ran(exit_code=0, stdout=b"1" * 10, stderr=b"", seconds=0.5, killed_for=None)),
    (result(stdout="1" * 11), Ran(exit_code=None, stdout=b"1" * 10, stderr=b"", seconds=0.5, killed_for="output")),
    (result(stderr="1" * 11), Ran(exit_code=None, stdout=b"", stderr=b"1" * 10, seconds=0.5, killed_for="output")),
    (
        {"status": "Failed", "compile_result": result(code=1)["run_result"], "run_result": None},
        Ran(exit_code=1, stdout=b"", stderr=b"", seconds=0.5, killed_for=None),
    ),
    ({"status": "SandboxError", "message": "no pod"} | {"run_result": result()["run_result"]}, "failed: no pod"),
    ({"status": "Success", "run_result": {"status": "Error"}, "message": ""}, 'failed: b\'{"status"'),
    ({"status": "Success", "run_result": [1], "message": "m" * 301}, "failed: " + "m" * 300 + "$"),
    (result(code=None), 'returned no exit code: b\'{"status": "Success"'),
    ([], r"does not answer as SandboxFusion does: b'\[\]'$"),
    ({"a": "x" * 200}, 'does not answer as SandboxFusion does: b\'{"a": "x{93}\'$'),
]


@pytest.mark.parametrize(("answer", "found"), RESULTS)
def test_an_answer_of_a_server_is_a_result_or_a_failure_of_the_sandbox(answer, found, server):
    server["body"] = json.dumps(answer).encode()
    url = server["url"]
    call = HttpSandbox(url).run(["python3", "x.py"], files={"x.py": b"1"}, limits=Limits(output_bytes=10))
    if isinstance(found, Ran):
        assert asyncio.run(call) == found
    else:
        with pytest.raises(SandboxUnavailable, match=f"^the sandbox {url} {found}"):
            asyncio.run(call)


def test_a_server_is_found_below_a_path_and_bounded(server):
    server["body"] = json.dumps(result(stdout=" 42\n")).encode()
    for path in ("", "/", "/a", "/a/run_code/", "/run_code"):
        box = HttpSandbox(server["url"] + path)
        asyncio.run(box.check())
        assert server["asked"][-1][:2] == ("/a/run_code" if "a" in path.split("/") else "/run_code", "application/json")
    assert server["asked"][0][2]["code"] == "print(6 * 7)"
    server["body"] = json.dumps(result(code=1, stderr="e" * 201)).encode()
    with pytest.raises(SandboxUnavailable) as raised:
        asyncio.run(HttpSandbox(server["url"]).check())
    assert str(raised.value) == f"the sandbox {server['url']} cannot run Python: exit code 1 {'e' * 200}"
    most = 2 * 6 * 5 + 8 * 2**16
    for size in (most, most + 1):
        server["body"] = b" " * size
        why = "does not answer as SandboxFusion does: .*" if size == most else f"answered more than {most} bytes"
        with pytest.raises(SandboxUnavailable, match=f"^the sandbox {server['url']} {why}$"):
            asyncio.run(HttpSandbox(server["url"]).run(["x"], limits=Limits(output_bytes=5)))
    server["status"] = 503
    with pytest.raises(SandboxUnavailable, match=r"answered 503 Service Unavailable$"):
        asyncio.run(HttpSandbox(server["url"]).run(["x"]))


@pytest.mark.parametrize(
    "command", [["python3", "x.py"], ["python3", "x.py", "1"], ["python3", "y.py"], ["cat", "x.py"]]
)
def test_only_a_file_that_is_sent_runs_as_python(command, server):
    server["body"] = json.dumps(result()).encode()
    files = {"x.py": b"print(1)"}
    asyncio.run(HttpSandbox(server["url"]).run(command, files=files))
    asked = server["asked"][0][2]
    is_python = command == ["python3", "x.py"]
    assert (asked["language"], asked["code"]) == (("python", "print(1)") if is_python else ("bash", " ".join(command)))
    assert asked["files"] == ({} if is_python else {"x.py": "cHJpbnQoMSk="}) and files == {"x.py": b"print(1)"}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        *(
            (url, f"the address of the sandbox '{url}' is not one like http://host:8080")
            for url in ("x", "ftp://h", "http://")
        ),
        ("http://h:99999", "the address of the sandbox 'http://h:99999' cannot be read: Port out of range 0-65535"),
    ],
)
def test_an_address_of_no_server_is_one_sentence(url, says):
    with pytest.raises(UserError) as raised:
        HttpSandbox(url)
    assert str(raised.value) == says
    if not url.startswith("http://"):
        with pytest.raises(UserError) as raised:
            make_sandbox(url)
        assert str(raised.value) == (
            f"the sandbox '{url}' is neither bubblewrap nor the address of a server (http://...): choose one"
        )
    assert isinstance(make_sandbox("bubblewrap"), Bubblewrap) and isinstance(make_sandbox("https://h"), HttpSandbox)
