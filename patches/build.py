"""Build a wheel from the pinned source: cache key, flags, compilation and packaging.

The cache key covers everything that determines the wheel's contents. A finished wheel is published
by renaming its folder, so a cached wheel is always complete and matches its key.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from patches import cuda, probe, wheel
from patches.progress import Progress
from patches.series import read_series
from patches.tree import native_sources, sync_tree
from patches.upstream import (
    PATCHES,
    BuildError,
    Upstream,
    cache_dir,
    fetch_sdist,
    locked,
    publishing,
    say,
)

KEEP_WHEELS = 6
TARGET = "llama"
# llama.cpp's CUDA sources that our patches change or that our kernels rely on. `cuda-check`
# compiles these and all of our own.
CUDA_SAMPLE = ("ggml-cuda.cu", "mmid.cu", "mmq.cu", "mmvq.cu")
OUR_WARNING = re.compile(r"^\S*\bmoe-edge/[\w.-]+(?:\(\d+\)|:\d+(?::\d+)?):? ?warning.*$", re.M)

# Disable everything that moe-edge does not use. This halves the compile time.
BASE_FLAGS = (
    "CMAKE_BUILD_TYPE=Release",
    "BUILD_SHARED_LIBS=ON",
    # A wheel cannot contain symbolic links. Two copies of a library under two names would be loaded
    # as two libraries with separate global variables.
    "CMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
    "CMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "GGML_NATIVE=ON",
    "LLAMA_CURL=OFF",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_COMMON=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_TOOLS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_SERVER=OFF",
    "LLAMA_BUILD_APP=OFF",
    "LLAMA_BUILD_NUMBER=0",
)


@dataclass(frozen=True)
class Options:
    """The options of the command line for building llama.cpp."""

    gpu: str = "auto"  # auto | cuda | off
    amx: str = "auto"  # auto | on | off; auto: on if the probe shows that it works
    cuda_arch: str | None = None
    sdist: Path | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that determines how llama.cpp is built: source, compilers, flags and devices."""

    upstream: Upstream
    tools: probe.Toolchain
    flags: tuple[str, ...]  # cmake definitions NAME=VALUE
    gpu: bool
    gpu_reason: str
    amx: bool
    amx_reason: str
    key: str  # content hash of the wheel

    @property
    def wheel_path(self) -> Path:
        """The path of the built wheel in the cache."""
        name = wheel.file_name(self.upstream)
        return cache_dir() / "wheels" / self.key[:24] / name

    @property
    def build_dir(self) -> Path:
        """The folder in which this plan's objects are compiled.

        Each combination of flags and compilers has its own folder, so that their objects are never
        mixed.
        """
        parts = [*self.flags, self.tools.identity, self.tools.generator, str(self.tools.ccache)]
        parts += [self.tools.cc, self.tools.cxx, self.upstream.sha256]
        return cache_dir() / "build" / _digest(parts)[:16]

    def stamp(self) -> dict[str, object]:
        """Return the build record that the wheel contains as llama_cpp/moe_edge_build.json."""
        return {
            "key": self.key,
            "version": self.upstream.local_version,
            "gpu": "cuda" if self.gpu else "off",
            "amx": self.amx,
            "flags": list(self.flags),
        }


def make_plan(upstream: Upstream, options: Options) -> Plan:
    """Determine how llama.cpp is built on this machine: compilers, flags and the wheel's cache key.

    Nothing is compiled. Only cuBLAS may be downloaded. Raises BuildError if a tool is missing.
    """
    tools = probe.find_toolchain()
    gpu, gpu_reason = probe.choose_gpu(options.gpu)
    amx, amx_reason = (False, "AMX=off") if options.amx == "off" else probe.probe_amx(tools)
    if options.amx == "on" and not amx:
        raise BuildError(f"AMX=on, but {amx_reason}.")
    flags = [*BASE_FLAGS, f"LLAMA_BUILD_COMMIT={upstream.local_version}"]
    rpath = ["$ORIGIN"]
    if tools.native_amx and not amx:
        # llama.cpp ignores GGML_AMX_*=OFF if GGML_NATIVE is set.
        flags += [f"CMAKE_{lang}_FLAGS={' '.join(probe.AMX_OFF)}" for lang in ("C", "CXX")]
    if gpu:
        cuda_flags, cuda_libs = cuda.flags(options.cuda_arch)
        flags += cuda_flags
        rpath += cuda_libs
    flags.append(f"CMAKE_INSTALL_RPATH={';'.join(rpath)}")
    flags += _user_flags(os.environ.get("CMAKE_ARGS", ""))
    parts = [upstream.sha256, upstream.local_version, tools.identity, *flags]
    sources = [PATCHES / "series", *sorted(PATCHES.glob("*.patch")), *native_sources()]
    sources += [PATCHES / name for name in ("build.py", "series.py", "tree.py", "wheel.py")]
    for path in sources:
        parts += [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
    return Plan(upstream, tools, tuple(flags), gpu, gpu_reason, amx, amx_reason, key=_digest(parts))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _user_flags(text: str) -> list[str]:
    """Return the cmake definitions in `text`, the value of the environment variable CMAKE_ARGS.

    Raises BuildError if the text contains anything but -DNAME=VALUE words.
    """
    flags = []
    for word in shlex.split(text):
        if not re.match(r"-D\w+(:\w+)?=", word):
            raise BuildError(f"CMAKE_ARGS can only contain -DNAME=VALUE words, not {word!r}")
        flags.append(word[2:])
    return flags


def cached_wheel(plan: Plan) -> Path | None:
    """Return the path of the cached wheel of llama.cpp that matches a build plan.

    Return None if the cache has no such wheel or the wheel is damaged.
    """
    path = plan.wheel_path
    try:
        with zipfile.ZipFile(path) as archive:
            # The stamp must be in the list: in a truncated wheel, zipfile would find the end of the
            # archive inside the wheel instead.
            whole = wheel.STAMP in archive.namelist() and archive.testzip() is None
            return path if whole else None
    except (OSError, zipfile.BadZipFile):
        return None


def build(upstream: Upstream, options: Options) -> tuple[Path, Plan, bool]:
    """Build the wheel of llama.cpp, unless the cache has it already.

    Return its path, the build plan, and whether the wheel was built now. After an interrupt,
    calling this again continues the build. Raises BuildError if the build fails.

    options: options of the command line.
    """
    plan = make_plan(upstream, options)
    found = cached_wheel(plan)
    if found:
        return found, plan, False
    with locked(cache_dir() / "lock") as lock:
        # The sources may have been edited while this process waited for another build.
        plan = make_plan(upstream, options)
        found = cached_wheel(plan)
        if found:
            return found, plan, False
        say(f"building llama.cpp with our sources (GPU: {plan.gpu_reason}; AMX: {plan.amx_reason})")
        sdist = fetch_sdist(upstream, options.sdist)
        root = sync_tree(sdist, upstream)
        if make_plan(upstream, options).key != plan.key:
            raise BuildError("the sources changed while they were copied: run the command again.")
        compile_tree(plan, root / upstream.source, options.jobs, lock)
        _publish(plan, root)
    return plan.wheel_path, plan, True


def compile_tree(
    plan: Plan, source: Path, jobs: int | None, lock: int, targets: Sequence[str] = (TARGET,)
) -> None:
    """Configure and compile a source tree in `plan.build_dir`, reusing objects of earlier builds.

    Raises BuildError if a command fails.

    source: folder of the source tree.
    jobs: number of compilers to run at once. Default: the result of `default_jobs`.
    lock: descriptor of the build lock, which compilers keep if this process is killed.
    targets: cmake targets to build.
    """
    folder = plan.build_dir
    configured, running = folder / "moe-edge-configured", folder / "moe-edge-running"
    if folder.exists() and not configured.exists():
        shutil.rmtree(folder)  # its first configuration was interrupted
    folder.mkdir(parents=True, exist_ok=True)
    # Ninja records finished objects and compiles the others again, so a killed build can continue.
    # After a crash of the machine, its records may not match the files on disk.
    killed = running.exists()
    if killed and (plan.tools.generator != "Ninja" or running.read_text() != _boot()):
        _drop_newer(folder, running.stat().st_mtime_ns)
    running.write_text(_boot())
    command = [plan.tools.cmake, "-S", str(source), "-B", str(folder)]
    command += ["-G", plan.tools.generator]
    definitions = [f"CMAKE_C_COMPILER={plan.tools.cc}", f"CMAKE_CXX_COMPILER={plan.tools.cxx}"]
    if plan.tools.ccache:
        for language in ("C", "CXX", *(["CUDA"] if plan.gpu else [])):
            definitions.append(f"CMAKE_{language}_COMPILER_LAUNCHER={plan.tools.ccache}")
    command += [f"-D{definition}" for definition in (*definitions, *plan.flags)]
    log = folder / "moe-edge-build.log"
    try:
        # Keep the log of a killed build: the warnings for its objects are not printed again.
        with log.open("a" if killed else "w") as file:
            _run(command, "configuring", file.fileno(), log, lock)
            configured.write_text("")
            command = [plan.tools.cmake, "--build", str(folder), "--target", *targets]
            command += ["--parallel", str(jobs or default_jobs(plan.gpu))]
            _run(command, "compiling", file.fileno(), log, lock)
    except (KeyboardInterrupt, BuildError):
        # Compilers that fail or receive Ctrl-C remove their incomplete output themselves.
        running.unlink(missing_ok=True)
        raise
    running.unlink()


def check_cuda_objects(plan: Plan, source: Path, full: bool, lock: int) -> None:
    """Compile our CUDA kernels, and the CUDA sources of llama.cpp that they rely on.

    Raises BuildError for an error, or for a warning in our files.

    source: folder of the llama.cpp tree.
    full: compile the whole library.
    lock: descriptor of the build lock, which compilers keep if this process is killed.
    """
    ours = [path.name for path in native_sources() if path.suffix == ".cu"]
    # CMake's object folder for sources outside of their target's folder.
    folder = "ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir"
    objects = [f"{folder}/__/__/__/moe-edge/{name}.o" for name in ours]
    for name in objects:
        (plan.build_dir / name).unlink(missing_ok=True)  # compile it again, to see its warnings
    targets = ["ggml-cuda"]
    # make cannot build a single object of a subfolder from the top folder.
    if not full and plan.tools.generator == "Ninja":
        targets = [*(f"{folder}/{name}.o" for name in CUDA_SAMPLE), *objects]
    compile_tree(plan, source, None, lock, targets)
    log = plan.build_dir / "moe-edge-build.log"
    warnings = our_warnings(log.read_text(errors="replace"))
    if warnings:
        raise BuildError("warnings in our CUDA sources:\n" + "\n".join(warnings))


def our_warnings(log: str) -> list[str]:
    """Return the lines of a build log that are compiler warnings about our files.

    Repeated lines are left out.
    """
    return list(dict.fromkeys(match[0] for match in OUR_WARNING.finditer(log)))


def _boot() -> str:
    """Return a text that is the same until the machine restarts.

    If the system does not identify its boots, the text is random.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return os.urandom(16).hex()


def _drop_newer(folder: Path, since_ns: int) -> None:
    """Delete objects and libraries that a killed build may have left incomplete.

    since_ns: start of the killed build. Files that were modified later are deleted.
    """
    for path in folder.rglob("*"):
        if path.suffix in (".o", ".a", ".so") and path.lstat().st_mtime_ns >= since_ns:
            path.unlink()


def default_jobs(gpu: bool) -> int:
    """Return the number of compilers to run at once.

    This is the number of cores, or the number of compilers that fit in free memory if that is
    smaller. A compiler needs 1 GiB, or 2 GiB with CUDA.

    gpu: whether CUDA sources are compiled.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return max(1, cores)
    return max(1, min(cores, free // ((2 if gpu else 1) << 30)))


def _run(command: list[str], what: str, log_fd: int, log: Path, lock: int) -> None:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(cache_dir().parent)}
    progress = Progress(what)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        env=environment,
    )
    try:
        if process.stdout is None:
            raise BuildError(f"{command[0]}: the output cannot be read")
        for line in process.stdout:
            os.write(log_fd, line)
            progress.line(line.decode(errors="replace"))
        status = process.wait()
    except BaseException:
        # Ctrl-C reaches all processes of the group, but `kill` reaches only this one.
        process.send_signal(signal.SIGINT)
        process.communicate()
        progress.close()
        raise
    progress.close()
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()
        errors = [n for n, line in enumerate(lines) if re.search(r"\berror\b|CMake Error", line)]
        first = errors[0] if errors else max(0, len(lines) - 20)
        excerpt = "\n".join(line[:300] for line in lines[first : first + 20])
        raise BuildError(f"{what} failed. The whole log is in {log}\n{excerpt}")


def _publish(plan: Plan, root: Path) -> None:
    binaries = plan.build_dir / "bin"
    libraries = sorted(binaries.glob("lib*.so")) or sorted(binaries.glob("lib*.dylib"))
    check_libraries(libraries)
    target = plan.wheel_path
    with publishing(target.parent, KEEP_WHEELS) as stage:
        wheel.write(stage / target.name, plan.upstream, root, libraries, plan.stamp())


def header_symbols(header: Path = PATCHES / "native" / "moe-edge.h") -> tuple[int, list[str]]:
    """Return the ABI version and the names of the exported functions, read from the C header.

    Raises BuildError if the header has no version.
    """
    text = header.read_text()
    version = re.search(r"^#define MOE_EDGE_ABI_VERSION (\d+)$", text, re.MULTILINE)
    if version is None:
        raise BuildError(f"{header}: no MOE_EDGE_ABI_VERSION")
    return int(version[1]), re.findall(r"^MOE_EDGE_API [^;(]*?\b(moe_edge_\w+)\(", text, re.M)


CHECK = """
import ctypes, json, sys
paths, symbols = json.loads(sys.argv[1])
libraries = [ctypes.CDLL(path) for path in paths]
missing = [s for s in symbols if not any(hasattr(library, s) for library in libraries)]
abi = None
for library in libraries:
    if hasattr(library, "moe_edge_abi_version"):
        abi = library.moe_edge_abi_version()
print(json.dumps([missing, abi]))
"""


def check_libraries(libraries: list[Path]) -> None:
    """Check that the built libraries can be loaded and match the C header.

    They are loaded in a child process. Raises BuildError if the ABI version differs or an exported
    function is missing.
    """
    if not any(path.stem == "libllama" for path in libraries):
        raise BuildError("the build has not produced libllama")
    abi, symbols = header_symbols() if read_series() else (None, [])
    argument = json.dumps([[str(path) for path in libraries], symbols])
    done = subprocess.run([sys.executable, "-c", CHECK, argument], capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"signal {-done.returncode}"]
        raise BuildError(f"the built libraries cannot be loaded: {lines[-1]}")
    missing, found = json.loads(done.stdout)
    if missing:
        raise BuildError(f"the built libraries lack {', '.join(missing)}")
    if abi is not None and found != abi:
        raise BuildError(f"the built libraries have ABI version {found}, but the header has {abi}")
