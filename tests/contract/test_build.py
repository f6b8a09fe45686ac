"""The build tool with a toy upstream: no stale or broken builds, and clear errors.

The toy has the form of the real source distribution and takes seconds: one library of three
sources, one of them ours. The tool runs as for a user, from a copy of this folder.
"""

import argparse
import contextlib
import ctypes
import hashlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from command_line import python
from tables import cases

from patches import build
from patches import tool as tool_module
from patches.upstream import PATCHES, read_upstream

HANG_S = 600  # no correct build takes this long
CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(llama CXX)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
# Slow enough that a test can kill it while it compiles.
add_custom_command(OUTPUT slow.cpp COMMAND sleep 0.7
    COMMAND ${CMAKE_COMMAND} -E touch slow.cpp)
add_library(llama src/one.cpp src/two.cpp slow.cpp moe-edge/ours.cpp)
"""
SOURCES = {
    "vendor/llama.cpp/CMakeLists.txt": CMAKE,
    "vendor/llama.cpp/LICENSE": "MIT\n",
    "vendor/llama.cpp/src/one.cpp": 'extern "C" int one() {\n    return 1;\n}\n',
    "vendor/llama.cpp/src/two.cpp": 'extern "C" int two() {\n    return 2;\n}\n',
    "llama_cpp/__init__.py": '__version__ = "1.0"\n',
    "PKG-INFO": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
    "LICENSE.md": "MIT\n",
}
OURS = """
extern "C" int moe_edge_abi_version() { return 7; }
extern "C" int ours() { return 3; }
"""
HEADER = """
#define MOE_EDGE_ABI_VERSION 7
MOE_EDGE_API int moe_edge_abi_version(void);
"""
PATCH = """From: A Name <a@example.org>
Subject: one is eleven

Reason: a test
Forwarded: no
Upstream-Base: toy-1.0
Remove-When: never

--- a/vendor/llama.cpp/src/one.cpp
+++ b/vendor/llama.cpp/src/one.cpp
@@ -1,3 +1,3 @@
 extern "C" int one() {
-    return 1;
+    return 11;
 }
"""
ALL = {"one": 11, "two": 2, "ours": 3}
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("cmake", "c++", "patch"))),
    reason="cmake, a C++ compiler or patch is missing",
)


class Toy:
    def __init__(self, root):
        self.root, self.patches, self.cache = root, root / "patches", root / "cache"
        self.sdist, native = root / "toy-1.0.tar.gz", self.patches / "native"
        self.ours, self.header = native / "ours.cpp", native / "moe-edge.h"
        native.mkdir(parents=True)
        for path in PATCHES.glob("*.py"):
            shutil.copy(path, self.patches)
        with tarfile.open(self.sdist, "w:gz") as archive:
            for name, text in SOURCES.items():
                info = tarfile.TarInfo(f"toy-1.0/{name}")
                info.size = len(text)
                info.mtime = 1_600_000_000
                archive.addfile(info, io.BytesIO(text.encode()))
        digest = hashlib.sha256(self.sdist.read_bytes()).hexdigest()
        (self.patches / "UPSTREAM").write_text(
            f"name = toy\nversion = 1.0\nsha256 = {digest}\npart = {'0' * 64}\n"
            "source = vendor/llama.cpp\nrevision = 3\n"
        )
        self.ours.write_text(OURS)
        self.header.write_text(HEADER)
        (self.patches / "series").write_text("one.patch\n")
        (self.patches / "one.patch").write_text(PATCH)

    def start(self, *arguments, **environment):
        command = [sys.executable, str(self.patches / "tool.py"), *(arguments or ("build",))]
        command += ["--amx", "off", "--gpu", "off", "--sdist", str(self.sdist)]
        clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CMAKE_ARGS")}
        clean |= {"XDG_CACHE_HOME": str(self.cache), "CCACHE_DISABLE": "1"} | environment
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=clean, start_new_session=True, **both)

    def build(self, **environment):
        """Build. Return (wheel, messages of the tool). Fail the test if the build fails."""
        out, said = self._ended(0, environment)
        return Path(out.strip()), said

    def fault(self, **environment):
        """Run a build that must fail, and return the tool's messages."""
        return self._ended(1, environment)[1]

    def _ended(self, status, environment):
        process = self.start(**environment)
        out, said = process.communicate(timeout=HANG_S)
        assert process.returncode == status, said
        return out, said

    def answers(self, wheel):
        """Load the library of a wheel from a new folder, and return what its functions return."""
        folder = self.root / f"load-{time.monotonic_ns()}"
        with zipfile.ZipFile(wheel) as archive:
            archive.extract("llama_cpp/lib/libllama.so", folder)
        library = ctypes.CDLL(str(folder / "llama_cpp/lib/libllama.so"))
        return {name: getattr(library, name)() for name in ("one", "two", "ours")}


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path / "a folder")


def test_builds_once_then_finds_it(toy):
    wheel, said = toy.build()
    assert said.splitlines()[-1] == "built"
    assert wheel.name.startswith("toy-1.0+moe.edge.3-py3-none-")
    assert toy.answers(wheel) == ALL
    with zipfile.ZipFile(wheel) as archive:
        assert b'"1.0+moe.edge.3"' in archive.read("llama_cpp/__init__.py")
        assert b"Version: 1.0+moe.edge.3\n" in archive.read("toy-1.0+moe.edge.3.dist-info/METADATA")
    assert toy.build() == (wheel, "up to date\n")


def test_every_edit_reaches_the_wheel(toy):
    first, _ = toy.build()
    toy.ours.write_text(OURS.replace("return 3", "return 33"))
    second, _ = toy.build()
    assert toy.answers(second) == {**ALL, "ours": 33}
    log = next(toy.cache.glob("moe-edge/build/*/moe-edge-build.log")).read_text()
    assert "ours.cpp" in log and "two.cpp" not in log, "one edit compiles one source"
    (toy.patches / "one.patch").write_text(PATCH.replace("return 11", "return 12"))
    third, _ = toy.build()
    assert toy.answers(third)["one"] == 12
    (toy.patches / "series").write_text("")
    (toy.patches / "one.patch").unlink()
    fourth, _ = toy.build()
    # Upstream's file returns with its old date, and must still be compiled.
    assert toy.answers(fourth)["one"] == 1
    fifth, _ = toy.build(CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-DX=1")
    assert len({first, second, third, fourth, fifth}) == 5


def test_edits_in_the_cache_are_undone_to_the_same_bytes(toy):
    wheel, _ = toy.build()
    before = wheel.read_bytes()
    tree = next(toy.cache.glob("moe-edge/source/toy-1.0-*"))
    (tree / "vendor/llama.cpp/src/two.cpp").write_text('extern "C" int two() { return 9; }\n')
    (tree / "vendor/llama.cpp/src/one.cpp").unlink()
    (tree / "vendor/llama.cpp/moe-edge/stray.cpp").write_text("#error stray\n")
    wheel.write_bytes(before[: len(before) // 2])
    assert toy.build()[0].read_bytes() == before
    assert not (tree / "vendor/llama.cpp/moe-edge/stray.cpp").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
@pytest.mark.parametrize("delay", [0.4, 0.9, 1.5])
def test_an_interrupted_build_is_repaired(toy, how, delay):
    process = toy.start()
    time.sleep(delay)
    os.killpg(process.pid, how)
    _, said = process.communicate(timeout=HANG_S)
    if how == signal.SIGINT and process.returncode != 0 and said:
        assert "Traceback" not in said
    assert toy.answers(toy.build()[0]) == ALL


@pytest.mark.parametrize("boot", ["another", "this"])
def test_half_written_objects_of_a_killed_run_are_not_linked(toy, boot):
    toy.build()
    build_folder = next(toy.cache.glob("moe-edge/build/*"))
    (build_folder / "moe-edge-running").write_text(build._boot() if boot == "this" else "")
    time.sleep(0.05)
    objects = list(build_folder.rglob("two.cpp.o"))
    assert objects
    for path in [*objects, build_folder / "bin" / "libllama.so"]:
        path.write_bytes(path.read_bytes()[:100])
    toy.ours.write_text(OURS.replace("return 3", "return 4"))
    assert toy.answers(toy.build()[0]) == {**ALL, "ours": 4}


def test_a_killed_build_continues(toy):
    """Compiled objects are reused, and the log is continued."""
    if not any(map(shutil.which, ("ninja", "ninja-build"))):
        pytest.skip("ninja is missing: make does not record finished objects")
    process = toy.start()
    while process.poll() is None:
        done = [path.read_text() for path in toy.cache.glob("moe-edge/build/*/.ninja_log")]
        if any("two.cpp.o" in text for text in done):
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=HANG_S)
    log = next(toy.cache.glob("moe-edge/build/*/moe-edge-build.log"))
    before = log.read_text()
    assert toy.answers(toy.build()[0]) == ALL
    assert log.read_text().startswith(before)
    assert "two.cpp.o" not in log.read_text()[len(before) :]


def test_two_builds_at_once_share_one(toy):
    processes = [toy.start(), toy.start()]
    results = [process.communicate(timeout=HANG_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert sorted(said.splitlines()[-1] for _, said in results) == ["built", "up to date"]


def test_a_compile_error_is_shown_with_its_log(toy):
    toy.ours.write_text(OURS + "int broken( { }\n")
    said = toy.fault()
    assert "compiling failed" in said and "broken" in said and "moe-edge-build.log" in said
    toy.ours.write_text(OURS)
    assert toy.answers(toy.build()[0])["ours"] == 3


def test_a_wheels_library_is_linked_in_a_folder_with_a_space(toy):
    """The flags of a wheel name a file in the checkout, whose path has a space here."""
    random = "moe-edge-random.cpp"
    shutil.copy(PATCHES / "native" / random, toy.patches / "native")
    drawing = OURS.replace("return 3", "return 3 + 0 * std::random_device()()")
    toy.ours.write_text(f"#include <random>\n{drawing}")
    code = "from patches import portable; print(portable.LINKED)"
    flags = python("-c", code, folder=toy.root).stdout
    assert str(toy.patches / "native" / random) in flags and " " in str(toy.patches)
    wheel, _ = toy.build(CMAKE_ARGS=shlex.quote("-D" + flags.strip()))
    assert toy.answers(wheel) == ALL
    with zipfile.ZipFile(wheel) as archive:
        assert b"libstdc++.so" not in archive.read("llama_cpp/lib/libllama.so")


def test_a_missing_symbol_is_never_packaged(toy):
    toy.header.write_text(HEADER + "MOE_EDGE_API int moe_edge_forgotten(void);\n")
    assert "lack moe_edge_forgotten" in toy.fault()
    assert not list(toy.cache.glob("moe-edge/wheels/*/*.whl"))


@cases(
    "missing, package",
    (("cc", "gcc", "clang"), "build-essential"),
    (("c++", "g++", "clang++"), "build-essential"),
    (("cmake",), "cmake"),
    (("ninja", "make"), "build-essential"),
    (("patch",), "patch"),
)
def test_a_missing_tool_is_reported_in_one_sentence(toy, missing, package):
    tools = toy.root / "bin"
    tools.mkdir()
    for name in ("cc", "c++", "gcc", "g++", "as", "ld", "cmake", "ninja", "make", "patch", "sh"):
        found = shutil.which(name)
        if found and name not in missing:
            (tools / name).symlink_to(found)
    said = toy.fault(PATH=str(tools), CC="", CXX="")
    assert len(said.splitlines()) == 1 and f"`sudo apt install {package}`" in said


def test_make_instead_of_ninja(toy):
    if not shutil.which("make"):
        pytest.skip("make is missing")
    tools = toy.root.parent / "bin"  # make cannot start if its own path has a space
    tools.mkdir()
    for folder in reversed(os.environ["PATH"].split(os.pathsep)):
        for path in Path(folder).glob("*"):
            (tools / path.name).unlink(missing_ok=True)
            if path.name not in ("ninja", "ninja-build"):
                (tools / path.name).symlink_to(path)
    wheel, said = toy.build(PATH=str(tools))
    assert toy.answers(wheel)["one"] == 11
    assert "%" in said


def test_files_option_uses_no_network(monkeypatch, tmp_path, user_folder):
    """With --files, pip uses only that folder, and the source is taken from there."""
    sdist = tmp_path / read_upstream().sdist_name
    sdist.write_bytes(b"not it")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    done = python("patches/tool.py", "--files", tmp_path, "source")
    assert done.returncode == 1 and f"{sdist}: SHA-256 is" in done.stderr
    done = python("patches/tool.py", "--files", "nowhere", "build")
    assert done.returncode == 1 and "--files nowhere: the folder does not exist" in done.stderr
    args = argparse.Namespace(files=tmp_path, sdist=None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    tool_module.use_files(args)
    assert args.sdist == sdist
    assert (os.environ["PIP_NO_INDEX"], os.environ["PIP_FIND_LINKS"]) == ("1", tmp_path.as_uri())
