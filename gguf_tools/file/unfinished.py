"""Write a file under a temporary name, so that a file with its final name is always complete.

The writer keeps the temporary file locked. If the writer is killed, the file remains without a
lock, and the next writer in the same folder removes it. Files that other writers are still writing
are locked and therefore kept.

Devices and pipes are never replaced: renaming a file to /dev/null would break other programs.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import weakref
from pathlib import Path

from gguf_tools import interrupts

ENDING = ".part"
# A file name that `create` makes.
_PART = re.compile(r"\..+\.[0-9a-f]{8}\.part", re.DOTALL)
# Linux's limit on symbolic links in a row.
_MOST_LINKS = 40


class UnfinishedFile:
    """A new, empty temporary file that is renamed to `path` when it is complete.

    Write to the file descriptor `fd`, then call either `complete` or `discard`. The file is also
    removed when the object is garbage collected, for example after an interrupt.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Create the temporary file in the folder of `path`.

        Raises OSError if that fails, or if `path` is a folder, a device or a pipe.
        """
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        problem = irregular(path)
        if problem:
            raise OSError(errno.EINVAL, problem, str(path))
        self.path = path
        with interrupts.held():
            self.fd, self.part = create(path, mode)
            self._discard = weakref.finalize(self, _discard, self.fd, self.part)

    def complete(self, *, synced: bool) -> None:
        """Rename the file to its final name.

        Raises OSError if that fails. The caller must then call `discard`.

        synced: wait until the contents and the name are on disk.
        """
        if synced:
            os.fsync(self.fd)
        # Closing the descriptor releases the lock, and an unlocked temporary file counts as
        # abandoned. So rename first.
        interrupts.rename(self.part, self.path)
        self._discard.detach()
        os.close(self.fd)
        if synced:
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """Remove the temporary file. Does nothing if the file was completed or removed before."""
        self._discard()


def irregular(path: Path) -> str | None:
    """Return an error text if `path` is a device, pipe or socket, which an output cannot replace.

    Return None for a regular file, a folder and a new name. Symbolic links are followed. A link to
    an open file of a process, such as /dev/stdout, counts as a device.
    """
    try:
        is_file = stat.S_ISREG(path.stat().st_mode) and not _is_stream(path)
    except OSError:  # The file does not exist, or creating it will report the problem.
        return None
    if is_file or path.is_dir():
        return None
    return "is not a regular file: choose a new file name, or a regular file to replace"


def _is_stream(path: Path) -> bool:
    """Return whether a path is a link to an open file of a process, such as /dev/stdout."""
    for _ in range(_MOST_LINKS):
        folder = Path(os.path.realpath(path.parent))
        path = folder / path.name
        if not path.is_symlink():
            return False
        if folder.is_relative_to("/proc"):
            return True
        path = folder / os.readlink(path)
    return False


def _discard(fd: int, part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink()
    os.close(fd)


def create(path: Path, mode: int = 0o666) -> tuple[int, Path]:
    """Create and lock an empty temporary file in the folder of `path`.

    Return the file descriptor and the path of the temporary file. The caller must rename the file
    before closing the descriptor, because an unlocked temporary file counts as abandoned. Raises
    OSError if the file cannot be created.
    """
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{ENDING}")
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            locked = _lock(fd)
        except OSError:  # The file system has no locks, so no other writer can remove the file.
            return fd, part
        # Another writer may have removed the file before it was locked.
        if locked and _is_at(fd, part):
            return fd, part
        os.close(fd)
        with contextlib.suppress(OSError):
            part.unlink()


def remove_abandoned(path: Path) -> None:
    """Remove temporary files that killed processes left in the folder of the output file `path`.

    Files that cannot be removed are ignored.
    """
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if _is_part(entry.name, path.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_unlocked(Path(entry.path))


def _is_part(name: str, of: str) -> bool:
    head = f".{of}."
    middle = name.removeprefix(head).removesuffix(ENDING)
    own = name == head + middle + ENDING and middle.isalnum()
    return own or _PART.fullmatch(name) is not None


def _remove_unlocked(part: Path) -> None:
    fd = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if _lock(fd) and _is_at(fd, part):
            part.unlink()
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Try to lock a file without waiting. Return False if another process holds the lock.

    Raises OSError if the file system does not support locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
