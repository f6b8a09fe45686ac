"""Where a user's own files are, and what an error of writing one names."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from orchestrator.files import check_target, user_folder, whole_file, write_whole
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
