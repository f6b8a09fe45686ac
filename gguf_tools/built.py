"""The built llama.cpp: in this package, where a wheel of moe-edge brings it, or in the `llama_cpp`
package that `make build` installs.

A wheel has libraries for several sets of instructions. One of them computes, libggml-cpu, and each
set has one of its own. The others are the same for all, and are linked with whichever is loaded
first. So it is with the library that knows CUDA, where the wheel moe-edge-cuda is installed beside.
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
CUDA = "cuda"  # the folder of the wheel moe-edge-cuda, beside those of the sets
STAMP = "moe_edge_build.json"
# What a set needs of the processor, the best set first, as (leaf, register, bit) of glibc's
# <sys/platform/x86.h>, or as a bit of the HWCAP that Linux gives for an ARM64. patches/portable.py
# has the compiler's options for each.
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


# How the dynamic linker names a library that lacks what another one needs, and glibc's own ones.
_TOO_OLD = re.compile(r"(\S*?([\w+-]+)\.so[.\d]*): version `([\w.]+)' not found")
_OF_GLIBC = ("libc", "libm", "libpthread")


class NotBuilt(MoeEdgeError):
    """One sentence: why there is no built llama.cpp, or why it does not run here."""


@cache
def package() -> Path:
    """The folder of the bindings, their libraries and upstream's converter. Raises NotBuilt."""
    if OWN.is_dir():
        return OWN
    spec = find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise NotBuilt("the llama_cpp package is not installed: run `make build`")
    return Path(next(iter(spec.submodule_search_locations)))


def advice() -> str:
    """What helps where what is installed is damaged, or is another version."""
    if not OWN.is_dir():
        return "run `make build`"
    return f"install moe-edge{' and moe-edge-cuda' * (OWN / 'lib' / CUDA).is_dir()} again"


def stamp() -> dict[str, Any]:
    """What the build says of itself; nothing where it is the stock package, or there is none."""
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
    """The folder of libllama, or of what LLAMA_CPP_LIB_PATH names, as it does for `llama_cpp`.
    Raises NotBuilt."""
    given = os.environ.get("LLAMA_CPP_LIB_PATH")
    return Path(given) if given else package() / "lib"


@cache
def instructions() -> str:
    """The set of instructions whose library is loaded; "native": what the compiler found.

    Raises NotBuilt, and where the processor has not even the least of a wheel's sets."""
    there = [name for name in SETS if (libraries() / name).is_dir()]
    if not there:
        return "native"
    missing: list[str] = []
    for name in there:
        missing = [each for each, where in SETS[name].items() if not _has(*where)]
        if not missing:
            return name
    raise NotBuilt(
        f"this processor lacks {', '.join(missing)}, which the prebuilt libraries need: build "
        "moe-edge for it in a clone, with `make build`"
    )


def _has(*where: int) -> bool:
    """Whether the processor and the system let a feature be used."""
    if len(where) == 1:
        hwcap = ctypes.CDLL(None).getauxval
        hwcap.restype = ctypes.c_ulong
        return bool(hwcap(ctypes.c_ulong(_HWCAP)) >> where[0] & 1)
    leaf, register, bit = where
    try:
        find = ctypes.CDLL(None).__x86_get_cpuid_feature_leaf
    except AttributeError:
        return False
    # Four registers that say what there is, and four that say what of it may be used.
    find.restype = ctypes.POINTER(ctypes.c_uint32 * 8)
    return bool(find(leaf).contents[4 + register] >> bit & 1)


def _first() -> list[Path]:
    """What is loaded before libllama, which is linked with it: of a wheel what computes,
    and what knows CUDA. Raises NotBuilt."""
    folder, chosen = libraries(), instructions()
    found = [] if chosen == "native" else list((folder / chosen).iterdir())
    if (folder / CUDA).is_dir():
        if _stamp_in(folder / CUDA).get("patches") != stamp().get("patches"):
            raise NotBuilt(
                "moe-edge-cuda is of another version than moe-edge: install both of one version, "
                "or run `pip uninstall moe-edge-cuda`"
            )
        found.append(folder / CUDA / "libgmoe.so")
    return found


@cache
def bindings() -> Any:
    """The module of upstream's bindings, its library loaded. Raises NotBuilt."""
    first = _first()
    name = "gguf_tools._llama" if package() == OWN else "llama_cpp"
    try:
        for path in first:
            ctypes.CDLL(str(path))
        return import_module(f"{name}.llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        raise NotBuilt(_why_not_loaded(str(error))) from error


def _why_not_loaded(said: str) -> str:
    """Return the sentence for libraries that the dynamic linker refuses. said: its reason."""
    older = _TOO_OLD.search(said)
    if older is None:
        return f"llama.cpp cannot be loaded ({said}): {advice()}"
    path, name, version = older.groups()
    text = (
        f"llama.cpp cannot be loaded: {path} has no {version}, so it is older than what llama.cpp "
        f"was built with: "
    )
    here = "run `make build` in a clone on this system"
    if name in _OF_GLIBC:
        return f"{text}{here}"
    return (
        f"{text}if it belongs to another program, such as conda, update it, or take its folder out "
        f"of LD_LIBRARY_PATH; if it is the system's own, {here}"
    )
