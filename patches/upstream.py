"""The pinned llama-cpp-python release.

Its description, its place in the cache, and its download.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).resolve().parent
REPO = PATCHES.parent


class BuildError(Exception):
    """Raised if a build fails. The message is one sentence with the cause and the remedy."""


@dataclass(frozen=True)
class Upstream:
    """The release of llama-cpp-python on which moe-edge is based, read from patches/UPSTREAM."""

    name: str
    version: str
    sha256: str
    source: str  # the llama.cpp tree inside the source distribution, e.g. "vendor/llama.cpp"
    revision: int
    part: str  # content_digest of the part that is built

    @property
    def base(self) -> str:
        """The name of the top folder in the source distribution, such as `llama_cpp_python-0.3.36`.

        The header of each patch has this name in the field Upstream-Base.
        """
        return f"{self.name}-{self.version}"

    @property
    def sdist_name(self) -> str:
        """The file name of the release's source distribution."""
        return f"{self.base}.tar.gz"

    @property
    def local_version(self) -> str:
        """The version of moe-edge's build of llama-cpp-python, such as `0.3.36+moe.edge.1`.

        The part after `+` (PEP 440) distinguishes the build from the original package.
        """
        return f"{self.version}+moe.edge.{self.revision}"


def read_upstream(path: Path = PATCHES / "UPSTREAM") -> Upstream:
    """Read the file patches/UPSTREAM, which pins a release of llama-cpp-python.

    Raises BuildError for a missing, unknown or malformed line.
    """
    fields: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not value or key in fields:
            raise BuildError(f"{path}:{number}: expected KEY = VALUE, got {line!r}")
        fields[key] = value
    known = ("name", "version", "sha256", "source", "revision", "part")
    for key in (*known, *fields):
        if key not in fields:
            raise BuildError(f"{path}: no {key!r} line")
        if key not in known:
            raise BuildError(f"{path}: unknown key {key!r}: known keys are {', '.join(known)}")
    for key in ("sha256", "part"):
        if len(fields[key]) != 64:
            raise BuildError(f"{path}: {key} must be 64 hexadecimal digits")
    if not fields["revision"].isdigit():
        raise BuildError(f"{path}: revision must be a whole number")
    return Upstream(
        name=fields["name"],
        version=fields["version"],
        sha256=fields["sha256"].lower(),
        source=fields["source"].strip("/"),
        revision=int(fields["revision"]),
        part=fields["part"].lower(),
    )


def cache_dir() -> Path:
    """Return the user's cache folder for moe-edge, and create the folder if necessary.

    The function in orchestrator/cache/files.py returns the same folder.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    path = (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "moe-edge"
    path.mkdir(parents=True, exist_ok=True)
    return path


def say(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock on a file during the `with` block, and yield its descriptor.

    Child processes that inherit the descriptor keep the lock. Therefore the compilers of a killed
    build never write to the same folder as a new build.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build to finish")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it has either its old or its new content, even if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def publishing(folder: Path, keep: int) -> Iterator[Path]:
    """Yield an empty temporary folder. At the end of the block, rename it to `folder`.

    Then delete old folders next to `folder`, except the `keep` newest. The caller must hold the
    build lock.
    """
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(".publish.*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".publish.") as above:
        stage = Path(above) / "stage"
        stage.mkdir()
        yield stage
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(stage, folder)
    by_age = sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in by_age[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cached_sdist(upstream: Upstream) -> Path | None:
    """Return the path of llama-cpp-python's source distribution in the cache, or None.

    The hash of the file is not checked. The result is None if the cache does not have the file.
    """
    path = cache_dir() / "sdist" / upstream.sdist_name
    return path if path.exists() else None


def fetch_sdist(upstream: Upstream, given: Path | None = None) -> Path:
    """Return the path of llama-cpp-python's source distribution, downloaded to the cache if needed.

    The hash of the file is checked before any of its code runs. Raises BuildError if the download
    fails, or if the file is not the pinned release.

    given: path of a local file, which is copied to the cache instead of a download. It may be the
    complete source distribution, or the smaller archive that `write_part` makes from it. This
    archive has only the files that are needed to build llama.cpp.
    """
    target = cache_dir() / "sdist" / upstream.sdist_name
    if target.exists() and given is None:
        if is_pinned(target, upstream):
            return target
        say(f"the cached {target.name} is damaged: downloading it again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch.") as folder:
        if given is None:
            fetched = _pip_download(upstream, Path(folder))
        else:
            fetched = Path(folder) / upstream.sdist_name
            try:
                shutil.copyfile(given, fetched)
            except OSError as error:
                raise BuildError(f"{given}: {error.strerror}") from None
        if not is_pinned(fetched, upstream):
            raise BuildError(
                f"{given or upstream.sdist_name}: SHA-256 is {sha256_file(fetched)}, but "
                f"patches/UPSTREAM requires {upstream.sha256}"
            )
        os.replace(fetched, target)
    return target


def _pip_download(upstream: Upstream, folder: Path) -> Path:
    say(f"downloading {upstream.sdist_name} (73 MiB)")
    requirements = folder / "requirements.txt"
    # If the requirement has a hash, pip checks it before it runs the package's build backend.
    requirements.write_text(
        f"{upstream.name}=={upstream.version} --hash=sha256:{upstream.sha256}\n"
    )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    # --no-binary :all: would also forbid wheels for the build backend.
    command += ["--no-deps", "--no-binary", upstream.name, "--quiet"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    finally:
        requirements.unlink(missing_ok=True)
    for found in folder.glob("*.tar.gz"):
        return found
    if "No module named pip" in done.stdout:
        raise BuildError(
            "pip is missing from this Python: install it with `sudo apt install python3-pip "
            "python3-venv`."
        )
    why = errors_of_pip(done.stdout) or ["no reason given"]
    raise BuildError(f"pip could not download {upstream.sdist_name}: {why[-1]}")


def errors_of_pip(said: str) -> list[str]:
    """Return the lines of pip's output that report errors, or all lines if none does."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return [line for line in lines if line.startswith("ERROR")] or lines


class Sdist:
    """Reads files of llama-cpp-python's source distribution, by path inside its top folder."""

    def __init__(self, path: Path, upstream: Upstream):
        self.path = path
        self.prefix = upstream.base + "/"

    def read(self, names: set[str]) -> dict[str, bytes]:
        """Return the contents of the named files, by path. Files that do not exist are left out."""
        found: dict[str, bytes] = {}
        if names:
            for name, data in self.files(names):
                found[name] = data
                if len(found) == len(names):
                    break
        return found

    def files(self, names: set[str] | None = None) -> Iterator[tuple[str, bytes]]:
        """Yield path and contents of every regular file, or of the named files only."""
        with tarfile.open(self.path, "r:*") as archive:
            for member in archive:
                name = member.name.removeprefix(self.prefix)
                if not member.isfile() or (names is not None and name not in names):
                    continue
                handle = archive.extractfile(member)
                if handle is not None:
                    yield name, handle.read()


# The files below Upstream.source that are used by the build, the wheel, the server, the CUDA
# emulation and llama.cpp's operator tests: a tenth of all files.
_PART = (
    *("CMakeLists.txt", "LICENSE", "cmake/", "licenses/", "include/", "src/", "conversion/"),
    *("gguf-py/gguf/", "vendor/", "tests/test-backend-ops.cpp", "ggml/CMakeLists.txt"),
    *("ggml/cmake/", "ggml/include/", "ggml/src/", "common/", "tools/server/server-"),
    *("tools/mtmd/mtmd", "tools/mtmd/clip", "tools/mtmd/models/", "tools/mtmd/debug/"),
)
_PART_TOP = ("CMakeLists.txt", "PKG-INFO", "LICENSE.md", "llama_cpp/")
_BACKENDS = ("ggml-cpu", "ggml-cuda")


def _in_part(name: str, upstream: Upstream) -> bool:
    inside = name.removeprefix(f"{upstream.source}/")
    if inside == name:
        return name.startswith(_PART_TOP)
    folder = inside.removeprefix("ggml/src/").split("/")
    if inside.startswith("ggml/src/") and len(folder) > 1 and folder[0] not in _BACKENDS:
        return False
    return inside.startswith(_PART)


def part_files(path: Path, upstream: Upstream) -> dict[str, bytes]:
    """Return the source files that are needed to build llama.cpp, as {path: contents}.

    The paths are sorted.

    path: the source distribution, or an archive that `write_part` wrote.
    upstream: describes the release to which `path` belongs.
    """
    files = Sdist(path, upstream).files()
    return dict(sorted((name, data) for name, data in files if _in_part(name, upstream)))


def content_digest(files: dict[str, bytes]) -> str:
    """Return a hash of file names and contents, which does not depend on an archive's format."""
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def is_pinned(path: Path, upstream: Upstream) -> bool:
    """Return whether a file is the source distribution of the pinned release.

    An archive that contains exactly the files needed for building is accepted, too.
    """
    if sha256_file(path) == upstream.sha256:
        return True
    try:
        names = {name for name, _ in Sdist(path, upstream).files()}
        files = part_files(path, upstream)
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error):
        return False
    return names == files.keys() and content_digest(files) == upstream.part


def write_part(path: Path, upstream: Upstream, target: Path) -> None:
    """Write an archive with the files of the source distribution that are needed for building.

    Raises BuildError if their hash is not the one in patches/UPSTREAM.

    path: the source distribution.
    target: path of the archive.
    """
    files = part_files(path, upstream)
    if content_digest(files) != upstream.part:
        raise BuildError(
            f"the part of {path.name} for building has the digest {content_digest(files)}, but "
            f"patches/UPSTREAM requires {upstream.part}"
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{upstream.base}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    write_atomic(target, buffer.getvalue())
