"""Detect what this machine offers for the build: compilers, build tools, AMX and CUDA."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from patches.upstream import BuildError

CMAKE_AT_LEAST = (3, 18)
AMX_OFF = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")

# The steps of ggml's AMX backend, compiled with the same optimization: request AMX from the kernel,
# configure the tiles of every thread, load, multiply, store. The product is checked. A processor
# that lists AMX can still raise SIGILL, because of a virtual machine or because of the compiler:
# GCC 12's header declares that ldtilecfg reads only 8 of its 64 bytes, so at -O3 the compiler drops
# the stores to the other bytes, and the first tile load is illegal.
AMX_FLAGS = ("-std=c++17", "-O3", "-march=native", "-pthread")
AMX_PROGRAM = r"""
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <thread>
struct tile_config {
    uint8_t palette = 0;
    uint8_t start = 0;
    uint8_t reserved[14] = {0};
    uint16_t colsb[16] = {0};
    uint8_t rows[16] = {0};
};
__attribute__((noinline)) static void configure() {
    static thread_local bool done = false;
    if (done) return;
    alignas(64) tile_config config = {};
    config.palette = 1;
    config.rows[0] = 8;
    config.colsb[0] = 64;
    config.rows[2] = 16;
    config.colsb[2] = 32;
    config.rows[4] = 16;
    config.colsb[4] = 64;
    _tile_loadconfig(&config);
    done = true;
}
static int multiply() {
    alignas(64) int8_t a[16 * 32], b[8 * 64];
    alignas(64) int32_t c[16 * 16];
    memset(a, 1, sizeof a);
    memset(b, 2, sizeof b);
    for (int round = 0; round < 200; round++) {
        configure();
        _tile_zero(4);
        _tile_loadd(0, b, 64);
        _tile_loadd(2, a, 32);
        _tile_dpbssd(4, 2, 0);
        _tile_stored(4, c, 64);
        for (int i = 0; i < 256; i++) if (c[i] != 64) return 1;
        if (round % 20 == 0) usleep(1000);
    }
    return 0;
}
int main() {
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 2;
    int failed[4];
    std::thread threads[4];
    for (int i = 0; i < 4; i++) threads[i] = std::thread([&failed, i] { failed[i] = multiply(); });
    int sum = 0;
    for (int i = 0; i < 4; i++) { threads[i].join(); sum += failed[i]; }
    return sum ? 3 : 0;
}
"""


@dataclass(frozen=True)
class Toolchain:
    """The compilers and build tools that were found on this machine."""

    cc: str
    cxx: str
    cmake: str
    generator: str  # of cmake
    ccache: str | None
    identity: str  # compiler versions and the native feature macros, hashed into the cache key
    native_amx: bool  # whether -march=native enables AMX


def _which(variable: str, *names: str) -> str | None:
    chosen = os.environ.get(variable)
    if chosen:
        return shutil.which(shlex.split(chosen)[0])
    for name in names:
        if path := shutil.which(name):
            return path
    return None


def find_toolchain() -> Toolchain:
    """Find the compilers and build tools on this machine.

    Raises BuildError, which names the package to install, if a tool is missing.
    """
    cc, cxx = _which("CC", "cc", "gcc", "clang"), _which("CXX", "c++", "g++", "clang++")
    if cc is None or cxx is None:
        raise BuildError(
            "A C and C++ compiler is missing: install it with `sudo apt install build-essential`."
        )
    for tool in ("cmake", "patch"):
        if shutil.which(tool) is None:
            raise BuildError(f"{tool} is missing: install it with `sudo apt install {tool}`.")
    cmake = str(shutil.which("cmake"))
    text = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None or (int(match[1]), int(match[2])) < CMAKE_AT_LEAST:
        raise BuildError(
            f"cmake {'.'.join(map(str, CMAKE_AT_LEAST))} or newer is needed, {cmake} is "
            f"{match[0] if match else 'unusable'}: update it with `sudo apt install cmake`."
        )
    if shutil.which("ninja"):
        generator = "Ninja"
    elif shutil.which("make"):
        generator = "Unix Makefiles"
    else:
        raise BuildError("make is missing: install it with `sudo apt install build-essential`.")
    macros = _macros(cc, "c") + _macros(cxx, "c++")
    return Toolchain(
        cc=cc,
        cxx=cxx,
        cmake=cmake,
        generator=generator,
        ccache=shutil.which("ccache"),
        identity=hashlib.sha256(macros.encode()).hexdigest(),
        native_amx="__AMX_TILE__" in macros,
    )


def _macros(compiler: str, language: str) -> str:
    """Return the macros that a compiler predefines for this machine's processor.

    They identify compiler version and CPU features. Raises BuildError if the compiler does not
    work.

    language: "c" or "c++".
    """
    for flags in (["-march=native"], ["-mcpu=native"], []):
        command = [compiler, *flags, "-x", language, "-dM", "-E", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
    raise BuildError(
        f"{compiler} does not work ({done.stderr.strip().splitlines()[-1:]}): "
        "install a compiler with `sudo apt install build-essential`."
    )


def probe_amx(tools: Toolchain) -> tuple[bool, str]:
    """Test whether programs with AMX instructions work on this machine. Return (works, reason).

    The test runs in a child process, because it may crash.
    """
    if not tools.native_amx:
        return False, "this compiler and processor have no AMX"
    with tempfile.TemporaryDirectory(prefix="moe-edge-amx.") as folder:
        source, binary = Path(folder) / "probe.cpp", Path(folder) / "probe"
        source.write_text(AMX_PROGRAM)
        command = [tools.cxx, *AMX_FLAGS, str(source), "-o", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return False, "the AMX test does not compile"
        try:
            status = subprocess.run([str(binary)], timeout=20).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return False, f"the AMX test did not finish: {error}"
    if status < 0:
        return False, f"the processor lists AMX, but the test of it ended with signal {-status}"
    return status == 0, "the test passed" if status == 0 else f"the test failed ({status})"


def find_nvcc() -> str | None:
    """Return the path of NVIDIA's compiler nvcc, or None if nvcc is not found."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def need_nvcc() -> str:
    """Return the path of NVIDIA's compiler nvcc.

    Raises BuildError, which says how to install nvcc, if nvcc is not found.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            "GPU=cuda needs nvcc: install it with `sudo apt install nvidia-cuda-toolkit`, "
            "or set CUDA_HOME to your CUDA toolkit."
        )
    return nvcc


def find_gpu() -> tuple[bool, str]:
    """Test whether the driver can access an NVIDIA GPU. Return (found, reason)."""
    smi = shutil.which("nvidia-smi")
    if smi:
        try:
            done = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired:
            return False, "nvidia-smi does not answer"
        if done.returncode == 0 and done.stdout.startswith("GPU "):
            return True, done.stdout.splitlines()[0].split(" (UUID")[0]
        return False, f"nvidia-smi finds no GPU: {(done.stdout + done.stderr).strip()[:80]}"
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True, "an NVIDIA driver is loaded"
    return False, "no NVIDIA driver is loaded"


def choose_gpu(choice: str) -> tuple[bool, str]:
    """Decide whether to build with CUDA. Return (decision, reason).

    choice: cuda, off or auto.
    """
    if choice == "off":
        return False, "GPU=off"
    if choice == "cuda":
        need_nvcc()
        return True, "GPU=cuda"
    found, why = find_gpu()
    if found and find_nvcc() is None:
        return False, f"{why}, but nvcc is not installed"
    return found, why


def toolkit_root(nvcc: str) -> Path:
    """Return the folder of the CUDA toolkit to which nvcc belongs."""
    done = subprocess.run([nvcc, "-v", "--dryrun", "x.cu"], capture_output=True, text=True)
    match = re.search(r"^#\$ TOP=(.+)$", done.stdout + done.stderr, re.MULTILINE)
    root = Path(match[1]) if match else Path(nvcc).resolve().parent.parent
    return root.resolve()


def nvcc_version(nvcc: str) -> str:
    """Return the full version of nvcc. Raises BuildError if nvcc does not print its version."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release (\d+\.\d+), V(\S+)", text)
    if match is None:
        raise BuildError(f"{nvcc} --version does not print a version: install CUDA again.")
    return match[2]
