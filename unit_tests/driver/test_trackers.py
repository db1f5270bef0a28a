"""Trackers with their real parts: an MLflow server, a W&B file, TensorBoard's event files; and trackers that fail."""

import importlib.util
import json
import os
import posixpath
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import main_rl
import main_sl
from configs.schema import RLConfig
from configs.tracking_schema import TrackingConfig
from core.errors import RunStopped, UserError
from core.metrics import is_evaluation
from driver.load_recipe import load_recipe
from driver.records import tracking
from driver.records.run_folder import RunFolder
from driver.records.trackers import check_trackers, feeder, hub, load_trackers
from driver.records.trackers.base import Identity, Outcome, TrackedRun, Tracker
from driver.records.trackers.hub import Trackers, find_previous
from driver.records.trackers.jsonl import Jsonl
from driver.records.trackers.mlflow import Mlflow, make_name
from driver.records.tracking import describe_git, describe_machine, make_sample_rows, make_trackers
from driver.resume import collect_settings
from unit_tests.helpers import wandb_file
from unit_tests.helpers.examples import run_here, some_groups
from unit_tests.helpers.processes import find_free_port

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MLFLOW_TRACKING_USERNAME": "planted-user-3141",
    "MLFLOW_TRACKING_PASSWORD": "planted-password-2718",
}
DONE = Outcome(exit_reason="done", model="/a/model")


def a_run(folder: Path) -> TrackedRun:
    return TrackedRun(
        name="a",
        folder=folder,
        config={"steps": 3},
        facts={},
        settings=TrackingConfig(),
        first_step=0,
        previous=None,
    )


def trackers_of(folder: Path, said: list[str], **classes: type[Tracker]) -> Trackers:
    return Trackers(classes, a_run(folder), previous={}, say=said.append)


class Keeping(Tracker):
    """Keeps what it gets."""

    def start(self, run):
        self.calls = [("start", run.name)]
        return Identity(id="17", where="here")

    def metrics(self, step, values):
        self.calls.append((step, values))

    def samples(self, step, rows):
        self.calls.append((step, rows))

    def finish(self, outcome):
        self.calls.append(("finish", outcome))


class Failing(Keeping):
    """Its server goes away after two steps."""

    def metrics(self, step, values):
        if step == 2:
            raise ConnectionError("no answer from https://ann:hunter2@host/api")
        super().metrics(step, values)

    def abandon(self):
        self.calls.append("abandoned")
        raise RuntimeError("nobody hears this")


class Exiting(Keeping):
    """Some packages end the process where they cannot go on."""

    def start(self, run):
        sys.exit(3)


class Hanging(Keeping):
    """Waits for what never comes."""

    release, abandoned = threading.Event(), threading.Event()

    def metrics(self, step, values):
        self.release.wait()

    def abandon(self):
        self.abandoned.set()


def test_a_tracker_gets_everything_in_order_and_is_remembered(tmp_path):
    said: list[str] = []
    trackers = trackers_of(tmp_path, said, keeping=Keeping, jsonl=Jsonl)
    trackers.start()
    for step in range(3):
        trackers.metrics(step, {"step": float(step), "x": 0.1 * step})
    trackers.samples(2, [{"a": 1}])
    assert trackers.finish(DONE) == {"keeping": {"lines": 3, "delivered": 3}}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert trackers.feeders[0].tracker.calls == [
        ("start", "a"),
        *((step, {"step": float(step), "x": 0.1 * step}) for step in range(3)),
        (2, [{"a": 1}]),
        ("finish", DONE),
    ]
    assert lines == [{"step": float(step), "x": 0.1 * step} for step in range(3)] and said == []
    assert find_previous(tmp_path) == {"keeping": Identity(id="17", where="here")}


def test_names_of_runs_that_no_run_writes_are_refused(tmp_path):
    assert find_previous(tmp_path) == {}
    for text, why in (
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[1]", "'list' object has no attribute 'items'"),
        ('{"wandb": {"at": "x"}}', "Identity.__init__() got an unexpected keyword argument 'at'"),
    ):
        (path := tmp_path / "trackers.json").write_text(text)
        with pytest.raises(UserError) as refused:
            find_previous(tmp_path)
        assert str(refused.value) == f"{path} is damaged ({why}): remove it, and the trackers begin new runs"


def test_a_tracker_that_fails_is_told_once_and_costs_the_others_nothing(tmp_path):
    said: list[str] = []
    trackers = trackers_of(tmp_path, said, failing=Failing, exiting=Exiting, keeping=Keeping)
    trackers.start()
    for step in range(50):
        trackers.metrics(step, {"x": 1.0})
    facts = trackers.finish(DONE)
    assert facts == {
        "failing": {"lines": 50, "delivered": 2},
        "exiting": {"lines": 50, "delivered": 0},
        "keeping": {"lines": 50, "delivered": 50},
    }
    assert sorted(said) == [
        "exiting failed and gets nothing more, the run goes on without it: SystemExit: 3",
        "exiting: 50 of 50 lines were not delivered",
        "failing failed, and gets its lines again with those of the next step: "
        "ConnectionError: no answer from https://***@host/api",
        "failing: 48 of 50 lines were not delivered",
    ]
    assert [call[0] if isinstance(call, tuple) else call for call in trackers.feeders[0].tracker.calls] == [
        *("start", 0, 1, "abandoned")
    ]


class Recovering(Keeping):
    """Its server is away while these steps come, and takes lines again from the next on."""

    away = range(3, 6)

    def start(self, run):
        self.asked = 0
        return super().start(run)

    def metrics(self, step, values):
        self.asked += 1
        if self.asked in self.away:
            raise ConnectionError("no answer")
        super().metrics(step, values)


@pytest.mark.parametrize("steps", [20, 4])
def test_lines_that_a_tracker_did_not_take_are_sent_again(tmp_path, steps):
    """Before the others, so the order stays; and at the end of the run too, where no other line comes."""
    said: list[str] = []
    trackers = trackers_of(tmp_path, said, recovering=Recovering)
    [tracker] = (feeder.tracker for feeder in trackers.feeders)
    tracker.away = range(3, 6) if steps == 20 else range(4, 5)
    trackers.start()
    for step in range(steps):
        trackers.metrics(step, {"x": float(step)})
        trackers.samples(step, [{"a": step}])
    assert trackers.finish(DONE) == {"recovering": {"lines": steps, "delivered": steps}}
    lines = [one for step in range(steps) for one in ((step, {"x": float(step)}), (step, [{"a": step}]))]
    assert tracker.calls == [("start", "a"), *lines, ("finish", DONE)]
    assert said == [
        "recovering failed, and gets its lines again with those of the next step: ConnectionError: no answer"
    ]


class Away(Keeping):
    """Takes nothing, after it has started."""

    def metrics(self, step, values):
        raise ConnectionError("no answer")


def test_lines_that_wait_for_a_tracker_fill_no_memory(tmp_path):
    said: list[str] = []
    trackers = trackers_of(tmp_path, said, away=Away)
    trackers.start()
    for step in range(n := 3 * feeder.MAX_WAITING):
        trackers.metrics(step, {"x": 1.0})
    [one] = trackers.feeders
    assert len(one._undelivered) <= feeder.MAX_WAITING + 1
    assert trackers.finish(DONE) == {"away": {"lines": n, "delivered": 0}}
    assert said[-1] == f"away: {n} of {n} lines were not delivered" and len(said) <= 3


def test_a_tracker_that_hangs_neither_stops_the_run_nor_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "TRACKER_FINISH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(feeder, "TRACKER_FINISH_TIMEOUT_S", 0.2)
    said: list[str] = []
    trackers = trackers_of(tmp_path, said, hanging=Hanging)
    trackers.start()
    n = feeder.MAX_WAITING + 50
    for step in range(n):
        trackers.metrics(step, {"x": 1.0})
    try:
        assert trackers.feeders[0]._calls.qsize() <= feeder.MAX_WAITING
        assert trackers.finish(DONE) == {"hanging": {"lines": n, "delivered": 0}}
        assert said == [
            "hanging is slower than the run: some lines are not sent to it",
            "hanging did not take everything within 0.2 s of the run's end",
            f"hanging: {n} of {n} lines were not delivered",
        ]
        assert Hanging.abandoned.is_set()
    finally:
        Hanging.release.set()


def test_a_value_that_is_not_finite_stops_the_run_whatever_the_trackers(tmp_path):
    said: list[str] = []
    trackers = trackers_of(tmp_path, said, jsonl=Jsonl)
    trackers.start()
    with pytest.raises(RunStopped, match=r"the metric x is nan: .*; the steps before are in .*metrics\.jsonl"):
        trackers.metrics(0, {"x": float("nan")})
    with pytest.raises(RunStopped, match=r"the metric x is inf: .* is not finite$"):
        trackers_of(tmp_path, said).metrics(0, {"x": float("inf")})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


LACKING = """
from driver.records.trackers.base import Tracker
class Mine(Tracker):
    packages = ("no_such_package",)
    install = "ask for it"
"""


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"trackers": ["jsonl", "comet"]},
            "trackers: there is no 'comet' in .*; it has jsonl, mlflow, ",
        ),
        ({"trackers": ["jsonl", "jsonl"]}, "trackers: jsonl is given twice"),
        ({"trackers": ["lacking.py"]}, "needs the package no_such_package, which is not installed: ask for it, or "),
        ({"trackers": ["wandb"]}, "trackers: wandb has no API key: .* tracking.wandb_mode to offline"),
        (
            {"trackers": ["wandb"], "tracking.wandb_project": "team/a", "tracking.wandb_mode": "offline"},
            "trackers: W&B takes no project team/a.* none of # % / : ",
        ),
        ({"trackers": ["mlflow"], "tracking.mlflow_experiment": "e" * 501}, "at most 500 char.* which has 501$"),
        ({"tracking.wandb_mode": "offline"}, "tracking.wandb_mode is set, and wandb is not among the trackers"),
        ({"trackers": ["mlflow"], "tracking.mlflow_uri": "http://a:hunter2@b"}, "tracking.mlflow_uri: the address ho"),
        ({"trackers": ["mlflow"], "tracking.mlflow_uri": "http://b?token=hunter2"}, "tracking.mlflow_uri: the addr"),
    ],
)
def test_what_cannot_start_is_refused_in_one_sentence(changes, sentence, recipe, tmp_path, monkeypatch):
    """Before anything is made: there is no run folder."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lacking.py").write_text(LACKING)
    if changes.get("trackers") == ["lacking.py"]:
        changes = {"trackers": [str(tmp_path / "lacking.py")]}
    with pytest.raises(UserError, match=sentence) as refused:
        cfg = load_recipe(RLConfig, recipe(changes), []).cfg
        check_trackers(cfg.trackers, cfg.tracking)
    assert "hunter2" not in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_an_api_key_is_found_where_wandb_finds_it(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "NETRC", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "k")
    check_trackers(["wandb"], TrackingConfig())
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    check_trackers(["wandb"], TrackingConfig())
    monkeypatch.setenv("WANDB_BASE_URL", "https://elsewhere.example")
    with pytest.raises(UserError, match="no API key"):
        check_trackers(["wandb"], TrackingConfig())
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"], TrackingConfig())


def test_naming_a_tracker_imports_none_of_their_packages():
    code = (
        "import sys\nfrom driver.records.trackers import load_trackers\n"
        "load_trackers(['jsonl', 'mlflow', 'wandb', 'tensorboard', 'prometheus'])\n"
        "print([m for m in ('mlflow', 'wandb', 'tensorboard', 'prometheus_client', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert list(load_trackers(["jsonl", "mlflow"])) == ["jsonl", "mlflow"]


def test_trackers_are_told_the_models_of_all_gpus(tmp_path, monkeypatch):
    for i, (address, model) in enumerate([("0000:01:00.0", "NVIDIA H100"), ("0000:02:00.0", "NVIDIA A100: 80GB")]):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t {i}\n")
    for folder, named in ((tmp_path, {"hardware.gpu": "NVIDIA H100, NVIDIA A100: 80GB"}), (tmp_path / "none", {})):
        monkeypatch.setattr(tracking, "GPU_FILES", folder)
        assert {key: value for key, value in describe_machine().items() if key == "hardware.gpu"} == named


def test_what_trackers_are_told_of_the_machine(tmp_path):
    facts = describe_machine()
    assert int(facts["hardware.cpu_cores"]) > 0 and facts["package.torch"] and facts["python"].startswith("3.")
    assert describe_git(tmp_path) == {}, "no clone"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
    clean = describe_git(tmp_path)
    (tmp_path / "a").write_text("2")
    assert len(clean["git.commit"]) == 40 and clean["git.branch"] == "main" and clean["git.changed_files"] == "0"
    assert describe_git(tmp_path) == clean | {"git.changed_files": "1"}


def test_rows_of_samples_hold_strings_and_numbers():
    rows = make_sample_rows(3, some_groups(4, 3), 5)
    assert [row["group"] for row in rows] == [0, 0, 0, 1, 1] and {row["step"] for row in rows} == {3}
    assert {type(value) for row in rows for value in row.values()} <= {int, float, str, type(None)}


@pytest.mark.parametrize(("name", "longest"), [("group", 100), ("notes", 5000), ("tags", 64)])
def test_what_describes_a_run_is_as_long_as_all_trackers_take(name, longest):
    def settings(length: int) -> TrackingConfig:
        return TrackingConfig(**{name: ["x" * length] if name == "tags" else "x" * length})

    settings(longest), settings(1)
    for length in (0, longest + 1):
        with pytest.raises(ValueError, match=r"should have at (most|least)"):
            settings(length)


@given(st.text(alphabet="a/. ?\n\u202e\ud800", max_size=9), st.integers(0, 260))
def test_a_name_for_mlflow_is_a_path_that_cannot_be_shorter(name, length):
    """MLflow refuses every other, with the whole request, and the run would lose its tracker."""
    made = make_name("a" * length + name)
    assert posixpath.normpath(made) == made != "." and not made.startswith(("..", "/"))
    assert len(made) <= 250 and make_name(made) == made


def test_a_secret_of_ones_own_stands_in_no_file(tmp_path, recipe):
    """Nor in a checkpoint, whose settings are compared when the run is resumed."""
    settings = {"url": "https://ann:planted-1@judge.example", "api_key": "planted-2", "stop_token": "kept"}
    cfg = load_recipe(RLConfig, recipe({"reward.settings": settings, "reward.function": "arithmetic"}), []).cfg
    folder = RunFolder(cfg.run_dir, cfg.name, cfg.model_dump()).path
    told = make_trackers(cfg, folder, print).run.config
    loaded = load_recipe(RLConfig, recipe({"reward.settings": settings}), [])
    for text in ((folder / "config.yaml").read_text(), json.dumps(told), json.dumps(collect_settings(loaded, {}, {}))):
        assert "planted" not in text and "***@judge.example" in text and "kept" in text


# ---- real runs ----


def ask(server: str, call: str, /, **question: str) -> dict:
    query = "&".join(f"{key}={value}" for key, value in question.items())
    with urllib.request.urlopen(f"{server}/api/2.0/mlflow/{call}?{query}", timeout=30) as answer:
        return json.load(answer)


SERVER = """
import sys
from mlflow.server import app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[str, subprocess.Popen, Path]]:
    """MLflow's tracking server on a loopback port, and its store: in one process, the command `mlflow server` takes
    three times as long to start."""
    port = find_free_port()
    folder = tmp_path_factory.mktemp("server")
    address, log, store = f"http://127.0.0.1:{port}", folder / "log", folder / "mlflow.db"
    env = os.environ | {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{store}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], env=env, stdout=out, stderr=out)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)
        yield address, process, store
    finally:
        process.kill()
        process.wait()


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def runs_of(tmp_path: Path, name: str) -> list[Path]:
    return sorted((tmp_path / "runs").glob(f"{name}-*"), key=lambda path: path.stat().st_mtime)


def check_wandb(folders: list[Path], lines: list[dict[str, float]]) -> None:
    """Each process of the run has a file; together they hold every value."""
    [*files] = [next(folder.glob("wandb/offline-run-*/*.wandb")) for folder in folders]
    rows = [row for file in files for row in wandb_file.history(file)]
    logged = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows if "samples/path" not in row]
    assert logged == lines
    artifacts = [r.request.log_artifact.artifact for f in files for r in wandb_file.records(f) if r.HasField("request")]
    artifacts += [r.artifact for f in files for r in wandb_file.records(f) if r.WhichOneof("record_type") == "artifact"]
    recipes = [one.name for one in artifacts if one.type == "recipe"]
    assert recipes == [f"recipe-{folder.name}" for folder in folders]
    runs = [r.run for file in files for r in wandb_file.records(file) if r.WhichOneof("record_type") == "run"]
    assert {(run.project, run.entity) for run in runs} == {("sums", "us")}
    assert {(run.run_group, *run.tags, run.notes) for run in runs} == {
        ("pair", "small", "try 1", "A note.\nTwo lines.")
    }
    assert {run.run_id for run in runs} == {json.loads((folders[-1] / "trackers.json").read_text())["wandb"]["id"]}
    [path, *rest] = [row["samples/path"] for row in rows if "samples/path" in row]
    table = json.loads((files[0].parent / "files" / path).read_text())
    assert len(rest) == 3 and len(table["data"]) == 8 and {"prompt", "completion", "reward"} <= set(table["columns"])
    summary = {
        item.key or item.nested_key[0]: json.loads(item.value_json)
        for record in wandb_file.records(files[-1])
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    assert summary["exit_reason"] == "done" and summary["model"] == str(folders[-1] / "model")


def check_mlflow(server: str, folders: list[Path], lines: list[dict[str, float]]) -> None:
    """The server is asked over its API."""
    identity = json.loads((folders[-1] / "trackers.json").read_text())["mlflow"]
    run = ask(server, "runs/get", run_id=identity["id"])["run"]
    assert run["info"]["status"] == "FINISHED"
    experiment = ask(server, "experiments/get", experiment_id=run["info"]["experiment_id"])["experiment"]
    assert experiment["name"] == "two sums"
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    params = {param["key"]: param["value"] for param in run["data"]["params"]}
    assert tags["exit_reason"] == "done" and tags["model"] == str(folders[-1] / "model")
    assert params["alg.name"] == "grpo" and params["steps"] == "2" and tags["resumed.steps"] == "4"
    about = {"group": "pair", "small": "true", "try 1": "true", "mlflow.note.content": "A note.\nTwo lines."}
    assert about.items() <= tags.items()
    listed = ask(server, "artifacts/list", run_id=identity["id"], path="recipe")["files"]
    assert [file["path"] for file in listed] == [f"recipe/{folder.name}" for folder in folders]
    assert {"python", "git.commit", "package.torch", "hardware.cpu_cores"} <= tags.keys()
    for name in {name for line in lines for name in line}:
        history = ask(server, "metrics/get-history", run_id=identity["id"], metric_key=name)["metrics"]
        got = {int(one["step"]): one["value"] for one in history}
        assert got == {int(line["step"]): line[name] for line in lines if name in line}, name
    files = [f["path"] for f in ask(server, "artifacts/list", run_id=identity["id"], path="samples")["files"]]
    steps = [int(line["step"]) for line in lines if not is_evaluation(line)]
    assert files == [f"samples/step_{step:05d}.json" for step in steps]
    query = f"path={files[0]}&run_uuid={identity['id']}"
    with urllib.request.urlopen(f"{server}/get-artifact?{query}", timeout=30) as answer:
        table = json.load(answer)
    written = [json.loads(line) for line in (folders[0] / "samples" / "step_00000.jsonl").read_text().splitlines()]
    column = table["columns"].index("completion")
    assert [row[column] for row in table["data"]] == [one["completion"] for one in written[:8]]


def check_tensorboard(folder: Path, lines: list[dict[str, float]]) -> None:
    """Both processes write into the folder of the first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        if not tag.endswith("/text_summary"):
            found[tag] = {e.step: float(e.tensor_proto.double_val[0]) for e in events.Tensors(tag)}
    for tag in events.Tags()["scalars"]:
        found[tag] = {e.step: e.value for e in events.Scalars(tag)}
    names = {name for line in lines for name in line}
    assert found == {name: {int(line["step"]): line[name] for line in lines if name in line} for name in names}
    assert {"config/text_summary", "samples/text_summary", "outcome/text_summary"} <= set(events.Tags()["tensors"])


@pytest.mark.one_core
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_metric_of_a_run_and_of_its_continuation_is_in_each_tracker(
    recipe, tmp_path, sums, server, monkeypatch, capfd
):
    """And no password that these trackers read is in a file that the run has made."""
    address, _, _ = server
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    changes = {
        "trackers": ["jsonl", "mlflow", "wandb", *(["tensorboard"] if HAS_TENSORBOARD else [])],
        "tracking": {
            **{"mlflow_uri": address, "mlflow_experiment": "two sums", "samples_every": 1},
            **{"wandb_mode": "offline", "wandb_project": "sums", "wandb_entity": "us"},
            **{"group": "pair", "tags": ["small", "try 1"], "notes": "A note.\nTwo lines."},
        },
        **{"data.eval": str(sums / "eval.parquet"), "data.eval_rows": 2, "eval_every": 1},
        **{"checkpoint.every": 1, "checkpoint.keep": 5, "name": "tracked"},
    }
    code, err = run_here(main_rl, "--config", recipe(changes))
    assert code == 0, err
    [first] = runs_of(tmp_path, "tracked")
    code, err = run_here(main_rl, "--config", recipe(changes | {"resume": str(first), "steps": 4}))
    assert code == 0, err
    folders = runs_of(tmp_path, "tracked")
    lines = [line for folder in folders for line in lines_of(folder)]
    assert [line["step"] for line in lines if not is_evaluation(line)] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if is_evaluation(line)] == [0, 1, 2, 2, 3, 4], "the second begins with 2"
    check_mlflow(address, folders, lines)
    check_wandb(folders, lines)
    out = capfd.readouterr().out
    for folder in folders:
        [offline] = folder.glob("wandb/offline-run-*")
        assert f"`wandb sync {offline}` sends this run" in out
        summary = json.loads((folder / "summary.json").read_text())
        assert all(one == {"lines": 5, "delivered": 5} for one in summary["trackers"].values())
        assert len(summary["trackers"]) == len(changes["trackers"]) - 1
        for file in (path for path in folder.rglob("*") if path.is_file()):
            held = file.read_bytes()
            assert not [name for name, value in SECRETS.items() if value.encode() in held], file
    if not HAS_TENSORBOARD:
        pytest.skip("mlflow and wandb hold every metric; tensorboard is not installed here")
    check_tensorboard(folders[0], lines)


@pytest.mark.one_core
@pytest.mark.slow
def test_what_a_resumed_run_changes_moves_on_with_every_resume(server, tmp_path):
    """MLflow keeps a parameter as it was first; the tags beside it say what the newest run has."""
    address, _, _ = server
    identity = None
    for steps in (2, 4, 2, 6):
        (tmp_path / str(steps)).mkdir(exist_ok=True)
        (tmp_path / str(steps) / "config.yaml").write_text(f"steps: {steps}")
        told = {"config": {"steps": steps, "seed": 0}, "settings": TrackingConfig(mlflow_uri=address)}
        run = replace(a_run(tmp_path / str(steps)), previous=identity, **told)
        tracker = Mlflow()
        identity = tracker.start(run)
        tracker.finish(Outcome(exit_reason="done", model=None))
        data = ask(address, "runs/get", run_id=identity.id)["run"]["data"]
        tags = {tag["key"]: tag["value"] for tag in data["tags"]}
        assert {p["key"]: p["value"] for p in data["params"]} == {"steps": "2", "seed": "0"}
        assert int(tags.get("resumed.steps", "2")) == steps and "resumed.seed" not in tags


@pytest.mark.one_core
@pytest.mark.slow
def test_long_values_and_odd_names_are_as_mlflow_takes_them(server, tmp_path, monkeypatch):
    """Also where MLflow has been told to refuse them."""
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")
    address, _, _ = server
    (tmp_path / "config.yaml").write_text("steps: 2")
    told = {"config": {"data.system": "é" * 9000 + "!", "k" * 400: 1, "a//b/": 2}, "facts": {"git": "x" * 9000 + "!"}}
    run = replace(a_run(tmp_path), settings=TrackingConfig(mlflow_uri=address), **told)
    identity = None
    for _ in range(2):
        tracker = Mlflow()
        identity = tracker.start(replace(run, previous=identity))
        tracker.metrics(0, {"reward/": 0.5, "/.": 1.0})
        tracker.finish(Outcome(exit_reason="error: " + "y" * 9000 + "!", model="z" * 9000 + "!"))
    data = ask(address, "runs/get", run_id=identity.id)["run"]["data"]
    params = {p["key"]: p["value"] for p in data["params"]}
    tags = {tag["key"]: tag["value"] for tag in data["tags"]}
    assert params["k" * 250] == "1" and params["a/_b_"] == "2"
    assert {metric["key"]: metric["value"] for metric in data["metrics"]} == {"reward_": 0.5, "__": 1.0}
    for value in (params["data.system"], *(tags[name] for name in ("git", "exit_reason", "model"))):
        assert len(value) > 5900 and "[" in value and value.endswith("!")
    assert not [key for key in tags if key.startswith("resumed.")]


KILLING = """
import os, signal
def score(prompt, messages):
    mark = os.environ["KILL_MARK"]
    with open(mark, "a") as file:
        file.write("x")
    if os.path.getsize(mark) == 24:  # in the middle of the second step
        os.kill(int(os.environ["KILL_PROCESS"]), signal.SIGKILL)
    return {"correct": 1.0}
"""


@pytest.mark.one_core
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_that_dies_costs_one_warning(recipe, tmp_path, server, monkeypatch, capfd):
    """And a supervised run after it uses the store, which was the server's, without a server."""
    address, process, store = server
    monkeypatch.setenv("KILL_PROCESS", str(process.pid))
    monkeypatch.setenv("KILL_MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "killing.py").write_text(KILLING)
    changes = {
        **{"trackers": ["jsonl", "mlflow"], "tracking.mlflow_uri": address, "tracking.samples_every": 0},
        **{"reward.function": str(tmp_path / "killing.py"), "steps": 6, "name": "killed"},
    }
    code, err = run_here(main_rl, "--config", recipe(changes))
    assert code == 0, err
    [folder] = runs_of(tmp_path, "killed")
    out = capfd.readouterr().out
    assert out.count("mlflow failed") == 1
    counted = json.loads((folder / "summary.json").read_text())["trackers"]["mlflow"]
    assert counted["lines"] == 6 == len(lines_of(folder)) and counted["delivered"] <= 1
    assert f"mlflow: {6 - counted['delivered']} of 6 lines were not delivered" in out
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(store, tmp_path / "runs" / "mlflow.db")  # making a new one takes seconds
    # an experiment of its own: files of the server's experiments can be had from the server only
    own = {"tracking.mlflow_experiment": "own"}
    supervised = {"trackers": ["jsonl", "mlflow"], "name": "supervised", **own}
    code, err = run_here(main_sl, "--config", recipe(supervised, kind="sl"))
    assert code == 0, err
    check_local_store(tmp_path, runs_of(tmp_path, "supervised")[0])


def check_local_store(tmp_path: Path, folder: Path) -> None:
    """MLflow's own client reads the store."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    run_id = json.loads((folder / "trackers.json").read_text())["mlflow"]["id"]
    lines = lines_of(folder)
    for name in lines[0]:
        got = {one.step: one.value for one in client.get_metric_history(run_id, name)}
        assert got == {int(line["step"]): line[name] for line in lines}, name


IMPATIENT = """
import sys
from driver.records.trackers import feeder
from driver.records.trackers import hub
hub.TRACKER_FINISH_TIMEOUT_S = feeder.TRACKER_FINISH_TIMEOUT_S = 5.0
import main_rl
from core.cli import run_guarded
sys.exit(run_guarded(main_rl.main))
"""


@pytest.mark.verify
@pytest.mark.timeout(200)
def test_an_unreachable_server_of_weights_and_biases_costs_one_warning(recipe, tmp_path):
    """Online, and nothing listens at its address: the run goes on, and ends in time."""
    with socket.socket() as bound:  # nobody else gets the port, and nobody listens at it
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        env |= {"WANDB_BASE_URL": address, "WANDB_API_KEY": SECRETS["WANDB_API_KEY"], "OMP_NUM_THREADS": "1"}
        changes = {"trackers": ["jsonl", "wandb"], "tracking.wandb_mode": "online", "steps": 6, "name": "unreachable"}
        command = [sys.executable, "-c", IMPATIENT, "--config", recipe(changes)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    [folder] = runs_of(tmp_path, "unreachable")
    assert len(lines_of(folder)) == 6
    assert json.loads((folder / "summary.json").read_text())["trackers"]["wandb"] == {"lines": 6, "delivered": 0}
    about = [line for line in (done.stdout + done.stderr).splitlines() if "wandb" in line]
    assert len(about) == 2, about
    assert "did not take everything within 5 s" in about[0] or "failed and gets nothing more" in about[0], about
    assert about[1].endswith("wandb: 6 of 6 lines were not delivered"), about
