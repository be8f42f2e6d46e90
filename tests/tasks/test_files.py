import pytest

from tasks.files import whole


def test_a_file_appears_when_whole(tmp_path):
    path = tmp_path / "new" / "table.md"
    with whole(path) as part:
        part.write_text("half")
        assert not path.exists()
        part.write_text("whole")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_no_rest(tmp_path):
    path = tmp_path / "table.md"
    path.write_text("old")

    def fail():
        with whole(path) as part:
            part.write_text("half")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
