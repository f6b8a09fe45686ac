"""Detection of damaged model files, and of files that are changed while a model runs.

The store compares each slice of an expert with its checksum when it reads the slice. The weights
that llama.cpp reads itself are read a second time here, in parallel and through the same page
cache, and compared before the first token.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gguf_tools import interrupts
from gguf_tools.errors import ChangedError, DamagedError, GGUFError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.checksums import header_checksum, n_slices, stored
from gguf_tools.file.layout import TIER_MARK, GGMLType
from gguf_tools.file.parse import TensorInfo
from gguf_tools.file.reader import GGUFFile
from orchestrator.native import Library, Slices, StoreSpec

_CHUNK_BYTES = 1 << 20

# (number of the file, offset of the tensor in the file)
Place = tuple[int, int]


class _Listed(NamedTuple):
    """A tensor of a model file, and the checksums of its slices.

    file: number of the file. checksums: empty if `pack` did not write the file.
    """

    file: int
    part: GGUFFile
    info: TensorInfo
    checksums: Sequence[int]


class Checksums:
    """The tensors of a model's files, with the checksums that the files contain.

    headers: (file, checksum of its header) of each file with checksums.
    """

    def __init__(self, model: ExpertModel) -> None:
        """Read the checksums from the files.

        Raises MetadataError if they do not fit the tensors.
        """
        self.headers: list[tuple[GGUFFile, int]] = []
        self.tensors: list[_Listed] = []
        for number, part in enumerate(model.parts):
            of_file = stored(part)
            if of_file is not None:
                self.headers.append((part, of_file[""][0]))
            self.tensors += [
                _Listed(number, part, info, of_file[name] if of_file is not None else ())
                for name, info in part.tensors.items()
            ]


def with_checksums(spec: StoreSpec, checksums: Checksums) -> StoreSpec:
    """Return the parameters of an expert store with a checksum of each expert.

    The store then verifies each expert that it reads. spec: the parameters without checksums.
    """
    known = {(each.file, each.info.offset): tuple(each.checksums) for each in checksums.tensors}

    def compared(_layer: int, _kind: int, each: Slices) -> Slices:
        return replace(each, checksums=known.get((each.file, each.offset), ()))

    return spec.with_slices(compared)


class InUse:
    """Watches the files of a running model for changes.

    A check takes a few microseconds per file.
    """

    def __init__(
        self, paths: Sequence[Path], compare: Callable[[], DataCheck | None] = lambda: None
    ) -> None:
        """Remember the size and the modification time of each file.

        compare: starts a thread that compares the files with their checksums, and returns it. It
        returns None if the files have no checksums.
        """
        self._known = {path: _stamp(path) for path in paths}
        self._compare = compare
        self._check: DataCheck | None = None
        self._checked: object = None  # the stamp of the file that is being compared

    def look(self) -> tuple[str, bool]:
        """Check whether a file of the running model was changed on disk.

        Returns (sentence for the user, whether answers may be wrong). The sentence is "" if there
        is nothing to report. Answers may be wrong after a file was written to in place, unless its
        contents still match its checksums. They stay correct after a file was replaced by a new
        file, because the old file stays open.
        """
        replaced = ""
        for path, known in self._known.items():
            now = _stamp(path)
            if now != known and known and now and now[0] == known[0]:
                fault = self._fault_of(path, now, is_as_long=now[1] == known[1])
                if fault:
                    return fault, True
                self._known[path] = now
                continue
            if now != known:
                replaced = f"{path} is another file now: answers still come from the old file."
        return replaced, False

    def check(self) -> None:
        """Raise ChangedError if a model file was written to while it is in use.

        Answers would then mix two versions of the file.
        """
        sentence, is_changed = self.look()
        if is_changed:
            raise ChangedError(sentence)

    def _fault_of(self, path: Path, now: object, is_as_long: bool) -> str:
        """Return a sentence that says why a modified file must not be used any longer.

        Return "" if the contents of the file still match its checksums.
        """
        written = f"{path} was written to while it is in use: load the model again."
        if not is_as_long:
            return written
        if self._check is None or self._checked != now:
            if self._check is not None:
                self._check.stop()
            self._check, self._checked = self._compare(), now
        if self._check is None:
            return written
        if self._check.is_running:
            return (
                f"{path} was written to while it is in use. Its contents are now compared with the "
                "stored checksums: try again in a few minutes."
            )
        return written if self._check.error is not None else ""


def _stamp(path: Path) -> tuple[tuple[int, int], int, int] | None:
    """Return (identity, size, modification time) of a file, or None if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns


def managed_places(model: ExpertModel) -> set[Place]:
    """Return the file positions of the tensors that llama.cpp does not read as a whole.

    These are the experts, which the expert store reads one by one, and the lookup tables, which are
    also read in parts. Each position is (number of the file, offset in the file).
    """
    experts = {
        (each.file_index, each.offset)
        for layer in model.slices
        for kind in layer
        for each in kind
        if each is not None
    }
    return experts | {(table.file_index, table.info.offset) for table in model.lookup}


class DataCheck:
    """Checks the tensors that llama.cpp reads, in a thread of its own.

    The thread compares checksums. It also searches norms, routers and other small tensors for NaN,
    from which llama.cpp would compute nonsense without an error. End the thread with ``finish`` or
    ``stop``.
    """

    def __init__(
        self, library: Library, checksums: Checksums, without: Collection[Place] = ()
    ) -> None:
        """Start the thread. without: positions of tensors that are skipped.

        The store verifies the skipped tensors itself. A position is (number of the file, offset).
        """
        self._crc32 = library.crc32
        self._headers = checksums.headers
        # llama.cpp does not load lower tiers, nor tensors that a second file repeats.
        tensors = {each.info.name: each for each in reversed(checksums.tensors)}
        self._todo = [
            each
            for name, each in tensors.items()
            if TIER_MARK not in name
            and (each.file, each.info.offset) not in without
            and (each.checksums or _may_hold_nan(each.info))
        ]
        self.error: Exception | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all tensors are checked.

        Raises DamagedError for the first tensor with a wrong checksum or a NaN. Raises GGUFError
        for a file that cannot be read.
        """
        while self._thread.is_alive():
            interrupts.check()
            self._thread.join(timeout=0.1)
        if self.error is not None:
            raise self.error

    @property
    def is_running(self) -> bool:
        """Whether the check is still running. Afterwards `error` holds the first fault, or None."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the check early, without a result."""
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        try:
            for part, expected in self._headers:
                if header_checksum(part) != expected:
                    raise DamagedError(f"{part.path}: the header is damaged: its checksum differs")
            for part in {each.part.path: each.part for each in self._todo}.values():
                self._check_data(part, [each for each in self._todo if each.part is part])
        except Exception as error:  # noqa: BLE001 - finish raises it
            self.error = error

    def _check_data(self, part: GGUFFile, tensors: Sequence[_Listed]) -> None:
        buffer = np.empty(_CHUNK_BYTES, np.uint8)
        try:
            with part.path.open("rb", buffering=0) as file:
                for each in sorted(tensors, key=lambda listed: listed.info.offset):
                    self._check_tensor(file.fileno(), each, buffer)
        except OSError as error:
            raise GGUFError(f"{part.path}: {error.strerror or error}") from error

    def _check_tensor(self, fd: int, listed: _Listed, buffer: np.ndarray[Any, Any]) -> None:
        info = listed.info
        slice_bytes = info.nbytes // n_slices(info.shape) if listed.checksums else info.nbytes
        for number, expected in enumerate(listed.checksums or (None,)):
            start = info.offset + number * slice_bytes
            crc, at = 0, start
            while at < start + slice_bytes and not self._stopped:
                view = buffer.data[: min(_CHUNK_BYTES, start + slice_bytes - at)]
                n = os.preadv(fd, [view], at)
                if n == 0:
                    raise GGUFError(
                        f"{listed.part.path}: the file ends too early, at offset {at}: get another "
                        "copy of it"
                    )
                if _may_hold_nan(info):
                    is_nan = np.isnan(buffer[: n - n % 4].view(np.float32))
                    if is_nan.any():
                        offset = at + 4 * int(is_nan.argmax())
                        raise DamagedError(
                            f"{listed.part.path}: tensor {info.name}: offset {offset}: the value "
                            "is NaN: get another copy of the file, or convert the model again"
                        )
                if expected is not None:
                    crc = self._crc32(crc, buffer.ctypes.data, n)
                at += n
            if self._stopped or expected is None:
                return
            if crc != expected:
                what = f"expert {number}" if len(listed.checksums) > 1 else "the tensor"
                raise DamagedError(
                    f"{listed.part.path}: tensor {info.name}: offset {start}: {what} is damaged: "
                    "its checksum differs"
                )


def _may_hold_nan(info: TensorInfo) -> bool:
    """Return whether a tensor should be searched for NaN.

    This applies to F32 tensors with at most two dimensions. Experts have three.
    """
    return info.type is GGMLType.F32 and len(info.shape) <= 2
