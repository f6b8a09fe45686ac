"""Compile llama.cpp's server core as a library for an installed llama_cpp package.

`make build` does this after it has installed the package. The library has a separate cache key, so
that an edit of the server's sources does not rebuild libllama. A moe-edge wheel contains it.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
from pathlib import Path

from patches import build, probe
from patches.tree import sync_tree
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

SOURCES = PATCHES / "native" / "server"
TARGET = "moe-edge-server"
KEEP = 4


def library_path(upstream: Upstream, llama_cpp: Path, cache: Path) -> Path:
    """Return where the cache stores the server library that fits an installed llama_cpp package.

    The file may not exist yet. Raises BuildError if moe-edge did not build the package.

    llama_cpp: folder of the package.
    cache: the cache folder.
    """
    try:
        stamp = json.loads((llama_cpp / "moe_edge_build.json").read_text())
    except (OSError, ValueError):
        raise BuildError(f"{llama_cpp} was not built by moe-edge: run `make build`.") from None
    parts = [upstream.sha256, str(stamp.get("key")), TARGET]
    for path in sorted(SOURCES.iterdir()):
        parts += [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache / "servers" / digest[:24] / f"lib{TARGET}.so"


def build_server(upstream: Upstream, llama_cpp: Path, sdist: Path | None = None) -> Path:
    """Put the server library into an installed llama_cpp package, and return its path there.

    If the cache does not have the library, it is compiled. Raises BuildError if moe-edge did not
    build the package, or if a compiler is missing or fails.

    llama_cpp: folder of the package.
    sdist: local copy of the source. Default: it is downloaded.
    """
    path = library_path(upstream, llama_cpp, cache_dir())
    if not path.exists():
        tools = probe.find_toolchain()
        with locked(cache_dir() / "lock") as lock:
            if not path.exists():
                say("building llama.cpp's server core")
                root = sync_tree(fetch_sdist(upstream, sdist), upstream)
                source, libraries = root / upstream.source, llama_cpp / "lib"
                built = compile_server(upstream, tools, source, libraries, lock)
                if library_path(upstream, llama_cpp, cache_dir()) != path:
                    raise BuildError(
                        "the sources changed while they were compiled: run the command again."
                    )
                with publishing(path.parent, KEEP) as stage:
                    shutil.copy2(built, stage / path.name)
    return _installed(path, llama_cpp / "lib" / path.name)


def _installed(path: Path, target: Path) -> Path:
    """Copy a file to `target`, unless it is the same already. Return the target.

    The target is replaced, not overwritten, because other processes may have loaded it.
    """
    if not (target.exists() and filecmp.cmp(path, target)):
        part = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            shutil.copy2(path, part)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    return target


def compile_server(
    upstream: Upstream,
    tools: probe.Toolchain,
    source: Path,
    libraries: Path,
    lock: int,
    more: tuple[str, ...] = (),
) -> Path:
    """Compile the server library and link it with libllama. Return its path.

    source: folder of the llama.cpp tree.
    libraries: folder of libllama.
    lock: descriptor of the build lock, which compilers keep if this process is killed.
    more: additional cmake definitions.
    """
    folders = (f"UPSTREAM={source}", f"LIBRARIES={libraries}", f"OURS={SOURCES}")
    flags = ("CMAKE_BUILD_TYPE=Release", *folders, *more)
    plan = build.Plan(upstream, tools, flags, False, "", False, "", key="")
    build.compile_tree(plan, SOURCES, None, lock, (TARGET,))
    return plan.build_dir / "bin" / f"lib{TARGET}.so"
