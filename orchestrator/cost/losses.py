"""Losses of experts in lower precisions, and the predicted quality loss of a plan, in nats.

The loss table holds the error of each expert's output in each precision. It is stored next to the
model as ``FILE.calib.json``. It is not in the model's metadata, because a longer header moves every
tensor, and a 20 GB file would have to be rewritten. The format is JSON in UTF-8:

    {"format": "moe-edge loss table", "version": 3,
     "model": identity of the file that it belongs to, "name": its name,
     "reference": the full precision, "method": quantization of the candidates that are not stored,
     "calibration": the text, its tokens, its hash, "max_rows": maximum tokens per expert,
     "candidates": [{"name": "q4_k", "bits": 4.5, "stored": true}, ...] best first,
     "counts": [n_layers][n_expert] tokens of the text that each expert saw,
     "power": [n_layers][n_expert] mean square of the reference's output, null without a token,
     "loss": [n_layers][n_expert][n_candidates] mean squared error, null without a token,
     "gates": [n_layers][n_expert] mean square of the gate weights, null without a token; absent if
         it was not measured,
     "kl": conversion to nats, absent if it was not fitted: {"factors": [n_layers] nats for
         g^2 L = 1, "tiers": the tiers used for the fit, "text": the tokens used for the fit,
         "error": relative standard error of all factors together, "scales": multipliers of the
         factors for each tier, empty for 1, "spread": [low, high] percentiles 10 and 90 of the loss
         of windows of the text relative to the factors, "routing": [low, high] range of the mean
         surprise of a use in these windows (see allocation/estimate.py), extended by their standard
         deviation}}
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.columns import aligned
from gguf_tools.experts import ExpertModel
from gguf_tools.file.reader import one_line
from orchestrator.allocation.estimate import KlEstimate, Routing, surprise
from orchestrator.cache.files import read_object, write_whole
from orchestrator.cache.profile import identity
from orchestrator.config import Config
from orchestrator.cost.calibrating import CalibrationTime, format_duration
from orchestrator.errors import ConfigError, LossTableError, NativeError, NoLossTableError
from orchestrator.events import SKIP, SKIP_TIER
from orchestrator.plan.records import Plan
from orchestrator.policy import ALLOWED_LOSS, POLICIES, policy_settings, spends_loss
from orchestrator.policy.base import Placement

_FORMAT = "moe-edge loss table"
_VERSION = 3
_LARGEST_BYTES = 256 << 20
# An upper bound of mean squares of outputs; sums of such numbers stay finite.
_LARGEST = 1e30
# The largest accepted standard error of a logarithm.
_LARGEST_ERROR = 10.0
SUFFIX = ".calib.json"


class TablePrecision(NamedTuple):
    """A precision in a loss table.

    bits: bits per weight over all matrices of an expert. stored: the model file has this precision.
    Other precisions were only measured.
    """

    name: str
    bits: float
    stored: bool


class Fit(NamedTuple):
    """Factors that convert errors of experts' outputs into quality loss (KL divergence) in nats.

    If an expert is computed in a tier (precision), a token loses the product of four numbers: the
    mean squared error of the expert's output, its squared gate weight, the factor of its layer, and
    the scale of the tier.

    - factors: the factor of each layer.
    - tiers, scales: the tiers, including "skip", and their scales. If `scales` is empty, all are 1.
    - text: a description of the text on which the loss was measured.
    - error: the standard error of log(measured loss / fitted loss) for the whole text.
    - spread: percentiles 10 and 90 of measured loss / fitted loss for the windows (pieces) of the
      text.
    - routing: limits of a window's mean surprise, which is high if rarely used experts are used
      (see orchestrator.allocation.estimate).
    """

    factors: tuple[float, ...]
    tiers: tuple[str, ...]
    text: str
    error: float
    scales: tuple[float, ...] = ()
    spread: tuple[float, float] = (1.0, 1.0)
    routing: tuple[float, float] = (-_LARGEST, _LARGEST)


@dataclass(frozen=True, slots=True)
class LossTable:
    """The error of each expert's output in each precision, measured by `moe-edge calibrate`.

    All arrays are [n_layers, n_expert]; `loss` has a third axis [n_candidates]. Means are over the
    tokens of a text that were routed to the expert. They are NaN for an expert without tokens.

    - candidates: the measured precisions, best first.
    - loss: the mean squared error of the expert's output elements against full precision, before
      the multiplication by the gate weight.
    - power: the mean square of the output elements in full precision.
    - counts: the number of tokens that were routed to the expert, int64.
    - gates: the mean squared gate weight. None if it was not measured.
    - fit: converts the errors into quality loss in nats. None if it was not fitted.
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
        """Return the mean squared errors of the experts' outputs, without NaN.

        The result is float64 [n_layers, n_expert, n_candidates], with one error for each precision
        in the field `candidates`. An expert that no token used gets the mean of the other experts
        in its layer. In this mean, each expert counts in proportion to the number of its tokens.
        """
        return self._filled(self.loss)

    def _filled(self, values: np.ndarray) -> np.ndarray:
        """Return the values with a mean instead of NaN for experts without tokens.

        values: float64 [n_layers, n_expert, n]. The mean is over the tokens of the expert's layer.
        """
        seen = self.counts[:, :, None] > 0
        total = np.maximum(self.counts.sum(axis=1, dtype=np.float64), 1)
        share = (self.counts / total[:, None])[:, :, None]
        mean = (np.where(seen, values, 0) * share).sum(axis=1, keepdims=True)
        filled: np.ndarray = np.where(seen, values, mean)
        return filled

    def costs(self, names: Sequence[str]) -> np.ndarray | None:
        """Return the quality loss in nats of one use of each expert, for a gate weight of 1.

        A use is the computation of one expert for one token. The loss is against full precision.
        The result is float64 [n_layers, n_expert, n_names + 1]. It has one value for each of the
        named tiers (precisions), and a last one for skipping the expert. It is None if the table
        lacks one of the tiers, or the factors (`fit`) that convert squared errors into nats.
        """
        lost = self.of_tiers(names)
        if self.fit is None or lost is None:
            return None
        skipped = self._filled(self.power[:, :, None])
        scales = self.fit.spread[1] * self._scales(self.fit, names)
        factors = np.array(self.fit.factors)[:, None, None] * scales
        costs: np.ndarray = factors * np.concatenate([lost, skipped], axis=2)
        return costs

    def _scales(self, fit: Fit, names: Sequence[str]) -> np.ndarray:
        """Return the multipliers of the fitted factors for the named tiers and for skipping.

        The result is float64 [n_names + 1], and the last value is for skipping. A tier that was not
        fitted gets the multiplier of the fitted tier with the nearest number of bits.
        """
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
        """Return an estimator of the quality loss if experts have the named precisions (tiers).

        The loss is the KL divergence, in nats, from a model with all experts in the tier `base`.
        names: the tiers, best first. base: the name of a tier, by default the first of `names`.

        The result is None if this table lacks one of the tiers, the gate weights, or the factors
        that convert its errors into nats (`fit`).
        """
        base = names[0] if base is None else base
        costs = self.costs([*names, base])
        if costs is None or self.gates is None or self.fit is None:
            return None
        gates = self._filled(self.gates[:, :, None])[..., 0]
        low, high = self.fit.spread
        routing = Routing(surprise(self.counts), *self.fit.routing)
        return KlEstimate.of_costs(costs, names, base, gates, low / high, routing)

    def of_tiers(self, names: Sequence[str]) -> np.ndarray | None:
        """Return the mean squared error of each expert's output in the named tiers (precisions).

        The result is float64 [n_layers, n_expert, n_names] without NaN. It is None if one of the
        tiers was not measured.
        """
        known = [each.name for each in self.candidates]
        if not set(names) <= set(known):
            return None
        of_names: np.ndarray = self.filled()[..., [known.index(name) for name in names]]
        return of_names

    def per_use(self, names: Sequence[str]) -> np.ndarray | None:
        """Return the mean quality loss if a token uses an expert in each of the named tiers.

        Tiers are precisions. The result is in nats, float64 [n_layers, n_expert, n_names]. It is
        None if one of the tiers was not measured.

        The loss is computed from the mean squared errors of the experts' outputs. If the field
        `fit` or `gates` is None, the errors cannot be converted into nats, and the result has the
        errors themselves.
        """
        costs, lost = self.costs(names), self.of_tiers(names)
        if costs is None or self.gates is None:
            return lost
        nats: np.ndarray = costs[..., :-1] * self._filled(self.gates[:, :, None])
        return nats

    def render(self) -> str:
        """Return the table as text for people, with one line for each precision.

        A line gives the mean squared error of the experts' outputs, as a fraction of their mean
        square. It has three such fractions: over all tokens, for the best expert and for the worst
        expert.
        """
        lines = [
            "mean: mean squared error of the experts' outputs over all tokens, relative to the "
            "mean square of the outputs.",
            "lowest, highest: the smallest and the largest such relative error of a single expert.",
        ]
        rows: list[tuple[str, ...]] = [
            ("precision", "source", "bits per weight", "mean", "lowest", "highest")
        ]
        seen = self.counts > 0
        tokens = self.counts[seen].astype(np.float64)
        power = np.maximum(self.power[seen], 1 / _LARGEST)
        for index, (name, bits, stored) in enumerate(self.candidates):
            loss = self.loss[..., index][seen]
            whole = float((loss * tokens).sum() / (power * tokens).sum())
            low, high = (loss / power).min(), (loss / power).max()
            source = "stored" if stored else self.method
            errors = (f"{error:.3%}" for error in (whole, low, high))
            rows.append((name, source, f"{bits:.2f}", *errors))
        lines += aligned(rows, str.rjust)
        if self.fit is not None:
            low, high = (math.exp(side * 1.96 * self.fit.error) for side in (-1, 1))
            basis = self.fit.text.split(", sha")[0]
            lines.append(
                f"The KL divergence is estimated from the squared errors of the experts' outputs, "
                f"by a fit to {basis}"
            )
            lines.append(
                f"The true mean KL is {low:.2f} to {high:.2f} times the estimated mean KL (95 % "
                "confidence)"
            )
            low, high = self.fit.spread
            lines.append(
                f"The measured KL of most windows (pieces of text) is {low:.2f} to {high:.2f} "
                "times the estimated KL of the window (10th to 90th percentile)"
            )
            lines.append(f"To be safe, moe-edge multiplies the estimated KL by {high:.2f}")
        if not seen.all():
            n_unseen = np.count_nonzero(~seen)
            lines.append(
                f"  {n_unseen} of {seen.size} experts got no token of the calibration text"
            )
        return "\n".join(lines)


def default_path(model: Path) -> Path:
    """Return the path of a model's loss table: FILE.calib.json, next to the model FILE.

    The loss table has the error of each expert's output in each precision.
    """
    return model.with_name(model.name + SUFFIX)


def save(path: Path, model: ExpertModel, table: LossTable) -> None:
    """Write a loss table to a file atomically. Raises OSError if the file cannot be written."""
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
    """Round the numbers in nested lists to six significant digits, and replace NaN by None."""
    if isinstance(values, list):
        return [_numbers(each) for each in values]
    return None if math.isnan(values) else float(f"{values:.6g}")


def load(path: Path, model: ExpertModel | None) -> LossTable:
    """Read the loss table in the file `path`.

    model: the model that the table must belong to. If it is None, the table may belong to any
    model. Raises LossTableError if the table is missing or damaged, or belongs to another model
    file.
    """
    command = calibrate_command(None if model is None else model.path)
    again = f"run {command}"
    data = _parse(path, again)
    if model is not None and data.get("model") != identity(model):
        name = one_line(str(data.get("name")))
        raise LossTableError(f"{path}: this loss table was made with another file ({name})", again)
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
        raise _damaged(path, again) from error
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
        raise _damaged(path, again)
    return table


def _fit(data: Any) -> Fit | None:
    """Parse the conversion to nats in the JSON of a loss table; return None for None.

    Raises KeyError, TypeError or ValueError for data that `save` cannot have written.
    """
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
    """Parse a list of two finite numbers. Raises TypeError or ValueError for anything else."""
    low, high = (float(each) for each in data)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("kl: not finite")
    return low, high


def _parse(path: Path, again: str) -> dict[str, Any]:
    """Read the JSON object of a loss table.

    again: the remedy that an error names, such as a command. Raises LossTableError if the file
    cannot be read, is no loss table, or has another format version.
    """
    try:
        data = read_object(path, _LARGEST_BYTES)
    except OSError as error:
        raise LossTableError(f"{path} cannot be read: {error.strerror or error}", again) from error
    if data is None or data.get("format") != _FORMAT:
        raise _damaged(path, again)
    if data.get("version") != _VERSION:
        raise LossTableError(f"{path}: this loss table has another format version", again)
    return data


def _damaged(path: Path, again: str) -> LossTableError:
    return LossTableError(f"{path}: this file is not a loss table, or is damaged", again)


def calibrate_command(model: Path | str | None) -> str:
    """Return the command that makes a model's loss table.

    If the table exists already, the command replaces it.
    """
    if model is None:
        return "`moe-edge calibrate -m MODEL`"
    replaces = " --force" if default_path(Path(model)).exists() else ""
    return f"`moe-edge calibrate -m {shlex.quote(str(model))}{replaces}`"


def no_losses(reason: str, is_missing: bool = False) -> ConfigError:
    """Return an error that says which options cannot be used, because quality losses are unknown.

    These are the option --max-loss (a loss budget) and the policies that have such a budget.

    - reason: why the losses are unknown.
    - is_missing: whether the model has no usable loss table. If True, the error is a
      NoLossTableError, because `moe-edge calibrate` can make the table.
    """
    spending = [name for name in POLICIES if spends_loss(name)]
    options = [policy_settings()[ALLOWED_LOSS].flag, *(f"--policy {name}" for name in spending)]
    kind = NoLossTableError if is_missing else ConfigError
    return kind(f"{' and '.join(options)} cannot be used: {reason}")


class Skips(NamedTuple):
    """The quality loss that a policy may cause by skipping experts.

    nats: for each expert, the mean loss if one use of the expert is skipped, float64 [n_layers,
    n_expert]. allowed: the maximum loss (loss budget) in nats per token.
    """

    nats: np.ndarray
    allowed: float


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The predicted quality loss of a plan.

    kl: mean KL divergence from the best precision of the file, in nats per token. It is None if no
    loss table covers the plan. at_most: kl is an upper bound. base: name of the best precision.
    """

    kl: float | None
    at_most: bool
    base: str

    @property
    def text(self) -> str:
        """A phrase for the status line about the predicted loss; empty if the plan is lossless."""
        if self.kl is None:
            return (
                f", quality loss of answers relative to {self.base} unknown (to measure it, run "
                "`moe-edge calibrate`)"
            )
        if not self.kl:
            return ""
        return f", estimated quality loss {self.kl:.2g} nats per token relative to {self.base}"


def started(placement: Placement, uses: np.ndarray | None = None) -> np.ndarray:
    """Return the tier (precision) of each expert at the start of a run, int [n_layers, n_expert].

    This function is for policies that keep every expert in memory. A tier is an index in
    `placement.shape.tiers`, 0 for the best.

    placement: how the policy divides the memory among experts. uses: the fraction of tokens that
    use each expert, [n_layers, n_expert]; None for the usage in earlier runs.
    """
    shape = placement.shape
    found = np.full((shape.n_layers, shape.n_expert), len(shape.tiers) - 1)
    for layer, expert, tier in placement.first(uses):
        found[layer, expert] = tier
    return found


def foreseen(plan: Plan, uses: np.ndarray, estimate: KlEstimate | None, base: str) -> Foreseen:
    """Predict the quality loss of a plan: a mean KL divergence in nats per token.

    The divergence is from the model with every expert in the file's best precision. If the policy
    has a loss budget (the loss per token that it may cause), it is assumed to use all of it. The
    field `at_most` of the result is True if the prediction is an upper bound.

    - plan: has the policy, and the memory for experts in each precision.
    - uses: the probability that a token uses each expert, [n_layers, n_expert].
    - estimate: gives the loss of each expert in each precision. None if the losses are unknown.
    - base: the name of the best precision. It is only copied to the result.
    """
    placement = plan.placement
    if placement is not None and placement.wants.all_resident:
        tiers = np.array(plan.tiers, np.uint8)[started(placement)]
        if not tiers.any():
            return Foreseen(0.0, False, base)
        return Foreseen(None if estimate is None else estimate.of_uses(uses, tiers), False, base)
    shares, kl = [1.0], 0.0
    if placement is not None:  # with uniform usage
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
    """Predicts quality losses of one model from its loss table.

    The loss table has the error of each expert's output in each precision. It is in the file that
    the setting `losses` names, or else in the file next to the model. note: a sentence that tells
    the user why no table is used, or None.
    """

    def __init__(self, config: Config, model: ExpertModel) -> None:
        self._named, self._model = config.given("losses"), model
        self._config = config
        self.note: str | None = None

    def recall(self, tiers: Sequence[str], per_use: bool = False) -> np.ndarray | None:
        """Return the loss of each expert in each of these precisions (tiers).

        The result is float64 [n_layers, n_expert, n_tiers]. It comes from the model's loss table.
        It is None if the model has no loss table, or if the table lacks one of the tiers. The
        argument `per_use` selects the values:

        - per_use=False: the mean squared error of the expert's output.
        - per_use=True: the mean quality loss, in nats, from one use of the expert by a token. A
          table that cannot convert errors into nats gives the errors here, too.

        Raises ConfigError if the user named the table, and it is unusable or lacks one of the
        tiers.
        """
        table, why = self._loaded
        self.note = None
        if why is not None:
            self.note = (
                f"Quality losses are only estimated from the bits per weight: {why}: "
                f"{self._remedy()}"
            )
        of = LossTable.per_use if per_use else LossTable.of_tiers
        losses = None if table is None else of(table, tiers)
        if losses is None and table is not None:
            names = ", ".join(tiers)
            if self._named is not None:
                raise ConfigError(
                    f"--losses {self._named} lacks one of the precisions {names}: calibrate with "
                    "all of them"
                )
            self.note = (
                f"The model's loss table lacks one of the precisions {names}. Quality losses are "
                f"only estimated from the bits per weight."
            )
        return losses

    def estimate(self, tiers: Sequence[str], base: str | None = None) -> KlEstimate | None:
        """Return an estimator of the quality loss of computing experts in these tiers (precisions).

        tiers: names, best first. base: the tier against which the loss is measured, by default the
        first of `tiers`. The result is None if the model has no loss table, or if the table does
        not cover the tiers.
        """
        table, _ = self._loaded
        return None if table is None else table.estimate(tiers, base)

    def costs(self, tiers: Sequence[str]) -> np.ndarray | None:
        """Return the quality loss in nats of one use of each expert, for a gate weight of 1.

        A use is the computation of one expert for one token. The result is float64 [n_layers,
        n_expert, n_tiers + 1]: the loss in each tier (precision), and then the loss if the expert
        is skipped. It is None if the model has no loss table, or if the table does not cover the
        tiers.
        """
        table, _ = self._loaded
        return None if table is None else table.costs(tiers)

    def needed(self, tiers: Sequence[str]) -> KlEstimate:
        """Return an estimator of the quality loss of computing experts in these tiers (precisions).

        The loss is in nats, relative to the first tier. If the losses are unknown, this method
        raises an error, which names the command that measures them:

        - NoLossTableError if the model has no usable loss table.
        - LossTableError if a table that the user named cannot be used, for example because it is
          missing, damaged or of another model.
        - ConfigError if the table lacks one of the tiers, the gate weights, or the factors that
          convert squared errors of the experts' outputs into nats.

        tiers: the names of the tiers, best first.
        """
        found = self.estimate(tiers)
        if found is None:
            raise no_losses(self.unknown(tiers, measures=True), self._loaded[0] is None)
        return found

    def unknown(self, tiers: Sequence[str], measures: bool = False) -> str:
        """Return why the losses of these tiers are unknown, and which command measures them.

        The text is empty if the losses are known. measures: whether the speed of the processor may
        be measured, if it is unknown, to say how long the command takes.
        """
        table, why = self._loaded
        if table is None:
            return f"{why}: {self._remedy(measures)}"
        if self.estimate(tiers) is not None:
            return ""
        if table.fit is None or table.gates is None:
            return (
                f"the loss table {self._path} cannot predict the quality loss (KL divergence): "
                f"{self._remedy(measures)}"
            )
        return (
            f"the loss table {self._path} lacks one of the precisions {', '.join(tiers)}: "
            f"{self._remedy(measures)}"
        )

    def _remedy(self, measures: bool = False) -> str:
        """Return the advice to run the command that makes the loss table, with its duration.

        measures: whether the speed of the processor may be measured for this, which takes some
        seconds. Without it, and if no earlier run has measured it, the advice has no duration.
        """
        command = calibrate_command(self._model.path)
        with suppress(NativeError):
            seconds = CalibrationTime.of(self._model, self._config, measures=measures).total_s
            return f"run {command} (about {format_duration(seconds)}, once)"
        return f"run {command} (once)"

    @cached_property
    def of_file(self) -> tuple[KlEstimate | None, str]:
        """A pair (estimator, reason) for the quality loss of all precisions of the model file.

        If the losses are known, the reason is empty. Otherwise the estimator is None, and the
        reason says why the losses are unknown.
        """
        names = [tier.name for tier in self._model.tiers]
        return self._of_all, self.unknown(names)

    @property
    def _of_all(self) -> KlEstimate | None:
        """An estimator of the quality loss of all tiers of the file, or None if it is unknown."""
        return self.estimate([tier.name for tier in self._model.tiers])

    def foreseen(self, plan: Plan, uses: np.ndarray) -> Foreseen:
        """Predict the quality loss of a plan with the current settings of its policy.

        uses: how often a token uses each expert, [n_layers, n_expert].
        """
        estimate, best = self._of_all, self._model.tiers[0].name
        spends = plan.placement is not None and plan.placement.spends is not None
        if estimate is None and spends and plan.tier_names[0] == best:
            estimate = self.estimate(plan.tier_names)  # a table that lacks the other tiers
        return foreseen(plan, uses, estimate, best)

    def skip_budget(self, plan: Plan) -> Skips | None:
        """Return the loss budget of a plan's policy, and the loss of skipping each expert.

        The budget is the quality loss that the policy may cause by skipping experts, in nats per
        token. The loss of skipping is an array [n_layers, n_expert], in nats for each use of an
        expert that is skipped.

        The result is None if the policy has no loss budget. Raises ConfigError if the losses of the
        plan's tiers (precisions) are unknown.
        """
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
        """The loss table, or None and the reason why there is none.

        Raises ConfigError if a table that the user named cannot be used.
        """
        path = self._path
        if self._named is None and not path.exists():
            return None, f"{self._model.path.name} has no loss table"
        try:
            return load(path, self._model), None
        except LossTableError as error:
            if self._named is not None:
                raise
            return None, error.problem
