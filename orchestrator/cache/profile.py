"""Records of a model that runs keep for later runs.

They are hotness, expert usage, and tuned settings of policies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.reader import one_line
from orchestrator.cache.files import keep, read_object, recalled, user_folder, write_whole
from orchestrator.config import Config
from orchestrator.errors import ProfileError

_FORMAT = "moe-edge hotness"
_TUNED = "moe-edge tuned"
_VERSION = 2
_LARGEST_BYTES = 64 << 20
# Maximum number of tokens in a usage profile: some dozens of conversations.
_USED_TOKENS = 65_536
# Number and size of the samples of a file's identity: 25 ms on a disk with 0.1 ms latency.
_SAMPLES, _SAMPLE_BYTES = 256, 4096


def identity(model: ExpertModel) -> str:
    """Return a hash that identifies the files of a model, whatever their names are.

    It covers the size of each part, the bytes before the first tensor (metadata and tensor table),
    and _SAMPLES pieces of the tensors' bytes, evenly over each part. Other weights or other
    rounding differ in all of these pieces. Checksums find a damaged byte between two pieces.

    The result stays that of the files that were opened if it was computed before other files got
    their names.
    """
    return _identity(tuple((part.path, part.data_offset) for part in model.parts), _stamps(model))


def _stamps(model: ExpertModel) -> tuple[tuple[int, int], ...]:
    found = (part.status or part.path.stat() for part in model.parts)
    return tuple((each.st_size, each.st_mtime_ns) for each in found)


@lru_cache(maxsize=16)
def _identity(parts: tuple[tuple[Path, int], ...], stamps: tuple[tuple[int, int], ...]) -> str:
    digest = hashlib.sha256()
    for (path, data_offset), (size, _) in zip(parts, stamps, strict=True):
        digest.update(str(size).encode())
        with open(path, "rb") as file:
            digest.update(file.read(data_offset))
            for at in range(_SAMPLES):
                file.seek(data_offset + (size - data_offset) * at // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def cached_path(model: ExpertModel, kind: str = "hotness") -> Path:
    """Return the user cache's file for one kind of record of a model.

    The kinds are hotness, usage, plans and tuned.
    """
    return user_folder("cache") / kind / f"{identity(model)[:32]}.json"


def load(path: Path, model: ExpertModel) -> np.ndarray:
    """Return the counts of a profile, float64 [n_layers, n_expert], not negative.

    Additional fields from older versions are ignored. Raises OSError, and ProfileError for a
    profile that is damaged or belongs to another model.
    """
    damaged = ProfileError(f"{path}: not a profile, or damaged: name a new file")
    data = read_object(path, _LARGEST_BYTES)
    if data is None or data.get("format") != _FORMAT:
        raise damaged
    if data.get("version") != _VERSION:
        raise ProfileError(f"{path}: this profile has another format version: name a new file")
    if not isinstance(data.get("model"), str) or not isinstance(data.get("name"), str):
        raise damaged
    if data["model"] != identity(model):
        raise ProfileError(
            f"{path}: this profile was made with another model ({one_line(data['name'])}): give "
            f"the one of {model.path.name}, or a new file name"
        )
    try:
        found = np.array(data.get("hotness"), np.float64)
    except (TypeError, ValueError, OverflowError):
        raise damaged from None
    shape = model.n_layers, model.n_expert
    if found.shape != shape or not (np.isfinite(found).all() and (found >= 0).all()):
        raise damaged
    return found


def save(path: Path, model: ExpertModel, counts: np.ndarray) -> None:
    """Write a profile with these counts [n_layers, n_expert], atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": identity(model),
        "name": model.path.name,
        "hotness": _rounded(counts),
    }
    write_whole(path, json.dumps(data), private=True)


def _rounded(values: np.ndarray) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in layer] for layer in values.tolist()]


class _Cached:
    """A record of a model in the user cache, if config.remember is set.

    Read and write errors of the cache are ignored.

    note: why the record of earlier runs is not used, or None.
    """

    kind: ClassVar[str]
    note: str | None = None

    def __init__(self, config: Config, model: ExpertModel) -> None:
        self._remember, self._model = config.remember, model

    @cached_property
    def _path(self) -> Path:
        return cached_path(self._model, self.kind)


class HotnessKeeper(_Cached):
    """The hotness of a model's experts, from this run or an earlier one.

    The setting profile names a file that replaces the user cache; it may not exist yet.
    """

    kind = "hotness"
    _now: np.ndarray | None = None

    def __init__(self, config: Config, model: ExpertModel) -> None:
        super().__init__(config, model)
        self._named = config.given("profile")
        if self._named:
            self._path = self._named
            with suppress(OSError):
                identity(model)  # before another file can get the model's name

    @cached_property
    def _known(self) -> np.ndarray | None:
        if self._named and not self._named.absolute().parent.is_dir():
            raise ProfileError(f"--profile {self._named}: there is no such folder")
        try:
            if (self._named or self._remember) and self._path.exists():
                return load(self._path, self._model)
        except (ProfileError, OSError) as error:
            if self._named:
                raise
            self.note = f"The hotness of earlier runs is not used: {error}"
        return None

    def recall(self) -> np.ndarray | None:
        """Return the hotness, float64 [n_layers, n_expert], or None if unknown.

        The first call reads the file. Raises ProfileError or OSError if a named file cannot be
        used.
        """
        return self._known if self._now is None else self._now

    def learn(self, hotness: np.ndarray) -> None:
        """Replace the hotness by a policy's current one. An array of zeros is ignored."""
        if hotness.any():
            self._now = hotness

    def save(self) -> None:
        """Write the hotness. Raises OSError for a named file; errors of the cache are ignored."""
        if self._now is None or not (self._named or self._remember):
            return
        self._known, self._now = self._now, None
        try:
            save(self._path, self._model, self._known)
        except OSError:
            if self._named:
                raise


class UsageKeeper(_Cached):
    """The number of tokens that used each expert of a model.

    It covers earlier runs under any policy and this one.

    It uses the file format of profiles. Older runs count less: the record of all earlier runs is
    scaled to at most _USED_TOKENS tokens.
    """

    kind = "usage"

    def __init__(self, config: Config, model: ExpertModel) -> None:
        super().__init__(config, model)
        self._known = self._now = self._none = np.zeros((model.n_layers, model.n_expert))
        if config.remember:
            try:
                self._known = load(self._path, model)
            except ProfileError as error:
                self.note = f"Expert usage is recorded from scratch: {error}"
            except OSError:
                pass

    def recall(self) -> np.ndarray | None:
        """Return the number of tokens that used each expert, float64 [n_layers, n_expert].

        Return None if it is unknown. Counts of stores freed in this run are included.
        """
        used = self._known + self._now
        return used if used.any() else None

    def learn(self, used: np.ndarray) -> None:
        """Add the counts of a store that is being freed, [n_layers, n_expert]."""
        self._now = self._now + used

    def save(self) -> None:
        """Write the counts if this run added any. Errors of the cache are ignored."""
        if not self._now.any() or not self._remember:
            return
        self._known, self._now = self._known + self._now, self._none
        tokens = float(self._known.sum(axis=1).max()) / self._model.n_expert_used
        share = min(1.0, _USED_TOKENS / max(1.0, tokens))
        with suppress(OSError):
            save(self._path, self._model, share * self._known)


class TunedKeeper(_Cached):
    """Settings that policies tuned on a model, by policy name, from this run or an earlier one."""

    kind = "tuned"
    _learned = False

    @cached_property
    def _known(self) -> dict[str, Any]:
        """The tuned settings by policy, read at the first access."""
        return recalled(self._path, _TUNED, "policies") if self._remember else {}

    def recall(self, policy: str) -> dict[str, Any] | None:
        """Return the settings that the named policy tuned; None if unknown."""
        known = self._known.get(policy)
        return known if isinstance(known, dict) else None

    def learn(self, policy: str, tuned: Mapping[str, Any]) -> None:
        """Replace the settings that the named policy tuned."""
        self._known[policy], self._learned = dict(tuned), True

    def save(self) -> None:
        """Write the settings if any were learned."""
        if not self._learned or not self._remember:
            return
        keep(self._path, _TUNED, "policies", self._known)
        self._learned = False
