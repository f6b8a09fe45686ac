"""Writing that is killed (SIGKILL) at any point leaves complete files only. Outputs never replace
devices, pipes, sockets or folders."""

import fcntl
import os
import socket
import stat

import pytest
from gguf_craft import model_metadata, model_tensors, write_model
from killing import Stopped, calls_of, check_model_at_twenty_deaths, killed

from gguf_tools import errors
from gguf_tools.file import unfinished
from gguf_tools.file.unfinished import UnfinishedFile, irregular
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack import export, pack
from gguf_tools.verify import verify
from orchestrator.cache.files import check_target, whole_file

OURS = tuple(
    f"gguf_tools.{name}"
    for name in ("pack", "file.unfinished", "file.chunks", "progress", "workers", "file.writer")
)


@pytest.fixture
def src(tmp_path):
    (tmp_path / "src").mkdir()
    metadata = model_metadata(embedding_length=256)
    tensors = model_tensors(n_embd=256, n_ff=256)
    return write_model(tmp_path / "src" / "src.gguf", tensors, metadata, alignment=4096)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "out.gguf"


def sound(path, ggml):
    return verify(path, threads=1, ggml=ggml).problems == []


@pytest.mark.parametrize("kind", ["pack", "export"])
@pytest.mark.parametrize("older", [False, True], ids=["new", "over-an-older-one"])
def test_killed_at_twenty_moments(kind, older, src, out, ggml):
    def work():
        if kind == "pack":
            pack(src, out, ["q8_0", "q2_k"], threads=2, ggml=ggml)
        else:
            export(src, out)

    check_model_at_twenty_deaths(work, out, OURS, 1 + older, src.read_bytes() if older else b"")


def test_two_processes_write_the_same_file_without_conflict(src, out, ggml):
    """The first process is stopped in the middle of its file, while a second one starts, cleans up
    and ends."""

    def first():
        pack(src, out, ["q8_0"], threads=1, ggml=ggml)

    total = calls_of(first, *OURS)
    of_first = out.read_bytes()
    for share in (0.6, 0.95):
        out.unlink()
        with Stopped(first, int(share * total), *OURS) as stopped:
            assert [name.endswith(".part") for name in os.listdir(out.parent)] == [True]
            pack(src, out, ["q4_k"], threads=1, ggml=ggml)
            assert sound(out, ggml)
            of_second = out.read_bytes()
            assert len(os.listdir(out.parent)) == 2
            assert stopped.finish() == 0
        assert os.listdir(out.parent) == [out.name]
        assert out.read_bytes() == of_first != of_second
        assert sound(out, ggml)


def test_only_abandoned_files_of_ours_are_removed(tmp_path):
    path = tmp_path / "a.gguf"
    other, _ = unfinished.create(tmp_path / "c.gguf")
    kept = {".a.gguf.b.c.part", ".a.gguf..part", ".b.gguf.4711.part", ".a.gguf.12", "a.gguf.part"}
    kept |= set(os.listdir(tmp_path))
    for name in (*kept, ".a.gguf.12ab34cd.part", ".a.gguf.4711.part", ".b.gguf.12ab34cd.part"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".a.gguf.dir.part").mkdir()
    (tmp_path / ".a.gguf.link.part").symlink_to(tmp_path / "a.gguf.part")
    kept |= {".a.gguf.dir.part", ".a.gguf.link.part"}
    fd, part = unfinished.create(path)
    unfinished.remove_abandoned(path)
    assert set(os.listdir(tmp_path)) == {*kept, part.name}
    os.close(fd)
    unfinished.remove_abandoned(path)
    assert set(os.listdir(tmp_path)) == kept
    os.close(other)
    unfinished.remove_abandoned(tmp_path / "none" / "a.gguf")


def test_a_cleaner_between_creation_and_lock_does_no_harm(tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    lock, first = unfinished._lock, []

    def late(fd):
        if not first:
            first.append(fd)
            unfinished.remove_abandoned(path)
            assert os.listdir(tmp_path) == []
        return lock(fd)

    monkeypatch.setattr(unfinished, "_lock", late)
    fd, part = unfinished.create(path)
    assert os.listdir(tmp_path) == [part.name]
    os.close(fd)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with GGUFWriter(tmp_path / "a.gguf") as writer:
        writer.begin()
        unfinished.remove_abandoned(tmp_path / "a.gguf")
    assert os.listdir(tmp_path) == ["a.gguf"]


def test_small_files_are_whole_or_as_before(out):
    def work():
        with whole_file(out) as file:
            file.write(b"new")

    modules = ("gguf_tools", "orchestrator")
    total = calls_of(work, *modules)
    out.write_bytes(b"old")
    for at in range(1, total + 1):
        killed(work, at, *modules)
        assert out.read_bytes() in (b"old", b"new")
    work()
    assert os.listdir(out.parent) == [out.name]


SAYS = "is not a regular file"


def make(kind, path):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)  # socket names must be short
    else:
        try:  # the numbers of /dev/null, so that writing is harmless
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("a device node needs root")


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_pipes_sockets_and_devices_are_not_replaced(tmp_path, monkeypatch, kind, linked):
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


def test_a_link_to_an_open_file_is_not_an_output(tmp_path):
    """/dev/stdout is such a link if the shell redirects it to a file."""
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
        pytest.fail("the block was entered")
    assert list(tmp_path.iterdir()) == [folder]
