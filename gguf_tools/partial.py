"""Files that are being written: under another name, which is locked as long as the writer lives.

A writer that was killed leaves such a file behind, and its lock is gone. So the next one tells it
from those of writers that are still at work, and removes it.
"""

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

ENDING = ".part"


def create(path: Path, mode: int = 0o644) -> tuple[int, Path]:
    """A new empty file beside ``path``, locked: its descriptor, open for reading and writing,
    and its name. It is to be renamed before the descriptor is closed. Raises OSError."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{ENDING}")
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            locked = _lock(fd)
        except OSError:  # a file system without locks, where nobody can clean up either
            return fd, part
        # Whoever cleans up may have come between the two calls.
        if locked and _is_at(fd, part):
            return fd, part
        os.close(fd)
        with contextlib.suppress(OSError):
            part.unlink()


def remove_abandoned(path: Path) -> None:
    """Removes what killed writers of ``path`` left; what cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if _is_part(entry.name, path.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_unlocked(Path(entry.path))


def _is_part(name: str, of: str) -> bool:
    head = f".{of}."
    middle = name.removeprefix(head).removesuffix(ENDING)
    return name == head + middle + ENDING and middle.isalnum()


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
