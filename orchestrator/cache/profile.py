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
    """Return a hash that identifies the contents of a model's files, whatever their names are.

    The hash covers the size of each file, all bytes before the first tensor, and samples of the
    tensors' bytes. So other weights or another quantization change the hash. A damaged byte between
    two samples does not change the hash; checksums find such damage.
    """
    # Computed once, so it describes the opened files even if others get their names later.
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
    """Return the path of a model's file in the user cache for one kind of record.

    The kinds are:

    - hotness: how often tokens use each expert, as policies learned it.
    - usage: how often tokens used each expert, counted in all runs.
    - plans: memory plans.
    - tuned: the settings that policies tuned.
    """
    return user_folder("cache") / kind / f"{identity(model)[:32]}.json"


def load(path: Path, model: ExpertModel) -> np.ndarray:
    """Read how often tokens used each expert from a profile, float64 [n_layers, n_expert].

    Raises OSError if the file cannot be read. Raises ProfileError if the profile is damaged or
    belongs to another model.
    """
    damaged = ProfileError(
        f"{path} is not a profile of expert usage, or is damaged: name a new file"
    )
    data = read_object(path, _LARGEST_BYTES)
    if data is None or data.get("format") != _FORMAT:
        raise damaged
    if data.get("version") != _VERSION:
        raise ProfileError(f"{path} is a profile with another format version: name a new file")
    if not isinstance(data.get("model"), str) or not isinstance(data.get("name"), str):
        raise damaged
    if data["model"] != identity(model):
        raise ProfileError(
            f"{path} is a profile of another model ({one_line(data['name'])}): give the profile of "
            f"{model.path.name}, or a new file name"
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
    """Write a profile of how often tokens used each expert, atomically. Raises OSError.

    counts: the values to write, [n_layers, n_expert].
    """
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
    """Base class of records of a model in the user cache that later runs read.

    Without the setting `remember`, nothing is read or written. Read and write errors are ignored.

    note: the reason why the record of earlier runs is not used, or None.
    """

    kind: ClassVar[str]
    note: str | None = None

    def __init__(self, config: Config, model: ExpertModel) -> None:
        self._remember, self._model = config.remember, model

    @cached_property
    def _path(self) -> Path:
        return cached_path(self._model, self.kind)


class HotnessKeeper(_Cached):
    """Keeps the fraction of tokens that use each expert, as learned by a policy, for later runs.

    The record is in the user cache. If the user gave the setting `profile`, the record is in the
    file that this setting names, which may not exist yet.
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
            self.note = f"The expert usage of earlier runs is not used: {error}"
        return None

    def recall(self) -> np.ndarray | None:
        """Return the fraction of tokens that used each expert, float64 [n_layers, n_expert].

        If the policy learned no values in this run, the result has the values of an earlier run. It
        is None if no run learned any. Raises ProfileError or OSError if the file that the setting
        `profile` names cannot be used.
        """
        return self._known if self._now is None else self._now

    def learn(self, hotness: np.ndarray) -> None:
        """Replace the fraction of tokens that use each expert by values that a policy learned.

        `save` writes the values to the file. hotness: the values, [n_layers, n_expert]. An array of
        zeros is ignored.
        """
        if hotness.any():
            self._now = hotness

    def save(self) -> None:
        """Save the expert usage that a policy learned in this run, for later runs.

        If the user gave the setting `profile`, the usage is written to the file that this setting
        names. Raises OSError if this file cannot be written.

        Otherwise, the usage is written to the user cache, unless the setting `remember` is off.
        Errors are then ignored.
        """
        if self._now is None or not (self._named or self._remember):
            return
        self._known, self._now = self._now, None
        try:
            save(self._path, self._model, self._known)
        except OSError:
            if self._named:
                raise


class UsageKeeper(_Cached):
    """Counts the tokens that used each expert of a model, in earlier runs and this run.

    Runs with any policy are counted. The saved counts are scaled down to at most _USED_TOKENS
    tokens, so that older runs count less.
    """

    kind = "usage"

    def __init__(self, config: Config, model: ExpertModel) -> None:
        super().__init__(config, model)
        self._known = self._now = self._none = np.zeros((model.n_layers, model.n_expert))
        if config.remember:
            try:
                self._known = load(self._path, model)
            except ProfileError as error:
                self.note = (
                    f"The count of expert usage starts again from zero, because the saved counts "
                    f"cannot be used: {error}"
                )
            except OSError:
                pass

    def recall(self) -> np.ndarray | None:
        """Return how many tokens used each expert in this run and earlier runs, or None.

        The result is float64 [n_layers, n_expert], or None if no tokens were counted. Counts of
        earlier runs may have been scaled down.
        """
        used = self._known + self._now
        return used if used.any() else None

    def learn(self, used: np.ndarray) -> None:
        """Add the expert usage of a run to the counts that `recall` returns and `save` writes.

        used: number of tokens that used each expert in the run, [n_layers, n_expert].
        """
        self._now = self._now + used

    def save(self) -> None:
        """Write to the user cache how many tokens used each expert, for later runs.

        Nothing is written if this run added no counts, or if the setting `remember` is off. Write
        errors are ignored.
        """
        if not self._now.any() or not self._remember:
            return
        self._known, self._now = self._known + self._now, self._none
        tokens = float(self._known.sum(axis=1).max()) / self._model.n_expert_used
        share = min(1.0, _USED_TOKENS / max(1.0, tokens))
        with suppress(OSError):
            save(self._path, self._model, share * self._known)


class TunedKeeper(_Cached):
    """Keeps the settings that policies tuned on a model, by policy name, for later runs."""

    kind = "tuned"
    _learned = False

    @cached_property
    def _known(self) -> dict[str, Any]:
        """The tuned settings by policy name, read from the user cache at the first access."""
        return recalled(self._path, _TUNED, "policies") if self._remember else {}

    def recall(self, policy: str) -> dict[str, Any] | None:
        """Return the settings that the policy tuned in this run or an earlier one, or None."""
        known = self._known.get(policy)
        return known if isinstance(known, dict) else None

    def learn(self, policy: str, tuned: Mapping[str, Any]) -> None:
        """Keep `tuned` as the tuned settings of a policy, instead of its earlier ones.

        policy: the name of the policy. tuned: the values by setting name. `save` writes them to the
        user cache.
        """
        self._known[policy], self._learned = dict(tuned), True

    def save(self) -> None:
        """Write the tuned settings of all policies to the user cache if this run changed any."""
        if not self._learned or not self._remember:
            return
        keep(self._path, _TUNED, "policies", self._known)
        self._learned = False
