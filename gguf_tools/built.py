"""Find and load the built llama.cpp.

It is part of this package in a moe-edge wheel. Otherwise it is the `llama_cpp` package that `make
build` installs.

A wheel contains one libggml-cpu for each supported instruction set. All other libraries are shared
by the instruction sets and link against the libggml-cpu that is loaded first, so the right one has
to be loaded before libllama. The CUDA library of the wheel moe-edge-cuda, if it is installed, is
loaded first for the same reason.
"""

import ctypes
import json
import os
import platform
import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gguf_tools.errors import MoeEdgeError

OWN = Path(__file__).parent / "_llama"
CUDA = "cuda"  # the library folder of the wheel moe-edge-cuda
STAMP = "moe_edge_build.json"
# CPU features that each instruction set requires, the best set first. On x86-64 a feature is a
# (leaf, register, bit) of glibc's <sys/platform/x86.h>; on ARM64 it is a bit number of Linux's
# HWCAP. patches/portable.py has the compiler options of each set.
_AVX2 = {
    **{"fma": (0, 2, 12), "movbe": (0, 2, 22), "avx": (0, 2, 28), "f16c": (0, 2, 29)},
    **{"bmi1": (1, 1, 3), "avx2": (1, 1, 5), "bmi2": (1, 1, 8), "lzcnt": (2, 2, 5)},
}
_HWCAP = 16  # AT_HWCAP of <elf.h>
_AVX512 = {
    **{"avx512f": (1, 1, 16), "avx512dq": (1, 1, 17), "avx512cd": (1, 1, 28)},
    **{"avx512bw": (1, 1, 30), "avx512vl": (1, 1, 31), "avx512_vnni": (1, 2, 11)},
}
SETS_OF: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {
    "x86_64": {
        "avx512_vnni": {**_AVX2, **_AVX512},
        "avx_vnni": {**_AVX2, "avx_vnni": (6, 0, 4)},
        "avx2": {**_AVX2},
    },
    "aarch64": {"dotprod": {"asimddp": (20,)}, "armv8": {}},
}
SETS = SETS_OF.get(platform.machine(), {})


# The dynamic linker's message for a library that is older than the one needed.
_TOO_OLD = re.compile(r"(\S*?([\w+-]+)\.so[.\d]*): version `([\w.]+)' not found")
_GLIBC_LIBRARIES = ("libc", "libm", "libpthread")


class NotBuilt(MoeEdgeError):
    """llama.cpp has not been built, or the built libraries do not run on this machine."""


@cache
def package() -> Path:
    """Return the folder of the Python bindings, the shared libraries and llama.cpp's converter.

    Raises NotBuilt if llama.cpp is not installed.
    """
    if OWN.is_dir():
        return OWN
    spec = find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise NotBuilt("the llama_cpp package is not installed: run `make build`")
    return Path(next(iter(spec.submodule_search_locations)))


def advice() -> str:
    """Return the remedy to print when the installed libraries are damaged or of a wrong version."""
    if not OWN.is_dir():
        return "run `make build`"
    return f"install moe-edge{' and moe-edge-cuda' * (OWN / 'lib' / CUDA).is_dir()} again"


def stamp() -> dict[str, Any]:
    """Return the build record of llama.cpp, the contents of `moe_edge_build.json`.

    The result is an empty dict if moe-edge did not build the installed package, or if no package is
    installed.
    """
    try:
        return _stamp_in(package())
    except NotBuilt:
        return {}


def _stamp_in(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def libraries() -> Path:
    """Return the folder that contains libllama.

    If the environment variable LLAMA_CPP_LIB_PATH is set, its value is the folder. Raises NotBuilt
    if llama.cpp is not installed.
    """
    given = os.environ.get("LLAMA_CPP_LIB_PATH")
    return Path(given) if given else package() / "lib"


@cache
def instruction_set() -> str:
    """Return the instruction set of the ggml CPU library to load, such as "avx2".

    A wheel of moe-edge contains several builds of ggml's CPU library, each for one instruction set.
    The result is the best of these instruction sets that this processor supports. If llama.cpp was
    compiled on this machine, the result is "native". Raises NotBuilt if the processor supports none
    of the builds.
    """
    shipped = [name for name in SETS if (libraries() / name).is_dir()]
    if not shipped:
        return "native"
    missing: list[str] = []
    for name in shipped:
        missing = [each for each, position in SETS[name].items() if not _has_cpu_feature(*position)]
        if not missing:
            return name
    raise NotBuilt(
        f"this processor lacks {', '.join(missing)}, which the prebuilt libraries require: clone "
        "the repository and compile moe-edge for this processor with `make build`"
    )


def _has_cpu_feature(*position: int) -> bool:
    """Return whether the processor and the operating system support a feature.

    position: (leaf, register, bit) of the feature in glibc's CPUID table on x86-64, or (bit,) in
        Linux's HWCAP on ARM64.
    """
    if len(position) == 1:
        hwcap = ctypes.CDLL(None).getauxval
        hwcap.restype = ctypes.c_ulong
        return bool(hwcap(ctypes.c_ulong(_HWCAP)) >> position[0] & 1)
    leaf, register, bit = position
    try:
        find = ctypes.CDLL(None).__x86_get_cpuid_feature_leaf
    except AttributeError:
        return False
    # The first four registers report features of the processor. The last four report which of them
    # the operating system enables.
    find.restype = ctypes.POINTER(ctypes.c_uint32 * 8)
    return bool(find(leaf).contents[4 + register] >> bit & 1)


def _preloads() -> list[Path]:
    """Return the paths of the libraries that must be loaded before libllama.

    If moe-edge was installed from a wheel, this is ggml's CPU library for this processor's
    instruction set. If moe-edge-cuda is installed, its CUDA library follows. Raises NotBuilt if
    moe-edge and moe-edge-cuda have different versions.
    """
    folder, chosen = libraries(), instruction_set()
    found = [] if chosen == "native" else list((folder / chosen).iterdir())
    if (folder / CUDA).is_dir():
        if _stamp_in(folder / CUDA).get("patches") != stamp().get("patches"):
            raise NotBuilt(
                "moe-edge-cuda and moe-edge have different versions: install the same version of "
                "both, or run `pip uninstall moe-edge-cuda`"
            )
        found.append(folder / CUDA / "libgmoe.so")
    return found


@cache
def bindings() -> Any:
    """Load llama.cpp and return llama-cpp-python's module of ctypes bindings.

    Raises NotBuilt if the libraries are missing or cannot be loaded.
    """
    preloads = _preloads()
    name = "gguf_tools._llama" if package() == OWN else "llama_cpp"
    try:
        for path in preloads:
            ctypes.CDLL(str(path))
        return import_module(f"{name}.llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        raise NotBuilt(_why_not_loaded(str(error))) from error


def _why_not_loaded(linker_error: str) -> str:
    """Return the error message for libraries that the dynamic linker refused to load."""
    older = _TOO_OLD.search(linker_error)
    if older is None:
        return f"llama.cpp cannot be loaded ({linker_error}): {advice()}"
    path, name, version = older.groups()
    problem = (
        f"llama.cpp cannot be loaded: {path} has no {version}, so it is older than the version "
        f"that llama.cpp was built with: "
    )
    rebuild = "run `make build` in a clone on this system"
    if name in _GLIBC_LIBRARIES:
        return f"{problem}{rebuild}"
    return (
        f"{problem}if the library belongs to another program, such as conda, update it, or remove "
        f"its folder from LD_LIBRARY_PATH; if it belongs to the system, {rebuild}"
    )
