"""What experts lose in lower precisions, and what a plan is foreseen to lose of an answer, in nats.

The loss table says what each expert's output loses in each precision, and is kept beside the model:

``FILE.calib.json`` and not the model's metadata, since a longer header moves every tensor: a
20 GB file would have to be written again. JSON, in UTF-8:

    {"format": "moe-edge loss table", "version": 3,
     "model": identity of the file that it belongs to, "name": its name,
     "reference": what full precision was, "method": of the candidates that are not stored,
     "calibration": the text, its tokens, its hash, "max_rows": most tokens measured an expert,
     "candidates": [{"name": "q4_k", "bits": 4.5, "stored": true}, ...] best first,
     "counts": [n_layers][n_expert] tokens of the text that each expert saw,
     "power": [n_layers][n_expert] mean square of the reference's output, null without a token,
     "loss": [n_layers][n_expert][n_candidates] mean squared error, null without a token,
     "gates": [n_layers][n_expert] mean square of the gate weights, null without a token; where it
         is absent, it was not measured,
     "kl": what makes nats of it, absent where that was not fitted: {"factors": [n_layers] nats for
         g^2 L = 1,
         "tiers": those that it was fitted with, "text": the tokens it was fitted on, "error": the
         standard error of the factors together, as a share, "scales": what the factors are
         multiplied by for each of the tiers, empty for 1, "spread": [low, high] what windows of the
         text lose of what the factors say, so that a tenth loses less and a tenth more, "routing":
         [low, high] the least and the largest mean surprise of a use in these windows, as
         allocation/estimate.py has it, and their standard deviation beyond that}}
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.reader import one_line
from orchestrator.allocation.estimate import KlEstimate, Routing, surprise
from orchestrator.cache.files import read_object, write_whole
from orchestrator.cache.profile import identity
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.events import SKIP, SKIP_TIER
from orchestrator.memory.plan import MemoryPlan
from orchestrator.policy import ALLOWED_LOSS, POLICIES, policy_settings, spends_loss
from orchestrator.policy.base import Placement

_FORMAT = "moe-edge loss table"
_VERSION = 3
_LARGEST_BYTES = 256 << 20
# No mean square of outputs comes near it, and sums of such numbers are still numbers.
_LARGEST = 1e30
# Of a logarithm: what is worse known is not known.
_LARGEST_ERROR = 10.0
SUFFIX = ".calib.json"
_AGAIN = "make it again with `moe-edge calibrate`"
# Measured: about 12 minutes for 16 GB on two cores.
_BYTES_PER_MINUTE = 16e9 / 12


class TablePrecision(NamedTuple):
    """A precision: bits per weight over all its matrices, and whether it is a tier of the
    file."""

    name: str
    bits: float
    stored: bool


class Fit(NamedTuple):
    """What makes nats of a table, as orchestrator.allocation.estimate says: the factor of each
    layer; the tiers that they were fitted with; the text; the standard error of all factors
    together, of their logarithm; what the factors are multiplied by for each of the tiers, none for
    1; the loss of a window over what the factors say, the tenth and the ninetieth percentile; the
    least and the largest mean surprise of a use in a window, and a margin beyond that."""

    factors: tuple[float, ...]
    tiers: tuple[str, ...]
    text: str
    error: float
    scales: tuple[float, ...] = ()
    spread: tuple[float, float] = (1.0, 1.0)
    routing: tuple[float, float] = (-_LARGEST, _LARGEST)


@dataclass(frozen=True, slots=True)
class LossTable:
    """L[l, e](b) of the near-data paper's section 4.2, over MoE layers.

    loss: float64 [n_layers, n_expert, n_candidates], the mean over tokens and outputs of
    (y_b - y)^2, y an expert's output (not weighted by its gate) in full precision; NaN for an
    expert without a token. power: float64 [n_layers, n_expert], the mean of y^2. counts: int64
    [n_layers, n_expert], tokens of the text that were routed to it. Candidates best first. gates:
    float64 [n_layers, n_expert], the mean square of these tokens' gate weights, NaN without one;
    None where that was not measured. fit: None where nobody measured what the losses do to the
    model's answers.
    """

    candidates: list[TablePrecision]
    loss: np.ndarray
    power: np.ndarray
    counts: np.ndarray
    reference: str
    method: str
    calibration: str
    max_rows: int
    gates: np.ndarray | None = None
    fit: Fit | None = None

    def filled(self) -> np.ndarray:
        """The losses, with the mean over the tokens of its layer for an expert without one:
        float64 [n_layers, n_expert, n_candidates], nowhere NaN."""
        return self._filled(self.loss)

    def _filled(self, values: np.ndarray) -> np.ndarray:
        """values [n_layers, n_expert, n] of experts with a token, and that mean for the others."""
        seen = self.counts[:, :, None] > 0
        total = np.maximum(self.counts.sum(axis=1, dtype=np.float64), 1)
        share = (self.counts / total[:, None])[:, :, None]
        mean = (np.where(seen, values, 0) * share).sum(axis=1, keepdims=True)
        filled: np.ndarray = np.where(seen, values, mean)
        return filled

    def costs(self, names: Sequence[str]) -> np.ndarray | None:
        """What an expert with a gate weight of 1 costs a token against full precision, in nats: in
        each of the named tiers and, last, skipped, float64 [n_layers, n_expert, n_names + 1], as of
        KlEstimate.nats; None where it was not fitted, or one of them not measured."""
        lost = self.of_tiers(names)
        if self.fit is None or lost is None:
            return None
        skipped = self._filled(self.power[:, :, None])
        scales = self.fit.spread[1] * self._scales(self.fit, names)
        factors = np.array(self.fit.factors)[:, None, None] * scales
        costs: np.ndarray = factors * np.concatenate([lost, skipped], axis=2)
        return costs

    def _scales(self, fit: Fit, names: Sequence[str]) -> np.ndarray:
        """By what the factors are multiplied for the named tiers and, last, for skipping, float64
        [n_names + 1]. A tier that was not fitted is like the one that is nearest in bits."""
        if not fit.scales:
            return np.ones(len(names) + 1)
        bits = {each.name: each.bits for each in self.candidates}
        known = dict(zip(fit.tiers, fit.scales, strict=True))
        fitted = [each for each in known if each in bits] or list(known)

        def near(name: str) -> str:
            return min(fitted, key=lambda each: abs(bits.get(each, 0.0) - bits[name]))

        scales = [known[name] if name in known else known[near(name)] for name in names]
        return np.array([*scales, known[SKIP_TIER]])

    def estimate(self, names: Sequence[str], base: str | None = None) -> KlEstimate | None:
        """What the named tiers, best first, cost against the tier base (None: the first of them);
        None where it was not fitted, or one of them not measured."""
        base = names[0] if base is None else base
        costs = self.costs([*names, base])
        if costs is None or self.gates is None or self.fit is None:
            return None
        gates = self._filled(self.gates[:, :, None])[..., 0]
        low, high = self.fit.spread
        routing = Routing(surprise(self.counts), *self.fit.routing)
        return KlEstimate.of_costs(costs, names, base, gates, low / high, routing)

    def of_tiers(self, names: Sequence[str]) -> np.ndarray | None:
        """filled() of the precisions with these names, float64 [n_layers, n_expert, n_names]; None
        where one of them was not measured."""
        known = [each.name for each in self.candidates]
        if not set(names) <= set(known):
            return None
        of_names: np.ndarray = self.filled()[..., [known.index(name) for name in names]]
        return of_names

    def per_use(self, names: Sequence[str]) -> np.ndarray | None:
        """What the named tiers cost where an expert is used with its usual gate weights, float64
        [n_layers, n_expert, n_names]: nats where that was fitted, so that layers compare, else the
        losses; None where one of them was not measured."""
        costs, lost = self.costs(names), self.of_tiers(names)
        if costs is None or self.gates is None:
            return lost
        nats: np.ndarray = costs[..., :-1] * self._filled(self.gates[:, :, None])
        return nats

    def render(self) -> str:
        """For each precision the mean squared error as a share of the outputs' mean square: over
        all tokens, and of the best and the worst expert."""
        lines = [f"  {'precision':>9} {'':>8}   bits     error       of the experts"]
        seen = self.counts > 0
        tokens = self.counts[seen].astype(np.float64)
        power = np.maximum(self.power[seen], 1 / _LARGEST)
        for index, (name, bits, stored) in enumerate(self.candidates):
            loss = self.loss[..., index][seen]
            whole = float((loss * tokens).sum() / (power * tokens).sum())
            low, high = (loss / power).min(), (loss / power).max()
            lines.append(
                f"  {name:>9} {'stored' if stored else self.method:>8}  {bits:5.2f}"
                f"  {whole:8.3%}  {low:8.3%} to {high:8.3%}"
            )
        if self.fit is not None:
            low, high = (math.exp(side * 1.96 * self.fit.error) for side in (-1, 1))
            lines.append(
                f"  KL is estimated by {self.fit.text.split(', sha')[0]}: its mean is {low:.2f} to "
                f"{high:.2f} of the fitted one (95 %)"
            )
            low, high = self.fit.spread
            lines.append(
                f"  Windows of it lose {low:.2f} (a tenth less) to {high:.2f} (a tenth more) of "
                f"that: estimates are {high:.2f} of it"
            )
        if not seen.all():
            lines.append(f"  {np.count_nonzero(~seen)} of {seen.size} experts saw no token")
        return "\n".join(lines)


def default_path(model: Path) -> Path:
    """Where the table of a model file is kept."""
    return model.with_name(model.name + SUFFIX)


def save(path: Path, model: ExpertModel, table: LossTable) -> None:
    """Writes a table, whole or not at all. Raises OSError."""
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": identity(model),
        "name": model.path.name,
        "reference": table.reference,
        "method": table.method,
        "calibration": table.calibration,
        "max_rows": table.max_rows,
        "candidates": [each._asdict() for each in table.candidates],
        "counts": table.counts.tolist(),
        "power": _numbers(table.power.tolist()),
        "loss": _numbers(table.loss.tolist()),
    }
    if table.gates is not None:
        data["gates"] = _numbers(table.gates.tolist())
    if table.fit is not None:
        data["kl"] = table.fit._asdict()
    write_whole(path, json.dumps(data))


def _numbers(values: Any) -> Any:
    """Nested lists of numbers, shortened, with null for NaN."""
    if isinstance(values, list):
        return [_numbers(each) for each in values]
    return None if math.isnan(values) else float(f"{values:.6g}")


def load(path: Path, model: ExpertModel | None) -> LossTable:
    """The table of a model file; of any one where model is None. Raises ConfigError for a missing
    or damaged one, and for one of another file."""
    data = _parse(path)
    if model is not None and data.get("model") != identity(model):
        name = one_line(str(data.get("name")))
        raise ConfigError(
            f"{path}: this loss table was made with another file ({name}): run "
            f"{calibrate_command(model.path)}"
        )
    try:
        candidates = [
            TablePrecision(str(each["name"]), float(each["bits"]), bool(each["stored"]))
            for each in data["candidates"]
        ]
        table = LossTable(
            candidates,
            np.array(data["loss"], np.float64),
            np.array(data["power"], np.float64),
            np.array(data["counts"], np.int64),
            str(data["reference"]),
            str(data["method"]),
            str(data["calibration"]),
            int(data["max_rows"]),
            np.array(data["gates"], np.float64) if "gates" in data else None,
            _fit(data.get("kl")),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path) from error
    shape = (model.n_layers, model.n_expert) if model is not None else table.counts.shape
    seen = table.counts > 0
    if (
        not candidates
        or not seen.any()
        or len(shape) != 2
        or table.counts.shape != shape
        or table.power.shape != shape
        or table.loss.shape != (*shape, len(candidates))
        or not (table.counts >= 0).all()
        or (table.gates is not None and table.gates.shape != shape)
        or (table.fit is not None and len(table.fit.factors) != shape[0])
        or not all(
            ((values[seen] >= 0) & (values[seen] <= _LARGEST)).all()
            for values in (table.loss, table.power, table.gates)
            if values is not None
        )
    ):
        raise _damaged(path)
    return table


def _fit(data: Any) -> Fit | None:
    """Raises KeyError, TypeError or ValueError for what save did not write."""
    if data is None:
        return None
    found = Fit(
        tuple(float(each) for each in data["factors"]),
        tuple(str(each) for each in data["tiers"]),
        str(data["text"]),
        float(data["error"]),
        tuple(float(each) for each in data.get("scales", ())),
        _pair(data["spread"]),
        _pair(data["routing"]),
    )
    if not (
        all(0 < factor <= _LARGEST for factor in (*found.factors, *found.scales))
        and 0 <= found.error <= _LARGEST_ERROR
        and 0 < found.spread[0] <= found.spread[1] <= _LARGEST
        and found.routing[0] <= found.routing[1]
        and (
            not found.scales or (len(found.scales) == len(found.tiers) and SKIP_TIER in found.tiers)
        )
    ):
        raise ValueError("kl: out of range")
    return found


def _pair(data: Any) -> tuple[float, float]:
    """Raises TypeError or ValueError for anything but two finite numbers."""
    low, high = (float(each) for each in data)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("kl: not finite")
    return low, high


def _parse(path: Path) -> dict[str, Any]:
    try:
        data = read_object(path, _LARGEST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    if data is None or data.get("format") != _FORMAT:
        raise _damaged(path)
    if data.get("version") != _VERSION:
        raise ConfigError(f"{path}: this loss table has another format version: {_AGAIN}")
    return data


def _damaged(path: Path) -> ConfigError:
    return ConfigError(f"{path}: this is no loss table, or a damaged one: {_AGAIN}")


def calibrate_command(model: Path | str) -> str:
    """The command that makes a model's loss table."""
    return f"`moe-edge calibrate {shlex.quote(str(model))} --calib TEXT`"


def no_losses(reason: str) -> ConfigError:
    """The refusal of a limit or a policy that needs losses which are not known."""
    spending = [name for name in POLICIES if spends_loss(name)]
    options = [policy_settings()[ALLOWED_LOSS].flag, *(f"--policy {name}" for name in spending)]
    return ConfigError(f"{' and '.join(options)} cannot be used: {reason}")


class Skips(NamedTuple):
    """What a policy may skip. nats: float64 [n_layers, n_expert], what skipping a use of each
    expert costs in the mean; allowed: nats a token."""

    nats: np.ndarray
    allowed: float


@dataclass(frozen=True, slots=True)
class Foreseen:
    """kl: mean KL from the tier `base`, the best of the file, in nats a token; an upper estimate
    where at_most; None where no table knows it."""

    kl: float | None
    at_most: bool
    base: str

    @property
    def text(self) -> str:
        """For the line that says what runs; empty where nothing is lost."""
        if self.kl is None:
            return f", what it loses from {self.base} no table knows (`moe-edge calibrate`)"
        if not self.kl:
            return ""
        return f", estimated to lose {self.kl:.2g} nats a token from {self.base}"


def started(placement: Placement, uses: np.ndarray | None = None) -> np.ndarray:
    """The tier in which each expert starts, [n_layers, n_expert], as its place among those in use;
    for a policy that keeps all experts in memory. uses: in place of what earlier runs learned."""
    shape = placement.shape
    found = np.full((shape.n_layers, shape.n_expert), len(shape.tiers) - 1)
    for layer, expert, tier in placement.first(uses):
        found[layer, expert] = tier
    return found


def foreseen(
    plan: MemoryPlan, uses: np.ndarray, estimate: KlEstimate | None, base: str
) -> Foreseen:
    """What a plan loses, where tokens use each expert so often, [n_layers, n_expert]. estimate:
    what all tiers of the file cost, best first; None where nobody knows.

    Which experts are lowered is decided by gates where the policy is asked while it decodes: those
    with the least, so that the mean gate of their share says too much. A policy that is told what
    it may lose spends all of it.
    """
    placement = plan.placement
    if placement is not None and placement.wants.all_resident:
        tiers = np.array(plan.tiers, np.uint8)[started(placement)]
        if not tiers.any():
            return Foreseen(0.0, False, base)
        return Foreseen(None if estimate is None else estimate.of_uses(uses, tiers), False, base)
    shares, kl = [1.0], 0.0
    if placement is not None:  # as if all experts were used alike
        shares = placement.fractions(np.ones(uses.shape)).mean(axis=(0, 1)).tolist()
        kl = (placement.spends or 0.0) if estimate is not None else 0.0
    asked = [*zip(plan.tiers, shares, strict=True), (SKIP, 1.0 - sum(shares))]
    lost = [(tier, share) for tier, share in asked if tier and share > 1e-9]
    if not lost:
        return Foreseen(kl, False, base)
    if estimate is None:
        return Foreseen(None, False, base)
    for tier, share in lost:
        kl += share * estimate.of_uses(uses, np.full(uses.shape, tier, np.uint8))
    return Foreseen(kl, lost[0][1] < 1.0 - 1e-9, base)


class LossModel:
    """The losses of one model, by the table that the setting `losses` names, else by the table
    beside the model.

    note: why there is none, or None.
    """

    def __init__(self, config: Config, model: ExpertModel) -> None:
        self._named, self._model = config.given("losses"), model
        self.note: str | None = None

    def recall(self, tiers: Sequence[str], per_use: bool = False) -> np.ndarray | None:
        """The losses in these tiers, float64 [n_layers, n_expert, n_tiers]; per_use: as of
        LossTable. None where nothing is known. Raises ConfigError for a named table that cannot be
        used."""
        table, why = self._loaded
        self.note = None if why is None else f"Nominal losses are used: {why}"
        of = LossTable.per_use if per_use else LossTable.of_tiers
        losses = None if table is None else of(table, tiers)
        if losses is None and table is not None:
            missing = f"lacks one of {', '.join(tiers)}"
            if self._named is not None:
                raise ConfigError(f"--losses {self._named} {missing}: calibrate with all of them")
            self.note = f"The loss table beside the model {missing}: nominal losses are used."
        return losses

    def estimate(self, tiers: Sequence[str], base: str | None = None) -> KlEstimate | None:
        """As LossTable.estimate; None where there is no table."""
        table, _ = self._loaded
        return None if table is None else table.estimate(tiers, base)

    def costs(self, tiers: Sequence[str]) -> np.ndarray | None:
        """As LossTable.costs; None where there is no table."""
        table, _ = self._loaded
        return None if table is None else table.costs(tiers)

    def needed(self, tiers: Sequence[str]) -> KlEstimate:
        """As estimate. Raises ConfigError if the losses are not known, and names the command that
        measures them."""
        found = self.estimate(tiers)
        if found is None:
            raise no_losses(self.unknown(tiers))
        return found

    def unknown(self, tiers: Sequence[str]) -> str:
        """Return why the losses of these tiers are not known, with the remedy; an empty text if
        they are known."""
        table, why = self._loaded
        if table is None:
            return str(why)
        if self.estimate(tiers) is not None:
            return ""
        if table.fit is None:
            return f"{self._path} has no factors that make KL of its losses: run {self._command}"
        return f"{self._path} lacks one of {', '.join(tiers)}: run {self._command}"

    @property
    def _command(self) -> str:
        """The command that makes the table, and how long it takes."""
        n_bytes = sum(path.stat().st_size for path in self._model.files)
        minutes = math.ceil(n_bytes / _BYTES_PER_MINUTE)
        about = f"about {minutes} minute{'s' * (minutes > 1)}"
        return f"{calibrate_command(self._model.path)} ({about}, once)"

    @cached_property
    def of_file(self) -> tuple[KlEstimate | None, str]:
        """What all tiers of the file cost, best first, and what to say where nobody knows."""
        names = [tier.name for tier in self._model.tiers]
        return self.estimate(names), self.unknown(names)

    def foreseen(self, plan: MemoryPlan, uses: np.ndarray) -> Foreseen:
        """Estimate what a plan loses with its policy's present settings. uses: how often a token
        uses each expert, [n_layers, n_expert]."""
        estimate, best = self.of_file[0], self._model.tiers[0].name
        spends = plan.placement is not None and plan.placement.spends is not None
        if estimate is None and spends and plan.tier_names[0] == best:
            estimate = self.estimate(plan.tier_names)  # a table that lacks the other tiers
        return foreseen(plan, uses, estimate, best)

    def skips(self, plan: MemoryPlan) -> Skips | None:
        """Return what a plan's policy may skip; None if it does not decide by losses. Raises what
        `needed` does."""
        allowed = plan.placement.spends if plan.placement else None
        if allowed is None:
            return None
        estimate = self.needed(plan.tier_names)
        return Skips(estimate.nats[..., -1] * estimate.gates, allowed)

    @property
    def _path(self) -> Path:
        return Path(self._named or default_path(self._model.path))

    @cached_property
    def _loaded(self) -> tuple[LossTable | None, str | None]:
        """The table, and why there is none. Raises ConfigError for a named one that cannot be
        used."""
        path = self._path
        if self._named is None and not path.exists():
            return None, f"{self._model.path.name} has no loss table: run {self._command}"
        try:
            return load(path, self._model), None
        except ConfigError as error:
            if self._named is not None:
                raise
            return None, str(error)
