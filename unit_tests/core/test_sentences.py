"""Sentences of the ground, whole: errors of files and plug-ins, missing room in a cluster, machines that differ."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.cluster.capacity import CPU, GPU, SLOT, Machine, Resources, Role, choose_bundle, describe_missing
from core.cluster.machine_check import OUR_FOLDERS, ROOT, MachineCheck, collect_facts, copy_code, hash_model
from core.errors import (
    MIB,
    CallFailed,
    ProcessDied,
    RunStopped,
    TransportFailed,
    UserError,
    find_closest,
    first_line,
    is_write_error,
    name_error,
    quote,
    shorten,
    suggest_name,
    writing,
)
from core.loading import FileSpec, PartMissing, list_plugins, load_class, load_module, needs_part, resolve
from core.stores import StoreUnreachable, find_cause, is_remote, open_store
from core.strict_model import StrictModel, find_odd_character
from unit_tests.helpers.sentences import tell


def test_texts_of_others_are_one_short_line():
    assert [len(shorten("x" * n)) for n in (299, 300, 301, 500)] == [299, 300, 303, 303]
    assert shorten("x" * 301) == "x" * 300 + "..."
    assert [quote(given) for given in ("é a", "a\nb", 3.0, "x" * 301)] == ["é a", "'a\\nb'", "3.0", "x" * 300 + "..."]
    assert first_line(ValueError("\n  \n  why \nmore")) == "why"
    assert first_line(ValueError("a\tb\x1b")) == r"a\tb\x1b"
    assert first_line(ValueError("x" * 400)) == "x" * 300 + "..."
    assert [name_error(error) for error in (KeyError(), ValueError("no"), ValueError("ValueError"))] == [
        *("KeyError", "ValueError: no", "ValueError")
    ]
    assert [find_closest("grop", names) for names in (["gspo", "grpo"], ["grpo", "gspo"], ["dpo"], [])] == [
        *("grpo", "grpo", None, None)
    ]
    # the same letters in another order, though four names are closer by their letters in order
    assert find_closest("grop", ["grops", "gro", "rop", "grp", "gpro"]) == "gpro"
    assert [suggest_name("grop", names) for names in (["grpo"], ["zzz"])] == [" (did you mean 'grpo'?)", ""]


def test_an_error_of_a_call_keeps_what_failed_apart_from_what_was_seen():
    seen, plain = CallFailed("no answer", "rank 0 waits"), TransportFailed("no answer")
    assert (str(seen), seen.what, str(plain), plain.what) == ("no answer; rank 0 waits", *["no answer"] * 3)
    died = ProcessDied("it died", worker=("engine", 1))
    assert (str(died), died.worker, died.steps, died.run_folder) == ("it died", ("engine", 1), 0, None)


def fail(path: Path, error: Exception, **how: Any) -> str:
    def write() -> None:
        with writing(path, **how):
            raise error

    return tell(write, RunStopped)


def test_a_failed_write_names_the_file_the_reason_and_the_meaning(tmp_path, monkeypatch):
    path, no_space = tmp_path / "a" / "x", OSError(errno.ENOSPC, "No space left on device")
    assert fail(path, OSError(errno.EROFS, "Read-only file system"), meaning="so it ends") == (
        f"{path} cannot be written: Read-only file system; so it ends"
    )
    path.parent.mkdir()
    path.write_bytes(b"x" * MIB)
    (path.parent / "x.partial").mkdir()
    (path.parent / "x.partial" / "y").write_bytes(b"x" * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=1024 * MIB))
    full = f"{path} cannot be written: the disk is full: "
    assert fail(path, no_space) == full + "there was room for 1,026.00 MiB"
    assert fail(path, OSError(errno.EDQUOT, "Quota"), needs=lambda: 2048 * MIB, meaning="it ends") == (
        full + "about 2,048.00 MiB are needed, and there was room for 1,026.00 MiB; it ends"
    )
    torch = RuntimeError("\nPytorchStreamWriter failed\nmore")
    assert fail(path, torch, needs=lambda: 1027 * MIB) == (
        full + "about 1,027.00 MiB are needed, and there was room for 1,026.00 MiB"
    )
    assert fail(path, torch, needs=lambda: 1026 * MIB) == f"{path} cannot be written: PytorchStreamWriter failed"
    monkeypatch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=MIB))
    assert fail(path, torch) == f"{path} cannot be written: PytorchStreamWriter failed"
    for other in (OSError(errno.ENOENT, "no such file"), RuntimeError("a bug")):
        with pytest.raises(type(other)), writing(path):
            raise other


def test_errors_of_writers_are_told_from_bugs():
    causes = [
        name for name, number in vars(errno).items() if isinstance(number, int) and is_write_error(OSError(number, ""))
    ]
    assert sorted(causes) == sorted(
        ["EACCES", "EDQUOT", "EFBIG", "EIO", "EISDIR", "ENAMETOOLONG", "ENOSPC", "ENOTDIR", "EPERM", "EROFS"]
    )
    said = ("PytorchStreamWriter", "inline_container.cc", "iostream error", "Error while serializing", "no memory")
    assert [is_write_error(RuntimeError(f"x {words} y")) for words in said] == [True] * 4 + [False]


NO_PLACE = (
    "start Ray on more machines, wait until other jobs end, or lower trainer.ranks, rollout.num_engines or "
    "rollout.tensor_parallel_size"
)


def make_machine(name: str, total: float, free: float) -> Machine:
    return Machine(node_id=name, host=name, total=total, free=free)


def test_missing_room_is_one_sentence():
    trainers = Role(name="trainer", n=2, resources=Resources(gpus=1))
    engines = Role(name="engine", n=2, resources=Resources(gpus=4, ranks=4))
    asked = "asked for 2 x trainer with 1 GPU each and 2 x engine with 4 GPUs each, and the cluster has "

    def say(*machines: Machine, roles: tuple[Role, ...] = (trainers, engines), resource: str = GPU) -> str:
        return describe_missing(roles, machines, resource=resource)

    assert say(make_machine("a", 8, 2), make_machine("b", 4, 4)) == (
        f"{asked}2 machines with 6 free GPUs (a: 2 of 8, b: 4 of 4): 4 GPUs are missing; {NO_PLACE}"
    )
    assert say(make_machine("a", 9, 9)) == (
        f"{asked}1 machine with 9 free GPUs (a: 9 of 9): 1 GPU is missing; {NO_PLACE}"
    )
    assert say(make_machine("a", 8, 7), make_machine("b", 3, 3)) == (
        f"{asked}2 machines with 10 free GPUs (a: 7 of 8, b: 3 of 3): no machine has 4 free GPUs for one of them, "
        f"which cannot be split; {NO_PLACE}"
    )
    of_cpu = Role(name="engine", n=1, resources=Resources(ranks=2))
    assert say(make_machine("a", 4, 1), roles=(of_cpu,), resource=SLOT) == (
        "asked for 1 x engine with 2 feynrl_worker slots each, and the cluster has 1 machine with 1 free feynrl_worker "
        f"slot (a: 1 of 4): 1 feynrl_worker slot is missing; {NO_PLACE}"
    )
    assert say(roles=(of_cpu,), resource=CPU) == (
        "asked for 1 x engine with 0.001 CPUs each, and the cluster has 0 machines with 0 free CPUs (): 0.001 CPUs are "
        f"missing; {NO_PLACE}"
    )
    both = Resources(gpus=3, ranks=2)
    assert [choose_bundle(both, has_slots=slots) for slots in (True, False)] == [{GPU: 3}] * 2
    assert choose_bundle(Resources(), has_slots=True) == {SLOT: 1}


def test_a_machine_that_differs_is_one_clause(tmp_path):
    (run := tmp_path / "run").mkdir()
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    check = MachineCheck.begin(run, {"model.path": str(model), "alg.other": "OWNER/NAME"}, gpu_use=None)
    ours, trainer = check.ours, Role(name="trainer", n=1, resources=Resources(gpus=1))
    same = "use the same environment on every machine (make install, with constraints.txt)"
    torch = ours["packages"]["torch"]
    mend = "bring both to one commit, let all machines share a folder, or set ship_code=true"
    other_code = f"runs other code of FeynRL, in /there, than the driver, in {ROOT}: "
    copy = "share the folder, or copy it to the same path on every machine"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"python": "3.9.1"}, f"runs Python 3.9.1, and the driver {ours['python']}: {same}"),
        ({"packages": {**ours["packages"], "torch": "0.1"}}, f"has torch 0.1, and the driver has {torch}: {same}"),
        ({"packages": {}}, f"has no torch, and the driver has {torch}: {same}"),
        ({"packages": {**ours["packages"], "more": "1"}}, ""),
        ({"code": ours["code"] | {"a.py": "x"}, "root": "/there"}, f"{other_code}a.py differs; {mend}"),
        (
            {"code": ours["code"] | {"b.py": "x", "a.py": "x"}, "root": "/there"},
            f"{other_code}a.py and 1 more files differ; {mend}",
        ),
        (
            {"nonce": "x"},
            f"does not see the run folder {run}: set run_dir to a folder that all machines share, under one path",
        ),
        ({"models": {}}, f"has no model.path={model}: {copy}"),
        ({"models": {"model.path": "x"}}, f"has other files in model.path={model}: {copy}"),
        ({"gpu_problem": "it is old"}, "cannot use the GPU that Ray gave it: it is old"),
    ]
    found = collect_facts(check.asked)
    for changes, clause in cases:
        theirs: Any = {**found, **changes}
        assert check.find_difference(theirs, trainer) == clause
    theirs = {**found, "gpu_problem": "it is old", "nonce": ""}
    assert check.find_difference(theirs, replace(trainer, resources=Resources(), needs_run_folder=False)) == ""
    assert check.explain_import("no module core") == (
        f"its machine cannot import FeynRL (no module core): let all machines share {ROOT}, or clone it there; where "
        "only the code is missing, set ship_code=true"
    )


def test_all_our_code_is_sent_and_a_model_is_told_by_config_and_sizes(tmp_path):
    sent = copy_code(tmp_path)
    assert sent == tmp_path / "code" and {folder.name for folder in sent.iterdir()} == {*OUR_FOLDERS}
    assert (sent / "core/errors.py").read_bytes() == (ROOT / "core/errors.py").read_bytes()
    assert not [*sent.rglob("__pycache__")]
    found = set[str]()
    for config, weights in (("{}", "ab"), ("{}", "abc"), ("[]", "ab"), (None, "ab")):
        folder = tmp_path / f"{config}{weights}"
        folder.mkdir()
        (folder / "w.bin").write_text(weights)
        if config is not None:
            (folder / "config.json").write_text(config)
        found.add(hash_model(folder))
    assert len(found) == 4 and {len(one) for one in found} == {16}


def offers_error(module: Any) -> bool:
    return "UserError" in vars(module)


def test_code_that_cannot_be_found_or_loaded_is_one_sentence(tmp_path):
    def find(name: str, **how: Any) -> FileSpec:
        return resolve(name, "core", offers=offers_error, **how)

    names = ", ".join(list_plugins("core", offers_error))
    assert "errors" in names.split(", ") and "metric" not in names.split(", ")
    own = "and a file of your own is named by its path (my_file.py)"
    for key, prefix in (("", ""), ("alg.name", "alg.name: ")):
        assert tell(lambda key=key: find("erors", key=key)) == (
            f"{prefix}there is no 'erors' in core/ (did you mean 'errors'?); it has {names}, {own}"
        )
    assert tell(lambda: find("_x.y")) == f"there is no '_x.y' in core/; it has {names}, {own}"
    assert tell(lambda: resolve("x", "core.text", offers=lambda _: False)) == (
        f"there is no 'x' in core/text/; it has none, {own}"
    )
    (tmp_path / "mine.py").write_text("class A:\n    pass\n\nclass B(Exception):\n    pass\n\nclass C(B):\n    pass\n")
    (tmp_path / "mine.txt").touch()
    assert tell(lambda: find(f"{tmp_path}/min.py", key="k")) == (
        f"k: there is no file {tmp_path}/min.py (did you mean 'mine.py'?)"
    )
    assert tell(lambda: find(f"{tmp_path}/no/min.py")) == f"there is no file {tmp_path}/no/min.py"
    assert tell(lambda: find(f"{tmp_path}/mine.txt", key="k")) == (
        f"k: {tmp_path}/mine.txt is not a Python file; its name must end in .py"
    )
    spec = find(f"{tmp_path}/mine.py")
    assert (spec.path, spec.in_package, spec.module) == (f"{tmp_path}/mine.py", False, f"mine_{spec.sha256[:12]}")
    for base, found in ((Exception, "B, C"), (ValueError, "none")):
        assert tell(lambda base=base: load_class(spec, base, key="k")) == (
            f"k: {tmp_path}/mine.py must define exactly one subclass of builtins.{base.__name__}, found {found}"
        )
    changed = replace(spec, sha256="0" * 64)
    assert tell(lambda: load_module(changed)) == (
        f"{tmp_path}/mine.py is not the file this run began with (sha256 {spec.sha256[:12]}, expected 000000000000); "
        "do not change it during the run, and keep it the same on every machine"
    )
    (tmp_path / "mine.py").unlink()
    assert tell(lambda: load_module(spec)) == (
        f"{tmp_path}/mine.py is missing on this machine; every machine of a run must see the same files"
    )


BROKEN = {
    "x = 1\nx +\n": ", line 2, cannot be imported: SyntaxError: invalid syntax (FILE, line 2)",
    "def f():\n    1 / 0\n\nf()\n": ", line 2, cannot be imported: ZeroDivisionError: division by zero",
    "import sys\n\nsys.exit(1)\n": ", line 3, cannot be imported: it ends the program (sys.exit); put what should "
    'only run as a program under `if __name__ == "__main__":`',
    "import no_such_part\n": ", line 1, cannot be imported: ModuleNotFoundError: No module named 'no_such_part'",
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_file_that_cannot_be_imported_is_one_sentence_twice(source, tmp_path):
    (file := tmp_path / "mine.py").write_text(source)
    spec = resolve(str(file), "core", offers=offers_error)
    for _ in range(2):
        assert tell(lambda: load_module(spec)) == f"{file}{BROKEN[source]}".replace("FILE", "mine.py")


def test_a_missing_part_is_named_with_the_key():
    def import_it(name: str, **how: str) -> None:
        with needs_part("my.key", **how):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    assert tell(lambda: import_it("rewards.sandbox.x"), PartMissing) == (
        "my.key needs rewards/sandbox/x, which this clone lacks: restore it, or leave the key out"
    )
    assert tell(lambda: import_it("analysis", otherwise="set it to off"), PartMissing) == (
        "my.key needs analysis, which this clone lacks: restore it, or set it to off"
    )
    for part in (
        *("data_feeds.images", "driver.evaluation.suites", "modeling.images", "rewards.judging"),
        *("rollouts.agents", "rollouts.judges", "rollouts.tools"),
    ):
        said = f"my.key needs {part.replace('.', '/')}, which this clone lacks: restore it, or leave the key out"
        assert tell(partial(import_it, part), PartMissing) == said
    for name in ("analysis_of_mine", "numpy.x", "rewards"):
        with pytest.raises(ModuleNotFoundError, match=name):
            import_it(name)


def test_stores_that_cannot_be_opened_are_one_sentence():
    assert [is_remote(path) for path in ("s3://a", "/a", "a:b", "hub:x")] == [True, False, False, False]
    filesystem, path = open_store("memory://a/b", "k")
    assert (type(filesystem).__name__, path) == ("MemoryFileSystem", "/a/b")
    assert tell(lambda: open_store("xyz://a", "data.train")) == (
        "data.train: fsspec knows no protocol xyz://: use one that it knows, as s3://, gs://, hf://, https://, memory://"
    )
    deep, middle, outer = ValueError("deep"), OSError("middle"), FileNotFoundError("outer")
    outer.__cause__, middle.__cause__ = middle, deep
    assert [find_cause(error) for error in (outer, deep)] == [deep, deep]
    assert issubclass(StoreUnreachable, UserError)


class Numbers(StrictModel):
    """Settings of each kind of number."""

    n: int = 1
    x: float = 1.0
    any_size: float | str = 1.0
    switch: bool = False
    texts: tuple[str, ...] = ()


def refused(**given: Any) -> str:
    said = tell(lambda: Numbers.model_validate(given), ValueError)
    return said.split("Value error, ")[1].split(" [type=")[0]


def test_settings_take_plausible_numbers_and_clean_text():
    assert refused(n=True) == refused(x=True) == "true is not valid, a number is expected"
    assert refused(x=False) == "false is not valid, a number is expected"
    assert refused(n=2**31) == "2.14748e+09 is too large, at most 2147483647 is allowed"
    assert refused(n=-(2**31)) == "-2.14748e+09 is too large, at most 2147483647 is allowed"
    assert refused(n=10**400) == "the number is too large, at most 2147483647 is allowed"
    assert refused(x=1.1e9) == "1.1e+09 is too large, at most 1e+09 is allowed"
    assert refused(texts=["a\0"]) == "a NUL character is not allowed: leave it out"
    assert refused(any_size="\udc00") == "half of a character is not allowed: leave it out"
    fine = Numbers(n=2**31 - 1, x=-1e9, switch=True)
    assert (fine.n, fine.x, fine.switch) == (2**31 - 1, -1e9, True)
    assert tell(lambda: fine.model_copy(update={"m": 1}), TypeError) == "Numbers has no field m"
    assert fine.model_copy(update={"n": 2}).n == 2 and fine.model_copy() == fine
    assert [find_odd_character(value) for value in ({"a": ("\ud800",)}, {"\0": 1}, ["a"], 3, ("a", "\0"))] == [
        *("half of a character", "a NUL character", "", "", "a NUL character")
    ]
