"""Write wheels (PEP 427).

Equal inputs give identical files: entries are in a fixed order and have a fixed date.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from patches.upstream import BuildError, Upstream

STAMP = "llama_cpp/moe_edge_build.json"
# llama.cpp's checkpoint converter and its version of the gguf package. `moe-edge convert` runs them
# from the wheel, so it needs neither the source tree nor another gguf package.
CONVERTER_PARTS = ("conversion", "gguf-py/gguf")
# Files that are not compressed: it would save only a few per cent and slow down the installation.
DENSE = (".gguf", ".zip")


def platform_tag() -> str:
    """Return the platform tag for wheels of this machine, such as "linux_x86_64"."""
    return re.sub(r"[-.]", "_", sysconfig.get_platform())


def file_name(upstream: Upstream) -> str:
    """Return the file name of the wheel of llama.cpp's Python bindings."""
    # The libraries are loaded with ctypes: no Python ABI is involved.
    return f"{upstream.name}-{upstream.local_version}-py3-none-{platform_tag()}.whl"


def write(
    path: Path, upstream: Upstream, root: Path, libraries: list[Path], stamp: dict[str, object]
) -> None:
    """Write the wheel of llama.cpp's Python bindings, libraries and converter.

    path: path of the wheel.
    root: the source tree that contains the llama_cpp package, the converter and PKG-INFO.
    libraries: paths of the built libraries.
    stamp: the build record.
    """
    entries = {
        str(file.relative_to(root)): file.read_bytes() for file in _python_files(root / "llama_cpp")
    }
    entries |= converter(root / upstream.source, "llama_cpp")
    entries |= {f"llama_cpp/lib/{library.name}": library.read_bytes() for library in libraries}
    entries[STAMP] = as_json(stamp)
    metadata, count = re.subn(
        r"^Version: .*$",
        f"Version: {upstream.local_version}",
        (root / "PKG-INFO").read_text(),
        count=1,
        flags=re.MULTILINE,
    )
    if count != 1:
        raise BuildError(f"{root}/PKG-INFO has no Version line")
    texts = {"METADATA": metadata.encode(), **licences(root, upstream)}
    write_archive(path, entries, texts)


def licences(root: Path, upstream: Upstream) -> dict[str, bytes]:
    """Return the licences of the bindings, of llama.cpp and of its dependencies.

    The result maps file names in the wheel's .dist-info folder to contents.
    """
    source = root / upstream.source
    files = {"LICENSE.md": root / "LICENSE.md", "LICENSE.llama.cpp": source / "LICENSE"}
    files |= {file.name: file for file in sorted((source / "licenses").glob("*"))}
    hashes = sorted((source / "vendor" / "hash").glob("*/LICENSE*"))
    files |= {f"LICENSE.{file.parent.name}": file for file in hashes}
    return {f"licenses/{name}": file.read_bytes() for name, file in files.items()}


def converter(source: Path, package: str) -> dict[str, bytes]:
    """Return a wheel's entry for llama.cpp's checkpoint converter, {path: bytes of a zip archive}.

    Python imports modules directly from the archive. Single files would take longer to install,
    because pip compiles each of them.

    source: folder of the llama.cpp tree. package: name of the package that contains the archive.
    """
    buffer = io.BytesIO()
    files = (file for part in CONVERTER_PARTS for file in _python_files(source / part))
    _archive(buffer, {str(file.relative_to(source)): file.read_bytes() for file in files})
    return {f"{package}/upstream.zip": buffer.getvalue()}


def as_json(stamp: Mapping[str, Any]) -> bytes:
    """Return the JSON text of a stamp, the record in a wheel that says how the wheel was built."""
    return (json.dumps(stamp, indent=2, sort_keys=True) + "\n").encode()


def write_archive(path: Path, entries: dict[str, bytes], texts: dict[str, bytes]) -> None:
    """Write a wheel. Its name, version and tag are taken from the file name.

    path: path of the wheel.
    entries: contents of the wheel's files by path.
    texts: contents of files in the .dist-info folder, including METADATA.
    """
    name, version, tag = path.stem.split("-", 2)
    info = f"{name}-{version}.dist-info"
    entries = entries | {f"{info}/{file}": data for file, data in texts.items()}
    entries[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: moe-edge\nRoot-Is-Purelib: false\nTag: {tag}\n"
    ).encode()
    record = "".join(f"{name},{_digest(data)},{len(data)}\n" for name, data in entries.items())
    entries[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    _archive(path, entries)


def _archive(target: Path | IO[bytes], entries: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(target, "w", compresslevel=6) as archive:
        for name, data in entries.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = (
                zipfile.ZIP_STORED if name.endswith(DENSE) else zipfile.ZIP_DEFLATED
            )
            entry.external_attr = (0o755 if ".so" in name else 0o644) << 16
            archive.writestr(entry, data)


def _python_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in (".py", ".typed") and "__pycache__" not in file.parts
    )


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
