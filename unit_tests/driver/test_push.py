"""push_to: refused before the start where it could not succeed, and done over real HTTP with a server as the hub."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from configs.schema import SLConfig
from core.errors import RunStopped
from driver.checks.hub_upload import check_hub_upload, push_model
from driver.checks.output_folder import MARKER
from driver.load_recipe import load_recipe
from unit_tests.helpers.sentences import tell

ROOT = Path(__file__).parent.parent.parent
TOKEN = "hf_right42"


class Hub(ThreadingHTTPServer):
    """What of the hub a push asks: who I am, a new repository, how to upload, and the commit with the files."""

    def __init__(self, *, role: str = "write", breaks: bool = False):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.role, self.breaks = role, breaks
        self.made: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.summary = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._send(200, {})

    def do_GET(self) -> None:
        if not self.path.startswith("/api/whoami-v2"):
            return self._send(404, {"error": "not found"})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials"})
        token = {"accessToken": {"role": self.server.role}}
        self._send(200, {"name": "me", "orgs": [{"name": "lab"}], "auth": token})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            return self._send(200, {"url": f"{self.server.url}/me/tiny", "id": "me/tiny", "name": "me/tiny"})
        if self.server.breaks:
            return self._send(400, {"error": "the disk is full"})
        if self.path == "/api/validate-yaml":  # of the model card
            card = json.loads(body)["content"]
            return self._send(200 if card.startswith("---\n") else 400, {"errors": [], "warnings": []})
        if self.path.endswith("/preupload/main"):
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            return self._send(200, {"files": [f | {"shouldIgnore": False, "oid": None} for f in files]})
        if self.path.endswith("/commit/main"):
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "header":
                    self.server.summary = item["value"]["summary"]
                if item["key"] == "file":
                    self.server.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            return self._send(200, {"commitUrl": f"{self.server.url}/me/tiny/commit/1", "commitOid": "1"})
        self._send(404, {"error": "not found"})

    def _send(self, code: int, answer: dict) -> None:
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def push(path: str, *, endpoint: str, token: str) -> subprocess.CompletedProcess[str]:
    """A whole run in a process of its own, which reads HF_ENDPOINT when it starts."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(Path(path).parent / "hf"), "OMP_NUM_THREADS": "1"}
    env |= {"HF_TOKEN": token}
    command = [sys.executable, "main_sl.py", "--config", path, "push_to=tiny", "steps=1"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


def test_a_run_without_a_network_is_refused(refused, monkeypatch):
    from huggingface_hub import constants

    # the variable is read when the library is imported, which a helper may have done before conftest.py set it
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused({"push_to": "me/tiny"}, "push_to=me/tiny: HF_HUB_OFFLINE is set", kind="sl")
    refused({"push_to": "a/b/c"}, "push_to", kind="sl")


@pytest.mark.one_core
@pytest.mark.one_core
@pytest.mark.slow
def test_the_model_is_pushed_after_it_is_saved(recipe, tmp_path):
    with serving(Hub()) as hub:
        done = push(recipe(kind="sl"), endpoint=hub.url, token=TOKEN)
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "runs").iterdir()
    saved = {str(f.relative_to(folder / "model")): f for f in (folder / "model").rglob("*") if f.is_file()}
    assert hub.files.keys() - {".gitattributes"} == saved.keys() - {"feynrl.json"}
    assert all(hub.files[name] == file.read_bytes() for name, file in saved.items() if name != "feynrl.json")
    assert hub.made[0]["visibility"] == "private", "a new repository is private"
    assert f"pushed to {hub.url}/me/tiny" in done.stdout
    assert not [f for f in folder.rglob("*") if f.is_file() and TOKEN.encode() in f.read_bytes()], "it stands nowhere"


REFUSED = {
    "no token": ({"token": ""}, Hub, "there is no token for the hub"),
    "a wrong token": ({"token": "wrong"}, Hub, "does not know the token"),
    "a token that only reads": ({"token": TOKEN}, lambda: Hub(role="read"), "may only read"),
    "somebody else's name": ({"token": TOKEN, "name": "them/tiny"}, Hub, "the token is that of me, lab"),
}


@contextmanager
def asking(hub: Hub, token: str, tmp_path: Path) -> Iterator[None]:
    """Let this process ask that hub, as HF_ENDPOINT and HF_TOKEN would have, had they been set before it started."""
    from huggingface_hub import constants

    with serving(hub), pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        patch.setenv("HF_TOKEN", token)
        yield


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_be_pushed_is_refused_before_the_start(case, refused, tmp_path):
    how, make, words = REFUSED[case]
    with asking(make(), how["token"], tmp_path):
        refused({"push_to": how.get("name", "tiny")}, words, kind="sl")


def test_a_hub_that_is_not_there_is_refused(refused, tmp_path):
    gone = Hub()
    with asking(gone, TOKEN, tmp_path):
        gone.server_close()
        refused({"push_to": "tiny"}, "does not answer", kind="sl")


def test_a_push_that_fails_says_where_the_model_is(tmp_path, tiny_path):
    with asking(Hub(breaks=True), TOKEN, tmp_path), pytest.raises(RunStopped, match=f"it is saved in {tiny_path}"):
        push_model("tiny", Path(tiny_path))


def test_a_pushed_folder_arrives_in_a_private_repository(tmp_path):
    folder = tmp_path / "model"
    (folder / "value_model").mkdir(parents=True)
    for name, text in (("config.json", "{}"), ("value_model/config.json", "[]"), (MARKER, "of this machine")):
        (folder / name).write_text(text)
    with asking(hub := Hub(), TOKEN, tmp_path):
        assert push_model("tiny", folder) == f"{hub.url}/me/tiny"
        with pytest.raises(RunStopped, match=r"^push_to=tiny: nothing is pushed, because .* could not be written$"):
            push_model("tiny", tmp_path / "none")
    assert hub.files == {"config.json": b"{}", "value_model/config.json": b"[]"}
    assert [made["visibility"] for made in hub.made] == ["private"] and hub.summary == "Trained with FeynRL"


def test_what_may_be_pushed_is_accepted_before_the_start(recipe, tmp_path):
    """Under one's own name, an organization's, and without a name, which is one's own."""
    cfg = load_recipe(SLConfig, recipe(kind="sl"), []).cfg
    check_hub_upload(cfg)
    with asking(Hub(), TOKEN, tmp_path):
        for name in ("tiny", "me/tiny", "lab/tiny"):
            check_hub_upload(cfg.model_copy(update={"push_to": name}))
        for name in ("them/tiny", "labs/tiny"):
            assert tell(lambda name=name: check_hub_upload(cfg.model_copy(update={"push_to": name}))) == (
                f"push_to={name}: the token is that of me, lab: name one of them before the slash"
            )
