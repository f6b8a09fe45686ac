"""Files that are being written, so that a file with its final name is always whole.

Until then a file has another name, and is locked as long as its writer lives. A writer that was
killed leaves such a file behind without a lock. So the next one in the folder tells it from those
of writers that are still at work, and removes it.

What is no regular file, a device or a pipe, is never replaced: giving a file its name would remove
what all programs of the machine may need.
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
# As create names them.
_PART = re.compile(r"\..+\.[0-9a-f]{8}\.part", re.DOTALL)
# Links in a row that a path may have, as in Linux.
_MOST_LINKS = 40


class UnfinishedFile:
    """A new empty file that gets the name ``path`` when it is complete. ``fd`` is open for
    reading and writing.

    Exactly one of ``complete`` and ``discard`` ends it; ``discard`` behind either does nothing.
    An interrupt may come before anybody has the object: then it is discarded with it.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Raises OSError, for a folder, a device or a pipe of this name as well."""
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        complaint = irregular(path)
        if complaint:
            raise OSError(errno.EINVAL, complaint, str(path))
        self.path = path
        with interrupts.held():
            self.fd, self.part = create(path, mode)
            self._discard = weakref.finalize(self, _discard, self.fd, self.part)

    def complete(self, *, synced: bool) -> None:
        """Gives the file its name. synced: it is on the disk when this returns, name and all.
        Raises OSError, and then ``discard`` still has to be called."""
        if synced:
            os.fsync(self.fd)
        # The descriptor is closed afterwards, since without its lock the file counts as abandoned.
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
        """Removes the file."""
        self._discard()


def irregular(path: Path) -> str | None:
    """What is wrong with the name of an output that belongs to a device, a pipe or a socket, or
    None. A link counts as what it leads to; one to a stream of a process, as /dev/stdout is, counts
    as a stream, wherever that leads."""
    try:
        is_file = stat.S_ISREG(path.stat().st_mode) and not _is_stream(path)
    except OSError:  # Nothing has the name yet, or writing there says why it cannot be.
        return None
    if is_file or path.is_dir():
        return None
    return "is not a regular file: an output is a new file, or takes the place of one"


def _is_stream(path: Path) -> bool:
    """Whether links lead through a list of open files in /proc."""
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
    """A new empty file beside ``path``, locked: its descriptor and its name. It must be renamed
    before the descriptor is closed. Raises OSError."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{ENDING}")
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            locked = _lock(fd)
        except OSError:  # This file system has no locks, so nobody can clean up either.
            return fd, part
        # Whoever cleans up may have come between the two calls.
        if locked and _is_at(fd, part):
            return fd, part
        os.close(fd)
        with contextlib.suppress(OSError):
            part.unlink()


def remove_abandoned(path: Path) -> None:
    """Removes what killed writers of ``path`` left, and of other files beside it; what cannot be
    removed stays."""
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
    """False where another has the lock. Raises OSError where files cannot be locked."""
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
