"""Whether a model's files hold what was written: a packed one's checksums, while it loads, and
whether anybody writes to them since.

The store compares each slice of an expert where it is read. What llama.cpp reads itself is read a
second time here, beside it and through the same page cache, and compared before the first token.
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

# (number of the file, offset of the tensor in it)
Place = tuple[int, int]


class _Told(NamedTuple):
    """A tensor, and the checksums of its slices that the file has; none in an ordinary file."""

    file: int
    part: GGUFFile
    info: TensorInfo
    checksums: Sequence[int]


class Checksums:
    """The tensors of a model's files, with their checksums as far as the files have them."""

    def __init__(self, model: ExpertModel) -> None:
        """Raises MetadataError for checksums that do not fit the tensors."""
        self.headers: list[tuple[GGUFFile, int]] = []
        self.tensors: list[_Told] = []
        for number, part in enumerate(model.parts):
            of_file = stored(part)
            if of_file is not None:
                self.headers.append((part, of_file[""][0]))
            self.tensors += [
                _Told(number, part, info, of_file[name] if of_file is not None else ())
                for name, info in part.tensors.items()
            ]


def with_checksums(spec: StoreSpec, checksums: Checksums) -> StoreSpec:
    """The store that also compares what it reads, as far as the model's files have checksums."""
    known = {(each.file, each.info.offset): tuple(each.checksums) for each in checksums.tensors}

    def compared(_layer: int, _kind: int, each: Slices) -> Slices:
        return replace(each, checksums=known.get((each.file, each.offset), ()))

    return spec.with_slices(compared)


class InUse:
    """Files that are read as long as a model runs. Looking takes some microseconds for each."""

    def __init__(
        self, paths: Sequence[Path], compare: Callable[[], DataCheck | None] = lambda: None
    ) -> None:
        """compare: starts to compare the files with their checksums; None if they have none."""
        self._known = {path: _stamp(path) for path in paths}
        self._compare = compare
        self._check: DataCheck | None = None
        self._checked: object = None  # the stamp of the file that is being compared

    def look(self) -> tuple[str, bool]:
        """(a sentence about a file that changed, empty where none did; whether what is read of it
        changed, too). Another file of its name leaves the one alone that was opened."""
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
                replaced = f"{path} is another file now: answers come from the one of the start."
        return replaced, False

    def check(self) -> None:
        """Raise ChangedError if one of the files was written to, so that answers would mix two."""
        sentence, is_changed = self.look()
        if is_changed:
            raise ChangedError(sentence)

    def _fault_of(self, path: Path, now: object, is_as_long: bool) -> str:
        """Return why a file whose time changed cannot be trusted; "" if its checksums still fit."""
        written = f"{path} was written to while it is in use: start again."
        if not is_as_long:
            return written
        if self._check is None or self._checked != now:
            if self._check is not None:
                self._check.stop()
            self._check, self._checked = self._compare(), now
        if self._check is None:
            return written
        if self._check.is_running:
            return f"{path} was written to while it is in use: it is compared with its checksums."
        return written if self._check.error is not None else ""


def _stamp(path: Path) -> tuple[tuple[int, int], int, int] | None:
    """Which file it is, its size and the time when it was written; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns


def managed_places(model: ExpertModel) -> set[Place]:
    """Where the experts lie that a store reads, and tables that nobody reads as a whole."""
    experts = {
        (each.file_index, each.offset)
        for layer in model.slices
        for kind in layer
        for each in kind
        if each is not None
    }
    return experts | {(table.file_index, table.info.offset) for table in model.lookup}


class DataCheck:
    """Reads what llama.cpp reads of a model's files, in a thread of its own, and checks it.

    It compares checksums, and finds NaN in norms, routers and other small tensors, with which
    llama.cpp would compute nonsense without a word. End it with ``finish`` or ``stop``.
    """

    def __init__(
        self, library: Library, checksums: Checksums, without: Collection[Place] = ()
    ) -> None:
        """without: tensors that the store checks when it reads them."""
        self._crc32 = library.crc32
        self._headers = checksums.headers
        # Lower tiers are none of llama.cpp's tensors, nor is what a second file has once more.
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
        """Wait for the end.

        Raises DamagedError for the first tensor that differs or holds NaN, GGUFError for a file
        that cannot be read.
        """
        while self._thread.is_alive():
            interrupts.check()
            self._thread.join(timeout=0.1)
        if self.error is not None:
            raise self.error

    @property
    def is_running(self) -> bool:
        """Whether it still compares. Afterwards `error` says what it found."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends it early; what it found does not matter any more."""
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        try:
            for part, expected in self._headers:
                if header_checksum(part) != expected:
                    raise DamagedError(f"{part.path}: the header is damaged: its checksum differs")
            for part in {each.part.path: each.part for each in self._todo}.values():
                self._check_data(part, [each for each in self._todo if each.part is part])
        except Exception as error:  # noqa: BLE001 - whoever waits raises it
            self.error = error

    def _check_data(self, part: GGUFFile, tensors: Sequence[_Told]) -> None:
        buffer = np.empty(_CHUNK_BYTES, np.uint8)
        try:
            with part.path.open("rb", buffering=0) as file:
                for each in sorted(tensors, key=lambda told: told.info.offset):
                    self._check_tensor(file.fileno(), each, buffer)
        except OSError as error:
            raise GGUFError(f"{part.path}: {error.strerror or error}") from error

    def _check_tensor(self, fd: int, told: _Told, buffer: np.ndarray[Any, Any]) -> None:
        info = told.info
        slice_bytes = info.nbytes // n_slices(info.shape) if told.checksums else info.nbytes
        for number, expected in enumerate(told.checksums or (None,)):
            start = info.offset + number * slice_bytes
            crc, at = 0, start
            while at < start + slice_bytes and not self._stopped:
                view = buffer.data[: min(_CHUNK_BYTES, start + slice_bytes - at)]
                n = os.preadv(fd, [view], at)
                if n == 0:
                    raise GGUFError(f"{told.part.path}: the file ends at offset {at}: it was cut")
                if _may_hold_nan(info):
                    is_nan = np.isnan(buffer[: n - n % 4].view(np.float32))
                    if is_nan.any():
                        raise DamagedError(
                            f"{told.part.path}: tensor {info.name}: offset"
                            f" {at + 4 * int(is_nan.argmax())}: the value is NaN: get another copy"
                            " of the file, or convert the model again"
                        )
                if expected is not None:
                    crc = self._crc32(crc, buffer.ctypes.data, n)
                at += n
            if self._stopped or expected is None:
                return
            if crc != expected:
                what = f"expert {number} is damaged" if len(told.checksums) > 1 else "damaged"
                raise DamagedError(
                    f"{told.part.path}: tensor {info.name}: offset {start}: {what}: its checksum"
                    " differs"
                )


def _may_hold_nan(info: TensorInfo) -> bool:
    """Whether a tensor is one of those that are searched for NaN: F32, and no expert."""
    return info.type is GGMLType.F32 and len(info.shape) <= 2
