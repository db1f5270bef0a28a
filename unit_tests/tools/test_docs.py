"""The documentation is true: generated pages are up to date, blocks run, links lead somewhere, quoted errors exist."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tools.docs import pages
from unit_tests.helpers.doc_blocks import LEVELS, ROOT, make_workspace, matches, read_blocks, run_page

DOCS = sorted((ROOT / "docs").rglob("*.md"))
STORIES = [page for page in [ROOT / "README.md", *DOCS] if read_blocks(page)]
KINDS = {
    "bash": r"test: (fast|slow|verify)(, exits \d+|, serves)?|test: skip: .+",
    "python": r"test: (fast|slow|verify)|file: \S+|test: skip: .+",
    "yaml": r"test: (supervised )?recipe|file: \S+",
}
MARKS = {
    "fast": (),
    "slow": (pytest.mark.slow, pytest.mark.one_core),
    "verify": (pytest.mark.verify, pytest.mark.timeout(1800)),
}


def stories() -> list:
    """List one test for each page and each level at which it has a block."""
    return [
        pytest.param(page, level, id=f"{page.relative_to(ROOT)}-{level}", marks=MARKS[level])
        for page in STORIES
        for level in LEVELS
        if any(block.level == level or (level == "fast" and not block.level) for block in read_blocks(page))
    ]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(("page", "level"), stories())
def test_the_blocks_of_a_page_run(page, level, tmp_path, tiny_path, sums, monkeypatch, one_thread):
    make_workspace(tmp_path, tiny_path, sums)
    monkeypatch.chdir(tmp_path)
    run_page(page, level, tmp_path)


def pages_with_blocks() -> list:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in STORIES]


@pytest.mark.parametrize("page", pages_with_blocks())
def test_every_block_says_how_it_is_tested(page):
    for block in read_blocks(page):
        where = f"{page.relative_to(ROOT)}, line {block.line}"
        assert block.kind in KINDS, f"{where}: a block is {', '.join(KINDS)} or text, found {block.kind}"
        assert re.fullmatch(KINDS[block.kind], block.marker), f"{where}: its marker is {block.marker!r}"
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
    assert all(fences[::2]), f"{page.relative_to(ROOT)}: a block without a language"


def test_output_is_compared_up_to_what_is_left_out():
    assert matches("a\n...\nd\n", "a\nb\nc\nd\n") and matches("a\n...\nd\n", "a\nd\n")
    assert matches("took ... s\n", "took   3.1 s\n") and matches("...\nb\n", "a\nb\n") and matches("a\n...\n", "a\nb\n")
    assert not matches("a\nc\n", "a\nb\nc\n") and not matches("took ... s\n", "took\n3 s\n")


def test_generated_pages_are_what_the_code_says():
    old = [str(path.relative_to(ROOT)) for path, text in pages().items() if path.read_text() != text]
    assert old == [], "run: python -m tools.docs --write"


def tracked_markdown() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({*(ROOT / name for name in listed.splitlines()), *DOCS})


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub and the site give to headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", t).lower()).strip().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", tracked_markdown(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_link_is_broken(page):
    if not page.exists():
        pytest.skip("removed in this working tree")
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "`", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.relative_to(ROOT)} links to {target}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), f"{page.relative_to(ROOT)} links to {target}: no such heading"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in DOCS)


def test_the_tests_that_a_page_names_are_there():
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "what_others_reported.md").read_text())
    assert len(named) > 15
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / "unit_tests" / file).read_text(), f"{file}::{test}"


def test_the_errors_of_troubleshooting_are_those_of_the_code():
    """A heading in backticks is part of an error; `...` stands for what varies. Strings that the code joins count."""
    folders = ("algs", "configs", "core", "data_feeds", "driver", "modeling", "rewards", "rollouts", "trainers")
    files = [path for folder in (*folders, "weight_sync") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text() for path in files)
    code = re.sub(r"""["']\s*\n\s*f?["']""", "", code)  # one string over several lines
    quoted = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert quoted
    for error in quoted:
        for part in filter(None, (p.strip() for p in error.split("..."))):
            assert part in code, f"no error says {part!r}"


def test_every_key_that_the_pages_name_exists():
    """Dotted keys of our sections in code format; in coming_from/ those of the second column."""
    sections = "alg|checkpoint|data|model|reward|rollout|trainer|weight_sync"
    generated = [page for page in DOCS if page.parent.name == "reference"]
    known = set(re.findall(r"^\| `([\w.]+)` \|", "\n".join(page.read_text() for page in generated), re.MULTILINE))
    for page in sorted({*DOCS} - {*generated}):
        text = page.read_text()
        if page.parent.name == "coming_from":
            text = "\n".join(line.split(" | ")[1] for line in text.splitlines() if line.startswith("| "))
        for key in re.findall(rf"`((?:{sections})\.[a-z_.]*[a-z_])(?![\w.(])", text):
            is_section = any(name.startswith(f"{key}.") for name in known)
            assert key in known or is_section or key.endswith(".py"), f"{page.relative_to(ROOT)}: no key {key}"


def test_every_file_names_the_same_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"Version {version}," in (ROOT / "README.md").read_text()
    assert f"## {version}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_packages_with_stable_names_say_that_they_have_types():
    page = (ROOT / "docs" / "reference" / "stable.md").read_text()
    packages = {name for name in re.findall(r"^from (\w+)", page, re.MULTILINE) if (ROOT / name).is_dir()}
    assert packages == {"algs", "core", "rewards", "rollouts"}
    assert [name for name in sorted(packages) if not (ROOT / name / "py.typed").is_file()] == []
