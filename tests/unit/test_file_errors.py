"""What the operating system says, as a message of ours."""

import errno
import os
from pathlib import Path

import pytest

from gptworks import file_errors


def error(number: int, *paths: str) -> OSError:
    return OSError(number, os.strerror(number), *(paths[:1] + (None,) + paths[1:] if len(paths) > 1 else paths))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "/there/x: lies on a filesystem that is read-only. Needed: a place that can be written to."),
        (errno.ENOSPC, "/there/x: No space left on device. Free some space."),
        (errno.EISDIR, "/there/x: is a folder. Needed: a file."),
        (errno.ELOOP, "/there/x: is a link that leads to itself."),
        (errno.EMFILE, "/there/x: too many files are open in this process. Raise the limit: ulimit -n."),
        (errno.EIO, "/there/x: the disk or the network could not read or write it."),
        (errno.ESTALE, "/there/x: was replaced on the file server meanwhile."),
        (errno.ENOENT, "/there/x: no such file or folder, or it went away while it was used."),
        (errno.EEXIST, "/there/x: exists already."),
    ],
)
def test_what_is_said(number: int, said: str) -> None:
    assert file_errors.explain(error(number, "/there/x")).startswith(said)
    assert file_errors.explain(error(number), otherwise="/there/x").startswith(said)


def test_what_is_not_about_files_is_not_explained() -> None:
    assert file_errors.explain(error(errno.EIO)) == ""
    assert file_errors.explain(error(errno.ECONNREFUSED, "/there/x")) == ""
    assert file_errors.explain(OSError("a library's own words")) == ""


def test_the_place_that_something_is_moved_to_is_named() -> None:
    assert file_errors.explain(error(errno.EXDEV, "/from/a", "/to/b")).startswith("/to/b: cannot be moved")


def test_names_that_are_too_long() -> None:
    text = file_errors.explain(error(errno.ENAMETOOLONG, "/there/" + "x" * 300))
    assert "the name is too long: 300 bytes between slashes, 307 in all" in text
    assert len(text) < 250, "it is not repeated in full"


def test_a_file_where_a_folder_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for number in (errno.ENOTDIR, errno.EEXIST):
        assert f"{file} is not a folder" in file_errors.explain(error(number, str(file)))
    assert f"{file} is not a folder" in file_errors.explain(error(errno.ENOTDIR, str(file / "a" / "b")))


def test_nothing_is_refused_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "file").write_text("x")
    for path in (tmp_path, tmp_path / "inside" / "file", tmp_path / "nowhere", tmp_path / "no" / "where"):
        file_errors.refuse_unreadable(path)
    with pytest.raises(NotADirectoryError):
        file_errors.refuse_unreadable(tmp_path / "inside" / "file" / "x")
    with pytest.raises(OSError, match="File name too long"):
        file_errors.refuse_unreadable(tmp_path / ("x" * 300))
