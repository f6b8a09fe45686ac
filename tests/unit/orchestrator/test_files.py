"""Where a user's own files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.files import user_folder
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
