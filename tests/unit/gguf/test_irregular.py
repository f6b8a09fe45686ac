"""An output never takes the place of a device, a pipe, a socket or a folder."""

import os
import socket
import stat

import pytest

from gguf_tools import errors
from gguf_tools.file.unfinished import UnfinishedFile, irregular
from gguf_tools.file.writer import GGUFWriter
from orchestrator.cache.files import check_target, whole_file

SAYS = "is not a regular file"


def make(kind, path):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)  # its names are short
    else:
        try:  # the numbers of /dev/null: whoever writes to it harms nobody
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("a device node needs root")


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_it_stays_what_it_is(tmp_path, monkeypatch, kind, linked):
    monkeypatch.chdir(tmp_path)
    target = out = tmp_path / "out"
    make(kind, target)
    if linked:
        out = tmp_path / "link"
        out.symlink_to(target)
    before = target.lstat()
    with pytest.raises(OSError, match=SAYS):
        UnfinishedFile(out)
    with pytest.raises(OSError, match=SAYS):
        check_target(out)
    with pytest.raises(OSError, match=SAYS), whole_file(out) as file:
        file.write(b"x")
    with pytest.raises(errors.WriteError, match=f"{out}: {SAYS}"), GGUFWriter(out) as writer:
        writer.begin()
    assert os.path.samestat(before, target.lstat()) and out.is_symlink() == linked
    assert set(tmp_path.iterdir()) == {target, out}


def test_a_stream_that_leads_to_a_file_is_none(tmp_path):
    """As /dev/stdout does where the shell sends it to a file."""
    link, further = tmp_path / "stdout", tmp_path / "further"
    with open(tmp_path / "file", "w") as file:
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        further.symlink_to(link)
        for each in (link, further):
            with pytest.raises(OSError, match=SAYS):
                UnfinishedFile(each)
    assert len(list(tmp_path.iterdir())) == 3


def test_files_links_to_files_and_new_names_are_outputs(tmp_path):
    file, link, dangling = tmp_path / "file", tmp_path / "link", tmp_path / "dangling"
    file.write_text("old")
    link.symlink_to(file)
    dangling.symlink_to(tmp_path / "nothing")
    for path in (file, link, dangling, tmp_path / "new"):
        assert irregular(path) is None
        with whole_file(path) as out:
            out.write(b"new")
        assert path.read_bytes() == b"new"


def test_a_folder_is_refused_before_anything_is_written(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match=str(folder)), whole_file(folder):
        pytest.fail("it is written")
    assert list(tmp_path.iterdir()) == [folder]
