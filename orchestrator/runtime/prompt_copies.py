"""Reads and writes the files of --prompt-cache. Each file keeps the tokens and state of a sequence.

Files appear complete or not at all, and are verified before they are used. A file has llama.cpp's
own sequence file (tokens and state), saved states, a description in JSON, and a footer. The states
are those of the model and the policy at the marks (lengths to which the sequence can be truncated).
The footer has lengths and a hash of everything before it. The description has the key, whether the
sequence can be truncated only at checkpoints (has_part), and each mark's length and bytes. Newer
files also have the positions that a mark's state covers (positions).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gguf_tools.file.unfinished import UnfinishedFile, remove_abandoned
from gguf_tools.units import format_size
from orchestrator.errors import ConfigError
from orchestrator.native import FileMark


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n], np.int64) != np.asarray(b[:n], np.int64))
    return int(differs[0]) if len(differs) else n


def usable(length: int, needs_checkpoints: bool, marks: Sequence[int], common: int) -> int:
    """Return how many tokens at the start of a stored sequence a prompt can reuse.

    - length: the number of tokens of the sequence.
    - common: the length of the common prefix of the sequence and the prompt.
    - needs_checkpoints: whether the sequence can be truncated only at checkpoints, which are saved
      parts of the model's state. True for models with sliding windows or recurrent layers.
    - marks: the lengths of the sequence at which checkpoints were saved.

    If the prompt begins with the whole sequence, the result is `length`. Otherwise the sequence
    must be truncated. The result is then `common`, or with needs_checkpoints, the largest of
    `marks` that is not above `common` (0 if there is none).
    """
    if common >= length:
        return length
    if not needs_checkpoints:
        return common
    return max((each for each in marks if each <= common), default=0)


@dataclass(frozen=True, slots=True)
class Mark:
    """A length to which a sequence can be truncated, with the states to restore at that point.

    length: number of tokens that remain. part: the model's state of sliding windows or recurrent
    layers, uint8, or None if it has no such state. policy: the policy's own data about the
    sequence, such as how often it used each expert, or None.
    """

    length: int
    part: np.ndarray | None
    policy: bytes | None

    @property
    def n_bytes(self) -> int:
        """The total size of the states in this Mark, the model's and the policy's, in bytes."""
        return (0 if self.part is None else self.part.nbytes) + len(self.policy or b"")


ENDING = ".prompt"
_NAME = re.compile(r"([0-9a-f]{24})-[0-9a-f]{24}\.prompt")
_MAGIC = b"moe-edge prompt\n"
# The footer: size of llama.cpp's data, size of the description, hash, magic.
_FOOTER = struct.Struct("<QQ32s16s")
# llama.cpp's magic and version of a sequence's file, and the number of its tokens.
_HEAD = struct.Struct("<III")
_LLAMA = (0x67677371, 3)
# The first numbers of the token list that llama.cpp's server writes (server_tokens).
_PACKED = (-1, 1)
_MOST_DESCRIPTION = 1 << 20
# A file that claims more tokens is damaged: they would be read into memory before anything else.
_MOST_TOKENS = 1 << 21
_PROBE_BYTES = 1 << 16
_CHUNK = 1 << 22


class Stored(NamedTuple):
    """The sizes and places of the data that llama.cpp wrote to a file for one sequence.

    n_bytes: size of the tokens and the state of the whole sequence, with which the file begins.
    marks: places of the checkpoints in the file. A checkpoint is the model's state at an earlier
    length of the sequence. It is restored if the sequence is truncated to this length.
    """

    n_bytes: int
    marks: Sequence[FileMark] = ()


class ListedMark(NamedTuple):
    """The description of a checkpoint in a prompt-cache file.

    A checkpoint has the states of the model and the policy at one length of the sequence. They are
    restored if the sequence is truncated to this length.

    length: number of tokens. part_bytes, policy_bytes: size of the model's state and of the
    policy's state; -1 if it was not saved. pos_min, pos_max: first and last token position in the
    model's state; -1 if the file does not record them.
    """

    length: int
    part_bytes: int
    policy_bytes: int
    pos_min: int = -1
    pos_max: int = -1

    @property
    def n_bytes(self) -> int:
        """The size of this checkpoint in the prompt-cache file, in bytes.

        This is the size of the model's state and of the policy's state together.
        """
        return max(0, self.part_bytes) + max(0, self.policy_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class Listed:
    """The description of one prompt-cache file, as `PromptFolder.of` lists it.

    The file holds a sequence of tokens and the model's state. Its checkpoints are states to restore
    if the sequence is truncated.

    - key: identifies the model and settings of the run that saved the file (state_key).
    - tokens: the tokens of the sequence, int32.
    - needs_checkpoints: whether the sequence can be truncated only at checkpoints.
    - marks: descriptions of the checkpoints.
    - state_end: size of llama.cpp's data at the start of the file, in bytes.
    """

    path: Path
    key: str
    tokens: np.ndarray
    needs_checkpoints: bool
    marks: tuple[ListedMark, ...]
    state_end: int

    def usable(self, common: int) -> int:
        """Return how many tokens at the start of the saved sequence a prompt can reuse.

        common: the length of the common prefix of the saved sequence and the prompt.

        - If the prompt begins with the whole sequence, the result is `common`.
        - Otherwise, models with sliding windows or recurrent layers must start from a checkpoint, a
          saved state of the model. The result is the largest length with a checkpoint that is not
          above `common`, or 0.
        - For all other models, the result is `common`.
        """
        places = [each.length for each in self.marks if each.part_bytes >= 0]
        return usable(len(self.tokens), self.needs_checkpoints, places, common)

    def file_marks(self) -> list[FileMark]:
        """Return the checkpoints in this prompt-cache file, with their byte offsets and sizes.

        A checkpoint is the model's state at one length of the sequence. llama.cpp restores it if
        the sequence is truncated to this length. Only models with sliding windows or recurrent
        layers need checkpoints.
        """
        found, at = [], self.state_end
        for each in self.marks:
            if each.part_bytes >= 0:
                found.append(FileMark(at, each.part_bytes, each.length, each.pos_min, each.pos_max))
            at += each.n_bytes
        return found


class PromptFolder:
    """The folder of --prompt-cache. Each file in it holds the tokens and state of one conversation.

    notes: sentences for the user about files that were removed or could not be written.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        """Make the folder if it does not exist, and remove unfinished files.

        most_bytes: limit for the total size of the files. Raises ConfigError if the folder cannot
        be made or read.
        """
        self._path, self._most_bytes = path, most_bytes
        self._unusable: set[Path] = set()
        self.notes: list[str] = []
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = os.listdir(path)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"--prompt-cache {path} is a file, or is inside a file: name a folder"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"--prompt-cache {path}: {error.strerror}: name a folder that can be made and "
                f"written"
            ) from error
        for name in names:
            original, dot, _ = name.removeprefix(".").rpartition(ENDING + ".")
            if name.startswith(".") and dot:
                remove_abandoned(path / (original + ENDING))

    def of(self, key: str) -> list[Listed]:
        """Return the saved sequences with a key, the most recently used one first.

        Damaged files are removed. key: identifies the model and settings of a run (state_key).
        """
        found = []
        for path in reversed(self._files()):
            if path.name.startswith(_short(key)) and path not in self._unusable:
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    listed = _describe(file, path)
                    if listed is None or listed.key != key:
                        self.drop(path)
                    else:
                        found.append(listed)
        return found

    def has(self, key: str, tokens: Sequence[int] | np.ndarray) -> bool:
        """Return whether the folder has a file for exactly these tokens.

        key: identifies the model and settings of the run that saved the file (state_key).
        """
        return self._target(key, tokens).exists()

    def save(
        self,
        key: str,
        tokens: Sequence[int] | np.ndarray,
        needs_checkpoints: bool,
        marks: Sequence[Mark],
        write_state: Callable[[Path], Stored | int | None],
    ) -> None:
        """Save a sequence to a file. Files that hold only a prefix of the sequence are removed.

        If saving fails, a sentence is added to `notes`, and no error is raised.

        - key: identifies the model and settings (state_key).
        - tokens: the tokens of the sequence.
        - needs_checkpoints: whether the sequence can be truncated only at lengths with saved
          states.
        - marks: states to save in addition to llama.cpp's own checkpoints, such as the policy's
          data. Each Mark belongs to one length of the sequence.
        - write_state: lets llama.cpp write the sequence and its own checkpoints to a path. Returns
          a Stored with the sizes of the data, or only the size in bytes if there are no
          checkpoints. A size of 0 means that writing failed. Returns None to save no file.
        """
        path = self._target(key, tokens)
        remove_abandoned(path)
        try:
            unfinished = UnfinishedFile(path, 0o600)
            try:
                stored = write_state(unfinished.part)
                if stored is None:
                    return
                if isinstance(stored, int):
                    stored = Stored(stored)
                _write(unfinished, key, needs_checkpoints, marks, stored)
                size = os.fstat(unfinished.fd).st_size
                if size > self._most_bytes:
                    self._note(
                        f"A conversation of {format_size(size)} is not kept: it is more than "
                        f"--prompt-cache-limit {format_size(self._most_bytes)}."
                    )
                    return
                unfinished.complete(synced=False)
                self._unusable.discard(path)
            finally:
                unfinished.discard()
        except OSError as error:
            self._note(
                f"{self._path}: {error.strerror}: no conversation is kept there. Free space or "
                f"allow writing, or name another folder with --prompt-cache."
            )
            return
        self._tidy(key, tokens, path)

    def load(
        self, listed: Listed, most_bytes: int | None, read_state: Callable[[Path], bool]
    ) -> tuple[Mark, ...] | None:
        """Verify a saved file, and let `read_state` restore its sequence.

        Returns the Marks in the file. A Mark has states of the model and the policy for a length to
        which the sequence can be truncated. Returns None if the file is damaged, cannot be read or
        does not fit in memory. A damaged file is removed.

        - listed: the description of the file.
        - most_bytes: the maximum size of the states in all Marks. If they exceed it, the Marks with
          the shortest lengths are left out. With None, all Marks are returned, but without the
          states of the model (`Mark.part`).
        - read_state: restores the sequence's tokens, and the model's state after the last token,
          from a path. Returns False if memory is too small.
        """
        try:
            with open(listed.path, "rb") as file:
                same = _is_whole(file) and _describe(file, listed.path)
                if not same or same.key != listed.key or same.marks != listed.marks:
                    self.drop(listed.path)
                    return None
                marks = _read_marks(file, listed, most_bytes)
            if not np.array_equal(same.tokens, listed.tokens):
                self.drop(listed.path)
                return None
            if not read_state(listed.path):
                self._unusable.add(listed.path)
                self._note(
                    f"{listed.path}: no memory for this kept conversation, so its tokens are "
                    "computed again."
                )
                return None
            os.utime(listed.path)
        except OSError:
            self._unusable.add(listed.path)
            return None
        return marks

    def drop(self, path: Path) -> None:
        """Remove a damaged file, and add a sentence about it to `notes`."""
        self._unusable.add(path)
        with contextlib.suppress(OSError):
            path.unlink()
        self._note(f"{path}: this kept conversation is damaged, so it was removed.")

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def _target(self, key: str, tokens: Sequence[int] | np.ndarray) -> Path:
        digest = hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()
        return self._path / f"{_short(key)}-{digest[:24]}{ENDING}"

    def _files(self) -> list[Path]:
        """Return the paths of all saved sequences, the most recently used one last."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError):
                        found.append((entry.stat().st_mtime_ns, Path(entry.path)))
        return [path for _, path in sorted(found)]

    def _tidy(self, key: str, tokens: Sequence[int] | np.ndarray, new: Path) -> None:
        """Remove files that a new file replaces, and old files above the size limit.

        The new file replaces each file whose tokens are a prefix of `tokens`. If the total size is
        above the limit, the least recently used files are removed. new: path of the new file.
        """
        for listed in self.of(key):
            n = len(listed.tokens)
            if listed.path != new and n == common_prefix(listed.tokens, tokens):
                with contextlib.suppress(OSError):
                    listed.path.unlink()
        sizes = {}
        for path in self._files():
            with contextlib.suppress(OSError):
                sizes[path] = path.stat().st_size
        for path in list(sizes):
            if sum(sizes.values()) <= self._most_bytes:
                return
            if path != new:
                with contextlib.suppress(OSError):
                    path.unlink()
                del sizes[path]


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _write(
    unfinished: UnfinishedFile,
    key: str,
    needs_checkpoints: bool,
    marks: Sequence[Mark],
    stored: Stored,
) -> None:
    """Complete a file with its marks, its description and its footer. Raises OSError.

    stored: sizes of the data that llama.cpp has written at the start of the file. marks: positions
    to which the sequence can be truncated, with their states.
    """
    state_end = stored.n_bytes
    if not state_end:
        # llama.cpp does not say why it failed; another write fails for the same reason.
        os.pwrite(unfinished.fd, bytes(_PROBE_BYTES), os.fstat(unfinished.fd).st_size)
        raise OSError(errno.EIO, "llama.cpp cannot write the file")
    with os.fdopen(os.dup(unfinished.fd), "r+b") as file:
        file.seek(state_end + sum(each.n_bytes for each in stored.marks))
        for mark in marks:
            if mark.part is not None:
                file.write(mark.part.data)
            if mark.policy is not None:
                file.write(mark.policy)
        described: dict[str, Any] = {
            "key": key,
            "has_part": needs_checkpoints,
            "marks": [
                *([each.n_tokens, each.n_bytes, -1] for each in stored.marks),
                *(
                    [
                        mark.length,
                        -1 if mark.part is None else mark.part.nbytes,
                        -1 if mark.policy is None else len(mark.policy),
                    ]
                    for mark in marks
                ),
            ],
        }
        if stored.marks:  # a separate list, because earlier versions refuse longer items in marks
            described["positions"] = [[each.pos_min, each.pos_max] for each in stored.marks]
        description = json.dumps(described).encode()
        file.write(description)
        file.flush()
        digest = _hash_of(file, file.tell(), state_end, len(description))
        file.write(_FOOTER.pack(state_end, len(description), digest, _MAGIC))


def _hash_of(file: BinaryIO, length: int, *lengths: int) -> bytes:
    """Return the SHA-256 hash of `lengths` and of the first `length` bytes of a file.

    If the file is shorter, all of its bytes are hashed. lengths: the sizes that the footer holds.
    """
    digest = hashlib.sha256(repr(lengths).encode())
    file.seek(0)
    while length > 0 and (data := file.read(min(_CHUNK, length))):
        digest.update(data)
        length -= len(data)
    return digest.digest()


def _is_whole(file: BinaryIO) -> bool:
    """Return whether a file is complete and undamaged.

    The hash of its contents must equal the hash in its footer.
    """
    footer = _footer(file)
    if footer is None:
        return False
    *lengths, digest, _ = footer
    body = os.fstat(file.fileno()).st_size - _FOOTER.size
    return _hash_of(file, body, *lengths) == digest


def _footer(file: BinaryIO) -> tuple[int, int, bytes, bytes] | None:
    size = os.fstat(file.fileno()).st_size
    if size < _HEAD.size + _FOOTER.size:
        return None
    file.seek(size - _FOOTER.size)
    found = _FOOTER.unpack(file.read(_FOOTER.size))
    return found if found[3] == _MAGIC else None


def _describe(file: BinaryIO, path: Path) -> Listed | None:
    """Read the description of a saved sequence. Return None if the file is damaged.

    Raises OSError if reading fails.
    """
    footer = _footer(file)
    if footer is None or footer[1] > _MOST_DESCRIPTION:
        return None
    state_end, length = footer[:2]
    at = os.fstat(file.fileno()).st_size - _FOOTER.size - length
    if not _HEAD.size <= state_end <= at:
        return None
    file.seek(at)
    try:
        data: dict[str, Any] = json.loads(file.read(length))
        marks = tuple(ListedMark(int(a), int(b), int(c)) for a, b, c in data["marks"])
        positions = [(int(a), int(b)) for a, b in data.get("positions", ())]
        key, needs_checkpoints = str(data["key"]), bool(data["has_part"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    if state_end + sum(each.n_bytes for each in marks) != at or len(positions) > len(marks):
        return None
    marks = tuple(
        each._replace(pos_min=place[0], pos_max=place[1]) if place else each
        for each, place in zip_longest(marks, positions)
    )
    file.seek(0)
    *magic, n = _HEAD.unpack(file.read(_HEAD.size))
    if tuple(magic) != _LLAMA or not 0 < n <= _MOST_TOKENS or _HEAD.size + 4 * n > state_end:
        return None
    tokens = _plain(np.frombuffer(file.read(4 * n), "<i4").astype(np.int32))
    return Listed(path, key, tokens, needs_checkpoints, marks, state_end)


def _plain(stored: np.ndarray) -> np.ndarray:
    """Return the tokens in the list of numbers that llama.cpp stores for a sequence.

    Before the tokens, llama.cpp's server may store a marker, a version and the number of tokens.
    After the tokens, it may store images.
    """
    if len(stored) < len(_PACKED) or not np.array_equal(stored[: len(_PACKED)], _PACKED):
        return stored
    n = int(stored[len(_PACKED)]) if len(stored) > len(_PACKED) else 0
    return stored[len(_PACKED) + 1 :][:n]


def _read_marks(file: BinaryIO, listed: Listed, most_bytes: int | None) -> tuple[Mark, ...]:
    """Read the marks of a saved sequence, the positions to which it can be truncated.

    Return the latest marks whose data fits most_bytes. If most_bytes is None, return all marks
    without the model's states. Raises OSError if reading fails.
    """
    end, found = listed.state_end + sum(each.n_bytes for each in listed.marks), []
    for each in reversed(listed.marks):
        end -= each.n_bytes
        part = policy = None
        if most_bytes is not None:
            most_bytes -= each.n_bytes
            if most_bytes < 0 and each.part_bytes >= 0:
                break
            if each.part_bytes >= 0:
                file.seek(end)
                part = np.frombuffer(file.read(each.part_bytes), np.uint8)
        if each.policy_bytes >= 0:
            file.seek(end + max(0, each.part_bytes))
            policy = file.read(each.policy_bytes)
        found.append(Mark(each.length, part, policy))
    return tuple(reversed(found))
