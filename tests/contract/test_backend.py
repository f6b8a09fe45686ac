"""`pip install .` without `make build`, and hints to install more."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from patches import backend
from patches.upstream import REPO, read_upstream

HOOKS = ("get_requires_for_build_wheel", "get_requires_for_build_editable")


@pytest.mark.parametrize("hook", HOOKS)
def test_without_our_build_pip_gets_one_sentence(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda _name: str(tmp_path))
    stock = tmp_path / f"llama_cpp_python-{read_upstream().version}.dist-info"
    for name in (None, stock):
        if name is not None:
            name.mkdir()
            fields = ("Metadata-Version: 2.1", "Name: llama_cpp_python")
            fields += (f"Version: {read_upstream().version}", "")
            (name / "METADATA").write_text("\n".join(fields))
        with pytest.raises(SystemExit, match=r"^moe-edge needs .* `make build` .*\.$"):
            getattr(backend, hook)()


def test_pip_asks_that_and_finds_what_make_build_installed() -> None:
    text = (REPO / "pyproject.toml").read_text()
    assert 'build-backend = "patches.backend"' in text and 'backend-path = ["."]' in text
    version = read_upstream().local_version
    if version not in {each.version for each in backend.distributions(name="llama_cpp_python")}:
        pytest.skip("our llama.cpp is not installed: run `make build`")
    backend.need_our_build()


def test_hints_to_install_more_hold_in_any_folder() -> None:
    """`-e '.[plot]'` would be of whatever folder the user is in."""
    hints = re.compile(r"pip install ([^`]*\[\w+\]'?)`")
    listed = subprocess.run(
        ["git", "ls-files", "orchestrator", "gguf_tools", "docs", "README.md"],
        capture_output=True,
        text=True,
        cwd=REPO,
    ).stdout.split()
    extras = set(re.findall(r"^(\w+) = \[", (REPO / "pyproject.toml").read_text(), re.MULTILINE))
    named = [
        hint
        for path in listed
        if path.endswith((".py", ".md"))
        for hint in hints.findall((REPO / path).read_text())
        if "lm_eval" not in hint
    ]
    assert named
    assert set(named) <= {f"'moe-edge[{extra}]'" for extra in extras}
