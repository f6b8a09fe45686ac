"""`pip install .` without `make build`, and hints to install more."""

import re
import subprocess

import pytest

from patches import backend
from patches.upstream import REPO, read_upstream

HOOKS = ("get_requires_for_build_wheel", "get_requires_for_build_editable")


@pytest.mark.parametrize("hook", HOOKS)
def test_without_our_build_pip_gets_one_sentence(hook, tmp_path, monkeypatch):
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda _name: str(tmp_path))
    version = read_upstream().version
    stock = tmp_path / f"llama_cpp_python-{version}.dist-info" / "METADATA"
    for is_there in (False, True):
        if is_there:
            stock.parent.mkdir()
            stock.write_text(f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n")
        with pytest.raises(SystemExit, match=r"^moe-edge needs .* `make build` .*\.$"):
            getattr(backend, hook)()


def test_pip_asks_that_and_finds_what_make_build_installed():
    text = (REPO / "pyproject.toml").read_text()
    assert 'build-backend = "patches.backend"' in text and 'backend-path = ["."]' in text
    version = read_upstream().local_version
    if version not in {each.version for each in backend.distributions(name="llama_cpp_python")}:
        pytest.skip("our llama.cpp is not installed: run `make build`")
    backend.need_our_build()


def test_hints_to_install_more_hold_in_any_folder():
    """`-e '.[plot]'` would be of whatever folder the user is in."""
    command = ["git", "ls-files", "orchestrator", "gguf_tools", "docs", "README.md"]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=REPO).stdout.split()
    texts = [(REPO / path).read_text() for path in listed if path.endswith((".py", ".md"))]
    named = {each for text in texts for each in re.findall(r"pip install ([^`]*\[\w+\]'?)`", text)}
    extras = re.findall(r"^(\w+) = \[", (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    ours = {each for each in named if "lm_eval" not in each}
    assert ours and ours <= {f"'moe-edge[{extra}]'" for extra in extras}
