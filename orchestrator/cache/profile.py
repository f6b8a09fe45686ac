"""What was learned of a model, kept between runs for those that start from it: which experts it
used, what these put out, and what policies tuned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.estimate import Outputs, Probed
from orchestrator.cache.files import keep, read_object, recalled, user_folder, write_whole
from orchestrator.config import Config
from orchestrator.errors import ProfileError

_FORMAT = "moe-edge hotness"
_TUNED = "moe-edge tuned"
_VERSION = 2
_LARGEST_BYTES = 64 << 20
# That a usage profile remembers: some dozens of conversations.
_USED_TOKENS = 65_536
# Pieces of a file that its identity is made of, and their bytes: 25 ms on a disk that takes 0.1 ms.
_SAMPLES, _SAMPLE_BYTES = 256, 4096


def identity(model: ExpertModel) -> str:
    """What makes a model file this one: the hash of the sizes of its parts, of what is before their
    first tensors' bytes, the metadata and the tensor table, and of _SAMPLES pieces of these bytes,
    evenly over each part. Other weights differ in all of them, as other rounding does; a damaged
    byte between two pieces is what checksums are for."""
    return _identity(tuple((part.path, part.data_offset) for part in model.parts), _stamps(model))


def _stamps(model: ExpertModel) -> tuple[tuple[int, int], ...]:
    found = (part.path.stat() for part in model.parts)
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
    """Where the user cache keeps what was learned of a model: what is hot, its usage, what was
    tuned."""
    return user_folder("cache") / kind / f"{identity(model)[:32]}.json"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a profile has: the hotness, float64 [n_layers, n_expert], not negative; what experts put
    out; what skipping did to answers; errors of lower tiers' weights, by the names of two tiers."""

    hotness: np.ndarray
    outputs: Outputs
    probed: Probed
    errors: Mapping[str, Outputs] = field(default_factory=dict)

    @classmethod
    def none(cls, model: ExpertModel) -> Usage:
        size = model.n_layers, model.n_expert
        return cls(np.zeros(size), Outputs.none(size), Probed.none(model.n_layers))

    def __add__(self, more: Usage) -> Usage:
        pairs = (self.outputs + more.outputs, self.probed + more.probed)
        none = Outputs.none(self.hotness.shape)
        errors = {
            each: self.errors.get(each, none) + more.errors.get(each, none)
            for each in {*self.errors, *more.errors}
        }
        return Usage(self.hotness + more.hotness, *pairs, errors)


def load(path: Path, model: ExpertModel) -> Usage:
    """A profile; zeros for what was not counted. Raises ProfileError for a damaged one and for one
    of another model, OSError."""
    damaged = ProfileError(f"{path}: this is no profile, or a damaged one: name a new file")
    data = read_object(path, _LARGEST_BYTES)
    if data is None or data.get("format") != _FORMAT:
        raise damaged
    if data.get("version") != _VERSION:
        raise ProfileError(f"{path}: this profile has another format version: name a new file")
    if not isinstance(data.get("model"), str) or not isinstance(data.get("name"), str):
        raise damaged
    if data["model"] != identity(model):
        raise ProfileError(
            f"{path}: this profile was made with another model ({data['name']}): give the one of "
            f"{model.path.name}, or a new file name"
        )

    def numbers(values: Any, *shape: int) -> np.ndarray:
        try:
            found = np.array(values, np.float64)
        except (TypeError, ValueError, OverflowError):
            found = np.empty(0)
        if found.shape != shape or not (np.isfinite(found).all() and (found >= 0).all()):
            raise damaged
        return found

    def part(values: Any, **shapes: tuple[int, ...]) -> list[np.ndarray]:
        if not isinstance(values, dict):
            raise damaged
        return [numbers(values.get(key), *shape) for key, shape in shapes.items()]

    def sums(values: Any) -> Outputs:
        return Outputs(*part(values, tokens=every, squares=every))

    found, every = Usage.none(model), (model.n_layers, model.n_expert)
    outputs, probed, errors = found.outputs, found.probed, data.get("errors", {})
    if "outputs" in data:
        outputs = sums(data["outputs"])
    if "probed" in data:
        probed = Probed(*part(data["probed"], moments=(7,), gates=(2, model.n_layers)))
    if not isinstance(errors, dict):
        raise damaged
    of_tiers = {tiers: sums(each) for tiers, each in errors.items()}
    return Usage(numbers(data.get("hotness"), *every), outputs, probed, of_tiers)


def save(
    path: Path,
    model: ExpertModel,
    hotness: np.ndarray,
    outputs: Outputs | None = None,
    probed: Probed | None = None,
    errors: Mapping[str, Outputs] | None = None,
) -> None:
    """Writes a profile, whole or not at all: as of Usage, None where nobody counted. Raises
    OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": identity(model),
        "name": model.path.name,
        "hotness": _rounded(hotness),
    }
    if outputs is not None:
        data["outputs"] = _sums(outputs)
    if probed is not None and probed.moments.any():
        # In full: what they scatter by is a small difference of them.
        data["probed"] = {"moments": probed.moments.tolist(), "gates": _rounded(probed.gates)}
    if errors:
        data["errors"] = {tiers: _sums(each) for tiers, each in errors.items()}
    write_whole(path, json.dumps(data), private=True)


def _sums(of: Outputs) -> dict[str, list[list[float]]]:
    return {"tokens": _rounded(of.tokens), "squares": _rounded(of.squares)}


def _rounded(values: np.ndarray) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in layer] for layer in values.tolist()]


class _Cached:
    """Something that is learned of a model, in the user cache where config.remember asks for that.
    What cannot be read or written there is done without.

    note: why what earlier runs learned was left aside, or None.
    """

    kind: ClassVar[str]
    note: str | None = None

    def __init__(self, config: Config, model: ExpertModel) -> None:
        self._remember, self._model = config.remember, model

    @cached_property
    def _path(self) -> Path:
        return cached_path(self._model, self.kind)


class HotnessKeeper(_Cached):
    """What an engine knows about its model's hotness, from this run or an earlier one.

    The setting profile names a file, which may not exist yet, in the place of the user cache.
    """

    kind = "hotness"
    _now: np.ndarray | None = None

    def __init__(self, config: Config, model: ExpertModel) -> None:
        super().__init__(config, model)
        self._named = config.given("profile")
        if self._named:
            self._path = self._named

    @cached_property
    def _known(self) -> np.ndarray | None:
        if self._named and not self._named.absolute().parent.is_dir():
            raise ProfileError(f"--profile {self._named}: there is no such folder")
        try:
            if (self._named or self._remember) and self._path.exists():
                return load(self._path, self._model).hotness
        except (ProfileError, OSError) as error:
            if self._named:
                raise
            self.note = f"What earlier runs learned is not used: {error}"
        return None

    def recall(self) -> np.ndarray | None:
        """float64 [n_layers, n_expert], or None where nothing is known; reads it the first time.
        Raises ProfileError or OSError for a named file that cannot be used."""
        return self._known if self._now is None else self._now

    def learn(self, hotness: np.ndarray) -> None:
        """What a policy knows by now; nothing, where it is all zero."""
        if hotness.any():
            self._now = hotness

    def save(self) -> None:
        """Writes what was learned. Raises OSError for a named file; the cache may fail."""
        if self._now is None or not (self._named or self._remember):
            return
        self._known, self._now = self._now, None
        try:
            save(self._path, self._model, self._known)
        except OSError:
            if self._named:
                raise


class UsageKeeper(_Cached):
    """How often tokens used each expert of a model, in earlier runs under any policy, what the
    experts put out in answers, what skipping did to answers, and how far lower tiers' weights are
    off, in the format of profiles. Runs long ago count less: of all earlier ones as many tokens
    stay as _USED_TOKENS."""

    kind = "usage"

    def __init__(self, config: Config, model: ExpertModel) -> None:
        super().__init__(config, model)
        self._now = self._none = Usage.none(model)

    @cached_property
    def _known(self) -> Usage:
        if self._remember:
            try:
                return load(self._path, self._model)
            except ProfileError as error:
                self.note = f"How this model was used is learned anew: {error}"
            except OSError:
                pass
        return self._none

    @property
    def _all(self) -> Usage:
        """What stores that were freed counted included."""
        return self._known + self._now

    def recall(self) -> np.ndarray | None:
        """Tokens that used each expert, float64 [n_layers, n_expert]; None where nothing is
        known."""
        used = self._all.hotness
        return used if used.any() else None

    def outputs(self) -> Outputs:
        """What experts put out."""
        return self._all.outputs

    def probed(self) -> Probed:
        """What skipping did to answers."""
        return self._all.probed

    def probe(self, answer: Probed) -> None:
        """Adds an answer that was computed twice."""
        if np.isfinite(answer.moments).all() and np.isfinite(answer.gates).all():
            self._now = replace(self._now, probed=self._now.probed + answer)

    def errors(self, tiers: Sequence[str]) -> Outputs:
        """How far the weights of the second of these tiers are from the first's, as far as they
        were sampled, as of orchestrator.engine.sample."""
        return self._all.errors.get("/".join(tiers), self._none.outputs)

    def sampled(self, tiers: Sequence[str], more: Outputs) -> None:
        """Adds experts that were sampled."""
        self._now += replace(self._none, errors={"/".join(tiers): more.finite()})

    def learn(self, used: np.ndarray, outputs: Outputs | None = None) -> None:
        """Adds what a store counted until it was freed, [n_layers, n_expert]."""
        put_out = self._none.outputs if outputs is None else outputs.finite()
        self._now += Usage(used.astype(np.float64), put_out, self._none.probed)

    def save(self) -> None:
        """Writes what was learned, if anything was."""
        if not self._now.hotness.any() or not self._remember:
            return
        self._known, self._now = self._all, self._none
        used, outputs = self._known.hotness, self._known.outputs
        kept = outputs.scaled(self._kept_share(outputs.tokens))
        with suppress(OSError):
            used = used * self._kept_share(used)
            save(self._path, self._model, used, kept, self._known.probed, self._known.errors)

    def _kept_share(self, uses: np.ndarray) -> float:
        tokens = float(uses.sum(axis=1).max()) / self._model.n_expert_used
        return min(1.0, _USED_TOKENS / max(1.0, tokens))


class TunedKeeper(_Cached):
    """What policies tuned on a model, by the name of the policy, from this run or an earlier
    one."""

    kind = "tuned"
    _learned = False

    @cached_property
    def _known(self) -> dict[str, Any]:
        """By policy; read when it is first asked for."""
        return recalled(self._path, _TUNED, "policies") if self._remember else {}

    def recall(self, policy: str) -> dict[str, Any] | None:
        """What the named policy tuned; None where nothing is known."""
        known = self._known.get(policy)
        return known if isinstance(known, dict) else None

    def learn(self, policy: str, tuned: Mapping[str, Any]) -> None:
        """What the named policy has tuned by now."""
        self._known[policy], self._learned = dict(tuned), True

    def save(self) -> None:
        """Writes what was learned, if anything was."""
        if not self._learned or not self._remember:
            return
        keep(self._path, _TUNED, "policies", self._known)
        self._learned = False
