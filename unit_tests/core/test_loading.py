"""Code by name or by path, with its hash checked wherever it is loaded."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from algs import find_algorithm
from core.errors import UserError
from core.loading import FileSpec, load_class, load_module
from core.loading import resolve as resolve_plugin


def resolve(name: str, package: str, *, key: str = "") -> FileSpec:
    """A plug-in is a module with a UserError here."""
    return resolve_plugin(name, package, offers=lambda module: "UserError" in vars(module), key=key)


SOURCE = "from dataclasses import dataclass\n\n@dataclass\nclass Thing:\n    n: int = 3\n"


def test_a_name_finds_a_module_of_the_package() -> None:
    spec = resolve("errors", "core")
    assert spec.module == "core.errors"
    assert load_module(spec).UserError is UserError


def test_a_file_loads_by_path_and_a_second_load_is_the_same_module(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    spec = resolve(str(file), "algs")
    assert load_module(spec).Thing().n == 3
    assert load_module(spec) is load_module(spec)


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    modules = []
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        file = tmp_path / str(n) / "mine.py"
        file.write_text(f"n = {n}\n")
        modules.append(load_module(resolve(str(file), "algs")))
    assert [m.n for m in modules] == [1, 2]


def test_another_process_loads_it_from_the_pickled_spec(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    spec_file = tmp_path / "spec.pkl"
    spec_file.write_bytes(pickle.dumps(resolve(str(file), "algs")))
    code = (
        "import pathlib, pickle, sys; from core.loading import FileSpec, load_module;"
        "spec = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); print(load_module(spec).Thing())"
    )
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code, spec_file], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Thing(n=3)"


ALGORITHM = """
from algs.base import Algorithm
from core.strict_model import StrictModel

class Sharp(StrictModel):
    floor: float = 0.5

class Mine(Algorithm):
    sharp: Sharp = Sharp()

    def loss(self, policy, tokens):
        return -policy.logp, {}
"""


def test_an_algorithm_of_a_file_reaches_another_process_with_its_sections(tmp_path: Path) -> None:
    """Its classes are known nowhere but in the file, which is compared before it is imported there."""
    file = tmp_path / "mine.py"
    file.write_text(ALGORITHM)
    settings = {"file": str(file), "sharp": {"floor": 0.25}}
    alg = find_algorithm(settings)[1](**settings)
    assert pickle.loads(pickle.dumps(alg)) == alg and alg.model_copy() == alg
    code = (
        "import pickle, sys\ntry: alg = pickle.load(sys.stdin.buffer)\nexcept Exception as e: print(e)\n"
        "else: print(alg.sharp.floor, alg.loss_norm, sorted(alg.model_fields_set))"
    )
    root = Path(__file__).parent.parent.parent

    def send() -> str:
        sent = pickle.dumps(alg)
        done = subprocess.run([sys.executable, "-c", code], cwd=root, input=sent, capture_output=True, check=True)
        return done.stdout.decode().strip()

    assert send() == "0.25 token ['file', 'sharp']"
    file.write_text(ALGORITHM.replace("-policy", "policy"))
    assert send().startswith(f"{file} is not the file this run began with (sha256 ")


def test_a_file_that_changed_since_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    spec = resolve(str(file), "algs")
    load_module(spec)
    file.write_text(SOURCE + "# edited\n")
    with pytest.raises(UserError, match="not the file this run began with"):
        load_module(spec)


def test_a_misspelt_name_is_answered_with_the_near_one() -> None:
    with pytest.raises(UserError, match=r"alg.name: there is no 'erors' in core/ \(did you mean 'errors'\?\)"):
        resolve("erors", "core", key="alg.name")


def test_a_module_that_is_not_on_offer_is_refused() -> None:
    with pytest.raises(UserError, match="there is no 'types' in core/"):
        resolve("types", "core")


def test_a_missing_file_is_answered_with_the_near_one(tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text("")
    with pytest.raises(UserError, match=r"there is no file .*my_los.py \(did you mean 'my_loss.py'\?\)"):
        resolve(str(tmp_path / "my_los.py"), "algs")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\nx +\n", "line 2, cannot be imported: SyntaxError"),
        ("\nimport no_such_library\n", "line 2, cannot be imported: ModuleNotFoundError"),
        ("x = 1\n\n1 / 0\n", "line 3, cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_broken_file_is_one_sentence_with_its_line(tmp_path: Path, source: str, said: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(UserError, match=said):
        load_module(resolve(str(file), "algs"))
    with pytest.raises(UserError, match=said):  # and not half a module the second time
        load_module(resolve(str(file), "algs"))


def test_a_plug_in_whose_part_is_gone_is_refused_and_not_listed(tmp_path: Path, monkeypatch) -> None:
    plugins = tmp_path / "my_plugins"
    plugins.mkdir()
    (plugins / "__init__.py").write_text("")
    (plugins / "whole.py").write_text(SOURCE)
    (plugins / "lacking.py").write_text(f"import rollouts.tools.gone\n{SOURCE}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"^my.key=lacking needs rollouts/tools/gone, which this clone lacks: restore"):
        resolve_plugin("lacking", "my_plugins", offers=lambda _: True, key="my.key")
    with pytest.raises(UserError, match=r"no 'other' in my_plugins/; it has whole, and"):
        resolve_plugin("other", "my_plugins", offers=lambda _: True, key="my.key")
    file = tmp_path / "mine.py"
    file.write_text("from rollouts.tools.gone import x\n")
    with pytest.raises(UserError, match=r"^my.key=.*mine.py needs rollouts/tools/gone, which this clone lacks"):
        load_class(resolve_plugin(str(file), "my_plugins", offers=lambda _: True), object, key="my.key")
