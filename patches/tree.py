"""Maintain the unpacked source tree in the cache: llama-cpp-python, patched, with our sources.

Files are rewritten only if their content changes, so that only edited sources are compiled again.
All other differences from the release are undone, so that manual edits of the tree never get into a
wheel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import tempfile
from pathlib import Path

from patches.series import apply_series, read_series
from patches.upstream import (
    PATCHES,
    BuildError,
    Sdist,
    Upstream,
    cache_dir,
    say,
    write_atomic,
)

MANIFEST = ".moe-edge-manifest.json"
NATIVE_SUFFIXES = (".h", ".cpp", ".cu")
VERSION_FILE = "llama_cpp/__init__.py"

# (size, mtime_ns) of each file of the release, by its path inside the tree
Manifest = dict[str, tuple[int, int]]


def native_sources(folder: Path = PATCHES / "native") -> list[Path]:
    """Return our C++ and CUDA files, which are copied into the llama.cpp tree."""
    return sorted(path for path in folder.glob("*") if path.suffix in NATIVE_SUFFIXES)


def tree_path(upstream: Upstream) -> Path:
    """Return the folder in the cache into which the release's source is unpacked."""
    return cache_dir() / "source" / f"{upstream.base}-{upstream.sha256[:12]}"


def sync_tree(sdist_path: Path, upstream: Upstream) -> Path:
    """Unpack the release's source if necessary, add our changes, and return its folder.

    Our changes are the patches and our own files. Only changed files are written. After an
    interrupt, calling this again repairs the folder. The caller must hold the build lock and have
    checked the archive's hash.

    sdist_path: path of the source distribution.
    """
    sdist = Sdist(sdist_path, upstream)
    wanted = wanted_files(sdist, upstream)
    root = tree_path(upstream)
    manifest = _read_manifest(root)
    if manifest is None:
        _unpack(sdist_path, upstream, root)
        manifest = _read_manifest(root)
        if manifest is None:
            raise BuildError(f"{root}: could not unpack {sdist_path.name}")
    damaged = _damaged(root, manifest, set(wanted))
    for name, data in sdist.read(damaged).items():
        # Let the file get the current time: it must look newer than objects that were compiled
        # from the edited content.
        write_atomic(root / name, data)
        status = os.stat(root / name)
        manifest[name] = (status.st_size, status.st_mtime_ns)
    for name, data in wanted.items():
        path = root / name
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, data)
    if damaged:
        write_atomic(root / MANIFEST, json.dumps(manifest).encode())
    return root


def wanted_files(sdist: Sdist, upstream: Upstream) -> dict[str, bytes]:
    """Return the contents of all files of the source tree that differ from the release, by path.

    These are patched files, our own files, and the file with the version.
    """
    wanted = apply_series(read_series(), sdist)
    for path in native_sources():
        wanted[f"{upstream.source}/moe-edge/{path.name}"] = path.read_bytes()
    init = sdist.read({VERSION_FILE}).get(VERSION_FILE, b"").decode()
    versioned, count = re.subn(
        r'^__version__ = ".*"$', f'__version__ = "{upstream.local_version}"', init, flags=re.M
    )
    if count != 1:
        raise BuildError(f"{sdist.path.name}: {VERSION_FILE} has no __version__ line")
    wanted[VERSION_FILE] = versioned.encode()
    return wanted


def _read_manifest(root: Path) -> Manifest | None:
    try:
        return {
            name: tuple(entry) for name, entry in json.loads((root / MANIFEST).read_text()).items()
        }
    except (OSError, ValueError):
        return None


def _unpack(sdist_path: Path, upstream: Upstream, root: Path) -> None:
    say(f"unpacking {sdist_path.name}")
    if root.exists():
        shutil.rmtree(root)
    root.parent.mkdir(parents=True, exist_ok=True)
    for stale in root.parent.glob(".unpack.*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=".unpack.") as folder:
        with tarfile.open(sdist_path, "r:*") as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extraction_filter = staticmethod(tarfile.data_filter)
            # Leave out .git: git commands in the tree must not find a nested repository.
            archive.extractall(
                folder, members=(m for m in archive if ".git" not in Path(m.name).parts)
            )
        top = Path(folder) / upstream.base
        manifest: Manifest = {}
        for path in top.rglob("*"):
            if path.is_file():
                status = path.stat()
                manifest[str(path.relative_to(top))] = (status.st_size, status.st_mtime_ns)
        (top / MANIFEST).write_text(json.dumps(manifest))
        os.replace(top, root)


def _damaged(root: Path, manifest: Manifest, wanted: set[str]) -> set[str]:
    """Delete files that do not belong to the source tree, and find damaged files.

    Return the paths of the release's files that must be restored.

    root: folder of the tree.
    manifest: size and time of each file of the release.
    wanted: paths of files that differ from the release on purpose.
    """
    intact = set()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.join(folder, name)
            key = os.path.relpath(path, root)
            if key in wanted or key == MANIFEST:
                continue
            if key not in manifest:
                os.unlink(path)
                continue
            status = os.stat(path)
            if (status.st_size, status.st_mtime_ns) == manifest[key]:
                intact.add(key)
    return manifest.keys() - intact - wanted
