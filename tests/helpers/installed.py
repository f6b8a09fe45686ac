"""Tests of what a wheel brings, in the place of what `make build` made:

    python tests/helpers/installed.py dist/moe_edge-*.whl tests/unit tests/native -m "not rest"

The wheel is installed into an environment of its own, which finds all other packages in this one.
pytest runs in a copy of the checkout without orchestrator/ and gguf_tools/, so that nothing of the
sources can be imported by mistake. Left out are tests of sources, as tests/contract, and of what
only a build has.
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LEFT_OUT = (
    "tests/contract",
    "tests/native/cuda",
    "tests/unit/hub/test_pulled.py::test_every_folder_of_the_cache_is_explained",
    "tests/unit/replay/test_policies_alone.py",
    "tests/unit/serve/test_running.py::test_a_stop_ends_the_compilers",
)


def install(wheel, folder):
    """The Python of a new environment with the wheel in it. No network is used."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip(python, "install", "--no-deps", "--no-index", str(wheel))
    # A folder that is named here is searched, but the .pth files in it are not read: this is what
    # leaves out the checkout, which is installed there as editable.
    (site_of(folder) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def pip(python, *arguments):
    """This environment's pip, for another one."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments, "--quiet"]
    subprocess.run(command, check=True)


def site_of(folder):
    """Where the packages of an environment are."""
    return next(folder.glob("lib/python3*/site-packages"))


def copy_tests(folder):
    """What tests are and what they need of the checkout, without its packages."""
    for name in ("tests", "patches", "models"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", folder)
    return folder


def run(wheel, arguments, folder):
    """pytest's exit status, in an empty folder."""
    python = install(wheel, folder / "environment")
    left_out = [f"--deselect={each}" for each in LEFT_OUT]
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *left_out, *arguments]
    return subprocess.run(command, cwd=copy_tests(folder / "checkout")).returncode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="moe-edge-installed.") as place:
        sys.exit(run(Path(sys.argv[1]).resolve(), sys.argv[2:], Path(place)))
