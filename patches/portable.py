"""Build the wheel of moe-edge that needs no compiler, and the additional wheel moe-edge-cuda.

The wheel contains our packages, the Python bindings, libraries for several instruction sets,
llama.cpp's server, and the demo model. gguf_tools/built.py selects the instruction set at run time.
moe-edge-cuda contains the libraries that differ with CUDA.

The libraries have other names than llama.cpp's, because a process loads only one library of a name,
and llama-cpp-python may be loaded in the same process. The wheel includes libgomp. libstdc++ is
linked statically.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patches import build, cuda, probe, server, wheel
from patches.tree import sync_tree
from patches.upstream import (
    PATCHES,
    REPO,
    BuildError,
    Upstream,
    cache_dir,
    fetch_sdist,
    locked,
    publishing,
    say,
)

GLIBC = 34  # minor version of the glibc that the wheel requires
PACKAGE = "gguf_tools/_llama"
STAMP = Path(wheel.STAMP).name
COMPUTES = "libggml-cpu.so"
# Additional cmake definitions for libggml-cpu for each instruction set, the smallest set first. On
# x86-64, all sets include ggml's default, AVX2. The set avx2 is tuned for AMD's last processors
# without AVX-512: with GCC's generic tuning, prompts take 5 to 10 % longer on them.
SETS_OF: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": ("CMAKE_C_FLAGS=-mtune=znver3", "CMAKE_CXX_FLAGS=-mtune=znver3"),
        "avx_vnni": ("GGML_AVX_VNNI=ON",),
        "avx512_vnni": ("GGML_AVX512=ON", "GGML_AVX512_VNNI=ON"),
    },
    "aarch64": {"armv8": (), "dotprod": ("GGML_CPU_ARM_ARCH=armv8.2-a+dotprod",)},
}
UNTRIED = {"aarch64": "; for ARM64, only tested in an emulator"}
MACHINE = platform.machine()
SETS = SETS_OF.get(MACHINE, {})
# Link libstdc++ statically, and add the source of a function that older versions of glibc lack.
LINKED = "CMAKE_SHARED_LINKER_FLAGS=-static-libstdc++ -Wl,--exclude-libs,ALL " + shlex.quote(
    str(PATCHES / "native" / "moe-edge-random.cpp")
)
FLAGS = (
    *build.BASE_FLAGS,
    LINKED,
    "GGML_NATIVE=OFF",
)
# Library names in llama.cpp and in the wheel. They have equal lengths, so that they can be replaced
# inside the libraries.
NAMES = {
    f"lib{old}.so".encode(): f"lib{new}.so".encode()
    for old, new in (
        *(("llama", "llmoe"), ("ggml", "gmoe")),
        *(("ggml-base", "gmoe-base"), ("ggml-cpu", "gmoe-cpu"), ("ggml-cuda", "gmoe-cuda")),
    )
}
# GPUs from Turing to Blackwell. For later ones the driver compiles the code of the last entry.
CUDA_ARCHITECTURES = "75-real;80-real;86-real;89-real;90-real;120"
WITH_CUDA = ("libggml.so", "libggml-cuda.so")
# The licence of GCC's run-time libraries in Debian and Ubuntu.
GCC_LICENCES = ("/usr/share/doc/libgomp1/copyright", "/usr/share/common-licenses/GPL-3")


def tag(machine: str = MACHINE) -> str:
    """Return the platform tag of a wheel.

    machine: type of the machines that the wheel is for, such as "x86_64".
    """
    return f"py3-none-manylinux_2_{GLIBC}_{machine}"


def digest_of_patches() -> str:
    """Return a hash of all files in patches/, which determine the built libraries."""
    digest = hashlib.sha256()
    for path in sorted(PATCHES.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(PATCHES)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def build_wheel(upstream: Upstream, sdist: Path | None, jobs: int | None, folder: Path) -> Path:
    """Build the wheel of moe-edge, with the libraries of llama.cpp, and return its path.

    The wheel is for the machine type that the compiler targets. Only changed sources are compiled.
    Raises BuildError if the build fails or the machine type is not supported.

    sdist: local copy of the source. Default: it is downloaded.
    jobs: number of compilers to run at once.
    folder: folder for the wheel.
    """
    tools, patches = probe.find_toolchain(), digest_of_patches()
    machine = _printed(tools.cc, "-dumpmachine").partition("-")[0]
    sets = SETS_OF.get(machine)
    if sets is None:
        known = " and ".join(SETS_OF)
        raise BuildError(
            f"{tools.cc} compiles for {machine}, but wheels can only be built for {known}."
        )
    texts = {"METADATA": metadata(upstream, machine), "entry_points.txt": entry_points()}
    least = next(iter(sets))
    across: tuple[str, ...] = ()
    if machine != MACHINE:
        across = ("CMAKE_SYSTEM_NAME=Linux", f"CMAKE_SYSTEM_PROCESSOR={machine}")
    flags = (
        *FLAGS,
        # The fallback for a program that loads libllama without choosing an instruction set.
        f"CMAKE_INSTALL_RPATH=$ORIGIN;$ORIGIN/..;$ORIGIN/{least}",
        f"LLAMA_BUILD_COMMIT={upstream.local_version}",
        *across,
    )
    plans = {
        name: build.Plan(upstream, tools, (*flags, *more), False, "", False, "", key="")
        for name, more in sets.items()
    }
    first = plans[least].build_dir / "bin"
    libraries = {}
    with locked(cache_dir() / "lock") as lock:
        root = sync_tree(fetch_sdist(upstream, sdist), upstream)
        source = root / upstream.source
        for name, plan in plans.items():
            say(f"compiling llama.cpp for {name}")
            target = build.TARGET if name == least else "ggml-cpu"
            build.compile_tree(plan, source, jobs, lock, (target,))
            libraries[f"{name}/{COMPUTES}"] = plan.build_dir / "bin" / COMPUTES
        libraries |= {path.name: path for path in first.glob("lib*.so") if path.name != COMPUTES}
        if not across:
            build.check_libraries(sorted(first.glob("lib*.so")))
        say("compiling llama.cpp's server")
        path = server.compile_server(upstream, tools, source, first, lock, (LINKED, *across))
        libraries[path.name] = path
        entries = bindings(root) | wheel.converter(source, PACKAGE)
        texts |= wheel.licences(root, upstream)
    libraries["libgomp.so.1"] = Path(_printed(tools.cc, "-print-file-name=libgomp.so.1"))
    data = {f"{PACKAGE}/lib/{_named(name)}": portable(path) for name, path in libraries.items()}
    if digest_of_patches() != patches:
        raise BuildError("the patches changed during compilation: run the command again.")
    stamp = {"version": upstream.local_version, "patches": patches, "sets": list(sets)}
    stamp |= {"key": hashlib.sha256(b"".join((patches.encode(), *data.values()))).hexdigest()}
    entries |= {f"{PACKAGE}/{STAMP}": wheel.as_json(stamp), **data, **our_files()}
    return write("moe_edge", entries, texts, folder, machine)


def build_cuda_wheel(
    upstream: Upstream,
    sdist: Path | None,
    jobs: int | None,
    folder: Path,
    architectures: str,
) -> Path:
    """Build the wheel moe-edge-cuda with the CUDA library of llama.cpp, and return its path.

    NVIDIA's libraries are not included. The wheel requires their packages on PyPI. After an
    interrupt, calling this again continues the build. Raises BuildError if the build fails.

    sdist: local copy of the source. Default: it is downloaded.
    jobs: number of compilers to run at once.
    folder: folder for the wheel.
    architectures: value of CMAKE_CUDA_ARCHITECTURES.
    """
    tools, patches = probe.find_toolchain(), digest_of_patches()
    major = int(probe.nvcc_version(probe.need_nvcc()).split(".")[0])
    if major < 13:
        raise BuildError(f"the wheel needs CUDA 13 or newer, but nvcc has version {major}.")
    flags = (*FLAGS, f"LLAMA_BUILD_COMMIT={upstream.local_version}", *cuda.flags(architectures)[0])
    # NVIDIA's packages are in site-packages, four folders up.
    flags += (f"CMAKE_INSTALL_RPATH=$ORIGIN;$ORIGIN/..;$ORIGIN/../../../../nvidia/cu{major}/lib",)
    plan = build.Plan(upstream, tools, flags, True, "", False, "", key="")
    with locked(cache_dir() / "lock") as lock:
        root = sync_tree(fetch_sdist(upstream, sdist), upstream)
        say(f"compiling llama.cpp for CUDA {major} ({architectures})")
        build.compile_tree(plan, root / upstream.source, jobs, lock, ("ggml",))
        texts = wheel.licences(root, upstream)
    if digest_of_patches() != patches:
        raise BuildError("the patches changed during compilation: run the command again.")
    return write_cuda([plan.build_dir / "bin" / name for name in WITH_CUDA], major, texts, folder)


def write_cuda(
    libraries: Sequence[Path], major: int, texts: Mapping[str, bytes], folder: Path
) -> Path:
    """Write the wheel moe-edge-cuda with the given CUDA libraries, and return its path.

    libraries: paths of libraries that were built from the current patches.
    major: the major version of CUDA.
    texts: licence texts by file name.
    """
    about = project()
    lines = (
        *("Metadata-Version: 2.1", "Name: moe-edge-cuda", f"Version: {about['version']}"),
        *("Summary: moe-edge on NVIDIA GPUs", f"License: {about['license']['text']}"),
        f"Requires-Dist: moe-edge=={about['version']}",
        *(f"Requires-Dist: nvidia-{name}=={major}.*" for name in ("cublas", "cuda-runtime")),
    )
    place = f"{PACKAGE}/lib/cuda"
    entries = {f"{place}/{_named(path.name)}": portable(path) for path in libraries}
    entries[f"{place}/{STAMP}"] = wheel.as_json({"patches": digest_of_patches()})
    texts = {**texts, "METADATA": "\n".join((*lines, "")).encode()}
    return write("moe_edge_cuda", entries, texts, folder)


def write(
    name: str,
    entries: Mapping[str, bytes],
    texts: Mapping[str, bytes],
    folder: Path,
    machine: str = MACHINE,
) -> Path:
    """Write a wheel with our licence and the licences of GCC's libraries. Return its path.

    The file has its final name only after it is complete.

    name: name of the package.
    entries: contents of the wheel's files by path.
    texts: contents of files in its .dist-info folder.
    """
    texts = {**texts, "licenses/LICENSE": (REPO / "LICENSE").read_bytes()}
    for number, place in enumerate(GCC_LICENCES):
        if not Path(place).is_file():
            raise BuildError(f"{place} does not exist: build the wheel on Debian or Ubuntu.")
        texts[f"licenses/LICENSE.gcc-runtime.{number}"] = Path(place).read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}-{project()['version']}-{tag(machine)}.whl"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".wheel.") as stage:
        wheel.write_archive(Path(stage) / made.name, dict(sorted(entries.items())), texts)
        os.replace(Path(stage) / made.name, made)
    return made


def portable(path: Path) -> bytes:
    """Return the bytes of a built library, with new names for the libraries that it loads.

    llama.cpp's library names are replaced by the names in the wheel, such as libllama by libllmoe.
    Raises BuildError if the library needs libstdc++, or a newer glibc than the wheel's tag allows.
    """
    data = path.read_bytes()
    newer = {int(n) for n in re.findall(rb"GLIBC_2\.(\d+)", data) if int(n) > GLIBC}
    if newer or b"libstdc++.so" in data:
        library = f"GLIBC_2.{max(newer)}" if newer else "libstdc++"
        raise BuildError(
            f"{path.name} needs {library}, which manylinux_2_{GLIBC} does not include."
        )
    for old, new in NAMES.items():
        data = data.replace(b"\0" + old + b"\0", b"\0" + new + b"\0")
    return data


def _named(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return folder + slash + NAMES.get(file.encode(), file.encode()).decode()


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def bindings(root: Path) -> dict[str, bytes]:
    """Return llama-cpp-python's ctypes bindings, changed to our package and library names.

    The result maps paths in the wheel to file contents. Raises BuildError if the bindings no longer
    contain a text to change.

    root: the source tree.
    """
    changes = {
        "llama_cpp.py": (
            ("from llama_cpp._ctypes_extensions import", "from ._ctypes_extensions import"),
            ('_lib_base_name = "llama"', '_lib_base_name = "llmoe"'),
        ),
        "_ctypes_extensions.py": (("from typing_extensions import", "from typing import"),),
    }
    entries = {f"{PACKAGE}/__init__.py": b""}
    for name, pairs in changes.items():
        text = (root / "llama_cpp" / name).read_text()
        for old, new in pairs:
            if old not in text:
                raise BuildError(
                    f"{name} no longer contains {old!r}: adapt the changes in patches/portable.py."
                )
            text = text.replace(old, new)
        entries[f"{PACKAGE}/{name}"] = text.encode()
    return entries


def our_files() -> dict[str, bytes]:
    """Return the files of the packages gguf_tools and orchestrator, and of the demo model.

    The result maps paths in the wheel to file contents.
    """
    found = [
        path
        for package in ("gguf_tools", "orchestrator")
        for path in (REPO / package).rglob("*")
        if path.suffix in (".py", ".typed", ".html", ".css", ".js", ".json", ".txt")
    ]
    entries = {str(path.relative_to(REPO)): path.read_bytes() for path in found}
    for path in (REPO / "models" / "demo").glob("*"):
        if path.suffix in (".gguf", ".json", ".md", ".txt"):
            entries[f"orchestrator/{path.relative_to(REPO)}"] = path.read_bytes()
    return entries


def project() -> dict[str, Any]:
    """Return the [project] table of pyproject.toml.

    Raises BuildError before Python 3.11, which cannot read the file.
    """
    try:
        import tomllib
    except ModuleNotFoundError:
        raise BuildError("`make wheel` needs Python 3.11 or newer.") from None
    found: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    return found


def requirements() -> list[str]:
    """Return the requirements of moe-edge at run time, as a list of lines for pip.

    One of them is moe-edge's build of llama-cpp-python.
    """
    lines = (PATCHES / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def metadata(upstream: Upstream, machine: str = MACHINE) -> bytes:
    """Return the contents of METADATA for the wheel of moe-edge.

    The wheel contains the bindings of llama.cpp, so its requirements do not include them.
    """
    about = project()
    summary = about["description"] + UNTRIED.get(machine, "")
    lines = [
        *("Metadata-Version: 2.1", f"Name: {about['name']}", f"Version: {about['version']}"),
        *(f"Summary: {summary}", f"Author: {about['authors'][0]['name']}"),
        *(f"License: {about['license']['text']}", f"Requires-Python: {about['requires-python']}"),
        "Description-Content-Type: text/markdown",
    ]
    bound = upstream.name.replace("_", "-")
    lines += [f"Requires-Dist: {each}" for each in requirements() if bound not in each]
    for extra, needed in about["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {each}; extra == "{extra}"' for each in needed]
    return "\n".join((*lines, "", (REPO / "README.md").read_text())).encode()


def entry_points() -> bytes:
    """Return the contents of the wheel's entry_points.txt, which defines the command moe-edge."""
    scripts = project()["scripts"].items()
    return "\n".join(("[console_scripts]", *(f"{a} = {b}" for a, b in scripts), "")).encode()


def prebuilt(upstream: Upstream, folders: Sequence[Path]) -> tuple[Path, str] | None:
    """Make a wheel of llama.cpp's bindings from the libraries in a prebuilt moe-edge wheel.

    Return the new wheel's path and its key, a hash that identifies the build. Return None if no
    moe-edge wheel in the folders was built from the current patches.

    folders: where to look for moe-edge wheels.
    """
    patches = digest_of_patches()
    for path in (path for folder in folders for path in folder.glob(f"moe_edge-*_{MACHINE}.whl")):
        try:
            with zipfile.ZipFile(path) as archive:
                stamp = json.loads(archive.read(f"{PACKAGE}/{STAMP}"))
                if stamp["patches"] != patches:
                    continue
                found = {name: archive.read(name) for name in archive.namelist()}
        except (OSError, KeyError, ValueError, zipfile.BadZipFile):
            continue
        target = cache_dir() / "wheels" / stamp["key"][:24] / wheel.file_name(upstream)
        entries = {
            name.replace(PACKAGE, "llama_cpp"): data
            for name, data in found.items()
            if name.startswith(f"{PACKAGE}/")
        }
        about = f"Metadata-Version: 2.1\nName: {upstream.name}\nVersion: {upstream.local_version}\n"
        texts = {
            f"licenses/{Path(name).name}": data
            for name, data in found.items()
            if ".dist-info/licenses/" in name
        }
        with locked(cache_dir() / "lock"), publishing(target.parent, build.KEEP_WHEELS) as stage:
            wheel.write_archive(stage / target.name, entries, {"METADATA": about.encode(), **texts})
        say(f"using the libraries of {path}")
        return target, stamp["key"]
    return None
