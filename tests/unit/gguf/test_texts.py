"""Text files named by the user: UTF-8 in a regular file, or an error of one sentence."""

import os

import pytest
from tables import cases

from gguf_tools.errors import TextFileError
from gguf_tools.file.texts import read_text

MARK = b"\xef\xbb\xbf"


@cases(
    "data, text",
    (b"", ""),
    ("wö\n".encode(), "wö\n"),
    (MARK + "wö".encode(), "wö"),
    (MARK, ""),
    ("a\ufeffb".encode(), "a\ufeffb"),  # only at the start is it a byte order mark
    (b"x" * 100, "x" * 100),
)
def test_a_text_is_read_without_its_byte_order_mark(tmp_path, data, text):
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    assert read_text(path, 100) == text


@cases(
    "data, said",
    ("wö".encode("utf-16"), "the text is in UTF-16: save it as UTF-8"),
    ("wö".encode("utf-16-be"), "not UTF-8 text (byte 0x00 at offset 0)"),
    ("wö".encode("utf-32"), "the text is in UTF-32: save it as UTF-8"),
    (b"w\xf6", "not UTF-8 text (byte 0xf6 at offset 1): save it as UTF-8"),
    (MARK + b"w\xf6", "(byte 0xf6 at offset 4)"),
    (b"x" * 101, "the file is longer than the maximum of 100 bytes"),
    (b"x\0" * 101, "not UTF-8 text (byte 0x00 at offset 1)"),
)
def test_other_encodings_and_long_files_are_refused(tmp_path, data, said):
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(TextFileError) as caught:
        read_text(path, 100)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "nothing"])
def test_only_a_regular_file_is_read(tmp_path, kind):
    """Pipes and devices are refused: a pipe without a writer would block, and a device has no
    end."""
    path = tmp_path / "a.txt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(TextFileError, match=r"a\.txt: (not a regular file|No such file|Is a dir)"):
        read_text(path, 100)
