"""The installed llama_cpp is this checkout's build, and exports all functions of the header."""

import importlib.metadata
import json
from pathlib import Path

import pytest
from command_line import python

from patches import build, env, wheel
from patches.upstream import read_upstream


@pytest.fixture
def installed():
    """Folder of the installed llama_cpp."""
    try:
        distribution = importlib.metadata.distribution("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llama_cpp is not installed: `make build` installs it")
    return Path(str(distribution.locate_file("llama_cpp")))


def test_installed_build_is_this_checkout(installed, real_cache):
    stamp = json.loads((installed.parent / wheel.STAMP).read_text())
    note = env.locate().read_note()
    options = build.Options(gpu=str(note.get("gpu", "auto")), amx=str(note.get("amx", "auto")))
    plan = build.make_plan(read_upstream(), options)
    assert stamp == plan.stamp(), "a stale build is installed: run `make build`"


def test_version_is_ours(installed):
    version = importlib.metadata.version("llama_cpp_python")
    assert version == read_upstream().local_version
    assert f'__version__ = "{version}"' in (installed / "__init__.py").read_text()


def test_library_keeps_the_header(installed):
    abi, symbols = build.header_symbols()
    assert {"moe_edge_abi_version", "moe_edge_buffer_type", "moe_edge_store_create"} <= set(symbols)
    libraries = sorted((installed / "lib").glob("lib*.so"))
    argument = json.dumps([[str(path) for path in libraries], symbols])
    # in a child process, because a library may crash while it is loaded
    done = python("-c", build.CHECK, argument)
    assert done.returncode == 0, done.stderr
    missing, found = json.loads(done.stdout)
    assert missing == []
    assert found == abi


def test_no_library_is_installed_twice(installed):
    files = sorted(path for path in (installed / "lib").iterdir() if path.is_file())
    assert all(path.suffix == ".so" for path in files), files
    contents = {path.read_bytes() for path in files}
    assert len(contents) == len(files)
