"""The loss table of a model: measured in one pass over a text, and made nats of in some more. What
is done is kept until all of it is, so that an interrupted run goes on.

The factors that make nats of a loss table: what lowering experts does to a model's answers.

The model reads the text once in its best tier, and then again with a loss in it, a pass for each
kind of it: experts skipped, drawn for each pair of a token and an expert, in one part of the depth,
which is another one in each window; skipped in all layers; and lowered in all layers, drawn for
each expert and step, in one tier after the other. Windows differ by up to eight times in how easily
their answers move, whatever moves them, so that each has a sensitivity of its own c: with the
factors f of the parts,

    KL of a window = c * sum of f g^2 L over its parts.

The passes with skipping give f and c by turns; the mean of c is the scale. A tier has a scale of
its own beside that, since large moves change answers less than in proportion. A token's first
expert is never skipped, as no policy skips it: that costs more than the losses of the others
foretell.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
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
from orchestrator.cost.losses import Fit, LossTable, load, save
from orchestrator.errors import BudgetError, ConfigError, NativeError
from orchestrator.events import SKIP_TIER, DecisionBuffer, RouteEvent
from orchestrator.lab.calibrate.capture import Calibration, Progress, read_calibration, spill_folder
from orchestrator.lab.calibrate.measure import OutputSums, Precisions
from orchestrator.lab.calibrate.methods import RTN, Method, open_quantizer
from orchestrator.lab.calibrate.reader import TextReader
from orchestrator.lab.eval.arithmetic import kl_divergence
from orchestrator.lab.eval.judge import Reference
from orchestrator.native.llama import Bindings, Model
from orchestrator.runtime.evaluator import log_softmax

# Shares of the experts that are lowered, and skipped in a part and in all layers. Small moves cost
# more than in proportion, so that the last one, which sets the scale, moves answers by about the
# usual --max-loss: the demo by 0.01 nats a token.
_LOWERED, _ALONE, _SKIPPED = 0.5, 0.25, 0.02
# Parts of the depth with a factor of their own, layers of about as many each.
_PARTS = 8
_TURNS = 32
_SEED = 1
_DRAWS = 1000
# Of how much windows lose of what the factors say, these quantiles: the least and the most that a
# text is expected to lose.
_TEXTS = (0.1, 0.9)

# Passes beside those of the lower tiers.
PARTS, ALL = "skip in parts", "skip"


class Moved(NamedTuple):
    """What a pass did to n windows. kl: float64 [n], the mean KL of a token; lost: float64 [n,
    n_layers], the mean g^2 L of a token in each layer; surprise: float64 [n], the mean surprise of
    a use."""

    kl: np.ndarray
    lost: np.ndarray
    surprise: np.ndarray


def passes(tiers: Sequence[str]) -> list[tuple[str, str | None]]:
    """(name, the tier that experts are lowered to, None for skipping) of each."""
    return [*((name, None) for name in (PARTS, ALL)), *((tier, tier) for tier in tiers[1:])]


def parts_of(n_layers: int, n_windows: int) -> np.ndarray:
    """The part of the depth that each layer belongs to, int [n_layers]: no more than windows."""
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
    """One pass. costs: float64 [n_layers, n_expert], what an expert loses in the pass with a gate
    weight of 1, without factors. unusual: the surprise of a use of each expert, of the same
    shape."""
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
    """tiers: of the file, best first; found: by the names of `passes`; weights: float64 [n], the
    tokens of each window. Raises ConfigError where nothing moves."""
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
                "the model says the same in every precision, or the text is too short"
            )
        # A part of which a short text says nothing is like the others.
        usual = of_part[tells].sum() / foreseen[tells].sum()
        factors = np.where(tells, of_part / np.where(tells, foreseen, 1), usual)
    factors = factors * float(weights @ found[ALL].kl) / float(weights @ (every @ factors))
    error = spread(weights * found[ALL].kl, weights * (every @ factors))
    scales = {}
    for tier in tiers[1:]:
        foreseen_kl = float(weights @ (by_part(found[tier].lost) @ factors))
        scales[tier] = float(weights @ found[tier].kl) / max(foreseen_kl, 1e-300)
    # The best tier loses nothing, or as little as the next one.
    scales = {tiers[0]: next(iter(scales.values()), 1.0), **scales, SKIP_TIER: 1.0}
    if not all(0 < each < np.inf for each in (*factors, *scales.values())):
        raise ConfigError("the model says the same in every precision, or the text is too short")
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
    """The standard error of log(sum of measured / sum of foreseen) over windows [n], drawn anew
    again and again; the draws have a seed of their own."""
    n = len(measured)
    drawn = np.random.default_rng(_SEED).integers(0, n, (_DRAWS, n))
    return float(np.std(np.log(measured[drawn].sum(axis=1) / foreseen[drawn].sum(axis=1))))


Report = Callable[[str, float], None]

# Tokens of the text that are read where no number is asked for, and of a window.
TOKENS, WINDOW = 8192, ROUTING_TOKENS
_FORM = 4


class Kept:
    """What a calibration has done, in the user cache; of one at a time for each model: passes by
    their names, and "scored", bool [n] of each window: the tokens that `rows` are of.

    went_on: something of it had been done before.
    """

    def __init__(self, model: ExpertModel, asked: Mapping[str, Any]) -> None:
        """asked: whatever its numbers depend on. Raises OSError."""
        self.folder = cached_path(model, "calibrating").with_suffix("")
        key = json.dumps({"form": _FORM, "model": identity(model), **asked}, sort_keys=True)
        known = self.folder / "asked.json"
        is_same = known.exists() and known.read_text("utf-8") == key
        self.went_on = is_same and self.table.exists()  # which is the first that is done
        if not is_same:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            with whole_file(known) as file:
                file.write(key.encode())

    @property
    def table(self) -> Path:
        """The table without factors, once it is measured; `rows` has the best tier's word then."""
        return self.folder / "table.json"

    @property
    def rows(self) -> Path:
        path = self.folder / "logits.f32"
        path.touch()
        return path

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """What was kept by this name, nothing where there was none."""
        path = self.folder / f"{name}.npz"
        if not path.exists():
            return {}
        with np.load(path) as found:
            return dict(found)

    def keep(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        with whole_file(self.folder / f"{name}.npz") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]


def read_windows(method: Method, path: Path) -> Calibration:
    """The text of a calibration for this model, its documents one behind the other in windows of
    one length: what is read at once has to have as many tokens of each."""
    if method.calib is None:
        raise ConfigError("a text to calibrate on is missing: give --calib TEXT")
    words = Model(
        Bindings.load(), path, managed=True, use_extra_bufts=False, use_mmap=False, no_data=True
    )
    with closing(words):
        tokenize = partial(words.tokenize, add_special=True, parse_special=True)
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
    report: Report,
    note: Callable[[str], None],
) -> LossTable:
    """Measures the loss table of a file's tiers and of other types, quantized by a method from
    the reference (None: the file's best tier), and writes it. report gets what is being done, and
    its share."""
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
            note(f"It went on from what an interrupted run had done ({kept.folder}).")
        run = _Run(method, model, text, kept, report)
        if not kept.table.exists():
            save(kept.table, model, run.measured(reference, types, note))
        table = load(kept.table, model)
        try:
            table = replace(table, fit=run.fit(table, tiers))
        except (BudgetError, ConfigError, NativeError) as error:
            note(f"The table has no factor that makes KL of its losses: {error}")
        # The table is written once and last, so that an interruption leaves none.
        save(out, model, table)
        shutil.rmtree(kept.folder, ignore_errors=True)
    return table


class _Run:
    """The passes of one calibration."""

    def __init__(
        self, method: Method, model: ExpertModel, text: Calibration, kept: Kept, report: Report
    ) -> None:
        self._method, self._model, self._text, self._kept = method, model, text, kept
        self._report = report
        self._threads = compute_threads(method.threads)

    def measured(
        self, reference: Path | None, types: Sequence[str], note: Callable[[str], None]
    ) -> LossTable:
        """The table without factors. Beside it, what the best tier says of the text."""
        # The text is for the losses, too; rtn itself has no use for it.
        method, model, path = self._method, self._model, reference or self._model.path
        quantizing = replace(method, calib=None) if method.chosen == RTN else method
        with ExitStack() as stack:
            full = stack.enter_context(ExpertModel.open(path))
            by = stack.enter_context(
                open_quantizer(
                    quantizing, path, lambda done: self._report("Calibrating", done), note
                )
            ) or Rtn(load_ggml())
            wanted = parse_types(types, by.has_importance)
            precisions = Precisions(model, full, wanted, by, load_ggml(), self._threads)
            # Inputs are kept where any of them differs from full precision.
            differ = path != model.path or len(precisions.listed) > 1
            sums = OutputSums(full, spill_folder() if differ else None)
            self._say(path, sums)
            if path != model.path:
                self._say(model.path, None)
            return precisions.table(
                sums, self._text, lambda done: self._report("Measuring losses", done)
            )

    def _say(self, path: Path, sums: OutputSums | None) -> None:
        """Reads the text in a file's best tier, and keeps what it says."""
        windows, ram = self._text.windows, self._method.ram
        with TextReader(path, windows, self._threads, ram) as reader:
            self._kept.keep("scored", {str(n): each for n, each in enumerate(reader.scored)})
            scored, at = sum(int(each.sum()) for each in reader.scored), 0
            for done, step in enumerate(
                reader.read(sums.route, sums.seen) if sums else reader.read(lambda *_: None), 1
            ):
                if at == 0:
                    rows = Reference(scored, step.logits.shape[1], self._kept.rows)
                for logits in step.logits:
                    rows.rows[at] = log_softmax(logits)
                    at += 1
                self._report("Reading the text", done / len(reader.steps))
            rows.close()

    def fit(self, table: LossTable, tiers: Sequence[str]) -> Fit:
        """Raises ConfigError where nothing can be compared, and what a model raises."""
        plain = replace(table, fit=Fit((1.0,) * len(table.counts), (), "", 0.0))
        todo, found = passes(tiers), {}
        for number, (name, tier) in enumerate(todo):
            known = self._kept.arrays(name)
            if not known:

                def progress(share: float, number: int = number) -> None:
                    self._report("Fitting KL", (number + share) / len(todo))

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
            raise ConfigError(f"the loss table lacks {best if tier is None else tier}")
        costs = estimate.nats[..., -1 if tier is None else 1]
        known = list(self._kept.arrays("scored").values())
        windows, ram = self._text.windows, self._method.ram
        n_rows = sum(int(each.sum()) for each in known)
        n_vocab = self._kept.rows.stat().st_size // (4 * n_rows)
        with (
            TextReader(self._model.path, windows, self._threads, ram, tier, known) as reader,
            Reference(n_rows, n_vocab, self._kept.rows) as whole,
        ):
            # Memory may be less than it was when the rows were kept.
            chosen = np.concatenate(reader.scored)[np.concatenate(known)]
            against = whole.part(np.flatnonzero(chosen))
            return moved(reader, name, costs, surprise(table.counts), against, progress)
