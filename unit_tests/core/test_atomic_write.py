"""A text file is there as a whole, or as it was."""

import pytest

from core.errors import RunStopped
from core.text.atomic_write import flush_folder, measure_sizes, write_whole


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    write_whole(tmp_path / "a.json", "old\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    (tmp_path / "a.json.partial").mkdir()
    with pytest.raises(RunStopped, match=r"a\.json cannot be written: Is a directory; nothing is lost"):
        write_whole(tmp_path / "a.json", "new\n", meaning="nothing is lost")
    assert (tmp_path / "a.json").read_text() == "old\n"


def test_sizes_are_those_of_all_files(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "d").write_bytes(b"123")
    (tmp_path / "a").write_bytes(b"")
    flush_folder(tmp_path)
    assert measure_sizes(tmp_path) == {"a": 0, "b/c/d": 3}
