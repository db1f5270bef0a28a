"""Which of the tests that run a line are asked, by the seconds that each may take."""

from __future__ import annotations

from pathlib import Path

import coverage

from tools.drawn_mutants.lines import PAGES, Record

FILE, HOME = "algs/product.py", "unit_tests.algs.test_product"


def make_record(root: Path, seconds: dict[str, float]) -> Record:
    """Return the record of tests that all run line 2 of the file. seconds: of each case."""
    (root / "algs").mkdir()
    (root / FILE).write_text("def half(x):\n    return x / 2\n")
    lines = coverage.CoverageData(str(root / "lines"))
    for name in seconds:
        lines.set_context(f"{HOME.replace('.', '/')}.py::{name}|run")
        lines.add_lines({FILE: [2]})
    lines.write()
    cases = "".join(f'<testcase classname="{HOME}" name="{name}" time="{took}" />' for name, took in seconds.items())
    (root / "tests.xml").write_text(f"<testsuite>{cases}</testsuite>")
    return Record("fast", (root,), root)


def test_cases_are_chosen_one_by_one_where_all_of_them_take_long(tmp_path: Path):
    found = make_record(
        tmp_path, {"test_all[a]": 9.0, "test_all[b]": 3.0, "test_all[c]": 4.0, "test_two[x]": 0.5, "test_two[y]": 1.0}
    )
    chosen = [name.partition("::")[2] for name in found.find_tests(FILE, 2, 10.0)]
    # 0.3 s for the file and 1.5 s for the short test with all of its cases leave no room for the third case
    assert chosen == ["test_two", "test_all[b]", "test_all[c]"]


def test_a_test_that_takes_too_long_hides_no_other(tmp_path: Path):
    found = make_record(tmp_path, {"test_a": 1.0, "test_b": 30.0, "test_c": 2.0})
    assert [name.partition("::")[2] for name in found.find_tests(FILE, 2, 5.0)] == ["test_a", "test_c"]


def test_one_test_is_asked_however_long_it_takes(tmp_path: Path):
    found = make_record(tmp_path, {"test_all[a]": 30.0, "test_all[b]": 20.0})
    assert [name.partition("::")[2] for name in found.find_tests(FILE, 2, 2.0)] == ["test_all[b]"]


def make_import_record(root: Path, test: str, table: str, *, seconds: float = 0.1, text: str = "") -> Path:
    """Write a test file and the record that it imports a table and runs no line of a function; return its folder."""
    path, _, name = test.partition("::")
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    folder = root / f"record of {Path(path).stem}"
    folder.mkdir()
    lines = coverage.CoverageData(str(folder / "lines"))
    lines.set_context("")
    lines.add_lines({table: [1]})
    lines.write()
    home = path.removesuffix(".py").replace("/", ".")
    case = f'<testcase classname="{home}" name="{name}" time="{seconds}" />'
    (folder / "tests.xml").write_text(f"<testsuite>{case}</testsuite>")
    return folder


def test_a_table_is_seen_by_those_that_import_it_and_by_the_pages(tmp_path: Path):
    (tmp_path / "algs").mkdir()
    (tmp_path / FILE).write_text("LIMITS = {1: 2, 3: 4}\n")
    near, own = (f"unit_tests/algs/test_{name}.py::test_a" for name in ("near", "own"))
    folders = (
        make_import_record(tmp_path, near, FILE),
        make_import_record(tmp_path, own, FILE, seconds=1.0, text="from algs.product import LIMITS"),
        make_import_record(tmp_path, PAGES, FILE),
        make_import_record(tmp_path, "unit_tests/algs/test_other.py::test_b", "algs/other.py"),
    )
    assert Record("fast", folders, tmp_path).find_tests(FILE, 1, 10.0) == [own, near, PAGES]
