"""Where a user's own files are, and what an error of writing one names."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from pathlib import Path

import pytest

from gguf_tools import interrupts
from orchestrator.cache.files import check_target, user_folder, whole_file, whole_files, write_whole
from patches.upstream import cache_dir


@pytest.mark.parametrize(("kind", "usual"), [("cache", ".cache"), ("state", ".local/state")])
@pytest.mark.parametrize("given", ["HOME/elsewhere", "", "relative", "~/x", None])
def test_the_user_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, usual: str, given: str | None
) -> None:
    """A relative path in the environment counts as none; the build agrees on the cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    name = f"XDG_{kind.upper()}_HOME"
    if given is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, given.replace("HOME", str(tmp_path)))
    expected = tmp_path / ("elsewhere" if given == "HOME/elsewhere" else usual) / "moe-edge"
    assert user_folder(kind) == expected
    if kind == "cache":
        assert cache_dir() == expected


@pytest.mark.parametrize(("umask", "shared"), [(0o002, 0o664), (0o077, 0o600)])
def test_modes_follow_the_umask_unless_a_file_is_private(
    tmp_path: Path, umask: int, shared: int
) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "shared", "")
        write_whole(tmp_path / "private", "", private=True)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "private")]
    assert modes == [shared, 0o600]


def test_an_error_of_writing_names_the_file(tmp_path: Path) -> None:
    """And neither the temporary one nor, where the disk is full, none."""
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", tmp_path / "none" / "x"):
        with pytest.raises(OSError) as caught, whole_file(target):
            pass
        assert caught.value.filename == str(target)
        with pytest.raises(OSError) as caught:
            check_target(target)
        assert caught.value.filename == str(target)
    target = tmp_path / "x"
    with pytest.raises(OSError) as caught, whole_file(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (caught.value.filename, caught.value.errno) == (str(target), errno.ENOSPC)
    with pytest.raises(OSError, match="other") as caught, whole_file(target):
        raise OSError(errno.EIO, "other", "another file")
    assert caught.value.filename == "another file"
    check_target(target)
    assert os.listdir(tmp_path) == ["folder"]


def test_files_get_their_names_together(tmp_path: Path) -> None:
    """And none of them where one cannot be written or the block
    does not end well."""
    out = tmp_path / "out"
    out.mkdir()
    with whole_files(out, "b") as made:
        for name in "abc":
            (made / name).write_text(name)
            assert os.listdir(out) == []
    assert {path.name: path.read_text() for path in out.iterdir()} == {x: x for x in "abc"}
    assert not made.exists()
    other = tmp_path / "other"
    (other / "z").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"), whole_files(other, "b") as made:
        for name in "bz":
            (made / name).write_text(name)
    with pytest.raises(KeyboardInterrupt), whole_files(other, "b") as made:
        (made / "b").write_text("b")
        raise KeyboardInterrupt
    assert os.listdir(other) == ["z"]
    assert not made.exists()


def test_an_interrupt_leaves_all_of_the_files_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes with the first name is none; one before it leaves nothing."""
    rename = os.replace

    def pressed_behind(part: Path, path: Path) -> None:
        rename(part, path)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "replace", pressed_behind)
    for pressed_before, left in ((False, {"a", "z"}), (True, set())):
        out = tmp_path / str(pressed_before)
        out.mkdir()
        with contextlib.suppress(KeyboardInterrupt), interrupts.listening():
            interrupts.ends_with(out / "z")
            with whole_files(out, "z") as made:
                for name in "az":
                    (made / name).write_text("")
                if pressed_before:
                    signal.raise_signal(signal.SIGINT)
        assert set(os.listdir(out)) == left
