"""Packs the Python bindings and the built libraries into one wheel (PEP 427).

The same inputs give the same bytes: sorted entries, one fixed date.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sysconfig
import zipfile
from pathlib import Path

from patches.upstream import BuildError, Upstream

STAMP = "llama_cpp/moe_edge_build.json"
# Upstream's converter of checkpoints and the gguf package of its version: `moe-edge convert`
# runs them from here, so that it needs neither the source tree nor another gguf.
CONVERTER = "llama_cpp/upstream"
CONVERTER_PARTS = ("conversion", "gguf-py/gguf")


def platform_tag() -> str:
    return re.sub(r"[-.]", "_", sysconfig.get_platform())


def file_name(upstream: Upstream) -> str:
    # The libraries are loaded with ctypes: no Python ABI is involved.
    return f"{upstream.name}-{upstream.local_version}-py3-none-{platform_tag()}.whl"


def write(
    path: Path, upstream: Upstream, root: Path, libraries: list[Path], stamp: dict[str, object]
) -> None:
    """root: the source tree, whose llama_cpp package, converter and PKG-INFO go into the wheel."""
    entries = {
        str(file.relative_to(root)): file.read_bytes() for file in _python_files(root / "llama_cpp")
    }
    for part in CONVERTER_PARTS:
        folder = root / upstream.source
        for file in _python_files(folder / part):
            entries[f"{CONVERTER}/{file.relative_to(folder)}"] = file.read_bytes()
    for library in libraries:
        entries[f"llama_cpp/lib/{library.name}"] = library.read_bytes()
    entries[STAMP] = (json.dumps(stamp, indent=2, sort_keys=True) + "\n").encode()
    info = f"{upstream.name}-{upstream.local_version}.dist-info"
    metadata, count = re.subn(
        r"^Version: .*$",
        f"Version: {upstream.local_version}",
        (root / "PKG-INFO").read_text(),
        count=1,
        flags=re.MULTILINE,
    )
    if count != 1:
        raise BuildError(f"{root}/PKG-INFO has no Version line")
    entries[f"{info}/METADATA"] = metadata.encode()
    entries[f"{info}/licenses/LICENSE.md"] = (root / "LICENSE.md").read_bytes()
    entries[f"{info}/licenses/LICENSE.llama.cpp"] = (
        root / upstream.source / "LICENSE"
    ).read_bytes()
    entries[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: moe-edge\nRoot-Is-Purelib: false\n"
        f"Tag: py3-none-{platform_tag()}\n"
    ).encode()
    record = "".join(f"{name},{_digest(data)},{len(data)}\n" for name, data in entries.items())
    entries[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, data in entries.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
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
