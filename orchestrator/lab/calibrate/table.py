"""Measures a model's loss table, and fits the factors that convert it to KL divergence.

The errors of the experts are measured in one pass over a text, and the factors in several more.
Each pass is saved when it is done, so that an interrupted run can continue.

The first pass reads the text in the best tier. Each further pass reads it with one kind of loss:

- experts skipped in one part of the depth, which differs between windows. They are drawn for each
  pair of a token and an expert.
- experts skipped in all layers.
- experts lowered to one tier in all layers, one pass per tier. They are drawn for each expert and
  step.

The sensitivity of a window to any loss varies by up to a factor of eight. Each window therefore has
its own sensitivity c. With a factor f for each part of the depth,

    KL of a window = c * sum of f g^2 L over its parts.

The passes with skipped experts give f and c by alternating estimates. The mean of c is the scale.
Each tier has another scale, because large losses change answers less than proportionally. The top
expert of a token is never skipped, because no policy skips it, and skipping it costs more than the
other experts' losses suggest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.process import compute_threads
from gguf_tools.quantize.ggml import load_ggml
from gguf_tools.quantize.methods import Rtn
from gguf_tools.quantize.tiers import parse_types
from orchestrator.allocation.estimate import ROUTING_TOKENS, surprise
from orchestrator.cache.files import whole_file
from orchestrator.cache.profile import cached_path, identity
from orchestrator.config import Config
from orchestrator.cost.calibrating import CalibrationTime, format_duration
from orchestrator.cost.losses import Fit, LossTable, load, save
from orchestrator.errors import BudgetError, ConfigError, NativeError
from orchestrator.events import SKIP_TIER, DecisionBuffer, RouteEvent
from orchestrator.lab.calibrate.capture import Calibration, Progress, read_calibration, spill_folder
from orchestrator.lab.calibrate.default import default_calibration
from orchestrator.lab.calibrate.measure import OutputSums, Precisions
from orchestrator.lab.calibrate.methods import RTN, Method, open_quantizer
from orchestrator.lab.calibrate.reader import TextReader
from orchestrator.lab.eval.arithmetic import kl_divergence
from orchestrator.lab.eval.judge import Reference
from orchestrator.native.llama import Bindings, Model
from orchestrator.runtime.evaluator import log_softmax

# Fractions of the experts that a pass lowers, skips in one part of the layers, and skips in all
# layers. Small losses change answers more than proportionally. The last fraction determines the
# scale. It is so small that the loss is about the usual --max-loss, 0.01 nats per token for the
# demo.
_LOWERED, _ALONE, _SKIPPED = 0.5, 0.25, 0.02
# Number of parts into which the layers are divided. Each part has its own factor.
_PARTS = 8
_TURNS = 32
_SEED = 1
_DRAWS = 1000
# Quantiles, over the windows, of the measured loss divided by the estimated loss.
_TEXTS = (0.1, 0.9)

# Names of the passes that skip experts. A pass that lowers experts has the name of the tier.
PARTS, ALL = "skip in parts", "skip"


class Moved(NamedTuple):
    """How much a model's output moves (changes) if some of its experts are changed.

    A changed expert is computed in a lower precision, or skipped. The model reads a text in n
    windows (pieces). Each value is a mean over the tokens of a window.

    - kl float64 [n]: the KL divergence from the unchanged model, in nats.
    - lost float64 [n, n_layers]: the error in each layer. For one token, the error is the sum of
      g^2 e over its changed experts. g is the expert's gate weight, and e is the mean squared error
      of the expert's output after the change.
    - surprise float64 [n]: a number that is high if the tokens use experts that the text rarely
      uses.
    """

    kl: np.ndarray
    lost: np.ndarray
    surprise: np.ndarray


def passes(tiers: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return the passes of a calibration, each as (name, precision).

    In each pass, the model reads the whole text while some experts, drawn at random, are changed.
    They are computed in the given precision, or skipped if the precision is None. All other experts
    keep the best precision.

    - tiers: the precisions of the model file, best first.
    """
    return [*((name, None) for name in (PARTS, ALL)), *((tier, tier) for tier in tiers[1:])]


def parts_of(n_layers: int, n_windows: int) -> np.ndarray:
    """Divide the layers of a model into at most 8 groups of consecutive layers, called parts.

    Returns the index of each layer's part, int [n_layers].

    A calibration measures the effect of skipped experts for each part. For this purpose, the model
    reads each window (piece of the text) with experts skipped in a single part. Because each part
    needs a window, there are at most n_windows parts.
    """
    n = min(_PARTS, n_layers, n_windows)
    return np.arange(n_layers) * n // n_layers


def moved(
    reader: TextReader,
    name: str,
    costs: np.ndarray,
    unusual: np.ndarray,
    against: Reference,
    progress: Progress,
) -> Moved:
    """Measure how a model's output moves if its experts are skipped or have a lower precision.

    The model reads its text once. The result has three means for each window (piece of the text):
    the KL divergence from the unchanged model, the error of the changed experts (from `costs`), and
    how rare the used experts are (from `unusual`). By the last mean, a later run recognises texts
    for which the measured errors are not valid.

    - reader: the model with its text.
    - name: one of the names from passes(). It decides which experts are changed, and how.
    - costs float64 [n_layers, n_expert]: the mean squared output error of each expert if it is
      changed.
    - unusual float64 [n_layers, n_expert]: a number that is high for a rarely used expert.
    - against: the log-probabilities of the unchanged model.
    - progress: called after each step with the fraction of the text that was read.
    """
    n_layers, n_windows = len(costs), len(reader.scored)
    part = parts_of(n_layers, n_windows)
    n_parts = int(part[-1]) + 1
    kl, lost, seen = np.zeros(n_windows), *np.zeros((2, n_windows, n_layers))
    surprised = np.zeros(n_windows)
    lowers = name not in (PARTS, ALL)
    at = 0

    def change(event: RouteEvent, decision: DecisionBuffer) -> np.ndarray | None:
        layer, of = event.layer, np.array(reader.reading)[event.sequences_array]
        random = np.random.default_rng([_SEED, reader.reading[0], layer])
        squares = np.square(event.weights_array, dtype=np.float64)
        bills = squares * costs[layer, event.ids_array]
        skipped = None
        if lowers:
            chosen = random.random(len(decision.tier_array)) < _LOWERED
            decision.tier_array[chosen] = 1
            bills = bills * chosen[event.ids_array]
        else:
            shares = np.full(len(of), _SKIPPED)
            if name == PARTS:
                shares = np.where(of % n_parts == part[layer], _ALONE, 0.0)
            skipped = random.random(bills.shape) < shares[:, None]
            if event.k > 1:
                skipped[np.arange(len(of)), event.weights_array.argmax(axis=1)] = False
            bills = bills * skipped
        lost[:, layer] += np.bincount(of, bills.sum(axis=1), n_windows)
        seen[:, layer] += np.bincount(of, minlength=n_windows)
        surprised[:] += np.bincount(of, unusual[layer, event.ids_array].mean(axis=1), n_windows)
        return skipped

    for done, step in enumerate(reader.read(change, masks=not lowers), 1):
        for window, logits in zip(np.array(step.windows)[step.of], step.logits, strict=True):
            row = against.row(at).astype(np.float64)
            kl[window] += kl_divergence(row, log_softmax(logits))
            at += 1
        progress(done / len(reader.steps))
    scored = np.array([each.sum() for each in reader.scored])
    return Moved(kl / scored, lost / np.maximum(seen, 1), surprised / seen.sum(axis=1))


def fitted(tiers: Sequence[str], found: dict[str, Moved], text: str, weights: np.ndarray) -> Fit:
    """Fit the factors that convert errors of experts' outputs to the model's KL divergence.

    The factors are fitted so that, for the whole text,

        KL divergence = scale of precision * sum over layers (factor of layer * error in layer)

    The model read the text several times. In two readings, experts were skipped instead of computed
    in a lower precision. The factors of the layers are fitted to these two readings, with a scale
    of 1. In each other reading, experts had one lower precision, and its scale is fitted.

    - tiers: the precisions of the model file, best first.
    - found: the KL divergence and the errors of each reading, by the reading's name from passes().
    - text: a description of the text.
    - weights: the number of tokens of each window (piece of the text), float64 [n].

    Raises ConfigError if skipping experts or lowering their precision had no measurable effect.
    """
    n_layers = found[ALL].lost.shape[1]
    part = parts_of(n_layers, len(weights))
    n_parts = int(part[-1]) + 1
    weights = weights / weights.sum()

    def by_part(lost: np.ndarray) -> np.ndarray:
        return np.stack([lost[:, part == each].sum(axis=1) for each in range(n_parts)], axis=1)

    every = by_part(found[ALL].lost)
    alone = by_part(found[PARTS].lost)
    of_part = weights * found[PARTS].kl @ (alone > 0)
    factors = np.ones(n_parts)
    for _ in range(_TURNS):
        sensitivity = weights * found[ALL].kl / np.maximum(every @ factors, 1e-300)
        foreseen = sensitivity @ alone
        tells = (of_part > 0) & (foreseen > 0)
        if not (tells.any() and (found[ALL].kl > 0).all()):
            raise ConfigError(
                "skipped experts did not measurably change the model's output, or the text is too "
                "short: try a longer text"
            )
        # If the text is too short to measure a part, the part gets the common factor.
        usual = of_part[tells].sum() / foreseen[tells].sum()
        factors = np.where(tells, of_part / np.where(tells, foreseen, 1), usual)
    factors = factors * float(weights @ found[ALL].kl) / float(weights @ (every @ factors))
    error = spread(weights * found[ALL].kl, weights * (every @ factors))
    scales = {}
    for tier in tiers[1:]:
        foreseen_kl = float(weights @ (by_part(found[tier].lost) @ factors))
        scales[tier] = float(weights @ found[tier].kl) / max(foreseen_kl, 1e-300)
    # The best tier gets the next tier's scale. It has no loss, unless the reference is another
    # file.
    scales = {tiers[0]: next(iter(scales.values()), 1.0), **scales, SKIP_TIER: 1.0}
    if not all(0 < each < np.inf for each in (*factors, *scales.values())):
        raise ConfigError(
            "experts in low precision did not measurably change the model's output, or the text "
            "is too short: try a longer text"
        )
    of_windows = found[ALL].kl / (every @ factors)
    low, high = np.quantile(of_windows, _TEXTS).tolist()
    surprise, margin = found[ALL].surprise, found[ALL].surprise.std()
    routing = float(surprise.min() - margin), float(surprise.max() + margin)
    return Fit(
        tuple(factors[part].tolist()),
        tuple(scales),
        text,
        error,
        tuple(scales.values()),
        (low, high),
        routing,
    )


def spread(measured: np.ndarray, foreseen: np.ndarray) -> float:
    """Return how uncertain the ratio sum(measured) / sum(foreseen) is.

    The result is the standard error of the ratio's logarithm. It is estimated with a bootstrap over
    the n windows (pieces) of a text, with a fixed random seed.

    - measured: KL divergence of each window, weighted by its number of tokens, float64 [n].
    - foreseen: predicted KL divergence of each window, with the same weights, float64 [n].
    """
    n = len(measured)
    drawn = np.random.default_rng(_SEED).integers(0, n, (_DRAWS, n))
    return float(np.std(np.log(measured[drawn].sum(axis=1) / foreseen[drawn].sum(axis=1))))


# Length of a window, in tokens.
WINDOW = ROUTING_TOKENS
_FORM = 5

# The largest completed fraction that is assumed for a part before it reports.
_NEARLY = 0.95
# Names of the stages of a calibration before the passes.
QUANTIZING, READING, READING_STORED, MEASURING = "quantizing", "reading", "stored", "measuring"


class Parts:
    """Estimates the progress of a calibration that consists of named parts, which run in order.

    A part reports its progress rarely, often only at its end. Between reports, the estimate assumes
    that the part takes its predicted time.
    """

    def __init__(self, seconds: Mapping[str, float]) -> None:
        """Start with no part begun. `seconds` maps each part's name to its predicted duration."""
        self._seconds = seconds
        self._done_s = self._part_s = self._reported = 0.0
        self._since = monotonic()

    @property
    def total_s(self) -> float:
        """The predicted duration of the calibration, the sum over its named parts, in seconds."""
        return sum(self._seconds.values())

    def begin(self, name: str) -> Progress:
        """Record the start of a named part of the calibration, and return its progress callback.

        All earlier parts then count as complete. The code of the part must call the callback with
        the completed fraction of the part, 0 to 1.
        """
        names = list(self._seconds)
        self._done_s = sum(self._seconds[each] for each in names[: names.index(name)])
        self._part_s = self._seconds[name]
        self._report(0.0)
        return self._report

    def _report(self, share: float) -> None:
        self._reported, self._since = share, monotonic()

    def share(self) -> float:
        """Return the estimated completed fraction of the whole calibration, from 0 to 1."""
        assumed = (monotonic() - self._since) / max(self._part_s, 1e-9)
        part = min(self._reported + assumed, _NEARLY + (1 - _NEARLY) * self._reported)
        return (self._done_s + part * self._part_s) / max(self.total_s, 1e-9)


class Kept:
    """The saved results of a calibration, so that it can continue after an interruption.

    Each model has a folder for these results in the user's cache. `went_on` is True if an
    interrupted calibration has left results.
    """

    def __init__(self, model: ExpertModel, asked: Mapping[str, Any]) -> None:
        """Open the folder of a model's calibration.

        `asked` are the inputs of the calibration, such as its text and types. If the folder's files
        were computed from other inputs, the files are deleted. Raises OSError.
        """
        self.folder = cached_path(model, "calibrating").with_suffix("")
        key = json.dumps({"form": _FORM, "model": identity(model), **asked}, sort_keys=True)
        known = self.folder / "asked.json"
        is_same = known.exists() and known.read_text("utf-8") == key
        # save() writes the table before any pass.
        self.went_on = is_same and self.table_path.exists()
        if not is_same:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            with whole_file(known) as file:
                file.write(key.encode())

    @property
    def table_path(self) -> Path:
        """Path of the saved loss table, which has each expert's output error in each precision.

        The calibration saves the table as soon as these errors are measured. It computes the
        factors that convert errors to KL divergence afterwards, so this file does not have them.
        """
        # When this file exists, the file of log_probs_path is complete.
        return self.folder / "table.json"

    @property
    def log_probs_path(self) -> Path:
        """Path of the file with the log-probabilities of the calibration text.

        The model computes them in its best precision. The file has the values of the whole
        vocabulary for each scored token of the text. If the file does not exist, an empty file is
        created.
        """
        path = self.folder / "logits.f32"
        path.touch()
        return path

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays that were saved under this name, or {} if none were saved."""
        path = self.folder / f"{name}.npz"
        if not path.exists():
            return {}
        with np.load(path) as found:
            return dict(found)

    def keep(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Save arrays in the folder of the calibration, as the file NAME.npz.

        arrays: the arrays by their names in the file. The method `arrays` reads the file.
        """
        with whole_file(self.folder / f"{name}.npz") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]


def read_windows(method: Method, path: Path) -> Calibration:
    """Return the calibration text as windows (lists of tokens) of equal length.

    Documents are concatenated before they are cut, because windows that are read in one step need
    equal lengths. If `method` names no text, the built-in text is used. `path` is the model file.
    """
    words = Model(
        Bindings.load(), path, managed=True, use_extra_bufts=False, use_mmap=False, no_data=True
    )
    with closing(words):
        tokenize = partial(words.tokenize, add_special=True, parse_special=True)
        if method.calib is None:
            return default_calibration(tokenize, method.tokens, WINDOW)
        found = read_calibration(tokenize, method.calib, method.tokens, WINDOW)
    tokens = [token for window in found.windows for token in window]
    starts = range(0, max(1, len(tokens) - WINDOW + 1), WINDOW)
    return replace(found, windows=[tokens[start : start + WINDOW] for start in starts])


def measure_losses(
    method: Method,
    source: Path,
    reference: Path | None,
    types: Sequence[str],
    out: Path,
    show: Callable[[Callable[[], float]], None],
    note: Callable[[str], None],
) -> LossTable:
    """Measure a model's loss table, write it to the file `out`, and return it.

    A loss table has the mean squared error of each expert's output in each precision. It also has
    factors that convert these errors to KL divergence, if they can be measured.

    - source: the model file. The table has its precisions, and the further quantization `types`.
    - reference: the same model in full precision. None uses the best precision of `source`.
    - method: names the calibration text, and the method that quantizes to `types`.
    - show: called once with a function that returns the completed fraction.
    - note: receives messages for the user.
    """
    text = read_windows(method, source)
    asked = {
        "text": text.summary(),
        "reference": None if reference is None else str(reference.resolve()),
        "types": [*types],
        "method": method.chosen,
        "ram": method.ram,
    }
    with ExpertModel.open(source) as model:
        kept = Kept(model, asked)
        tiers = [tier.name for tier in model.tiers]
        if kept.went_on:
            note(f"Continued the interrupted run saved in {kept.folder}.")
        config = Config.build(model=source, threads=method.threads, ram=method.ram)
        time = CalibrationTime.of(model, config, text.n_tokens)
        seconds = {} if kept.table_path.exists() else _first_parts(method, source, reference, time)
        names = [name for name, _ in passes(tiers)]
        of_pass = dict(zip(names, time.passes_s, strict=True))
        parts = Parts(seconds | {name: of_pass[name] for name in names if not kept.arrays(name)})
        note(
            f"Calibrating takes about {format_duration(parts.total_s)}. "
            "If it is interrupted, the same command continues it."
        )
        show(parts.share)
        run = _Run(method, model, text, kept, parts)
        if not kept.table_path.exists():
            save(kept.table_path, model, run.measured(reference, types, note))
        table = load(kept.table_path, model)
        try:
            table = replace(table, fit=run.fit(table, tiers))
        except (BudgetError, ConfigError, NativeError) as error:
            note(
                f"The loss table is saved without estimates of the KL divergence, so --max-loss "
                f"cannot use it: {error}"
            )
        # The table is written last, so that an interrupted run leaves no incomplete table.
        save(out, model, table)
        shutil.rmtree(kept.folder, ignore_errors=True)
    return table


def _first_parts(
    method: Method, source: Path, reference: Path | None, time: CalibrationTime
) -> dict[str, float]:
    """Return the predicted duration in seconds of each stage before the passes over the text.

    These stages compute the loss table without its factors. The keys are the names of the stages.
    """
    return {
        QUANTIZING: 0.0 if method.chosen == RTN else time.passes_s[0],
        READING: time.read_s,
        READING_STORED: 0.0 if reference in (None, source) else time.passes_s[0],
        MEASURING: time.measure_s,
    }


class _Run:
    """Performs one calibration, and saves the result of each pass over the text."""

    def __init__(
        self, method: Method, model: ExpertModel, text: Calibration, kept: Kept, parts: Parts
    ) -> None:
        self._method, self._model, self._text, self._kept = method, model, text, kept
        self._parts = parts
        self._threads = compute_threads(method.threads)

    def measured(
        self, reference: Path | None, types: Sequence[str], note: Callable[[str], None]
    ) -> LossTable:
        """Measure the loss of each expert in each precision, and return the losses as a table.

        A loss is the mean squared error of an expert's output on the calibration text. Also saves
        the model's log-probabilities for this text, in the best precision of the model file. The
        method `fit` needs them later.

        - reference: file of the model in full precision. None uses the best precision of the model
          file.
        - types: quantization types to measure in addition to the precisions of the model file.
        - note: receives messages for the user.
        """
        # rtn does not use the text, but the measurement of the losses does.
        method, model, path = self._method, self._model, reference or self._model.path
        quantizing = replace(method, calib=None) if method.chosen == RTN else method
        with ExitStack() as stack:
            full = stack.enter_context(ExpertModel.open(path))
            opened = open_quantizer(quantizing, path, self._parts.begin(QUANTIZING), note)
            by = stack.enter_context(opened) or Rtn(load_ggml())
            wanted = parse_types(types, by.has_importance)
            precisions = Precisions(model, full, wanted, by, load_ggml(), self._threads)
            # The experts' inputs are needed only if a precision differs from full precision.
            differ = path != model.path or len(precisions.listed) > 1
            sums = OutputSums(full, spill_folder() if differ else None)
            self._save_log_probabilities(path, sums, self._parts.begin(READING))
            if path != model.path:
                self._save_log_probabilities(model.path, None, self._parts.begin(READING_STORED))
            return precisions.table(sums, self._text, self._parts.begin(MEASURING))

    def _save_log_probabilities(
        self, path: Path, sums: OutputSums | None, progress: Progress
    ) -> None:
        """Let a model read the text in its best tier, and save the log-probabilities of the tokens.

        `path` is the model file. The outputs of its experts are added to `sums`, if given.
        """
        windows, ram = self._text.windows, self._method.ram
        with TextReader(path, windows, self._threads, ram) as reader:
            self._kept.keep("scored", {str(n): each for n, each in enumerate(reader.scored)})
            scored, at = sum(int(each.sum()) for each in reader.scored), 0
            steps = (
                reader.read(sums.route, sums.add_product) if sums else reader.read(lambda *_: None)
            )
            for done, step in enumerate(steps, 1):
                if at == 0:
                    rows = Reference(scored, step.logits.shape[1], self._kept.log_probs_path)
                for logits in step.logits:
                    rows.rows[at] = log_softmax(logits)
                    at += 1
                progress(done / len(reader.steps))
            rows.close()

    def fit(self, table: LossTable, tiers: Sequence[str]) -> Fit:
        """Compute the factors that convert the losses of a loss table to KL divergence.

        For this purpose, the model reads the calibration text several times. Each time, some
        experts are skipped or have a lower precision. Readings that an interrupted calibration has
        completed are not repeated.

        - tiers: the precisions of the model file, best first.

        Raises ConfigError if no factor can be computed, and the exceptions of loading a model.
        """
        plain = replace(table, fit=Fit((1.0,) * len(table.counts), (), "", 0.0))
        found = {}
        for name, tier in passes(tiers):
            known = self._kept.arrays(name)
            if not known:
                progress = self._parts.begin(name)
                known = self._moved(plain, name, tier, tiers[0], progress)._asdict()
                self._kept.keep(name, known)
            found[name] = Moved(**known)
        weights = np.array([len(window) for window in self._text.windows], np.float64)
        text = f"{self._text.n_tokens} tokens of {table.calibration}"
        return fitted(tiers, found, text, weights)

    def _moved(
        self, table: LossTable, name: str, tier: str | None, best: str, progress: Progress
    ) -> Moved:
        estimate = table.estimate([best] if tier is None else [best, tier])
        if estimate is None:
            missing = best if tier is None else tier
            raise ConfigError(
                f"the new loss table has no losses for the precision {missing}: run `moe-edge "
                f"calibrate` again with --force"
            )
        costs = estimate.nats[..., -1 if tier is None else 1]
        known = list(self._kept.arrays("scored").values())
        windows, ram = self._text.windows, self._method.ram
        n_rows = sum(int(each.sum()) for each in known)
        n_vocab = self._kept.log_probs_path.stat().st_size // (4 * n_rows)
        with (
            TextReader(self._model.path, windows, self._threads, ram, tier, known) as reader,
            Reference(n_rows, n_vocab, self._kept.log_probs_path) as whole,
        ):
            # Fewer tokens are scored if less memory is available than in the run that saved the
            # log-probabilities.
            chosen = np.concatenate(reader.scored)[np.concatenate(known)]
            against = whole.part(np.flatnonzero(chosen))
            return moved(reader, name, costs, surprise(table.counts), against, progress)
