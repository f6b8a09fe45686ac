"""The examples of the pages on Python run with the demo model, and are type-checked as a user's
code is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import DEMO, python
from generated import REPO

PAGES = ("docs/python.md", "docs/own-policy.md", "README.md")
BLOCK = re.compile(r"^```python(?: file=(\S+))?\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Examples that need a network or minutes are type-checked only.
NOT_RUN = ("hf:OWNER",)
MOST_LINES = 40  # of the tutorial's policy


def blocks_of(page):
    """(name of the file that an example is, or "", its text)."""
    found = [(name, text) for name, text in BLOCK.findall((REPO / page).read_text())]
    assert found, f"{page} has no example"
    return found


def written(page, folder):
    """The examples of a page as files: those that are run, in their order."""
    runnable = []
    for number, (name, text) in enumerate(blocks_of(page)):
        path = folder / (name or f"{Path(page).stem.replace('-', '_').lower()}_{number}.py")
        is_run = not any(each in text for each in NOT_RUN)
        path.write_text(text.replace("MODEL.gguf", str(DEMO)) if is_run else text)
        if is_run and not name:
            runnable.append(path)
    return runnable


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(library, page, tmp_path):
    paths = written(page, tmp_path)
    program = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, {}, '__main__')"
    path = os.pathsep.join(map(str, (tmp_path, REPO)))
    done = python("-c", program, *paths, folder=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.strip()


def test_examples_are_typed(tmp_path):
    """With mypy's strictest setting, as in a project of a user's own."""
    for page in PAGES:
        written(page, tmp_path)
    misspelled = "from orchestrator import LMM  # type: ignore[attr-defined]\n"
    (tmp_path / "misspelled.py").write_text(misspelled)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\nfollow_imports = silent\n")
    cache = REPO / ".mypy_cache" / "examples"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", cache, "."],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tutorial_is_short_and_has_one_policy():
    ((name, text),) = [each for each in blocks_of("docs/own-policy.md") if each[0]]
    assert name == "ahead.py" and len(text.splitlines()) <= MOST_LINES


def test_every_public_name_is_described():
    import orchestrator

    pages = "".join((REPO / page).read_text() for page in PAGES)
    public = [each for each in orchestrator.__all__ if not re.search(rf"\b{each}\b", pages)]
    assert orchestrator.__all__ and not public
