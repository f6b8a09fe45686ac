"""Run tests with an installed wheel instead of the result of `make build`.

    python tests/helpers/installed.py dist/moe_edge-*.whl tests/unit tests/native -m "not rest"

The wheel is installed into its own environment, which finds all other packages in the current one.
pytest runs in a copy of the checkout without orchestrator/ and gguf_tools/, so that no source can
be imported by mistake. Tests of the sources, such as tests/contract, and tests of the build are
left out.
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
    """Create an environment with the wheel, without network access. Return its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip(python, "install", "--no-deps", "--no-index", str(wheel))
    # A folder in a .pth file is searched, but its own .pth files are not read. This excludes the
    # checkout, which is installed there as editable.
    (site_of(folder) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def pip(python, *arguments):
    """Run the current environment's pip for another environment."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments, "--quiet"]
    subprocess.run(command, check=True)


def site_of(folder):
    """Return the folder of an environment's packages."""
    return next(folder.glob("lib/python3*/site-packages"))


def copy_tests(folder):
    """Copy the tests and the parts of the checkout that they need, without its packages."""
    for name in ("tests", "patches", "models"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", folder)
    return folder


def run(wheel, arguments, folder):
    """Run pytest in an empty folder. Return its exit status."""
    python = install(wheel, folder / "environment")
    left_out = [f"--deselect={each}" for each in LEFT_OUT]
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *left_out, *arguments]
    return subprocess.run(command, cwd=copy_tests(folder / "checkout")).returncode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="moe-edge-installed.") as place:
        sys.exit(run(Path(sys.argv[1]).resolve(), sys.argv[2:], Path(place)))
